"""Rules for score biases: ALiBi, T5's relative bias; and additive masks split into mask and
bias."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import _disable_current_modes

from regard.constants import device_vector
from regard.masks import Dense, Span
from regard.masks.dense import HIDDEN_BELOW


@runtime_checkable
class ScoreBias(Protocol):
    """A rule for `score_bias=`: `Alibi`, `RelativeBias`, or a user-defined one."""

    def bias(
        self, span: Span, *, device: torch.device | str | None = None, dtype: torch.dtype
    ) -> Float[Tensor, "#B #H L S"]:
        """The bias of the scores of the span's queries (`L`) and keys (`S`)."""


@dataclass(frozen=True)
class Alibi:
    """Attention with linear biases: `-slope * |query - key|`, one slope for each head.

    Press et al. 2021, arXiv:2108.12409. `Alibi.for_heads(num_heads)` has the paper's slopes.

    Args:
        slopes: one number for each head, a list or a tensor `[H]`, which is read once.

    Raises:
        TypeError: if the slopes are not real numbers.
        ValueError: if there are none, they are not `[H]`, or one is not finite.

    Examples:
        >>> import torch
        >>> from regard import Alibi, Span
        >>> Alibi([0.5]).bias(Span(2, 3, 0, 4), dtype=torch.float32)
        tensor([[[[-1.0000, -0.5000, -0.0000, -0.5000]]]])
    """

    slopes: Sequence[float | int] | Float[Tensor, " H"]

    def __post_init__(self) -> None:
        slopes = self.slopes
        if isinstance(slopes, Tensor):
            if slopes.ndim != 1:
                raise ValueError(f"Alibi: slopes must be [H], got shape {tuple(slopes.shape)}")
            slopes = slopes.tolist()
        numbers = slopes if isinstance(slopes, Sequence) else [None]
        if any(isinstance(s, bool) or not isinstance(s, int | float) for s in numbers):
            raise TypeError(f"Alibi: slopes must be real numbers, one a head, got {slopes!r}")
        if not slopes or not all(math.isfinite(s) for s in slopes):
            raise ValueError(
                f"Alibi: slopes must be finite numbers, one a head, got {slopes!r}; "
                "Alibi.for_heads(num_heads) has the paper's"
            )
        object.__setattr__(self, "slopes", tuple(float(s) for s in slopes))

    @property
    def num_heads(self) -> int:
        """The number of slopes."""
        return len(self.slopes)

    @classmethod
    def for_heads(cls, num_heads: int) -> "Alibi":
        """The paper's slopes: `2 ** (-8 i / H)`, and every other slope of `2 H` heads for the rest.

        Raises:
            ValueError: if `num_heads` is not positive.

        Examples:
            >>> Alibi.for_heads(3)
            Alibi(slopes=(0.0625, 0.00390625, 0.25))
        """
        if not isinstance(num_heads, int) or num_heads < 1:
            raise ValueError(f"Alibi.for_heads: num_heads must be positive, got {num_heads!r}")
        whole = 2 ** (num_heads.bit_length() - 1)  # the largest power of two that fits
        slopes = [2.0 ** (-8 * i / whole) for i in range(1, whole + 1)]
        between = [2.0 ** (-4 * i / whole) for i in range(1, 2 * whole, 2)]
        return cls((slopes + between)[:num_heads])

    def bias(
        self, span: Span, *, device: torch.device | str | None = None, dtype: torch.dtype
    ) -> Float[Tensor, "#B H L S"]:
        """`[1, H, L, S]`, or `[B, H, L, S]` for a ragged span; rounded once to `dtype`."""
        wide = torch.promote_types(dtype, torch.float32)
        distances = offsets_of(span, device).abs().to(wide)
        slopes = device_vector(tuple(self.slopes), wide, distances.device)
        return (-slopes[:, None, None] * distances).to(dtype)


