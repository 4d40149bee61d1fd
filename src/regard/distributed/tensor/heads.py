"""The assignment of a layer's heads to ranks, and the masks and score biases of a rank's heads."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from regard.distributed.ranks import Ranks
from regard.distributed.tensor.sums import all_reduce_gradient
from regard.masks import (
    AllOf,
    AnyOf,
    Causal,
    Chunked,
    Dense,
    Documents,
    Everything,
    Mask,
    Not,
    Nothing,
    Padding,
    Prefix,
    SlidingWindow,
    Span,
    Where,
)
from regard.ops.bias import Alibi, RelativeBias, ScoreBias, offsets_of
from regard.plan.shapes import replicas


@dataclass(frozen=True)
class HeadLayout:
    """The assignment of heads to ranks. Every rank has equally many.

    With as many key heads as ranks or more, a rank has key heads of its own, and the query heads
    that they serve. With fewer, `replicas` ranks have the same key head, and share the query heads
    that it serves. Numbers need not divide: the last heads of some ranks are then *padding*, heads
    whose weights are zero.

    Args:
        num_heads: query heads of the layer on one device.
        num_kv_heads: its key/value heads. For multi-head latent attention, which rebuilds a key
            head for each query head, as many as query heads.
        size: the number of ranks.

    Examples:
        >>> from regard.distributed import HeadLayout
        >>> split = HeadLayout(9, 3, 2)
        >>> split.local_heads, split.heads(0), split.heads(1)
        (6, range(0, 6), range(6, 9))
        >>> split = HeadLayout(8, 2, 4)
        >>> split.replicas, split.heads(1), split.kv_heads(1)
        (2, range(2, 4), range(0, 1))
    """

    num_heads: int
    num_kv_heads: int
    size: int

    @property
    def replicas(self) -> int:
        """Ranks that have the same key heads."""
        return replicas(self.num_kv_heads, self.size)

    @property
    def groups(self) -> int:
        """Sets of `replicas` ranks."""
        return self.size // self.replicas

    @property
    def local_kv_heads(self) -> int:
        """Key heads of each rank, with padding."""
        return -(-self.num_kv_heads // self.groups)

    @property
    def local_heads(self) -> int:
        """Query heads of each rank, with padding."""
        return self.local_kv_heads * -(-self._served // self.replicas)

    @property
    def _served(self) -> int:
        """Query heads that a key head serves."""
        return self.num_heads // self.num_kv_heads

    def kv_heads(self, rank: int) -> range:
        """The key heads of a rank, without padding."""
        first = rank // self.replicas * self.local_kv_heads
        return range(*_within(self.num_kv_heads, first, first + self.local_kv_heads))

    def heads(self, rank: int) -> range:
        """The query heads of a rank, without padding."""
        mine, served = self.kv_heads(rank), self._served
        if self.replicas == 1:
            return range(mine.start * served, mine.stop * served)
        share = -(-served // self.replicas)
        first = rank % self.replicas * share
        start, stop = _within(served, first, first + share)
        if not mine:
            return range(self.num_heads, self.num_heads)
        return range(mine.start * served + start, mine.start * served + stop)


def _within(most: int, start: int, stop: int) -> tuple[int, int]:
    return min(start, most), min(stop, most)


@dataclass(frozen=True, eq=False)
class HeadSplit(HeadLayout):
    """The heads of a layer that is split over ranks: `split_of(layer)`.

    What `HeadLayout` says, and the part of a call that is about this rank's heads.

    Args:
        num_heads: query heads of the layer on one device.
        num_kv_heads: its key/value heads.
        size: the number of ranks.
        ranks: the ranks.

    Examples:
        >>> from regard.distributed import HeadLayout, HeadSplit
        >>> issubclass(HeadSplit, HeadLayout)
        True
    """

    ranks: Ranks

    def shared(self, x: Tensor) -> Tensor:
        """The same tensor, whose gradient is all-reduced: each rank reads it for its own heads."""
        return all_reduce_gradient(
            x, self.ranks, "tensor parallel: gradients of what the heads read"
        )

    def _numbers(self) -> tuple[int, ...]:
        """The query heads of this rank. For padding, the last of all heads, or another's."""
        first = self.heads(self.ranks.rank).start
        return tuple(min(first + i, self.num_heads - 1) for i in range(self.local_heads))

    def mask(self, mask: Mask) -> Mask:
        """The mask of this rank's heads.

        Raises:
            ValueError: if the mask has another number of heads.
        """
        if mask.heads not in (None, 1, self.num_heads):
            raise ValueError(
                f"{mask!r} is for heads={mask.heads}, the layer has num_heads={self.num_heads} on "
                "all ranks together; give the mask of all heads, of which each rank reads its own"
            )
        return mask_of_heads(mask, self._numbers())

    def score_bias(self, bias: Tensor | ScoreBias | None) -> Tensor | ScoreBias | None:
        """The score bias of this rank's heads.

        Raises:
            ValueError: if the bias has another number of heads.
        """
        if bias is None:
            return None
        if isinstance(bias, Tensor):
            return self._of_axis(self.shared(bias), -3)
        if isinstance(bias, Alibi):
            return _alibi(bias, self._checked(len(bias.slopes)), self._numbers())
        if isinstance(bias, RelativeBias):
            self._checked(bias.num_heads)
            return RelativeBiasOfHeads(bias, self._numbers())
        return BiasOfHeads(bias, self)

    def _of_axis(self, x: Tensor, axis: int) -> Tensor:
        """This rank's heads of an axis that may also be missing or of size 1."""
        if x.dim() < -axis or x.shape[axis] == 1:
            return x
        self._checked(x.shape[axis])
        return of_heads(x, axis, self._numbers())

    def _checked(self, heads: int) -> int:
        if heads not in (1, self.num_heads):
            raise ValueError(
                f"score_bias is for {heads} heads, the layer has num_heads={self.num_heads} on all "
                "ranks together; give the bias of all heads, of which each rank reads its own"
            )
        return heads

    def __deepcopy__(self, memo: dict[int, Any]) -> "HeadSplit":
        return self  # process groups are not copied


