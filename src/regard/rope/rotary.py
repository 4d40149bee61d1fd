"""Rotary positions: channels turn in pairs by their position, so a score sees only the distance."""

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, get_args, runtime_checkable

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn import functional as F

from regard.constants import accumulating_dtype, constant
from regard.rope.frequencies import paste, plain_frequencies, require_positive
from regard.rope.scaling import Scaling
from regard.tracing import without_autocast

Pairing = Literal["halves", "pairs"]
Positions = Shaped[Tensor, "..."]  # [L] or [B, L]; `_require_positions` says so in words


@runtime_checkable
class Rope(Protocol):
    """What a layer asks of its `rope=`: `Rotary`, `NO_ROPE`, or one of your own."""

    @property
    def dim(self) -> int:
        """How many of the head's channels are rotated: the first ones."""

    @property
    def softmax_factor(self) -> float:
        """What a layer whose `scale` is None multiplies its softmax scale by."""

    def __call__(
        self, q: Float[Tensor, "B H L D"], k: Float[Tensor, "B G L D"], positions: Positions
    ) -> tuple[Float[Tensor, "B H L D"], Float[Tensor, "B G L D"]]:
        """Queries and keys at `positions`, rotated."""

    def rotate(self, x: Float[Tensor, "B H L D"], positions: Positions) -> Float[Tensor, "B H L D"]:
        """Either of them alone."""


