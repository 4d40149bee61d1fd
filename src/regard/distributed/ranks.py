"""The ranks that share a layer's work, and all that is sent between them.

Every byte that regard sends goes through `Ranks`, which counts it, and whose errors name the step
and the other ranks. The collectives are those of torch.distributed.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from typing import Any, NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from regard.plan.sent import sum_bytes

__all__ = ["RankError", "Ranks", "counted", "sum_bytes"]


class RankError(RuntimeError):
    """The error of a message that failed: another rank ended, or the time-out passed.

    The process group cannot be used after it: start the processes again.

    Attributes:
        step: the content of the message.
        ranks: the ranks at the other ends of the message, by their numbers in the world. One that
            is still running may itself wait for a further rank.

    Examples:
        >>> from regard.distributed import RankError
        >>> issubclass(RankError, RuntimeError)
        True
    """

    step: str
    ranks: tuple[int, ...]

    def __init__(self, message: str, step: str = "", ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.step, self.ranks = step, tuple(ranks)


@contextmanager
def answering(ranks: "Ranks", step: str, others: Collection[int]) -> Iterator[None]:
    """A block that waits for messages of `step` with other ranks, by their numbers in the mesh."""
    try:
        yield
    except RuntimeError as error:
        numbers = [ranks.members[other] for other in sorted(others)]
        names = ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(map(str, numbers))
        reason = str(error).strip().partition("\n")[0]
        raise RankError(
            f"{step}: {names} did not answer rank {dist.get_rank()}: ended, in another step, or "
            "sending another size; every rank makes the same calls in the same order "
            f"({reason[:300]})",
            step,
            numbers,
        ) from error


@dataclass(eq=False)
class Sent:
    """Bytes that this rank has sent to others, in all and by step."""

    bytes: int = 0
    steps: dict[str, int] = field(default_factory=dict)

    def add(self, step: str, nbytes: int) -> None:
        self.bytes += nbytes
        self.steps[step] = self.steps.get(step, 0) + nbytes


# Of the open `counted` blocks; of the process, since autograd has threads of its own.
_COUNTERS: list[Sent] = []


@contextmanager
def counted() -> Iterator[Sent]:
    """A block in which the bytes that this rank sends are counted.

    Examples:
        >>> from regard.distributed import counted
        >>> with counted() as sent:
        ...     pass
        >>> sent.bytes
        0
    """
    sent = Sent()
    _COUNTERS.append(sent)
    try:
        yield sent
    finally:
        _COUNTERS.remove(sent)


Message = tuple[Callable[..., Any], int, Tensor]  # dist.isend or dist.irecv, the other rank, what


class Pending(NamedTuple):
    """Messages on their way, by the ranks that they go to or come from. `wait` returns when they
    have arrived. It has to be called: messages after one that was dropped may be lost."""

    messages: Sequence[tuple[Collection[int], Any]]
    step: str
    ranks: "Ranks"

    def wait(self) -> None:
        """Wait for all messages. Raises a RankError if a rank does not answer within the time-out
        of the process group."""
        timeout = self.ranks.timeout
        for others, message in self.messages:
            with answering(self.ranks, self.step, others):
                _wait(message, timeout)


@dataclass(frozen=True, eq=False)
class Ranks:
    """The ranks of a mesh of one dimension.

    Raises:
        TypeError: if it is no mesh.
        ValueError: if it has several dimensions, this rank is not in it, or it has one rank.
    """

    mesh: DeviceMesh  # of one dimension; for another, `mesh["name"]` has one

    def __post_init__(self) -> None:
        if not isinstance(self.mesh, DeviceMesh):
            raise TypeError(
                "mesh is a DeviceMesh, got "
                f"{type(self.mesh).__name__}; init_device_mesh('cpu', (2,)) makes one"
            )
        if self.mesh.ndim != 1:
            raise ValueError(
                f"mesh has one dimension, got {self.mesh.ndim} of sizes {tuple(self.mesh.shape)}; "
                f"give one of them, mesh[name] of {self.mesh.mesh_dim_names}"
            )
        if self.mesh.size() < 2:
            raise ValueError(
                "mesh has one rank, so that nothing would be split or sent; use the layer as it is"
            )
        if self.mesh.get_coordinate() is None:
            raise ValueError(
                f"this process, rank {dist.get_rank()}, is not in the mesh of ranks "
                f"{self.mesh.mesh.tolist()}; call this in its ranks only"
            )

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of the mesh."""
        return self.mesh.get_group()

    @property
    def members(self) -> list[int]:
        """The number of each rank in the world, by its number in the mesh."""
        return dist.get_process_group_ranks(self.group)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.mesh.size()

    @property
    def rank(self) -> int:
        """The number of this rank in the mesh, from 0."""
        return self.mesh.get_local_rank()

    @property
    def timeout(self) -> timedelta | None:
        """The time to wait for a message: the time-out of the mesh's process group or that of the
        world, whichever is shorter, since the groups of a mesh of several dimensions are made with
        torch's own, of 30 minutes. None where torch waits by itself, off the CPU."""
        if self.mesh.device_type != "cpu":
            return None
        return min(
            (t for group in (self.group, dist.group.WORLD) if (t := _timeout_of(group))),
            default=None,
        )

    def exchange(
        self, send: Mapping[int, Tensor], receive: Mapping[int, Tensor], step: str
    ) -> Pending:
        """Send tensors to some ranks and receive tensors from some, by their numbers in the mesh;
        neither waits.

        A message is received only under the step that it was sent under, and in the size that is
        expected: ranks that do not agree about them run into the time-out. (NCCL has no tags, and
        leaves that to the sizes.) `step` is the content of the message, in the same words on both
        sides; numbers may differ. Tensors to be sent must not change until `wait`; those to write
        to are contiguous. A RankError is raised if a rank has ended.
        """
        sends = {to: x.detach().contiguous() for to, x in send.items() if x.numel()}
        receives = {source: x.detach() for source, x in receive.items() if x.numel()}
        messages: list[Message] = [(dist.isend, to, x) for to, x in sends.items()]
        messages += [(dist.irecv, source, x) for source, x in receives.items()]
        assert self.rank not in {**send, **receive}, f"{step}: a rank sends to itself"
        for _, _, x in messages:
            assert x.is_contiguous(), f"{step}: tensors to write to are contiguous"
            self._assert_place(x, step)
        self._count(step, sum(x.nbytes for x in sends.values()))
        return Pending(self._launched(messages, step) if messages else (), step, self)

    def _launched(
        self, messages: Sequence[Message], step: str
    ) -> list[tuple[Collection[int], Any]]:
        """The messages on their way, by the ranks at their other ends."""
        group = self.group
        if self.mesh.device_type != "cpu":  # NCCL starts sends and receives together
            others = {other for _, other, _ in messages}
            batch = [
                dist.P2POp(run, x, group=group, tag=_tag(step, x), group_peer=other)
                for run, other, x in messages
            ]
            with answering(self, step, others):
                return [(others, work) for work in dist.batch_isend_irecv(batch)]
        launched: list[tuple[Collection[int], Any]] = []
        for run, other, x in messages:
            end = "group_dst" if run is dist.isend else "group_src"
            with answering(self, step, [other]):
                launched.append(([other], run(x, group=group, tag=_tag(step, x), **{end: other})))
        return launched

    def all_gather(self, x: Tensor, step: str) -> list[Tensor]:
        """This tensor of every rank, all of one shape and dtype; this rank's is `x` itself. Raises
        a RankError if a rank does not answer within the time-out of the process group."""
        own = x.detach().contiguous()
        pieces = {other: torch.empty_like(own) for other in self.others()}
        self.exchange(dict.fromkeys(pieces, own), pieces, step).wait()
        return [pieces.get(rank, own) for rank in self]

    def all_reduce(self, x: Tensor, step: str) -> Tensor:
        """The sum of this tensor over all ranks, a new tensor. Sums in half precision are added up
        in float32. Raises as `all_gather`."""
        dtype = torch.promote_types(x.dtype, torch.float32) if x.is_floating_point() else x.dtype
        total = x.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)
        self._assert_place(total, step)
        self._count(step, sum_bytes(total.nbytes, self.size))
        with answering(self, step, self.others()):
            _wait(dist.all_reduce(total, group=self.group, async_op=True), self.timeout)
        return total.to(x.dtype)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size))

    def others(self) -> list[int]:
        """The numbers of the other ranks."""
        own = self.rank
        return [rank for rank in self if rank != own]

    def _count(self, step: str, nbytes: int) -> None:
        for counter in _COUNTERS:
            counter.add(step, nbytes)

    def _assert_place(self, x: Tensor, step: str) -> None:
        there, here = x.device.type, self.mesh.device_type
        assert there == here, f"{step}: a tensor on {there}, ranks on {here}"


def _timeout_of(group: Any) -> timedelta | None:
    """The time-out of a process group on the CPU; None if this torch does not tell."""
    try:
        timeout: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    except (AttributeError, RuntimeError):
        return None
    return timeout


def _wait(message: Any, timeout: timedelta | None) -> None:
    message.wait() if timeout is None else message.wait(timeout)


def _tag(step: str, x: Tensor) -> int:
    """A number that messages have in common if they are of one step and size."""
    return crc32(_words(step), x.nbytes & 0xFFFFFFFF) >> 1  # gloo's tags have 31 bits


@lru_cache(maxsize=1024)
def _words(step: str) -> bytes:
    """The letters of a step. A number in it may be a rank, in which sender and receiver differ."""
    return "".join(filter(str.isalpha, step)).encode()
