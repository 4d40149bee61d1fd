"""Scalings of RoPE: lower frequencies, for contexts longer than those a model was trained with.

Where they depend on the length of a call (`NTK`, `LongRope`), cached keys are not rotated again:
they keep the frequencies of their own call, as in the published models.
"""

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Float64, Shaped
from torch import Tensor

from regard.constants import Device, device_vector
from regard.rope.frequencies import given, plain_frequencies, require_finite, require_positive
from regard.words import code_of

Length = Shaped[Tensor, ""] | None
RAMP_EPSILON = 0.001  # pairs; the width of an empty ramp, as in YaRN's code: avoids dividing by 0


@runtime_checkable
class Scaling(Protocol):
    """The protocol of `Rotary(scaling=...)`. Scalings can be compared and hashed.

    Examples:
        >>> from regard import LinearScaling
        >>> LinearScaling(2) == LinearScaling(2)
        True
    """

    @property
    def uses_length(self) -> bool:
        """Whether `frequencies` depend on `length`."""

    @property
    def attention_factor(self) -> float | int | None:
        """A factor of cosines and sines; None is 1."""

    @property
    def softmax_factor(self) -> float | int:
        """A factor of the softmax scale of layers whose `scale` is None."""

    def frequencies(
        self, dim: int, theta: float | int, *, length: Length = None, device: Device = None
    ) -> Float64[Tensor, " half"]:
        """The frequencies of the `dim / 2` pairs, in radians per position, in float64."""


class _Fixed:
    """Base class of scalings that change frequencies only, and do not depend on the length."""

    uses_length: ClassVar[bool] = False
    attention_factor: ClassVar[float] = 1.0
    softmax_factor: ClassVar[float] = 1.0

    def __repr__(self) -> str:
        return code_of(self, 1)


@dataclass(frozen=True, repr=False)
class LinearScaling(_Fixed):
    """Position interpolation: every frequency divided by `factor`.

    Chen et al. 2023, arXiv:2306.15595.

    Args:
        factor: the new context length over the original.

    Raises:
        TypeError, ValueError: if `factor` is not a number, or not finite and above 0.

    Examples:
        >>> from regard import LinearScaling
        >>> LinearScaling(2).frequencies(4, 100.0)
        tensor([0.5000, 0.0500], dtype=torch.float64)
    """

    factor: float | int

    def __post_init__(self) -> None:
        require_positive("LinearScaling", factor=self.factor)

    def frequencies(
        self, dim: int, theta: float | int, *, length: Length = None, device: Device = None
    ) -> Float64[Tensor, " half"]:
        """Radians per position, `[dim / 2]` in float64; `length` has no effect."""
        return plain_frequencies(dim, theta, device) / self.factor


@dataclass(frozen=True, repr=False)
class NTK:
    """NTK-aware scaling: a larger `theta`, which lowers low frequencies more than high ones.

    The length of a call is the largest position of the whole batch plus one.

    Args:
        factor: the base is `theta * factor ** (dim / (dim - 2))`.
        original_max_position: None for the same base in every call. With a number ("dynamic NTK"),
            the base grows with the length of longer calls, and shorter calls are not scaled.

    Raises:
        TypeError, ValueError: if a number is not finite and above 0; on use, if `dim` is below 4.

    Examples:
        >>> from regard import NTK
        >>> NTK(8.0).frequencies(4, 100.0)
        tensor([1.0000, 0.0125], dtype=torch.float64)
    """

    factor: float | int
    original_max_position: int | None = None

    attention_factor: ClassVar[float] = 1.0
    softmax_factor: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        length = given(original_max_position=self.original_max_position)
        require_positive("NTK", factor=self.factor, **length)

    @property
    def uses_length(self) -> bool:
        """Whether this is dynamic NTK."""
        return self.original_max_position is not None

    def frequencies(
        self, dim: int, theta: float | int, *, length: Length = None, device: Device = None
    ) -> Float64[Tensor, " half"]:
        """Radians per position, `[dim / 2]` in float64; None is a `length` within the original."""
        if dim < 4:
            raise ValueError(f"NTK needs dim >= 4 (its exponent is dim / (dim - 2)), got dim={dim}")
        exponents = torch.arange(0, dim, 2, dtype=torch.float64, device=device) / (dim - 2)
        return plain_frequencies(dim, theta, device) * self._growth(length, exponents) ** -exponents

    def _growth(self, length: Length, like: Float64[Tensor, " half"]) -> Float64[Tensor, ""]:
        original = self.original_max_position
        if original is None:
            return like.new_full((), self.factor)
        if length is None:
            return like.new_ones(())
        beyond = length.to(like.dtype).clamp(min=original) / original
        return self.factor * beyond - (self.factor - 1)

    def __repr__(self) -> str:
        return code_of(self, 1)


