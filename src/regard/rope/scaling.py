"""A scaling maps rotary frequencies to slower ones: a model then reads further than it was trained.

Every scaling is a frozen value with three members: `frequencies`, which maps `(dim, theta)` to the
scaled frequencies; `attention_factor`, which multiplies cosines and sines; and `softmax_factor`,
which multiplies the softmax scale. Frequencies are computed in float64; `Rotary` casts them last.

Two of them, `NTK` with an `original_max_position` and `LongRope`, look at the length of the
sequence, which is the call's largest position plus one. Keys a cache already holds were rotated
with the frequencies of their own call and keep them: the published models do the same.
"""

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Float64, Shaped
from torch import Tensor

from regard.constants import device_vector
from regard.rope.frequencies import (
    Device,
    paste,
    plain_frequencies,
    require_finite,
    require_positive,
)

Length = Shaped[Tensor, ""] | None
RAMP_EPSILON = 0.001  # YaRN's code keeps an empty ramp from dividing by zero with this


@runtime_checkable
class Scaling(Protocol):
    """What `Rotary(scaling=...)` asks of a scaling. Values compare, hash and paste back."""

    @property
    def uses_length(self) -> bool:
        """Whether `frequencies` reads `length`."""

    @property
    def attention_factor(self) -> float | int | None:
        """What cosines and sines are multiplied by; None is 1."""

    @property
    def softmax_factor(self) -> float | int:
        """What the softmax scale is multiplied by, where the layer's `scale` is None."""

    def frequencies(
        self, dim: int, theta: float | int, *, length: Length = None, device: Device = None
    ) -> Float64[Tensor, " half"]:
        """Radians a position for each of the `dim / 2` pairs, in float64."""


@dataclass(frozen=True, repr=False)
class LinearScaling:
    """Position interpolation (arXiv 2306.15595): every frequency divided by `factor`.

    Raises:
        TypeError, ValueError: if `factor` is not a number, or not finite and above 0.

    >>> LinearScaling(2).frequencies(4, 100.0)
    tensor([0.5000, 0.0500], dtype=torch.float64)
    """

    factor: float | int

    uses_length: ClassVar[bool] = False
    attention_factor: ClassVar[float] = 1.0
    softmax_factor: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        require_positive("LinearScaling", factor=self.factor)

    def frequencies(
        self, dim: int, theta: float | int, *, length: Length = None, device: Device = None
    ) -> Float64[Tensor, " half"]:
        """Radians a position, `[dim / 2]` in float64; `length` is not read."""
        return plain_frequencies(dim, theta, device) / self.factor

    def __repr__(self) -> str:
        return paste(self)


@dataclass(frozen=True, repr=False)
class NTK:
    """NTK-aware scaling: a larger `theta`, so fast pairs keep their speed and slow ones stretch.

    With `original_max_position=None` the base is `theta * factor ** (dim / (dim - 2))` always. With
    a number the base grows with the call's length beyond it ("dynamic NTK"), and calls within it
    are unscaled. The length is the largest position of the whole batch plus one.

    Raises:
        TypeError, ValueError: if a number is not finite and above 0; on use, if `dim` is below 4.

    >>> NTK(8.0).frequencies(4, 100.0)
    tensor([1.0000, 0.0125], dtype=torch.float64)
    """

    factor: float | int
    original_max_position: int | None = None

    attention_factor: ClassVar[float] = 1.0
    softmax_factor: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        require_positive(
            "NTK", factor=self.factor, original_max_position=self.original_max_position
        )

    @property
    def uses_length(self) -> bool:
        """Whether this is dynamic NTK."""
        return self.original_max_position is not None

    def frequencies(
        self, dim: int, theta: float | int, *, length: Length = None, device: Device = None
    ) -> Float64[Tensor, " half"]:
        """Radians a position, `[dim / 2]` in float64. No `length` is one within the original."""
        if dim < 4:
            raise ValueError(f"NTK needs dim >= 4 (its exponent is dim / (dim - 2)), got dim={dim}")
        slower = torch.arange(0, dim, 2, dtype=torch.float64, device=device) / (dim - 2)
        return plain_frequencies(dim, theta, device) * self._growth(length, slower) ** -slower

    def _growth(self, length: Length, like: Float64[Tensor, " half"]) -> Float64[Tensor, ""]:
        original = self.original_max_position
        if original is None:
            return like.new_full((), self.factor)
        if length is None:
            return like.new_ones(())
        beyond = length.to(like.dtype).clamp(min=original) / original
        return self.factor * beyond - (self.factor - 1)

    def __repr__(self) -> str:
        return paste(self)


