"""What running a causal language model costs, and how well it predicts.

Perplexity, bytes of cache, speed, and the divergence of two models' predictions. `regard convert`
and `regard compare` both measure with these functions.
"""

import math
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from regard.cache.growing import Contiguous
from regard.hf.generating.cache_of_model import cache as cache_for
from regard.hf.generating.predicting import AT_ONCE, hidden_states, logits_of, losses_of, pieces
from regard.hf.generating.watching import argument_of
from regard.ops.observed import backends_run, names
from regard.turns import LEAST, Ratio, in_turns, ratio_of

Phase = Literal["prefill", "decode"]

# Rounds in which each model takes its turn: of prefill a window, about a second for a model of
# 135M parameters on two cores; of decoding the faster of two steps, of 20 to 100 ms each, since
# other programs interrupt some of them.
PREFILLS = LEAST
STEPS = 48
TRIES: dict[Phase, int] = {"prefill": 1, "decode": 2}
LOGITS = 1 << 28  # bytes of logits kept for comparison: 1,365 tokens of a vocabulary of 49,152


@dataclass(frozen=True)
class Measured:
    """Perplexity by text and bytes of cache a token; tokens a second of prefill and of decoding,
    their ratios to the first model's, which has none, and the backends of regard that ran; no
    backend where transformers' own attention ran."""

    perplexity: dict[str, float]
    cache_bytes_per_token: float
    prefill_tokens_per_second: float | None = None
    decode_tokens_per_second: float | None = None
    prefill_speed: Ratio | None = None
    decode_speed: Ratio | None = None
    prefill_backend: str = ""
    decode_backend: str = ""
    losses: Tensor | None = field(default=None, repr=False, compare=False)  # of every token


@dataclass
class Timings:
    """Seconds of one model's prefills and decoding steps, and the backends that ran: timed in turns
    with the first model (`seconds`, and `first` of the first model), or alone (`alone`)."""

    seconds: defaultdict[Phase, list[float]] = field(default_factory=lambda: defaultdict(list))
    first: defaultdict[Phase, list[float]] = field(default_factory=lambda: defaultdict(list))
    alone: defaultdict[Phase, list[float]] = field(default_factory=lambda: defaultdict(list))
    ran: defaultdict[Phase, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))

    def observe(self, phase: Phase, run: Callable[[], Tensor]) -> Tensor:
        """Time one run without turns, note the backends that ran, and return the result."""
        started = time.perf_counter()
        with backends_run() as ran:
            result = run()
        self.alone[phase].append(time.perf_counter() - started)
        self.ran[phase] += ran
        return result

    def speeds(self, length: int) -> dict[str, Any]:
        """Tokens a second of windows of `length` tokens and of steps, their ratios to the first
        model's, and the backends: medians, or the fastest run if none took turns."""
        found: dict[str, Any] = {}
        tokens: dict[Phase, int] = {"prefill": length, "decode": 1}
        for phase, count in tokens.items():
            own = self.seconds[phase] or [min(self.alone[phase])]
            first = self.first[phase]
            found[f"{phase}_tokens_per_second"] = count / statistics.median(own)
            found[f"{phase}_speed"] = ratio_of(first, own) if first else None
            found[f"{phase}_backend"] = names(self.ran[phase])
        return found


