"""Processes that run functions of tests side by side, as ranks of a gloo group.

They are forked once by each worker of pytest and serve all its tests. A function runs in the first
n of them, and is given their mesh.
"""

import atexit
import ctypes
import io
import multiprocessing
import os
import shutil
import socket
import tempfile
import time
import traceback
import warnings
from contextlib import suppress
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path

import jaxtyping
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from regard.distributed.ranks import RankError
from session import LONG

SIZE = 4
# Seconds: more than a test's function takes on a machine that runs other tests, too. The long tests
# have real models, of which there may be one for each of four ranks on two cores.
PATIENCE = 600 if LONG else 180
AFTER_AN_ERROR = 3  # seconds that the other ranks have: they may wait for the one that failed
_pools = []


def on_ranks(number, function, *args, mesh=None, **options):
    """`function(mesh, *args, **options)` in `number` ranks: the list of what they return.

    Args:
        number: 2, 3 or 4.
        function: at the top level of a test file.
        mesh: sizes of a mesh with more dimensions, such as `(2, 2)`, named "a" and "b".
    """
    if not _pools:
        _pools.append(Pool())
        atexit.register(lambda: _pools and _pools.pop().end())
    try:
        return _pools[0].run(number, mesh, function, args, options)
    except BaseException:  # their messages may be out of step: the next test gets new ranks
        _pools.pop().end()
        raise


class Pool:
    def __init__(self):
        self.owner = os.getpid()
        self.folder = tempfile.mkdtemp()
        self.pipes, self.processes = [], []
        for rank in range(SIZE):
            fork(self, _serve, rank, self.folder)
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(PATIENCE):
                self.end()
                raise TimeoutError(f"rank {rank} has not started in {PATIENCE} s")
            pipe.recv_bytes()

    def run(self, number, mesh, function, args, options):
        buffer = io.BytesIO()
        unchecked = jaxtyping.config.jaxtyping_disable  # as here, in this test
        torch.save((unchecked, mesh or (number,), function, args, options), buffer)
        for pipe in self.pipes[:number]:
            pipe.send_bytes(buffer.getvalue())
        answers, until = {}, time.monotonic() + PATIENCE
        waiting = {pipe: rank for rank, pipe in enumerate(self.pipes[:number])}
        while waiting and time.monotonic() < until:
            for pipe in connection.wait(waiting, timeout=until - time.monotonic()):
                rank = waiting.pop(pipe)
                answers[rank] = answer = self._answer_of(rank)
                if isinstance(answer, Failed):
                    until = min(until, time.monotonic() + AFTER_AN_ERROR)
        errors = [each for each in answers.values() if isinstance(each, Failed)]
        errors += [Failed(rank, "has not returned") for rank in sorted(waiting.values())]
        if errors:
            ranks = "\n".join(f"rank {each.rank} of {number}: {each.text}" for each in errors)
            raise AssertionError(f"{function.__name__} in ranks:\n{ranks}")
        return [answers[rank] for rank in range(number)]

    def _answer_of(self, rank):
        try:
            file = Path(self.pipes[rank].recv_bytes().decode())
        except EOFError:
            self.processes[rank].join(1)
            return Failed(rank, f"ended, with exit code {self.processes[rank].exitcode}")
        answer = torch.load(file, weights_only=False, mmap=True)
        file.unlink()  # tensors that are mapped keep its contents
        return answer

    def end(self):
        if os.getpid() == self.owner:
            for process in self.processes:
                process.kill()
                process.join()
            for pipe in self.pipes:
                pipe.close()
            shutil.rmtree(self.folder, ignore_errors=True)


