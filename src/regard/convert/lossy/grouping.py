"""Which heads are merged with which: groups of one size with the least loss between their members.

Greedy pairs of clusters would leave the last heads with whoever remains, so every head may still
change places with one of another group while that helps.
"""

from itertools import combinations

from jaxtyping import Float
from torch import Tensor


def grouped(loss: Float[Tensor, "heads heads"], size: int) -> list[list[int]]:
    """Groups of `size` heads, by first head; `loss[a, b]` is what merging those two loses.

    >>> import torch
    >>> grouped(torch.tensor([[0.0, 9, 1, 9], [9, 0, 9, 1], [1, 9, 0, 9], [9, 1, 9, 0]]), 2)
    [[0, 2], [1, 3]]
    """
    table: list[list[float]] = loss.tolist()
    left, groups = list(range(len(table))), []
    while left:
        group = [left.pop(0)]
        while len(group) < size:
            nearest = min(left, key=lambda head: sum(table[head][other] for other in group))
            left.remove(nearest)
            group.append(nearest)
        groups.append(group)
    while _swapped(table, groups):
        pass
    return sorted(sorted(group) for group in groups)


def _swapped(table: list[list[float]], groups: list[list[int]]) -> bool:
    """Exchange two heads if that helps by more than rounding; say whether any were."""
    for one, other in combinations(groups, 2):
        for i in range(len(one)):
            for j in range(len(other)):
                before = _within(table, one) + _within(table, other)
                one[i], other[j] = other[j], one[i]
                if _within(table, one) + _within(table, other) < before * (1 - 1e-9):
                    return True
                one[i], other[j] = other[j], one[i]
    return False


def _within(table: list[list[float]], group: list[int]) -> float:
    return sum(table[a][b] for a, b in combinations(group, 2))