class RelativeBias(nn.Module):
    """T5's relative position bias: one learned bias for each head and bucket of distances.

    Raffel et al. 2019, arXiv:1910.10683. Half of the buckets hold one small distance each; the
    widths of the others grow geometrically up to `max_distance`, and larger distances share the
    last. The weight is `relative_attention_bias.weight`, `[num_buckets, num_heads]`, as in T5's
    checkpoints. Several layers may share one, as in T5.

    Args:
        num_heads: query heads.
        num_buckets: rows of the weight.
        max_distance: the distance from which on all share the last bucket.
        bidirectional: whether keys after the query have buckets of their own; else they share that
            of distance 0.

    Raises:
        ValueError: if `num_heads` is not positive, `num_buckets` too small or odd for
            `bidirectional`, or `max_distance` within the near buckets.

    Examples:
        >>> import torch
        >>> from regard import RelativeBias, Span
        >>> bias = RelativeBias(2)
        >>> bias.bias(Span(0, 3, 0, 5), dtype=torch.float32).shape
        torch.Size([1, 2, 3, 5])
    """

    def __init__(
        self,
        num_heads: int,
        num_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = True,
    ) -> None:
        super().__init__()
        directions = 2 if bidirectional else 1
        if num_heads < 1:
            raise ValueError(f"RelativeBias: num_heads must be positive, got {num_heads}")
        if num_buckets < 2 * directions or num_buckets % directions:
            raise ValueError(
                f"RelativeBias: num_buckets={num_buckets} cannot be divided; "
                + ("bidirectional needs an even number >= 4" if bidirectional else "it needs >= 2")
            )
        near = num_buckets // directions // 2
        if max_distance <= near:
            raise ValueError(
                f"RelativeBias: max_distance={max_distance} must be above {near}, the number of "
                f"distances that num_buckets={num_buckets} holds one by one"
            )
        self.num_heads = num_heads
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        self.bidirectional = bidirectional
        self._buckets = _buckets_by_distance(num_buckets // directions, max_distance)
        self.relative_attention_bias = nn.Embedding(num_buckets, num_heads)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the weight, small compared to scores, which are about 1."""
        nn.init.normal_(self.relative_attention_bias.weight, std=0.02)

    def bias(
        self, span: Span, *, device: torch.device | str | None = None, dtype: torch.dtype
    ) -> Float[Tensor, "#B H L S"]:
        """`[1, H, L, S]`, or `[B, H, L, S]` for a ragged span, in `dtype`, with gradients."""
        weight = self.relative_attention_bias.weight
        buckets = self.buckets(offsets_of(span, weight.device if device is None else device))
        bias: Tensor = self.relative_attention_bias(buckets.squeeze(1))
        return bias.movedim(-1, 1).to(dtype)

    def buckets(self, offsets: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """The bucket of each offset, a key's position less its query's.

        Examples:
            >>> RelativeBias(1).buckets(torch.tensor([-128, -1, 0, 1, 8, 128]))
            tensor([15,  1,  0, 17, 24, 31])
        """
        table = device_vector(self._buckets, torch.int64, offsets.device)
        distances = offsets.abs() if self.bidirectional else (-offsets).clamp(min=0)
        buckets = table[distances.clamp(max=self.max_distance)]
        return buckets + (self.num_buckets // 2 * (offsets > 0) if self.bidirectional else 0)

    def __repr__(self) -> str:
        return (
            f"RelativeBias({self.num_heads}, num_buckets={self.num_buckets}, "
            f"max_distance={self.max_distance}, bidirectional={self.bidirectional})"
        )


class BiasWith(nn.Module):
    """A learned rule for score biases, with other tensors in place of its parameters.

    Args:
        rule: a module with the method `bias`.
        tensors: by the names of the parameters and buffers in the rule.
    """

    def __init__(self, rule: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.rule = rule
        self._tensors = {f"rule.{name}": each for name, each in tensors.items()}

    def bias(
        self, span: Span, *, device: torch.device | str | None = None, dtype: torch.dtype
    ) -> Tensor:
        """As the rule's own method."""
        bias: Tensor = functional_call(self, self._tensors, (span, device, dtype))
        return bias

    def forward(self, span: Span, device: torch.device | str | None, dtype: torch.dtype) -> Tensor:
        bias: Tensor = self.rule.bias(span, device=device, dtype=dtype)  # type: ignore[operator]
        return bias


def split_additive(
    t: Float[Tensor, "*batch L S"],
) -> tuple[Dense, Float[Tensor, "*batch L S"]]:
    """An additive mask split into a mask, `Dense`, and the bias of the visible keys.

    Args:
        t: `[.., L, S]`, about the queries and keys of one call. Entries `<= -1e4`, rounded to its
            dtype, hide.

    Returns:
        The mask, and `t` with 0 where it hides, in its dtype and with its gradients.

    Raises:
        TypeError: if `t` is not a floating-point tensor.
        ValueError: if an entry is NaN or +inf, or `t` has fewer than two dimensions.

    Examples:
        >>> import torch
        >>> from regard import split_additive
        >>> mask, score_bias = split_additive(torch.tensor([[0.5, -torch.inf]]))
        >>> mask.keep.tolist(), score_bias.tolist()
        ([[True, False]], [[0.5, 0.0]])
    """
    if not isinstance(t, Tensor) or not t.is_floating_point():
        kind = t.dtype if isinstance(t, Tensor) else type(t).__name__
        raise TypeError(f"split_additive takes a floating-point tensor, got {kind}")
    if t.ndim < 2:
        raise ValueError(f"split_additive takes a tensor [.., L, S], got shape {tuple(t.shape)}")
    if (t.isnan() | (t == torch.inf)).any():
        raise ValueError(
            "split_additive: NaN and +inf are neither hidden nor a bias; entries must be finite, "
            f"or at most {HIDDEN_BELOW:.0f} to hide"
        )
    hidden = t <= t.new_full((), HIDDEN_BELOW)  # in the dtype of t: bfloat16 has no -10000
    return Dense(~hidden), t.masked_fill(hidden, 0.0)


def offsets_of(span: Span, device: torch.device | str | None) -> Int[Tensor, "#B 1 L S"]:
    """The positions of the span's keys less those of its queries."""
    queries = span.positions(device)
    offsets = torch.arange(span.kv_start, span.kv_stop, device=queries.device) - queries[..., None]
    return offsets[:, None] if offsets.ndim == 3 else offsets[None, None]


def _buckets_by_distance(share: int, max_distance: int) -> tuple[int, ...]:
    near = share // 2
    with _disable_current_modes():  # rounded as T5 rounds, by torch; fake tensors have no numbers
        far = torch.arange(near, max_distance + 1, dtype=torch.float32, device="cpu") / near
        steps = (far.log() / math.log(max_distance / near) * (share - near)).tolist()
    return (*range(near), *(min(near + int(step), share - 1) for step in steps))