def split_of(module: nn.Module | None) -> HeadSplit | None:
    """The heads of a module that `tensor_parallel` has split over ranks; None of other modules."""
    return None if module is None else vars(module).get("head_split")


def ranks_of_both(module: nn.Module | None, ranks: Ranks) -> list[int]:
    """The ranks over which the heads of a module are split and which are among `ranks`, by their
    numbers in the world; none if these all have the same heads."""
    split = split_of(module)
    both = set(ranks.members) & set(split.ranks.members if split else ())
    return sorted(both) if len(both) > 1 else []


def share_of(module: Any, name: str) -> Tensor:
    """A parameter of a module, or, where it is split over ranks, the share of this rank."""
    value: Tensor = module.local(name) if hasattr(module, "local") else getattr(module, name)
    return value


def of_heads(x: Tensor, axis: int, heads: tuple[int, ...]) -> Tensor:
    """Neighbouring heads of an axis, a view; a copy where the last one repeats.

    Examples:
        >>> import torch
        >>> from regard.distributed.tensor.heads import of_heads
        >>> of_heads(torch.arange(4), 0, (2, 3, 3)).tolist()
        [2, 3, 3]
    """
    if heads[-1] - heads[0] + 1 == len(heads):
        return x.narrow(axis, heads[0], len(heads))
    return x.index_select(axis, torch.tensor(heads, device=x.device))


_SAME_FOR_ALL_HEADS = (
    Everything, Nothing, Causal, SlidingWindow, Chunked, Prefix, Documents, Padding,
)  # fmt: skip


def mask_of_heads(mask: Mask, heads: tuple[int, ...]) -> Mask:
    """The mask of some heads: its head `i` is head `heads[i]` of `mask`. The same object where all
    heads have the same mask.

    Examples:
        >>> from regard import Causal, Where
        >>> from regard.distributed.tensor.heads import mask_of_heads
        >>> own = Where(lambda b, h, q_idx, kv_idx: kv_idx % 2 == h % 2)
        >>> mask_of_heads(own, (1, 2)).explain(0, 0, 0, 1).split(":")[0]
        'query 0 may attend to key 1'
        >>> mask_of_heads(Causal(), (1, 2))
        Causal()
    """
    if isinstance(mask, AllOf | AnyOf):
        parts = tuple(mask_of_heads(part, heads) for part in mask.parts)
        same = all(new is old for new, old in zip(parts, mask.parts, strict=True))
        return mask if same else type(mask)(parts)
    if isinstance(mask, Not):
        inner = mask_of_heads(mask.mask, heads)
        return mask if inner is mask.mask else Not(inner)
    if isinstance(mask, Dense):
        if mask.heads in (None, 1):
            return mask
        return Dense(of_heads(mask.keep, 1, heads), place=mask.place)
    if type(mask) in _SAME_FOR_ALL_HEADS:
        return mask
    return Where(_RuleOfHeads(mask, heads))


@dataclass(frozen=True)
class _RuleOfHeads:
    """A mask's rule for one rank's consecutive query heads; heads of padding repeat the last."""

    rule: Mask
    heads: tuple[int, ...]

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return self.rule(b, (h + self.heads[0]).clamp(max=self.heads[-1]), q_idx, kv_idx)

    @property
    def __name__(self) -> str:
        return f"{self.rule!r}, heads {self.heads[0]} to {self.heads[-1]}"


@lru_cache(maxsize=64)
def _alibi(bias: Alibi, given: int, heads: tuple[int, ...]) -> Alibi:
    """The slopes of some heads; all tensors made of them are memoised by the slopes."""
    return bias if given == 1 else Alibi([tuple(bias.slopes)[head] for head in heads])


class RelativeBiasOfHeads(nn.Module):
    """The relative position bias of some heads, of a rule for all."""

    def __init__(self, rule: RelativeBias, heads: tuple[int, ...]) -> None:
        super().__init__()
        self.buckets = rule.buckets
        self.table = of_heads(share_of(rule.relative_attention_bias, "weight"), 1, heads)

    def parameters(self, recurse: bool = True) -> Any:
        """The columns of the weight that belong to the heads."""
        return iter([self.table])

    def named_parameters(self, *args: Any, **options: Any) -> Any:
        """The columns of the weight that belong to the heads, with a name."""
        return iter([("table", self.table)])

    def bias(
        self, span: Span, *, device: torch.device | str | None = None, dtype: torch.dtype
    ) -> Tensor:
        """`[1, n, L, S]`, or `[B, n, L, S]` for a ragged span, in `dtype`, with gradients."""
        offsets = offsets_of(span, self.table.device if device is None else device)
        bias = functional.embedding(self.buckets(offsets.squeeze(1)), self.table)
        return bias.movedim(-1, 1).to(dtype)


@dataclass(frozen=True, eq=False)
class BiasOfHeads:
    """The bias of this rank's heads, of a rule without parameters."""

    rule: ScoreBias  # of all heads
    split: HeadSplit  # which heads are this rank's

    def bias(
        self, span: Span, *, device: torch.device | str | None = None, dtype: torch.dtype
    ) -> Tensor:
        """`[B, local_heads, L, S]`, or with axes of size 1."""
        return self.split._of_axis(self.rule.bias(span, device=device, dtype=dtype), -3)