@dataclass(frozen=True, repr=False)
class Yarn:
    """YaRN: low frequencies divided by `factor`, high ones unchanged, a ramp between.

    Peng et al. 2023, arXiv:2309.00071; `mscale` and `mscale_all_dim` are DeepSeek's.

    Args:
        factor: the new context length over the original.
        original_max_position: the original context length, in tokens.
        beta_fast: pairs that rotate more often than this within the original length are kept.
        beta_slow: pairs that rotate less often than this are divided by `factor`.
        mscale: if both are given, the attention factor is the ratio of the two mscales.
        mscale_all_dim: if given, the square of its mscale is the `softmax_factor`.
        attention_factor: of cosines and sines; by default that ratio, or `0.1 ln(factor) + 1`.
        truncate: whether the ends of the ramp are rounded to whole pairs.

    Raises:
        TypeError, ValueError: if a number is not finite and above 0 (an mscale of 0 is the same as
            None), or `beta_fast < beta_slow`; on use, if `theta` is not above 1.

    Examples:
        >>> from regard import Yarn
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
        names = ("factor", "original_max_position", "beta_fast", "beta_slow")
        scales = given(mscale=self.mscale or None, mscale_all_dim=self.mscale_all_dim or None)
        scales |= given(attention_factor=self.attention_factor)
        require_positive("Yarn", **{name: getattr(self, name) for name in names}, **scales)
        if self.beta_fast < self.beta_slow:
            raise ValueError(
                f"Yarn: beta_fast={self.beta_fast} counts rotations of the fast pairs and must not "
                f"be below beta_slow={self.beta_slow}; swap the two"
            )
        if self.attention_factor is None:
            object.__setattr__(self, "attention_factor", self._derived_attention_factor())

    @property
    def softmax_factor(self) -> float:
        """The square of the mscale of `mscale_all_dim`; 1.0 without one."""
        return self._mscale(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def frequencies(
        self, dim: int, theta: float | int, *, length: Length = None, device: Device = None
    ) -> Float64[Tensor, " half"]:
        """Radians per position, `[dim / 2]` in float64; `length` has no effect."""
        low, high = self._ramp(dim, theta)
        pairs = torch.arange(dim // 2, dtype=torch.float64, device=device)
        divided = ((pairs - low) / (high - low)).clamp(0, 1)
        plain = plain_frequencies(dim, theta, device)
        return torch.lerp(plain, plain / self.factor, divided)

    def _ramp(self, dim: int, theta: float | int) -> tuple[float, float]:
        if theta <= 1:
            raise ValueError(f"Yarn needs theta > 1 (falling frequencies), got theta={theta}")
        low, high = (self._pair_rotating(n, dim, theta) for n in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = float(math.floor(low)), float(math.ceil(high))
        low, high = max(low, 0.0), min(high, dim - 1.0)
        return low, high + RAMP_EPSILON if high == low else high

    def _pair_rotating(self, rotations: float | int, dim: int, theta: float | int) -> float:
        """The index of the pair that rotates so many times within the original context."""
        wavelength = self.original_max_position / rotations
        return dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))

    def _mscale(self, weight: float | int) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * weight * math.log(self.factor) + 1.0

    def _derived_attention_factor(self) -> float:
        if self.mscale and self.mscale_all_dim:
            return self._mscale(self.mscale) / self._mscale(self.mscale_all_dim)
        return self._mscale(1)

    def __repr__(self) -> str:
        return code_of(self, 1, attention_factor=self._derived_attention_factor())


@dataclass(frozen=True, repr=False)
class Llama3(_Fixed):
    """Llama 3.1: low frequencies divided by `factor`, high ones unchanged, a ramp between.

    Args:
        factor: the new context length over the original.
        low_freq_factor: wavelengths above `original_max_position` over this are low frequencies.
        high_freq_factor: wavelengths below `original_max_position` over this are high ones.
        original_max_position: the original context length, in tokens.

    Raises:
        TypeError, ValueError: if a number is not finite and above 0, or `high_freq_factor` is not
            above `low_freq_factor`.

    Examples:
        >>> from regard import Llama3
        >>> Llama3(8.0).frequencies(4, 500_000.0)
        tensor([1.0000e+00, 5.2485e-04], dtype=torch.float64)
    """

    factor: float | int
    _: KW_ONLY
    low_freq_factor: float | int = 1.0
    high_freq_factor: float | int = 4.0
    original_max_position: int = 8192

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
        """Radians per position, `[dim / 2]` in float64; `length` has no effect."""
        plain = plain_frequencies(dim, theta, device)
        rotations = self.original_max_position * plain / (2 * math.pi)
        kept = (rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return torch.lerp(plain / self.factor, plain, kept.clamp(0, 1))


@dataclass(frozen=True, repr=False)
class LongRope:
    """LongRoPE: the frequency of each pair is divided by its own factor.

    Ding et al. 2024, arXiv:2402.13753.

    Args:
        short_factor: `dim / 2` divisors, for calls of up to `original_max_position` tokens.
        long_factor: as many, for longer calls.
        original_max_position: the original context length, in tokens.
        factor: the new context length over the original.
        attention_factor: of cosines and sines; `sqrt(1 + ln(factor) / ln(original))` if None.

    Raises:
        TypeError, ValueError: if a number is not finite and above 0, or the lists differ in length;
            on use, if they are not `dim / 2` long.

    Examples:
        >>> from regard import LongRope
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
        numbers = {"factor": self.factor, "original_max_position": self.original_max_position}
        require_positive("LongRope", **numbers, **given(attention_factor=self.attention_factor))
        if self.original_max_position <= 1:
            raise ValueError("LongRope: original_max_position must be above 1, whose log is 0")
        if self.attention_factor is None:
            object.__setattr__(self, "attention_factor", self._derived_attention_factor())

    def frequencies(
        self, dim: int, theta: float | int, *, length: Length = None, device: Device = None
    ) -> Float64[Tensor, " half"]:
        """Radians per position, `[dim / 2]` in float64; None is a `length` within the original."""
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
        return code_of(self, 2, attention_factor=self._derived_attention_factor())