@dataclass(frozen=True, repr=False)
class Rotary:
    """Rotary position embedding (RoFormer, arXiv 2104.09864) of the first `dim` channels of a head.

    `pairing` says which channels turn together: `"halves"` turns channel `i` with `i + dim / 2`, as
    Hugging Face weights expect; `"pairs"` turns `2i` with `2i + 1`, as Meta's and DeepSeek's do.
    The output keeps the layout of the input.

    A value, not a module: there is no buffer that `.to(bfloat16)` could spoil. Frequencies are
    computed in float64. Angles and the rotation are computed in float32 and rounded once to the
    dtype of the input; for float64 inputs, in float64. A float32 angle is `position * frequency`
    rounded, as it was when the published models were trained, so at position 1e6 it is true to
    about 0.06 radians and no better. Autocast changes nothing.

    `softmax_factor` is what the scaling multiplies a layer's softmax scale by, and
    `attention_factor` what it multiplies cosines and sines by: 1.0 unless the scaling says so.

    Raises:
        TypeError: if an argument is of the wrong kind.
        ValueError: if `dim` is not even and positive, `theta` not finite and above 0, or `pairing`
            unknown; whatever the scaling objects to in this `dim` and `theta`.

    >>> rope = Rotary(2, theta=100.0)
    >>> q = k = torch.tensor([[[[1.0, 0.0], [1.0, 0.0]]]])
    >>> rope(q, k, torch.tensor([0, 1]))[0]
    tensor([[[[1.0000, 0.0000],
              [0.5403, 0.8415]]]])
    >>> rope
    Rotary(2, theta=100.0)
    """

    dim: int
    theta: float | int = 10_000.0
    pairing: Pairing = "halves"
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        require_positive("Rotary", dim=self.dim, theta=self.theta)
        if self.dim % 2:
            raise ValueError(f"Rotary turns channels in pairs, so dim must be even, got {self.dim}")
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
        """What cosines and sines are multiplied by."""
        return 1.0 if self.scaling is None else float(self.scaling.attention_factor or 1.0)

    @property
    def softmax_factor(self) -> float:
        """What a layer whose `scale` is None multiplies its softmax scale by."""
        return 1.0 if self.scaling is None else float(self.scaling.softmax_factor)

    def __call__(
        self, q: Float[Tensor, "B H L D"], k: Float[Tensor, "B G L D"], positions: Positions
    ) -> tuple[Float[Tensor, "B H L D"], Float[Tensor, "B G L D"]]:
        """Queries and keys at the same `positions`, `[L]` or `[B, L]`, rotated.

        Raises:
            TypeError: if q or k is not floating, or positions are neither integers nor wide floats.
            ValueError: if D is below `dim`, or positions are not `[L]` or `[B, L]`.
        """
        for x in (q, k):
            self._require_fit(x, positions)
        with without_autocast(q.device):
            cos, sin = self._cos_sin(positions, accumulating_dtype(q.dtype, k.dtype))
            return self._turn(q, cos, sin), self._turn(k, cos, sin)

    def rotate(self, x: Float[Tensor, "B H L D"], positions: Positions) -> Float[Tensor, "B H L D"]:
        """Queries, or keys, at `positions`, `[L]` or `[B, L]`; raises as calling does."""
        self._require_fit(x, positions)
        with without_autocast(x.device):
            cos, sin = self._cos_sin(positions, accumulating_dtype(x.dtype))
            return self._turn(x, cos, sin)

    def angles(
        self, positions: Positions, dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "... half"]:
        """The angle of each pair at each position in radians: `[*positions.shape, dim / 2]`.

        >>> Rotary(4, theta=100.0).angles(torch.tensor([0, 10]))
        tensor([[ 0.,  0.],
                [10.,  1.]])
        """
        return positions.to(dtype).unsqueeze(-1) * self._frequencies(positions).to(dtype)

    def _frequencies(self, positions: Positions) -> Float[Tensor, " half"]:
        if self.scaling is None or not self.scaling.uses_length:
            return _steady_frequencies(self, positions.device)
        length = F.pad(positions.flatten(), (1, 0)).max() + 1  # the pad: no positions, length 1
        return self.scaling.frequencies(
            self.dim, self.theta, length=length, device=positions.device
        )

    def _cos_sin(self, positions: Positions, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angles = self.angles(positions, dtype).unsqueeze(-3)  # [1 or B, 1, L, dim/2]: heads share
        cos, sin = angles.cos(), angles.sin()
        factor = self.attention_factor
        return (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)

    def _turn(
        self, x: Float[Tensor, "B H L D"], cos: Tensor, sin: Tensor
    ) -> Float[Tensor, "B H L D"]:
        turned, rest = x[..., : self.dim], x[..., self.dim :]
        if self.pairing == "halves":
            a, b = turned.chunk(2, dim=-1)
            return torch.cat([*(y.to(x.dtype) for y in _spin(a, b, cos, sin)), rest], dim=-1)
        a, b = turned[..., 0::2], turned[..., 1::2]
        pairs = torch.stack(_spin(a, b, cos, sin), dim=-1).flatten(-2).to(x.dtype)
        return torch.cat([pairs, rest], dim=-1) if rest.shape[-1] else pairs

    def _require_fit(self, x: Tensor, positions: Tensor) -> None:
        if not x.is_floating_point():
            raise TypeError(f"Rotary rotates floating-point tensors, got {x.dtype}")
        if x.shape[-1] < self.dim:
            raise ValueError(
                f"Rotary(dim={self.dim}) rotates the first {self.dim} channels of a head, but the "
                f"tensor of shape {tuple(x.shape)} has {x.shape[-1]}; give dim <= head_dim"
            )
        _require_positions(x, positions)

    def __repr__(self) -> str:
        return paste(self)


@dataclass(frozen=True, repr=False)
class NoRotary:
    """The neutral rope, `NO_ROPE`: positions turn nothing.

    >>> NO_ROPE.rotate(torch.ones(1, 1, 1, 2), torch.tensor([7]))
    tensor([[[[1., 1.]]]])
    """

    dim: ClassVar[int] = 0
    attention_factor: ClassVar[float] = 1.0
    softmax_factor: ClassVar[float] = 1.0

    def __call__(
        self, q: Float[Tensor, "B H L D"], k: Float[Tensor, "B G S D"], positions: Positions
    ) -> tuple[Float[Tensor, "B H L D"], Float[Tensor, "B G S D"]]:
        """q and k themselves."""
        return q, k

    def rotate(self, x: Float[Tensor, "B H L D"], positions: Positions) -> Float[Tensor, "B H L D"]:
        """x itself."""
        return x

    def angles(
        self, positions: Positions, dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "... 0"]:
        """No angle at any position: `[*positions.shape, 0]`."""
        return positions.new_empty((*positions.shape, 0), dtype=dtype)

    def __repr__(self) -> str:
        return "NO_ROPE"

    def __reduce__(self) -> str:
        return "NO_ROPE"


NO_ROPE = NoRotary()


@constant
def _steady_frequencies(rope: Rotary, device: torch.device) -> Float[Tensor, " half"]:
    if rope.scaling is None:
        return plain_frequencies(rope.dim, rope.theta, device)
    return rope.scaling.frequencies(rope.dim, rope.theta, device=device)


def _spin(a: Tensor, b: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return a * cos - b * sin, b * cos + a * sin  # half-precision a and b are promoted, exactly


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
