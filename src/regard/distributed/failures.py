"""The error that a rank raises when others do not answer.

The error of a collective names a connection, and often that of a rank which itself waits. So a rank
whose message fails closes its connections, so that ranks which wait for it fail too, writes its
step to the store of the process group, and reads what the others have written: the ranks without a
report are those that do not answer.
"""

import os
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from threading import Thread
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

# Seconds that a rank waits for the reports of others. Those that wait for a message fail within
# milliseconds; this is for ranks that are computing, and must stay small beside a time-out.
GRACE = 2.0
_ASKED = 0.02  # seconds between two looks at the store
_KEY = "regard/failed"


class RankError(RuntimeError):
    """The error of ranks that did not answer: they ended, or their time ran out.

    The process group has no connections after it, on any rank: the processes start again.

    Attributes:
        step: what was sent.
        ranks: those that did not answer, by their numbers in the world.

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


_FIRST: WeakKeyDictionary[dist.ProcessGroup, RankError] = WeakKeyDictionary()


def failure(mesh: DeviceMesh, step: str, others: Collection[int], error: Exception) -> RankError:
    """The error that names the ranks that do not answer and the step, for a message that failed.

    Args:
        mesh: of one dimension, with this rank and the others.
        step: what was sent.
        others: the ranks at the other ends of the message, by their numbers in the mesh.
        error: that of torch.distributed.
    """
    group = mesh.get_group()
    first = _FIRST.get(group)
    if first is not None:
        message = f"{step}: these ranks have no connections any more, since {first}"
        return RankError(message, step, first.ranks)
    reports = Reports(mesh)
    reports.collect(step, others)
    numbers = dist.get_process_group_ranks(group)
    silent = [numbers[rank] for rank in reports.silent()]
    text = f"{step}: {_explanation(reports, silent, numbers)} ({_shorten(error)})"
    _FIRST[group] = result = RankError(text, step, silent)
    return result


@dataclass
class Reports:
    """The steps in which ranks failed, and the ranks that they waited for."""

    mesh: DeviceMesh
    steps: dict[int, str] = field(default_factory=dict)
    awaited: set[int] = field(default_factory=set)
    store_lost: bool = False

    def collect(self, step: str, others: Collection[int]) -> None:
        """Report, and read the reports of the others for at most `GRACE` seconds. In a thread,
        since a store whose host is gone may never answer."""
        self._add(self.mesh.get_local_rank(), step, others)
        _disconnect(self.mesh)
        self.store_lost = True
        thread = Thread(target=self._converse, args=(step, others), daemon=True)
        thread.start()
        thread.join(GRACE + 1.0)

    def silent(self) -> list[int]:
        """The ranks that did not report: of them, those that others waited for."""
        if self.no_reports:
            members = dist.get_process_group_ranks(self.mesh.get_group())
            hosted = 0 in members and not _launcher_holds_store()
            return [members.index(0)] if hosted else sorted(self.awaited)
        missing = set(range(self.mesh.size())) - set(self.steps)
        return sorted(missing & self.awaited or missing)

    @property
    def no_reports(self) -> bool:
        """Whether the store was gone before anything was read."""
        return self.store_lost and len(self.steps) == 1

    def _add(self, rank: int, step: str, others: Collection[int]) -> None:
        self.steps[rank] = step
        self.awaited.update(others)

    def _converse(self, step: str, others: Collection[int]) -> None:
        with suppress(RuntimeError):
            store, until = _store_of(self.mesh.get_group()), time.monotonic() + GRACE
            awaited = ",".join(map(str, sorted(others)))
            store.set(f"{_KEY}/{self.mesh.get_local_rank()}", f"{awaited};{step}")
            store.add(_KEY, 1)
            seen = 0
            while len(self.steps) < self.mesh.size() and time.monotonic() < until:
                count = store.add(_KEY, 0)
                if count != seen:
                    seen = count
                    self._read(store)
                time.sleep(_ASKED)
            self.store_lost = False

    def _read(self, store: Any) -> None:
        for rank in range(self.mesh.size()):
            key = f"{_KEY}/{rank}"
            if rank not in self.steps and store.check([key]):
                others, _, step = store.get(key).decode().partition(";")
                self._add(rank, step, [int(other) for other in others.split(",")])


def _store_of(group: dist.ProcessGroup) -> Any:
    if hasattr(group, "get_group_store"):
        return group.get_group_store()
    return dist.distributed_c10d._get_process_group_store(group)


def _launcher_holds_store() -> bool:
    """Whether torchrun holds the store of the process group; else rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def _disconnect(mesh: DeviceMesh) -> None:
    """Close this rank's connections, so that ranks that wait for it fail now and report."""
    if mesh.device_type != "cpu":
        with suppress(RuntimeError):
            mesh.get_group().abort()
        return
    own, group = mesh.get_local_rank(), mesh.get_group()
    for other in (rank for rank in range(mesh.size()) if rank != own):
        with suppress(RuntimeError):  # gloo closes all connections when one message's time is up
            message = dist.irecv(torch.empty(1, device="cpu"), group=group, group_src=other)
            assert message is not None
            message.wait(timedelta(milliseconds=1))


def _explanation(reports: Reports, ranks: Sequence[int], numbers: Sequence[int]) -> str:
    """A sentence: the ranks that did not answer, and the steps in which the others failed."""
    own = numbers[reports.mesh.get_local_rank()]
    names = ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
    if reports.no_reports:
        host = "the launcher" if _launcher_holds_store() else "rank 0"
        return (
            f"{names} did not answer rank {own}, nor did the store of the process group, which "
            f"{host} holds; it has ended, or its machine cannot be reached"
        )
    if ranks:
        elsewhere = set(reports.steps.values()) - {reports.steps[reports.mesh.get_local_rank()]}
        also = f"; the others failed in {_list_of(elsewhere)}" if elsewhere else ""
        return f"{names} did not answer rank {own}: ended, or not in this step yet{also}"
    steps = sorted(reports.steps.items())
    where = ", ".join(f"rank {numbers[rank]} in {step!r}" for rank, step in steps)
    return (
        f"all ranks run, but do not send what the others wait for: {where}; every rank makes the "
        "same calls in the same order, on tensors of the same sizes, and none later than the "
        "time-out"
    )


def _list_of(steps: Collection[str]) -> str:
    return ", ".join(repr(step) for step in sorted(steps))


def _shorten(error: Exception) -> str:
    """The error of torch.distributed without its place in the source and its advice."""
    text = str(error).strip().partition("\n")[0]
    return text.rpartition("] ")[2].partition(". This is typically")[0][:300]
