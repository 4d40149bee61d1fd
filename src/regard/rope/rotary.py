"""Rotary position embedding (RoPE): pairs of channels are rotated in proportion to the position.

The score of a query and a key then depends on their distance only.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, get_args, runtime_checkable

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn import functional as F

from regard.constants import constant
from regard.rope.frequencies import plain_frequencies, require_positive
from regard.rope.scaling import Scaling
from regard.rope.tables import read_row, read_table, table_for
from regard.tracing import without_autocast
from regard.words import code_of

Pairing = Literal["halves", "pairs"]
Positions = Shaped[Tensor, "..."]  # [L] or [B, L]; checked by `_require_positions`


@runtime_checkable
class Rope(Protocol):
    """The protocol of a layer's `rope=`: `Rotary`, `NO_ROPE`, or a class of your own.

    Examples:
        >>> from regard import NO_ROPE, Rotary
        >>> Rotary(8).dim, NO_ROPE.dim  # channels of a head that are rotated
        (8, 0)
    """

    @property
    def dim(self) -> int:
        """The number of channels of a head that are rotated; they are the first ones."""

    @property
    def softmax_factor(self) -> float:
        """A factor of the softmax scale of layers whose `scale` is None."""

    def __call__(
        self, q: Float[Tensor, "B H L D"], k: Float[Tensor, "B G L D"], positions: Positions
    ) -> tuple[Float[Tensor, "B H L D"], Float[Tensor, "B G L D"]]:
        """Rotate queries and keys at the same `positions`, `[L]` or `[B, L]`."""

    def rotate(self, x: Float[Tensor, "B H L D"], positions: Positions) -> Float[Tensor, "B H L D"]:
        """Rotate queries, or keys, at `positions`, `[L]` or `[B, L]`."""


@dataclass(frozen=True, repr=False)
class Rotary:
    """Rotary position embedding (RoPE) of the first `dim` channels of a head.

    RoFormer, Su et al. 2021, arXiv:2104.09864. The output has the channel order of the input.

    This is a frozen dataclass, not a module: it has no buffer that `.to(bfloat16)` would round.
    Frequencies are computed in float64. Angles and the rotation are computed in float32 and rounded
    once to the dtype of the input; for float64 inputs, in float64. A float32 angle is `position *
    frequency` rounded, as in the training of the published models; at position 1e6 its error is up
    to 0.06 radians. Autocast has no effect.

    Args:
        dim: channels that are rotated, an even number.
        theta: the base; pair `i` rotates by `theta ** (-2 i / dim)` radians per position.
        pairing: `"halves"` pairs channel `i` with `i + dim / 2`, as Hugging Face weights expect;
            `"pairs"` pairs `2i` with `2i + 1`, as Meta's and DeepSeek's do.
        scaling: frequencies for longer contexts, such as `Yarn`; None for unscaled ones.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if `dim` is not even and positive, `theta` not finite and above 0, `pairing`
            unknown, or the scaling does not support `dim` or `theta`.

    Examples:
        >>> import torch
        >>> from regard import Rotary
        >>> rope = Rotary(2, theta=100.0)
        >>> q = k = torch.tensor([[[[1.0, 0.0], [1.0, 0.0]]]])
        >>> rope(q, k, torch.tensor([0, 1]))[0]
        tensor([[[[1.0000, 0.0000],
                  [0.5403, 0.8415]]]])
    """

    dim: int
    theta: float | int = 10_000.0
    pairing: Pairing = "halves"
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        require_positive("Rotary", dim=self.dim, theta=self.theta)
        if self.dim % 2:
            raise ValueError(f"Rotary rotates pairs of channels: dim must be even, got {self.dim}")
        if self.pairing not in get_args(Pairing):
            raise ValueError(
                f"Rotary: pairing must be 'halves' (Hugging Face) or 'pairs' (Meta, DeepSeek), "
                f"got {self.pairing!r}"
            )
        if self.scaling is not None:
            if not isinstance(self.scaling, Scaling):
                raise TypeError(
                    "Rotary: scaling must be a value such as Yarn(...) or Llama3(...), "
                    f"got {self.scaling!r}"
                )
            self.scaling.frequencies(self.dim, self.theta, device="cpu")

    @property
    def attention_factor(self) -> float:
        """A factor of cosines and sines, from the scaling; 1.0 without one."""
        return 1.0 if self.scaling is None else float(self.scaling.attention_factor or 1.0)

    @property
    def softmax_factor(self) -> float:
        """A factor of the softmax scale of layers whose `scale` is None; 1.0 without a scaling."""
        return 1.0 if self.scaling is None else float(self.scaling.softmax_factor)

    def __call__(
        self, q: Float[Tensor, "B H L D"], k: Float[Tensor, "B G L D"], positions: Positions
    ) -> tuple[Float[Tensor, "B H L D"], Float[Tensor, "B G L D"]]:
        """Rotate queries and keys at the same `positions`, `[L]` or `[B, L]`.

        Raises:
            TypeError: if q or k is not floating point, or positions are not integers, float32 or
                float64.
            ValueError: if D is below `dim`, or positions are not `[L]` or `[B, L]`.
        """
        with without_autocast(q.device):
            cos, sin = self._cos_sin(positions, q, k)
            return self._rotated(q, cos, sin), self._rotated(k, cos, sin)

    def rotate(self, x: Float[Tensor, "B H L D"], positions: Positions) -> Float[Tensor, "B H L D"]:
        """Rotate queries, or keys, at `positions`, `[L]` or `[B, L]`; raises as a call does."""
        with without_autocast(x.device):
            cos, sin = self._cos_sin(positions, x)
            return self._rotated(x, cos, sin)

    def row(self, position: int) -> tuple[Float[Tensor, " dim"], Float[Tensor, " dim"]]:
        """The cosine and the signed sine of every channel at one position, in float32.

        In a pair, `-sin` comes first, then `sin`. For ropes whose frequencies do not depend on the
        length.

        Examples:
            >>> from regard import Rotary
            >>> cos, sin = Rotary(2).row(1)
            >>> cos, sin
            (tensor([0.5403, 0.5403]), tensor([-0.8415,  0.8415]))
        """
        cos, sin = read_row(self, self._computed, position)
        return cos.clone(), sin.clone()  # a caller may write to them

    def _table(self, positions: Positions) -> tuple[Tensor, Tensor] | None:
        """Cosines and signed sines of all positions from 0 up to these, as `row` has them.

        They are memoised, so nobody may write to them; None where none are kept.
        """
        return table_for(self, self._computed, positions, torch.float32)

    def angles(
        self, positions: Positions, dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "... half"]:
        """The angle of each pair at each position in radians: `[*positions.shape, dim / 2]`.

        Examples:
            >>> Rotary(4, theta=100.0).angles(torch.tensor([0, 10]))
            tensor([[ 0.,  0.],
                    [10.,  1.]])
        """
        return positions.to(dtype).unsqueeze(-1) * self._frequencies(positions).to(dtype)

    def _frequencies(self, positions: Positions) -> Float[Tensor, " half"]:
        if self.scaling is None or not self.scaling.uses_length:
            return _fixed_frequencies(self, positions.device)
        whole = positions if positions.is_floating_point() else positions.long()  # no overflow
        length = F.pad(whole.flatten(), (1, 0)).max() + 1  # at least 1, for no positions
        return self.scaling.frequencies(
            self.dim, self.theta, length=length, device=positions.device
        )

    def _cos_sin(self, positions: Positions, *rotated: Tensor) -> tuple[Tensor, Tensor]:
        """For every channel, the cosine and the signed sine: `-sin` first in a pair, then `sin`.

        Their shape broadcasts to `[B, H, L, dim]`. Raises if the positions do not fit the tensors.
        """
        plain = positions.dtype is torch.int64 and positions.dim() == 1  # in most calls
        dtype = torch.float32
        for x in rotated:
            shape = x.shape
            fits = x.is_floating_point() and shape[-1] >= self.dim
            if not (plain and fits and shape[2] == positions.shape[0]):
                self._explain(x, positions)
            if x.dtype is torch.float64:
                dtype = torch.float64
        table = read_table(self, self._computed, positions, dtype)
        return self._computed(positions, dtype) if table is None else table

    def _computed(self, positions: Positions, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angles = self.angles(positions, dtype).unsqueeze(-3)  # [1 or B, 1, L, dim/2]
        cos, sin = angles.cos(), angles.sin()
        factor = self.attention_factor
        if factor != 1.0:
            cos, sin = cos * factor, sin * factor
        return self._paired(cos, cos), self._paired(-sin, sin)

    def _paired(self, first: Tensor, second: Tensor) -> Float[Tensor, "... dim"]:
        """Arrange the first and the second channels of all pairs as the channels of a head."""
        if self.pairing == "halves":
            return torch.cat([first, second], dim=-1)
        return torch.stack([first, second], dim=-1).flatten(-2)

    def _rotated(
        self, x: Float[Tensor, "B H L D"], cos: Tensor, sin: Tensor
    ) -> Float[Tensor, "B H L D"]:
        """`(a cos - b sin, b cos + a sin)` of each pair `(a, b)`."""
        whole = x.shape[-1] == self.dim
        wide = x if whole else x[..., : self.dim]
        if x.dtype != cos.dtype:  # half precision
            wide = wide.to(cos.dtype)
        scaled = wide * cos
        if self.pairing == "halves":  # for every channel, the other one of its pair
            other = wide.roll(self.dim // 2, -1)
        else:
            other = wide.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        rotated = torch.addcmul(scaled, other, sin)
        if x.dtype != cos.dtype:
            rotated = rotated.to(x.dtype)
        return rotated if whole else torch.cat([rotated, x[..., self.dim :]], dim=-1)

    def _explain(self, x: Tensor, positions: Tensor) -> None:
        """Raise an error for the first argument that does not fit, if one does not."""
        if not x.is_floating_point():
            raise TypeError(f"Rotary rotates floating-point tensors, got {x.dtype}")
        if x.shape[-1] < self.dim:
            raise ValueError(
                f"Rotary(dim={self.dim}) rotates the first {self.dim} channels of a head, but the "
                f"tensor of shape {tuple(x.shape)} has {x.shape[-1]}; give dim <= head_dim"
            )
        _require_positions(x, positions)

    def __repr__(self) -> str:
        return code_of(self, 1)


@dataclass(frozen=True, repr=False)
class NoRotary:
    """The neutral rope, `NO_ROPE`, which rotates nothing.

    Examples:
        >>> import torch
        >>> from regard import NO_ROPE
        >>> x = torch.ones(1, 1, 1, 2)
        >>> NO_ROPE.rotate(x, torch.tensor([7])) is x
        True
    """

    dim: ClassVar[int] = 0
    attention_factor: ClassVar[float] = 1.0
    softmax_factor: ClassVar[float] = 1.0

    def __call__(
        self, q: Float[Tensor, "B H L D"], k: Float[Tensor, "B G S D"], positions: Positions
    ) -> tuple[Float[Tensor, "B H L D"], Float[Tensor, "B G S D"]]:
        """Return `q` and `k`."""
        return q, k

    def rotate(self, x: Float[Tensor, "B H L D"], positions: Positions) -> Float[Tensor, "B H L D"]:
        """Return `x`."""
        return x

    def angles(
        self, positions: Positions, dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "... 0"]:
        """An empty tensor, `[*positions.shape, 0]`."""
        return positions.new_empty((*positions.shape, 0), dtype=dtype)

    def __repr__(self) -> str:
        return "NO_ROPE"

    def __reduce__(self) -> str:
        return "NO_ROPE"


NO_ROPE = NoRotary()


@constant
def _fixed_frequencies(rope: Rotary, device: torch.device) -> Float[Tensor, " half"]:
    if rope.scaling is None:
        return plain_frequencies(rope.dim, rope.theta, device)
    return rope.scaling.frequencies(rope.dim, rope.theta, device=device)


def _require_positions(x: Tensor, positions: Tensor) -> None:
    if positions.dtype in (torch.bool, torch.float16, torch.bfloat16) or positions.is_complex():
        raise TypeError(
            f"positions must be integers, float32 or float64, got {positions.dtype}: it cannot "
            "count a sequence; use torch.arange(length)"
        )
    *rows, length = positions.shape if positions.ndim in (1, 2) else (0, -1)
    if length != x.shape[2] or any(n not in (1, x.shape[0]) for n in rows):
        raise ValueError(
            f"positions must be [L] or [B, L], one for each token: the tensor of shape "
            f"{tuple(x.shape)} has L={x.shape[2]} and B={x.shape[0]}, but positions have shape "
            f"{tuple(positions.shape)}"
        )