@dataclass(frozen=True, repr=False)
class Yarn:
    """YaRN (arXiv 2309.00071): slow pairs divided by `factor`, fast ones kept, a ramp between.

    A pair that turns more than `beta_fast` times within `original_max_position` is kept, one that
    turns less than `beta_slow` times is divided; `truncate` rounds the ends of the ramp to whole
    pairs. Cosines and sines are multiplied by the `attention_factor` given, else by the ratio of
    the two mscales if both are given, else by `0.1 ln(factor) + 1`. DeepSeek's `mscale_all_dim`
    acts on the softmax scale as well, by the square of its mscale: `softmax_factor`.

    Raises:
        TypeError, ValueError: if a number is not finite and above 0 (an mscale may be 0, which is
            as good as None), or `beta_fast < beta_slow`; on use, if `theta` is not above 1.

    >>> Yarn(40, original_max_position=4096, mscale=1.0, mscale_all_dim=1.0).attention_factor
    1.0
    """

    factor: float | int
    _: KW_ONLY
    original_max_position: int
    beta_fast: float | int = 32
    beta_slow: float | int = 1
    mscale: float | int | None = None
    mscale_all_dim: float | int | None = None
    attention_factor: float | int | None = None
    truncate: bool = True

    uses_length: ClassVar[bool] = False

    def __post_init__(self) -> None:
        numbers = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "truncate"}
        unused = {name: None for name in ("mscale", "mscale_all_dim") if not numbers[name]}
        require_positive("Yarn", **(numbers | unused))
        if self.beta_fast < self.beta_slow:
            raise ValueError(
                f"Yarn: beta_fast={self.beta_fast} counts the turns of the fast pairs and must not "
                f"be below beta_slow={self.beta_slow}; swap the two"
            )
        if self.attention_factor is None:
            object.__setattr__(self, "attention_factor", self._derived_attention_factor())

    @property
    def softmax_factor(self) -> float:
        """The square of the mscale that `mscale_all_dim` asks for; 1.0 without one."""
        return self._mscale(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def frequencies(
        self, dim: int, theta: float | int, *, length: Length = None, device: Device = None
    ) -> Float64[Tensor, " half"]:
        """Radians a position, `[dim / 2]` in float64; `length` is not read."""
        low, high = self._ramp(dim, theta)
        pairs = torch.arange(dim // 2, dtype=torch.float64, device=device)
        slowed = ((pairs - low) / (high - low)).clamp(0, 1)
        plain = plain_frequencies(dim, theta, device)
        return torch.lerp(plain, plain / self.factor, slowed)

    def _ramp(self, dim: int, theta: float | int) -> tuple[float, float]:
        if theta <= 1:
            raise ValueError(f"Yarn needs theta > 1 (frequencies that fall), got theta={theta}")
        low, high = (self._pair_turning(n, dim, theta) for n in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = float(math.floor(low)), float(math.ceil(high))
        low, high = max(low, 0.0), min(high, dim - 1.0)
        return low, high + RAMP_EPSILON if high == low else high

    def _pair_turning(self, turns: float | int, dim: int, theta: float | int) -> float:
        wavelength = self.original_max_position / turns
        return dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))

    def _mscale(self, weight: float | int) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * weight * math.log(self.factor) + 1.0

    def _derived_attention_factor(self) -> float:
        if self.mscale and self.mscale_all_dim:
            return self._mscale(self.mscale) / self._mscale(self.mscale_all_dim)
        return self._mscale(1)

    def __repr__(self) -> str:
        return paste(self, attention_factor=self._derived_attention_factor())


@dataclass(frozen=True, repr=False)
class Llama3:
    """Llama 3.1's scaling: long wavelengths divided by `factor`, short ones kept, a blend between.

    Wavelengths above `original_max_position / low_freq_factor` are long, those below
    `original_max_position / high_freq_factor` are short.

    Raises:
        TypeError, ValueError: if a number is not finite and above 0, or `high_freq_factor` is not
            above `low_freq_factor`.

    >>> Llama3(8.0).frequencies(4, 500_000.0)
    tensor([1.0000e+00, 5.2485e-04], dtype=torch.float64)
    """

    factor: float | int
    _: KW_ONLY
    low_freq_factor: float | int = 1.0
    high_freq_factor: float | int = 4.0
    original_max_position: int = 8192

    uses_length: ClassVar[bool] = False
    attention_factor: ClassVar[float] = 1.0
    softmax_factor: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        require_positive("Llama3", **{f.name: getattr(self, f.name) for f in fields(self)})
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"Llama3: high_freq_factor={self.high_freq_factor} must be above "
                f"low_freq_factor={self.low_freq_factor}; Llama 3.1 has 4.0 and 1.0"
            )

    def frequencies(
        self, dim: int, theta: float | int, *, length: Length = None, device: Device = None
    ) -> Float64[Tensor, " half"]:
        """Radians a position, `[dim / 2]` in float64; `length` is not read."""
        plain = plain_frequencies(dim, theta, device)
        turns = self.original_max_position * plain / (2 * math.pi)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return torch.lerp(plain / self.factor, plain, kept.clamp(0, 1))

    def __repr__(self) -> str:
        return paste(self)