def take_turns(
    phase: Phase, runs: Sequence[tuple[Timings, Callable[[], Tensor]]], count: int
) -> None:
    """Time each run, `TRIES` in a round, of which the fastest counts, and note the seconds beside
    those of the first run: so many times, or until the ratios to the first run are known."""
    tries = TRIES[phase]
    turns = {at: partial(_seconds, run, tries) for at, (_, run) in enumerate(runs)}

    def known(found: Mapping[int, list[float]]) -> bool:
        first, *others = found.values()
        return all(ratio_of(first, each).is_narrow for each in others)

    found = in_turns(turns, count // tries, until=known)
    for at, (timings, _) in enumerate(runs):
        timings.seconds[phase] += found[at]
        timings.first[phase] += found[0] if at else []


def _seconds(run: Callable[[], Tensor], tries: int) -> float:
    """Seconds of the fastest of some runs."""
    found = []
    for _ in range(tries):
        started = time.perf_counter()
        result = run()
        if result.is_cuda:
            torch.cuda.synchronize(result.device)
        found.append(time.perf_counter() - started)
    return min(found)


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype, as configurations write it: "float16"."""
    return str(dtype).removeprefix("torch.")


@torch.no_grad()
def measure(
    model: Any, texts: Mapping[str, Int[Tensor, "N L"]], dtype: torch.dtype | None = None
) -> Measured:
    """How well a causal language model of transformers predicts windows of each text, and the bytes
    of its cache in a dtype, which is the model's own if None."""
    losses = {
        name: [losses_of(model, hidden_states(model, each[None])[0], each) for each in windows]
        for name, windows in texts.items()
    }
    perplexity = {
        name: math.exp(statistics.fmean(float(each.mean()) for each in found))
        for name, found in losses.items()
    }
    window = next(iter(texts.values()))[:1]
    filled = _filled(model, window)
    nbytes = sum(_bytes_in(layer.cache, dtype or model.dtype) for layer in filled.layers)
    every = torch.cat([each for found in losses.values() for each in found])
    return Measured(perplexity, nbytes / window.shape[1], losses=every)


def _bytes_in(cache: Contiguous, dtype: torch.dtype) -> int:
    """Bytes of the tokens that a plain cache of one row holds, if its numbers were of `dtype`."""
    token = 0
    for stream in cache.empty_streams:
        itemsize = dtype.itemsize if stream.is_floating_point() else stream.element_size()
        token += stream.shape[1] * stream.shape[3] * itemsize
    return token * (cache.length - cache.first)


@torch.no_grad()
def measure_speeds(models: Sequence[Any], window: Int[Tensor, " L"]) -> list[dict[str, Any]]:
    """The fields of `Measured` about speed, of models that take turns; ratios are to the first.

    They run as their users run them: by transformers, with a cache of `regard.hf.cache`.
    """
    tokens, timings = window[None], [Timings() for _ in models]
    prefills = [partial(hidden_states, model, tokens) for model in models]
    _time("prefill", list(zip(timings, prefills, strict=True)), PREFILLS)
    steps = [_step(model, tokens) for model in models]
    _time("decode", list(zip(timings, steps, strict=True)), STEPS)
    return [each.speeds(len(window)) for each in timings]


def _time(phase: Phase, runs: Sequence[tuple[Timings, Callable[[], Tensor]]], count: int) -> None:
    """Run every function once untimed, since first calls compile; then time them in turns."""
    for timings, run in runs:
        timings.observe(phase, run)
        run()  # no backend is counted any more, as in the runs that are timed
    take_turns(phase, runs, count)


def _step(model: Any, tokens: Int[Tensor, "1 L"]) -> Callable[[], Tensor]:
    """A function that decodes one token, on a cache of the window but for the steps to come."""
    given = argument_of(model, _filled(model, tokens[:, : max(1, tokens.shape[1] - STEPS - 2)]))

    def step() -> Tensor:
        logits: Tensor = model(input_ids=tokens[:, -1:], use_cache=True, **given).logits
        return logits

    return step


def _filled(model: Any, tokens: Int[Tensor, "1 L"]) -> Any:
    """A cache that holds these tokens."""
    cache = cache_for(model)
    model(input_ids=tokens, use_cache=True, logits_to_keep=1, **argument_of(model, cache))
    return cache


def ratio(after: Mapping[str, float], before: Mapping[str, float]) -> float:
    """The geometric mean over texts of one perplexity divided by another."""
    logs = [math.log(after[name] / before[name]) for name in after]
    return math.exp(statistics.fmean(logs))


def last_logits(
    model: Any, hidden: Float[Tensor, "L E"], nbytes: int = LOGITS
) -> Float[Tensor, "K V"]:
    """The logits of the last tokens, as many as `nbytes` of them hold; one at least."""
    one = _wide_logits(model, hidden[-1:]).nbytes
    last = hidden[-max(1, nbytes // one) :]
    return torch.cat([_wide_logits(model, last[start:stop]) for start, stop in pieces(len(last))])


def compare_logits(
    model: Any,
    window: Int[Tensor, " L"],
    hidden: Float[Tensor, "L E"],
    wanted: Float[Tensor, "K V"],
) -> tuple[Float[Tensor, " T"], float]:
    """The loss of every token of a window but the first, and the largest difference of a logit of
    the last K tokens from those that are `wanted`, not a number if a logit is none; from hidden
    states.
    """
    losses, differences = [], []
    begin = len(window) - len(wanted)
    for start, stop in pieces(len(window)):
        logits = _wide_logits(model, hidden[start:stop])
        following = window[start + 1 : stop + 1]
        losses.append(F.cross_entropy(logits[: len(following)], following, reduction="none"))
        if (first := max(start, begin)) < stop:
            logits = logits[first - start :]
            differences.append(largest(logits - wanted[first - begin : stop - begin]))
    return torch.cat(losses), float(torch.stack(differences).max())


def largest(values: Float[Tensor, "L V"]) -> Float[Tensor, ""]:
    """The largest absolute value, or a value that is not a number; read once."""
    least, most = values.aminmax()
    return torch.maximum(-least, most)


def _wide_logits(model: Any, hidden: Float[Tensor, "L E"]) -> Float[Tensor, "L V"]:
    """Logits in float32, or in a wider dtype that they have."""
    logits = logits_of(model, hidden)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def divergence(
    student: Any, hidden: Float[Tensor, "B P E"], teacher: Any, wanted: Float[Tensor, "B P E"]
) -> Float[Tensor, ""]:
    """`KL(teacher || student)` of next-token predictions from hidden states, in nats a token.

    Logits and their gradient are computed for `AT_ONCE` tokens at a time, so memory does not grow
    with the tokens. The parameters of the head get no gradient.
    """
    rows, targets = hidden.flatten(0, 1), wanted.flatten(0, 1)
    pieces = zip(rows.split(AT_ONCE), targets.split(AT_ONCE), strict=True)
    parts = [_piece(student, row, teacher, target) for row, target in pieces]
    value = torch.stack([part[0] for part in parts]).sum() / len(rows)
    slope = torch.cat([part[1] for part in parts]) / len(rows)
    linear = (rows.float() * slope).sum()  # has the same gradient as the value
    return value + linear - linear.detach()


def _piece(student: Any, rows: Tensor, teacher: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The divergence of the student's predictions from the teacher's, summed over some tokens, and
    its gradient with respect to the student's last hidden states."""
    with torch.no_grad():
        wanted = F.log_softmax(logits_of(teacher, targets).float(), dim=-1)
    with torch.enable_grad():
        leaf = rows.detach().requires_grad_()
        predicted = F.log_softmax(logits_of(student, leaf).float(), dim=-1)
        value = F.kl_div(predicted, wanted, reduction="sum", log_target=True)
        if not rows.requires_grad:
            return value.detach(), torch.zeros_like(rows, dtype=torch.float32)
        (slope,) = torch.autograd.grad(value, leaf)
    return value.detach(), slope.float()