def fork(to, function, *args):
    """A process that runs `function(*args, pipe)`; it ends when this one does, as its pipe does.
    It and the pipe's other end are added to lists of `to`."""
    context, files = multiprocessing.get_context("fork"), _open_files()
    ours, theirs = context.Pipe()
    given = [*to.pipes, ours], files, function, args, theirs
    process = context.Process(target=_run, args=given, daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads
        process.start()
    theirs.close()
    to.pipes.append(ours)
    to.processes.append(process)


def _run(inherited, files, function, args, pipe):
    for each in inherited:
        each.close()
    _release(files)
    _pools.clear()
    torch.set_num_threads(1)  # the threads of the process that was forked are not there
    function(*args, pipe)


def _open_files():
    folder = Path("/proc/self/fd")  # of Linux
    return {int(file.name) for file in folder.iterdir()} if folder.is_dir() else set()


def _release(files):
    """Let go of files and pipes of the process that was forked: the end of a pipe that is open
    here, too, would never be reached by its reader. Their numbers stay taken, since objects that
    have them may close them later."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in files - {0, 1, 2}:
        with suppress(OSError):  # closed already
            os.fstat(number)
            os.dup2(nothing, number)


class Failed:
    def __init__(self, rank, text):
        self.rank, self.text = rank, text


def _serve(rank, folder, pipe):
    dist.init_process_group(
        "gloo",
        init_method=f"file://{Path(folder) / 'store'}",
        rank=rank,
        world_size=SIZE,
        timeout=timedelta(seconds=PATIENCE / 2),
    )
    meshes = {(n,): DeviceMesh("cpu", torch.arange(n)) for n in (2, 3, 4)}
    names = ("a", "b")
    meshes[2, 2] = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=names)
    pipe.send_bytes(b"ready")
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            os._exit(0)
        try:
            given = torch.load(io.BytesIO(message), weights_only=False)
            unchecked, sizes, function, args, options = given
            jaxtyping.config.update("jaxtyping_disable", unchecked)
            torch.manual_seed(0)
            result = function(meshes[sizes], *args, **options)
        except BaseException:
            result = Failed(rank, traceback.format_exc())
        # By a file: of a real model's gradients, a message would be in memory four times.
        file = Path(folder) / f"answer-{rank}"
        torch.save(result, file)
        del result
        pipe.send_bytes(str(file).encode())
        _trim()


def _trim():
    """Give memory that was freed back to the system: ranks wait for the next test, and glibc keeps
    gigabytes of the models of the last one."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class Apart:
    """Ranks with a process group of their own, which may die: one start for one test.

    They begin at once; `outcomes` waits for them, so that several can run side by side.

    Args:
        number: of ranks.
        function: as for `on_ranks`.
        timeout: seconds, of the process group.
        store: "file", or "tcp" for one that rank 0 holds.
    """

    def __init__(self, number, function, *args, timeout=3.0, store="file"):
        self.function = function.__name__
        place = tempfile.mkdtemp() if store == "file" else _free_port()
        self.pipes, self.processes, self.results = [], [], None
        for rank in range(number):
            fork(self, _live, (rank, number, place, timeout), function, args)

    def settled(self):
        """Wait until most of them have returned or died, so that others can be started."""
        connection.wait(self.pipes[:1], timeout=PATIENCE)

    def outcomes(self, dead=()):
        """What each rank returned or raised, and after how many seconds; None for one that died,
        and for `dead` ones, which are not waited for."""
        if self.results is None:
            self.results = self._collected(dead)
        return self.results

    def _collected(self, dead):
        results = []
        for rank, pipe in enumerate(self.pipes):
            if rank in dead:
                results.append((None, None))
                continue
            if not pipe.poll(PATIENCE):
                raise TimeoutError(f"{self.function}: rank {rank} hangs")
            try:
                results.append(torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False))
            except EOFError:
                results.append((None, None))
        for process in self.processes:
            process.kill()
            process.join()
        return results


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


_start = [0.0]


def restart_clock():
    """Measure the seconds of a rank that may die from now."""
    _start[0] = time.monotonic()


def _live(settings, function, args, pipe):
    rank, number, place, timeout = settings
    torch.manual_seed(0)
    if isinstance(place, str):
        store = dist.FileStore(str(Path(place) / "store"), number)
    else:
        store = dist.TCPStore("127.0.0.1", place, number, rank == 0)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=number, timeout=timedelta(seconds=timeout)
    )
    mesh = DeviceMesh("cpu", torch.arange(number))
    dist.barrier()
    restart_clock()
    try:
        result = function(mesh, *args)
    except RankError as error:
        result = error
    except BaseException:
        result = Failed(rank, traceback.format_exc())
    answer = io.BytesIO()
    torch.save((result, time.monotonic() - _start[0]), answer)
    pipe.send_bytes(answer.getvalue())
    pipe.close()
    os._exit(0)
