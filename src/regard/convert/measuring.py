"""What running a causal language model costs, and how well it predicts.

Perplexity, bytes of cache, speed, and the divergence of two models' predictions. `regard convert`
and `regard compare` both measure with these functions.
"""

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from regard.hf.generating.cache_of_model import cache as cache_for
from regard.hf.generating.predicting import AT_ONCE, hidden_states, logits_of, losses_of, pieces
from regard.ops.observed import backends_run, names

# Decode steps in one window. The first is not timed, since it allocates. The median of the other 15
# is one of them, and a few steps that the system interrupts do not change it. On two cores a model
# of 135M parameters takes 1 to 2 s for them, about as long as for the prefill of 1,024 tokens.
DECODE_STEPS = 16


@dataclass(frozen=True)
class Measured:
    """Perplexity by text, bytes of cache a token, tokens a second of prefill and of decoding, and
    the backends of regard that ran; no backend where transformers' own attention ran."""

    perplexity: dict[str, float]
    cache_bytes_per_token: float
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    prefill_backend: str = ""
    decode_backend: str = ""


@dataclass
class Timings:
    """The times of prefills and decode steps of one model, and the backends that ran them."""

    prefill_seconds: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    prefill_ran: Counter[str] = field(default_factory=Counter)
    decode_ran: Counter[str] = field(default_factory=Counter)

    def prefill(self, run: Callable[[], Tensor]) -> Tensor:
        """Run and time the forward pass over one window; returns its result."""
        with backends_run() as ran:
            hidden, seconds = _timed(run)
        self.prefill_ran += ran
        self.prefill_seconds.append(seconds)
        return hidden

    def decode(self, step: Callable[[Tensor], Tensor], tokens: Int[Tensor, "1 L"]) -> None:
        """Run and time `step` for each of the first `DECODE_STEPS` tokens but the first."""
        first, *others = tokens[:, :DECODE_STEPS].split(1, dim=1)
        step(first)
        with backends_run() as ran:
            self.step_seconds += [_timed(partial(step, token))[1] for token in others]
        self.decode_ran += ran

    def speeds(self, length: int) -> dict[str, Any]:
        """Tokens a second and backends: the fastest prefill of `length` tokens, the median step."""
        return {
            "prefill_tokens_per_second": length / min(self.prefill_seconds),
            "decode_tokens_per_second": 1.0 / statistics.median(self.step_seconds),
            "prefill_backend": names(self.prefill_ran),
            "decode_backend": names(self.decode_ran),
        }


def _timed(run: Callable[[], Tensor]) -> tuple[Tensor, float]:
    started = time.perf_counter()
    result = run()
    if result.is_cuda:
        torch.cuda.synchronize(result.device)
    return result, time.perf_counter() - started


@torch.no_grad()
def measure(model: Any, texts: Mapping[str, Int[Tensor, "N L"]]) -> Measured:
    """Measure a causal language model of transformers on windows of each text.

    It runs as its users run it: by transformers, with a cache of `regard.hf.cache`.
    """
    timings = Timings()

    def loss(window: Tensor) -> float:
        hidden = timings.prefill(partial(hidden_states, model, window[None]))
        return float(losses_of(model, hidden[0], window).mean())

    losses = {name: [loss(window) for window in windows] for name, windows in texts.items()}
    window = next(iter(texts.values()))[:1]
    before, last = window[:, :-DECODE_STEPS], window[:, -DECODE_STEPS:]
    cache = cache_for(model)
    model(input_ids=before, past_key_values=cache, use_cache=True, logits_to_keep=1)
    nbytes = cache.nbytes / before.shape[1]

    def step(token: Tensor) -> Tensor:
        logits: Tensor = model(input_ids=token, past_key_values=cache, use_cache=True).logits
        return logits

    timings.decode(step, last)
    perplexity = {name: math.exp(statistics.fmean(found)) for name, found in losses.items()}
    return Measured(perplexity, nbytes, **timings.speeds(window.shape[1]))


@torch.no_grad()
def loss_of(model: Any, window: Int[Tensor, " L"]) -> float:
    """The mean loss over a window, in nats a token."""
    return float(losses_of(model, hidden_states(model, window[None])[0], window).mean())


def ratio(after: Mapping[str, float], before: Mapping[str, float]) -> float:
    """The geometric mean over texts of one perplexity divided by another.

    Examples:
        >>> ratio({"a": 20.0, "b": 5.0}, {"a": 10.0, "b": 10.0})
        1.0
    """
    logs = [math.log(after[name] / before[name]) for name in after]
    return math.exp(statistics.fmean(logs))


def compare_logits(
    model: Any,
    window: Int[Tensor, " L"],
    hidden: Float[Tensor, "1 L E"],
    reference: Float[Tensor, "1 L E"],
) -> tuple[float, float, float]:
    """The mean loss over a window, the largest difference of a logit from that of the reference,
    and the reference's largest logit; from hidden states.

    A logit that is not a number makes the difference not a number.
    """
    ((loss, difference),), largest = compare_all_logits(model, window, [hidden], reference)
    return loss, difference, largest


def compare_all_logits(
    model: Any,
    window: Int[Tensor, " L"],
    hiddens: Sequence[Float[Tensor, "1 L E"]],
    reference: Float[Tensor, "1 L E"],
) -> tuple[list[tuple[float, float]], float]:
    """Of each of `hiddens` the loss and the difference that `compare_logits` gives, and the
    reference's largest logit; the reference's logits are computed once."""
    losses = [0.0] * len(hiddens)
    differences: list[list[Tensor]] = [[] for _ in hiddens]
    sizes = []
    for start, stop in pieces(len(window)):
        wanted = _wide_logits(model, reference[:, start:stop])
        following = window[start + 1 : stop + 1]
        sizes.append(_largest(wanted))
        for at, hidden in enumerate(hiddens):
            logits = _wide_logits(model, hidden[:, start:stop])
            differences[at].append(_largest(wanted - logits))
            predicted = logits[: len(following)]
            losses[at] += float(F.cross_entropy(predicted, following, reduction="sum"))
    most = [float(torch.stack(each).max()) for each in (*differences, sizes)]
    means = [loss / (len(window) - 1) for loss in losses]
    return list(zip(means, most[:-1], strict=True)), most[-1]


def _largest(values: Float[Tensor, "L V"]) -> Float[Tensor, ""]:
    """The largest absolute value, or a value that is not a number; read once."""
    least, most = values.aminmax()
    return torch.maximum(-least, most)


def _wide_logits(model: Any, hidden: Float[Tensor, "1 L E"]) -> Float[Tensor, "L V"]:
    """Logits in float32, or in a wider dtype that they have."""
    logits = logits_of(model, hidden)[0]
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def divergence(
    student: Any,
    hidden: Float[Tensor, "B P E"],
    teacher: Any,
    wanted: Float[Tensor, "B P E"],
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
    """The summed divergence of some tokens, and its gradient with respect to their rows."""
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
