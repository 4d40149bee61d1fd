"""Runs of slots, and the keys that a rule shows to a run of queries."""

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import NamedTuple

from jaxtyping import Bool
from torch import Tensor

FAR = 1 << 62  # a slot after all others
NEAR = -FAR  # a slot before all others
Runs = list[tuple[int, int]]  # half-open ranges of slots, sorted, with gaps between them
ALL: Runs = [(NEAR, FAR)]
NONE: Runs = []  # never written to


class Shown(NamedTuple):
    """The keys that are visible to a run of queries, in all rows of a batch together.

    Attributes:
        some: contains each key that is visible to some of the queries; may be larger.
        every: contains only keys that are visible to all of them; may be smaller.
        edges: slots where a block of queries should begin: other keys are visible from there on.

    Examples:
        >>> from regard.masks import Causal
        >>> shown = Causal().runs(4, 7)  # the queries at slots 4 to 7
        >>> shown.some[0][1], shown.every[0][1]  # one of them sees keys before slot 8, all before 5
        (8, 5)
    """

    some: Runs
    every: Runs
    edges: Iterable[int] = ()

    def edges_between(self, first: int, stop: int) -> list[int]:
        """The edges after `first` and before `stop`, each once, in order."""
        return sorted({slot for slot in self.edges if first < slot < stop})


Finder = Callable[[int, int], Shown]  # from the first and the last slot of a run of queries


def unknown(first: int, last: int) -> Shown:
    """The runs of a rule that cannot be analysed: any key may be visible, none surely is."""
    return Shown(ALL, NONE)


def run(start: int, stop: int) -> Runs:
    """One run of slots, or none."""
    return [(start, stop)] if start < stop else []


def union(*lists: Runs) -> Runs:
    """The slots in any of the lists."""
    joined: Runs = []
    for start, stop in sorted(each for runs in lists for each in runs):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        elif start < stop:
            joined.append((start, stop))
    return joined


def intersection(some: Runs, others: Runs) -> Runs:
    """The slots in both lists."""
    common, mine, its = [], 0, 0
    while mine < len(some) and its < len(others):
        start = max(some[mine][0], others[its][0])
        stop = min(some[mine][1], others[its][1])
        if start < stop:
            common.append((start, stop))
        if some[mine][1] < others[its][1]:
            mine += 1
        else:
            its += 1
    return common


def complement(runs: Runs) -> Runs:
    """The slots in none of the runs."""
    edges = [NEAR, *(edge for run in runs for edge in run), FAR]
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return [(start, stop) for start, stop in pairs if start < stop]


def without_gaps(runs: Runs, gap: int) -> Runs:
    """The runs, joined where fewer than `gap` slots lie between them."""
    near: Runs = []
    for start, stop in runs:
        if near and start - near[-1][1] < gap:
            near[-1] = (near[-1][0], stop)
        else:
            near.append((start, stop))
    return near


def true_runs(flags: Bool[Tensor, " n"]) -> Runs:
    """The runs of indices at which the flags are true."""
    if not len(flags):
        return NONE
    edges = [0, *((flags[1:] != flags[:-1]).nonzero().squeeze(1) + 1).tolist(), len(flags)]
    return list(pairwise(edges))[0 if bool(flags[0]) else 1 :: 2]


def contains(runs: Runs, start: int, stop: int) -> bool:
    """Whether the slots `start..stop` all lie in one run."""
    return any(low <= start and stop <= high for low, high in runs)