@dataclass(frozen=True, repr=False)
class Frequencies(_Fixed):
    """Given frequencies, in radians per position; `theta` has no effect.

    Args:
        values: `dim / 2` numbers in any order; they may repeat, as conversions that keep some pairs
            of several heads need it. A pair of frequency 0 is not rotated, one of a negative
                frequency
            rotates in the other direction.

    Raises:
        TypeError, ValueError: if a frequency is not a finite number, or there is none; on use, if
            there are not `dim / 2`.

    Examples:
        >>> from regard import Frequencies
        >>> Frequencies((1.0, 1.0, 0.25)).frequencies(6, 10_000.0)
        tensor([1.0000, 1.0000, 0.2500], dtype=torch.float64)
    """

    values: Sequence[float | int]

    def __post_init__(self) -> None:
        values = tuple(self.values)
        if not values:
            raise ValueError("Frequencies: values must have at least one entry, got ()")
        require_finite("Frequencies", **{f"values[{i}]": v for i, v in enumerate(values)})
        object.__setattr__(self, "values", values)

    def frequencies(
        self, dim: int, theta: float | int, *, length: Length = None, device: Device = None
    ) -> Float64[Tensor, " half"]:
        """Radians per position, `[dim / 2]` in float64; `theta` and `length` have no effect."""
        if dim != 2 * len(self.values):
            raise ValueError(
                f"Frequencies: there are {len(self.values)} values, but dim={dim} has {dim // 2} "
                "pairs"
            )
        return torch.tensor(self.values, dtype=torch.float64, device=device)
