"""Drafts of speculative decoding: a tree of tokens that one call verifies."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import and_, or_

import torch
from torch import Tensor

from regard.masks.mask import Mask, Reach
from regard.masks.row_data import DataMask, as_rows, at_row, is_whole, readable, row_index
from regard.masks.runs import NEAR, Runs, Shown, union
from regard.span import Span


@dataclass(frozen=True, eq=False, repr=False)
class Tree(DataMask):
    """A tree of drafts: each token may attend to itself, its ancestors and keys before the tree.

    One call then computes all continuations that a draft model proposes, as in SpecInfer (Miao et
    al. 2023, arXiv:2305.09781), Medusa (Cai et al. 2024, arXiv:2401.10774) and EAGLE (Li et al.
    2024, arXiv:2401.15077). Of N tokens, the tree is the last N slots up to the call's last query.
    Queries before it may attend to the keys before it, so add `Causal()` where there are any.

    Args:
        parents: `[B, N]` or `[N]` integers: for each token the place in the tree of the one that it
            continues, which is an earlier place, or -1 if it continues the tokens before the tree.
        place: the slots of the call; the tree begins at slot 0 if None. Set by `within`.

    The positions of the tokens are `depths`, counted from the number of tokens before the tree.

    Raises:
        TypeError: if `parents` are not integers.
        ValueError: if they do not have one or two dimensions, or one is not an earlier place, or if
            `within` is called with a span whose queries end before slot N.

    Examples:
        >>> import torch
        >>> from regard import Span, Tree
        >>> tree = Tree(torch.tensor([-1, 0, 0, 1]))  # 1 and 2 continue 0; 3 continues 1
        >>> print(tree.draw(Span(2, 6, 0, 6)))
        Tree(parents=<[1, 4] int64>)
          0 1 2 3 4 5
        2 ■ ■ ■ · · ·
        3 ■ ■ ■ ■ · ·
        4 ■ ■ ■ · ■ ·
        5 ■ ■ ■ ■ · ■
    """

    parents: Tensor
    place: Span | None = field(default=None, kw_only=True, repr=False)
    sees: Tensor = field(init=False)  # `[B, N, N]`: whether a token may attend to another
    lines: list[list[int]] | None = field(init=False)  # for each token those places, as bits

    def __post_init__(self) -> None:
        parents = as_rows("Tree", "parents", self.parents)
        if not is_whole(parents):
            raise TypeError(
                f"Tree takes integers, the places of parents, got {parents.dtype}; booleans of "
                "queries by keys go in Dense(keep)"
            )
        (parents,) = self._copies(parents)
        places = torch.arange(parents.shape[1], device=parents.device)
        if readable(parents) and not bool(((parents >= -1) & (parents < places)).all()):
            raise ValueError(
                "a parent is the place of an earlier token of the tree, or -1, got "
                f"{parents.tolist()}; order the tokens by their depth"
            )
        lines = [_lines(row) for row in parents.tolist()] if readable(parents) else None
        self._set(parents=parents, sees=_ancestors(parents, places), lines=lines)

    @property
    def depths(self) -> Tensor:
        """`[B, N]`, the number of ancestors of each token."""
        return self.sees.sum(-1) - 1

    @property
    def batch(self) -> int | None:
        return self.parents.shape[0]

    @property
    def extent(self) -> Span:
        size = self.parents.shape[1]
        return Span(0, size, 0, size) if self.place is None else self.place

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        self._check_unchanged()
        sees, size, stop = self.sees.to(kv_idx.device), self.sees.shape[1], self.extent.q_stop
        start = (at_row(stop, b) if isinstance(stop, Tensor) else stop) - size
        mine, its = q_idx - start, kv_idx - start
        if size == 0:
            return its < 0
        inside = (mine >= 0) & (mine < size) & (its >= 0) & (its < size)
        cell = row_index(sees, b), mine.clamp(0, size - 1), its.clamp(0, size - 1)
        return (its < 0) | (inside & sees[cell])

    def within(self, span: Span) -> Mask:
        return super(Tree, self._placed(span)).within(span)

    def reach(self, span: Span) -> Reach:
        return super(Tree, self._placed(span)).reach(span)

    def _placed(self, span: Span) -> "Tree":
        if self.place is not None:
            return self
        stop, size = span.first_query + span.num_queries, self.parents.shape[1]
        if stop < size:
            raise ValueError(
                f"a tree of {size} tokens ends with the call's last query, which has slot "
                f"{stop - 1}; give all tokens of the tree, or a span or cache with those before"
            )
        return self._at(span)

    def runs(self, first: int, last: int) -> Shown:
        place, size = self.extent, self.parents.shape[1]
        start = place.first_query + place.num_queries - size  # the lowest of all rows
        before = [(NEAR, start)]
        if self.lines is None or isinstance(place.q_stop, Tensor) or torch.compiler.is_compiling():
            return Shown([(NEAR, max(place.last_query - size, last) + 1)], before, (start,))
        inside = slice(max(0, first - start), max(0, last + 1 - start))
        here = [line for row in self.lines for line in row[inside]]
        every = reduce(and_, here, -1 if start <= first and last < start + size else 0)
        some = _runs_of(reduce(or_, here, 0), start, size)
        return Shown(union(before, some), union(before, _runs_of(every, start, size)), (start,))

    def _hidden_keys(self, b: int, q: int, k: int) -> str:
        return "tokens that are not its ancestors"


def _lines(parents: Sequence[int]) -> list[int]:
    """For each token the places of itself and its ancestors, as bits."""
    lines: list[int] = []
    for place, parent in enumerate(parents):
        lines.append((lines[parent] if parent >= 0 else 0) | 1 << place)
    return lines


def _ancestors(parents: Tensor, places: Tensor) -> Tensor:
    """The ancestors of each token as booleans, by doubling the number of steps to a parent."""
    sees = (parents[..., None] == places) | (places[:, None] == places)
    for _ in range(parents.shape[1].bit_length()):
        sees = (sees.float() @ sees.float()) > 0
    return sees


def _runs_of(bits: int, start: int, size: int) -> Runs:
    """The runs of slots of these places."""
    slots = [start + place for place in range(size) if bits >> place & 1]
    return union([(slot, slot + 1) for slot in slots])
