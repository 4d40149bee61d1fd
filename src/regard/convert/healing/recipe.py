"""The settings of healing as values: batches, learning rates and the budget."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor


@dataclass(frozen=True)
class Recipe:
    """All settings that change the result of healing.

    The defaults are measured by `benchmarks/healing.py`: a model of 135M parameters,
    windows of 768 tokens, half an hour and two cores.

    The loss is the divergence from the teacher's predictions.

    Args:
        batch: windows a step.
        at_once: windows in memory at once; a divisor of `batch`, all of it if None.
        lr: the highest learning rate. It rises over `warmup` and then falls to zero.
        warmup: a share of the run.
        positions: the share of a window's positions at which predictions are compared.
        betas: of AdamW.
        weight_decay: of AdamW.
        clip: the largest norm of a gradient.
        train: the parameters to train: `"attention"`, or `"all"` but embeddings and head.
        autocast: the dtype of the arithmetic, such as `torch.bfloat16`; the models' own if None.
        seed: of the order of the windows and the choice of positions.

    Raises:
        ValueError: if a value is out of its range.

    Examples:
        >>> from regard.convert import Recipe
        >>> recipe = Recipe(lr=1e-4, warmup=0.5)
        >>> [recipe.rate(share) for share in (0.0, 0.5, 1.0)]
        [0.0, 0.0001, 0.0]
    """

    batch: int = 2
    at_once: int | None = None
    lr: float = 2e-4
    warmup: float = 0.1
    positions: float = 0.5
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.0
    clip: float = 1.0
    train: Literal["attention", "all"] = "attention"
    autocast: torch.dtype | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch", "lr", "positions", "clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is above 0, got {getattr(self, name)}")
        for name in ("warmup", "positions"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is a share, 0 to 1, got {getattr(self, name)}")
        if self.at_once is not None and (self.at_once < 1 or self.batch % self.at_once):
            raise ValueError(f"at_once={self.at_once} does not divide batch={self.batch}")
        if self.train not in ("attention", "all"):
            raise ValueError(f"train is 'attention' or 'all', got {self.train!r}")

    def rate(self, share: float) -> float:
        """The learning rate when this share of the run is over."""
        rising = share / self.warmup if self.warmup else 1.0
        falling = (1 - share) / (1 - self.warmup) if self.warmup < 1 else 1.0
        return self.lr * max(0.0, min(rising, falling))


@dataclass(frozen=True)
class Budget:
    """The limit of a run, in steps, in seconds or both; the first that is reached ends it."""

    steps: int | None
    seconds: float | None

    def share(self, steps: int, seconds: float) -> float:
        """The share that is used up; the run ends at 1."""
        used = []
        if self.steps is not None:
            used.append(steps / self.steps if self.steps else 1.0)
        if self.seconds is not None:
            used.append(seconds / self.seconds)
        return max(used)


def rows_of(step: int, *, windows: int, batch: int, seed: int) -> list[int]:
    """The windows of one step: epochs over all windows, each in a new random order.

    Examples:
        >>> sorted(rows_of(0, windows=4, batch=2, seed=0) + rows_of(1, windows=4, batch=2, seed=0))
        [0, 1, 2, 3]
    """
    places = range(step * batch, (step + 1) * batch)
    return [_order(windows, place // windows, seed)[place % windows] for place in places]


@lru_cache(maxsize=4)
def _order(windows: int, epoch: int, seed: int) -> list[int]:
    shuffled: list[int] = torch.randperm(windows, generator=_generator(seed, epoch)).tolist()
    return shuffled


def positions_of(step: int, *, length: int, share: float, seed: int) -> Int[Tensor, " P"]:
    """The positions of a step at which predictions are compared, at least one."""
    count = max(1, round(length * share))
    shuffled = torch.randperm(length, generator=_generator(seed, ~step))
    return shuffled[:count].sort().values


def _generator(seed: int, number: int) -> torch.Generator:
    return torch.Generator().manual_seed((seed * 1_000_003 + number) % (1 << 63))
