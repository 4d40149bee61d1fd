"""Measurements taken in turns, and their ratios, so that noise of the machine is not a difference.

Other programs and a drifting clock change all times of a round alike: a time is divided by that of
the first in the same round. The ratios of all rounds have a median and quartiles; where 1 lies
between the quartiles, no difference was measured.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from jaxtyping import Float
from torch import Tensor

LEAST = 6  # pairs: with fewer, chance alone puts all on one side of 1 in more than one of 20 runs
NARROW = 0.05  # of a ratio: the width of an interval that more pairs need not narrow
Name = TypeVar("Name")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Ratio:
    """A ratio of two quantities that were measured in pairs, with an interval.

    Attributes:
        value: the ratio.
        low: the lower end of its interval.
        high: the upper end.
        pairs: the number of pairs.

    Examples:
        >>> from regard.turns import Ratio
        >>> str(Ratio(0.92, 0.9, 0.95, pairs=16)), str(Ratio(0.98, 0.9, 1.04, pairs=16))
        ('0.92 (0.90-0.95)', 'same (0.90-1.04)')
    """

    value: float
    low: float
    high: float
    pairs: int

    @property
    def is_narrow(self) -> bool:
        """Whether the ends of the interval are within 5 % of each other."""
        return self.high - self.low <= NARROW * self.value

    @property
    def differs(self) -> bool:
        """Whether a difference was measured: 1 is outside of the interval of enough pairs."""
        return self.pairs >= LEAST and not self.low <= 1.0 <= self.high

    def of(self, speed: str) -> str:
        """The ratio in words, to end a sentence about a speed, as "1.2 times torch's".

        Examples:
            >>> from regard.turns import Ratio
            >>> Ratio(0.92, 0.9, 0.95, pairs=16).of("the shipped speed")
            'at 0.92x the shipped speed (quartiles 0.90 to 0.95)'
            >>> Ratio(0.98, 0.9, 1.04, pairs=16).of("the shipped speed")
            'with no measurable difference in speed (quartiles 0.90 to 1.04 of the shipped speed)'
        """
        quartiles = f"quartiles {self.low:.2f} to {self.high:.2f}"
        if self.differs:
            return f"at {self.value:.2f}x {speed} ({quartiles})"
        return f"with no measurable difference in speed ({quartiles} of {speed})"

    @property
    def brief(self) -> str:
        """The ratio, and half of the width of its interval as a share of it.

        Examples:
            >>> from regard.turns import Ratio
            >>> Ratio(0.92, 0.9, 0.95, pairs=16).brief
            '0.92 ±3%'
        """
        return f"{self._value} ±{(self.high - self.low) / 2 / self.value:.0%}"

    @property
    def _value(self) -> str:
        return f"{self.value:.2f}" if self.differs else "same"

    def __str__(self) -> str:
        return f"{self._value} ({self.low:.2f}-{self.high:.2f})"


def in_turns(
    runs: Mapping[Name, Callable[[], Result]],
    rounds: int,
    *,
    limit: float = math.inf,
    until: Callable[[Mapping[Name, list[Result]]], bool] = lambda found: False,
) -> dict[Name, list[Result]]:
    """The results of each run by round. Every second round runs in the opposite order.

    After `limit` seconds, or if `until` is true of the results so far, no further round begins,
    once there are enough for an interval.

    Examples:
        >>> from regard.turns import in_turns
        >>> count = iter(range(9))
        >>> in_turns({"a": lambda: next(count), "b": lambda: next(count)}, rounds=2)
        {'a': [0, 3], 'b': [1, 2]}
    """
    begun = time.perf_counter()
    found: dict[Name, list[Result]] = {name: [] for name in runs}
    for turn in range(rounds):
        if turn >= LEAST and (time.perf_counter() - begun > limit or until(found)):
            break
        for name in list(runs)[:: -1 if turn % 2 else 1]:
            found[name].append(runs[name]())
    return found


def ratio_of(values: Sequence[float], base: Sequence[float]) -> Ratio:
    """The median, and the lower and upper quartile, of the ratios of values to those of the base.

    With fewer than 15 pairs values further out take the place of the quartiles, so that chance
    alone leaves 1 outside in one of 20 runs at most: of 6 pairs, the least and the greatest.

    Args:
        values: one in each round.
        base: of the same rounds.

    Examples:
        >>> from regard.turns import ratio_of
        >>> ratio_of([1.0, 2.0, 30.0], [1.0, 1.0, 10.0])
        Ratio(value=2.0, low=1.0, high=3.0, pairs=3)
    """
    ratios = sorted(a / b for a, b in zip(values, base, strict=True))
    pairs = len(ratios)
    out = max(0, min(pairs // 4, pairs // 3 - 2))
    return Ratio(statistics.median(ratios), ratios[out], ratios[-1 - out], pairs)


def perplexity_ratio(losses: Float[Tensor, " L"], base: Float[Tensor, " L"]) -> Ratio:
    """The ratio of two perplexities of the same tokens, and two standard errors around it.

    Args:
        losses: of each token, in nats.
        base: of the same tokens.

    Examples:
        >>> import torch
        >>> from regard.turns import perplexity_ratio
        >>> base = torch.tensor([2.0, 9.0, 4.0, 3.0, 5.0, 1.0])
        >>> perplexity_ratio(base + 0.5, base).low  # exp(0.5), whatever the token
        1.6487212707001282
    """
    differences = (losses - base).double()
    mean = float(differences.mean())
    error = float(differences.std() / len(differences) ** 0.5) if len(differences) > 1 else math.inf
    low, high = math.exp(mean - 2 * error), math.exp(min(mean + 2 * error, 700.0))
    return Ratio(math.exp(mean), low, high, len(differences))