@dataclass(frozen=True, repr=False)
class LongRope:
    """LongRoPE (arXiv 2402.13753): each pair divided by its own factor, one list a length.

    `long_factor` serves calls longer than `original_max_position` (by the largest position of the
    whole batch plus one), `short_factor` the others; both have `dim / 2` entries. `factor` is how
    much longer the new context is than the original. Cosines and sines are multiplied by the
    `attention_factor` given, else by `sqrt(1 + ln(factor) / ln(original_max_position))`.

    Raises:
        TypeError, ValueError: if a number is not finite and above 0, or the lists differ in length;
            on use, if they are not `dim / 2` long.

    >>> LongRope([1, 1], [1, 4], original_max_position=4096, factor=32).frequencies(4, 100.0)
    tensor([1.0000, 0.1000], dtype=torch.float64)
    """

    short_factor: Sequence[float | int]
    long_factor: Sequence[float | int]
    _: KW_ONLY
    original_max_position: int
    factor: float | int
    attention_factor: float | int | None = None

    uses_length: ClassVar[bool] = True
    softmax_factor: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        for name in ("short_factor", "long_factor"):
            values = tuple(getattr(self, name))
            require_positive("LongRope", **{f"{name}[{i}]": v for i, v in enumerate(values)})
            object.__setattr__(self, name, values)
        if len(self.short_factor) != len(self.long_factor):
            raise ValueError(
                f"LongRope: short_factor has {len(self.short_factor)} entries and long_factor "
                f"{len(self.long_factor)}; both need dim / 2"
            )
        numbers = ("factor", "original_max_position", "attention_factor")
        require_positive("LongRope", **{name: getattr(self, name) for name in numbers})
        if self.original_max_position <= 1:
            raise ValueError("LongRope: original_max_position must be above 1, whose log is 0")
        if self.attention_factor is None:
            object.__setattr__(self, "attention_factor", self._derived_attention_factor())

    def frequencies(
        self, dim: int, theta: float | int, *, length: Length = None, device: Device = None
    ) -> Float64[Tensor, " half"]:
        """Radians a position, `[dim / 2]` in float64. No `length` is one within the original."""
        if dim != 2 * len(self.short_factor):
            raise ValueError(
                f"LongRope: short_factor and long_factor have {len(self.short_factor)} entries, "
                f"but dim={dim} has {dim // 2} pairs"
            )
        plain = plain_frequencies(dim, theta, device)
        short = plain / device_vector(tuple(self.short_factor), plain.dtype, plain.device)
        if length is None:
            return short
        long = plain / device_vector(tuple(self.long_factor), plain.dtype, plain.device)
        return torch.where(length > self.original_max_position, long, short)

    def _derived_attention_factor(self) -> float:
        if self.factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_position))

    def __repr__(self) -> str:
        return paste(self, always=2, attention_factor=self._derived_attention_factor())


@dataclass(frozen=True, repr=False)
class Frequencies:
    """Frequencies given one by one, in radians a position: `theta` is not read.

    What a conversion leaves when it keeps some pairs of several heads: any order, and repeats.
    0 is a pair that does not turn, a negative frequency turns the other way. There must be
    `dim / 2` of them.

    Raises:
        TypeError, ValueError: if a frequency is not a finite number, or there is none; on use, if
            there are not `dim / 2`.

    >>> Frequencies((1.0, 1.0, 0.25)).frequencies(6, 10_000.0)
    tensor([1.0000, 1.0000, 0.2500], dtype=torch.float64)
    """

    values: Sequence[float | int]

    uses_length: ClassVar[bool] = False
    attention_factor: ClassVar[float] = 1.0
    softmax_factor: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        values = tuple(self.values)
        if not values:
            raise ValueError("Frequencies: values must have at least one entry, got ()")
        require_finite("Frequencies", **{f"values[{i}]": v for i, v in enumerate(values)})
        object.__setattr__(self, "values", values)

    def frequencies(
        self, dim: int, theta: float | int, *, length: Length = None, device: Device = None
    ) -> Float64[Tensor, " half"]:
        """Radians a position, `[dim / 2]` in float64; `theta` and `length` are not read."""
        if dim != 2 * len(self.values):
            raise ValueError(
                f"Frequencies: there are {len(self.values)} values, but dim={dim} has {dim // 2} "
                "pairs"
            )
        return torch.tensor(self.values, dtype=torch.float64, device=device)

    def __repr__(self) -> str:
        return paste(self)
