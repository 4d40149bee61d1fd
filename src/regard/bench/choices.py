"""Two sets of rates compared by calls for which they choose different backends.

random calls -> those with two choices -> both backends timed in turns -> ratios of their times
"""

import math
import random
import statistics
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from regard.bench.short import Shape
from regard.bench.timing import COLD, Store, Variants, interleave
from regard.masks import EVERYTHING, Causal, Mask, SlidingWindow
from regard.ops.attend import attend, prepare
from regard.ops.backends import BACKENDS
from regard.ops.call import Call
from regard.ops.choose import choose
from regard.rates import SPEED, Speed
from regard.tracing import without_autocast
from regard.turns import LEAST, ratio_of
from regard.words import counted

DRAWN = 800  # random calls, among which two sets of rates choose differently for some
TIMED = 32  # of these at most are timed
ROUNDS = 7
SECONDS = 0.5  # for each of these, after which no further round begins
SHORTEST, LONGEST = 1e-4, 0.03  # estimated seconds of the calls: long enough to matter, soon timed
CELLS = 20_000_000  # scores of a call at most
NEAR = 1.15  # times: two backends whose times differ by less are equally good choices
HEAD_DIMS = (64, 128)  # two: a kernel is compiled for each
DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Choices:
    """Times of calls for which two sets of rates choose different backends.

    Attributes:
        ratios: for each call, the time of the backend that the measured rates choose, over that of
            the backend that the constants choose; below 1 the measured rates choose the faster one.

    Examples:
        >>> from regard.bench.choices import Choices
        >>> Choices([0.8, 0.9, 1.0, 0.7, 0.9, 0.8]).objection()
        >>> Choices([0.9, 1.3, 1.6]).objection()
        'of 3 calls for which the measured rates choose another backend than the constants, \
0 take less than 1/1.15 of the time with it, 2 more than 1.15 times; the mean ratio is 1.23'
    """

    ratios: list[float]

    @property
    def average(self) -> float:
        """The geometric mean of the ratios; 1 if the two sets never choose differently."""
        return math.exp(statistics.fmean(map(math.log, self.ratios))) if self.ratios else 1.0

    @property
    def error(self) -> float:
        """The standard error of the logarithm of the mean; infinite with fewer than 6 ratios."""
        if len(self.ratios) < LEAST:
            return math.inf
        return statistics.stdev(map(math.log, self.ratios)) / math.sqrt(len(self.ratios))

    def __str__(self) -> str:
        if not self.ratios:
            return "the measured rates choose the backends that the constants choose"
        faster = sum(ratio < 1 / NEAR for ratio in self.ratios)
        slower = sum(ratio > NEAR for ratio in self.ratios)
        return (
            f"of {counted(len(self.ratios), 'call')} for which the measured rates choose another "
            f"backend than the constants, {faster} take less than 1/{NEAR} of the time with it, "
            f"{slower} more than {NEAR} times; the mean ratio is {self.average:.2f}"
        )

    def objection(self) -> str | None:
        """Why the choices of the constants should stay, in a sentence; None if the measured rates
        choose faster backends, by two standard errors: the constants were fitted to many calls."""
        if math.log(self.average) + 2 * self.error < 0:
            return None
        return str(self)


@dataclass(frozen=True)
class Drawn:
    """A random call: its shape, dtype and mask."""

    shape: Shape
    dtype: torch.dtype
    mask: Mask

    def run(self, store: Store, backend: str) -> Tensor:
        """Attend with keys that no cache of the processor holds."""
        each = self.shape
        q = store(each.batch, each.heads, each.queries, each.head_dim)
        k, v = (store(each.batch, each.kv_heads, each.keys, each.head_dim) for _ in range(2))
        return attend(q, k, v, mask=self.mask, span=each.span, backend=backend)

    def describe(self) -> Call:
        """The description of the call, without memory for its queries and keys."""
        each, number = self.shape, torch.zeros(2, 1, dtype=self.dtype, device="cpu")
        q = number[0].expand(each.batch, each.heads, each.queries, each.head_dim)
        k, v = (
            number[:, 0].expand(each.batch, each.kv_heads, each.keys, each.head_dim, 2).unbind(-1)
        )
        return prepare(q, k, v, mask=self.mask, span=each.span, backend="eager").call


def draw_calls(number: int, seed: int = 0) -> list[Drawn]:
    """Random calls, the same for a seed; sizes are uniform on a logarithmic scale."""
    rng = random.Random(seed)

    def between(low: int, high: int) -> int:
        return round(math.exp(rng.uniform(math.log(low), math.log(high))))

    drawn: list[Drawn] = []
    while len(drawn) < number:
        kv_heads, keys = rng.choice([1, 2, 4, 8, 16, 32]), between(1, 16384)
        heads = kv_heads * rng.choice([1, 1, 2, 4, 8])
        queries = 1 if rng.random() < 0.4 else between(1, min(2048, keys))
        head_dim, batch = rng.choice(HEAD_DIMS), rng.choice([1, 1, 1, 2, 4])
        window = Causal() & SlidingWindow(between(1, keys))
        mask, dtype = rng.choice([EVERYTHING, Causal(), window]), rng.choice(DTYPES)
        shape = Shape("random", heads, kv_heads, head_dim, queries, keys, batch)
        if heads <= 64 and batch * heads * queries * keys <= CELLS:
            drawn.append(Drawn(shape, dtype, mask))
    return drawn


def compare_choices(
    measured: Speed, constants: Speed, *, timed: int = TIMED, cold: int = COLD
) -> Choices:
    """Time random calls for which two sets of rates choose different backends.

    Args:
        measured: the rates to judge.
        constants: the rates to compare them with.
        timed: calls to time at most.
        cold: bytes of memory that keys are spread over.

    Examples:
        >>> from regard.bench.choices import compare_choices
        >>> from regard.rates import AVX2
        >>> compare_choices(AVX2, AVX2).ratios  # they never choose differently
        []
    """
    pairs = differing(draw_calls(DRAWN), measured, constants)[:timed]
    stores = {dtype: Store(dtype, cold) for dtype in {drawn.dtype for drawn, _ in pairs}}
    with torch.no_grad(), without_autocast(torch.device("cpu")):
        return Choices([_ratio(drawn, names, stores[drawn.dtype]) for drawn, names in pairs])


def differing(
    calls: list[Drawn], measured: Speed, constants: Speed
) -> list[tuple[Drawn, tuple[str, str]]]:
    """The calls for which the rates choose two backends, and the names of both backends."""
    described, before = [each.describe() for each in calls], SPEED.now()
    try:
        SPEED.use(measured)
        first = [choose(call) for call in described]
        SPEED.use(constants)
        second = [choose(call) for call in described]
        pairs = zip(described, second, strict=True)
        seconds = [BACKENDS[name].estimate(call) for call, name in pairs]
    finally:
        SPEED.use(before)
    return [
        (call, (one, other))
        for call, one, other, each in zip(calls, first, second, seconds, strict=True)
        if one != other and SHORTEST <= each <= LONGEST
    ]


def _ratio(drawn: Drawn, names: tuple[str, str], store: Store) -> float:
    """The time of the first backend over that of the second."""
    runs: Variants = {name: partial(drawn.run, store, name) for name in names}
    times = interleave(runs, rounds=ROUNDS, sample=0.005, limit=SECONDS)
    return ratio_of(times[names[0]], times[names[1]]).value
