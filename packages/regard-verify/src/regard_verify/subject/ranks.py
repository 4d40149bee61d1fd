"""A function of (q, k, v) on several ranks, as context parallelism calls it."""

import multiprocessing
import pickle
import shutil
import tempfile
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch import distributed as dist

from regard_verify.blame import line_of, said
from regard_verify.subject.signatures import parameters_of
from regard_verify.subject.subject import SubjectError, output_of

PATIENCE = 20.0  # seconds that ranks wait for each other
AXES = {"BHLD": 2, "BLHD": 1}  # of tokens, by layout


class OnRanks:
    """Calls a function in `ranks` processes of one gloo group, as one function of whole tensors.

    Queries, keys and values are split along the tokens, a part for each rank, and the outputs are
    joined. The processes are forked at the first call and serve all further ones.
    """

    def __init__(self, function: Callable[..., Any], ranks: int, layout: str) -> None:
        if layout not in AXES:
            raise SubjectError(f"on ranks the layout is {' or '.join(AXES)}; {layout} is declared")
        self.function, self.ranks, self.axis = function, ranks, AXES[layout]
        self.__name__ = getattr(function, "__name__", "attention")
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []

    @property
    def signature_of_call(self) -> dict[str, Any]:
        """The arguments of the function."""
        return parameters_of(self.function)

    def __call__(self, *given: Tensor, **options: Any) -> Tensor:
        """The outputs of all ranks, joined.

        Raises:
            SubjectError: if a rank raises, ends, or waits too long for another.
        """
        for x in given:
            if x.shape[self.axis] % self.ranks:
                raise SubjectError(f"{x.shape[self.axis]} tokens for {self.ranks} ranks")
        if not self.pipes:
            self._start()
        parts = (x.detach().tensor_split(self.ranks, self.axis) for x in given)
        for pipe, mine in zip(self.pipes, zip(*parts, strict=True), strict=True):
            with suppress(BrokenPipeError):  # of a rank that has ended, which its answer tells
                pipe.send_bytes(pickle.dumps(([x.clone() for x in mine], options)))
        outs: dict[int, Tensor] = {}
        while len(outs) < self.ranks:
            waiting = [pipe for rank, pipe in enumerate(self.pipes) if rank not in outs]
            ready = wait(waiting, 2 * PATIENCE)
            if not ready:
                self._fail("the ranks wait for each other")
            for each in ready:
                assert isinstance(each, Connection)
                outs[self.pipes.index(each)] = self._answer(each)
        return torch.cat([outs[rank] for rank in range(self.ranks)], self.axis)

    def _answer(self, pipe: Connection) -> Tensor:
        """The output that a rank sends."""
        try:
            out, text, line = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionError):
            out, text, line = None, "it ended the process", ""
        if not isinstance(out, Tensor):
            self._fail(f"on rank {self.pipes.index(pipe)} {text}", line)
        return out

    def _fail(self, text: str, line: str = "") -> NoReturn:
        """End all ranks, whose collectives no longer match, and raise; a later call starts anew."""
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.close()
            process.kill()
        self.pipes, self.processes = [], []
        (error := SubjectError(text)).line = line
        raise error from RuntimeError(text)

    def _start(self) -> None:
        """Fork the ranks: functions of files that were run cannot be sent to a new process."""
        context = multiprocessing.get_context("fork")
        store = Path(tempfile.mkdtemp(prefix="regard-verify-"), "store")
        weakref.finalize(self, shutil.rmtree, store.parent, ignore_errors=True)
        for rank in range(self.ranks):
            ours, theirs = context.Pipe()
            self.pipes.append(ours)
            arguments = (self.function, rank, self.ranks, store, theirs, list(self.pipes))
            self.processes.append(context.Process(target=_serve, args=arguments, daemon=True))
            self.processes[-1].start()
            theirs.close()


def _serve(
    function: Callable[..., Any],
    rank: int,
    ranks: int,
    store: Path,
    pipe: Connection,
    others: Sequence[Connection],
) -> None:
    """One rank: calls the function with each part that it is sent, until the pipe is closed."""
    for each in others:
        each.close()  # or the pipes of other ranks would stay open here
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{store}", timedelta(seconds=PATIENCE), world_size=ranks, rank=rank
    )
    answer: tuple[Tensor | None, str, str]
    while True:
        try:
            given, options = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        try:
            with torch.no_grad():
                out = function(*given, **options)
            answer = (output_of(out, given[0].numel()).contiguous(), "", "")
        except Exception as error:
            line = line_of(error)
            answer = (None, f"it raised {said(error, line)}", line)
        pipe.send_bytes(pickle.dumps(answer))
