"""compare: first the proof that regard computes what the model does, then every candidate."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.compare import converted_cache as kept
from regard.compare.candidates import Candidate, chosen
from regard.compare.measure import Row, Sample, measure_window
from regard.compare.runner import Runner
from regard.compare.texts import Texts
from regard.compare.verdict import verdict
from regard.convert.converting import convert
from regard.convert.targets import Target
from regard.hf import attention_modules, attention_of, install, uninstall
from regard.hf.generating.predicting import hidden_states, logits_of, pieces
from regard.layers.attention import Attention

ROUNDINGS = 32  # how many roundings of the largest logit each layer may add
Progress = Callable[[str, int, int], None]  # what is done now, steps done, steps in all


@dataclass(frozen=True)
class Proof:
    """The largest difference between logits with and without `regard.hf.install`, and the bound.

    The bound is `32 * u * layers * max |logit|`, u being the unit roundoff of the model's dtype.
    """

    largest_difference: float
    tolerance: float
    largest_logit: float

    @property
    def holds(self) -> bool:
        """Whether regard computes what the model computes, to rounding."""
        return self.largest_difference <= self.tolerance


@dataclass(frozen=True)
class Comparison:
    """Everything `regard compare` measured, and the sentence it ends with."""

    model: str
    kind: str
    num_layers: int
    context: int
    memory: int
    dtype: str
    threads: int
    text: str
    proof: Proof
    rows: tuple[Row, ...]
    verdict: str
    seconds: float


@torch.no_grad()
def compare(
    model: Any,
    texts: Texts,
    *,
    name: str = "model",
    memory: int = 1 << 30,
    candidates: Sequence[Candidate] | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Comparison:
    """Run a causal language model with every attention it can be turned into.

    Every candidate really runs, in the model's own dtype, on the windows of `texts`; candidates
    take turns, forwards in one window and backwards in the next. The model is left as it was.

    Raises:
        ValueError: if the model's attention is unknown, its positions are too few for the windows,
            or its logits change under regard by more than rounding.
    """
    started = time.perf_counter()
    candidates = chosen(()) if candidates is None else candidates
    context, dtype = texts.windows.shape[1], str(model.dtype).removeprefix("torch.")
    _check_length(model, context)
    total = 2 + len(texts.windows) * (1 + len(candidates))
    steps = iter(range(total))

    def tell(what: str) -> None:
        progress(what, next(steps), total)

    tell("proving that regard computes what the model does")
    proof = prove(model, texts.windows[0])
    shipped = [attention_of(module) for module in attention_modules(model).values()]
    kind = shipped[0].kind
    named = [replace(each, name=each.name.format(kind=kind)) for each in candidates]
    tell("converting")
    runners = _runners(model, shipped, named, texts.calibration, progress)
    rows = tuple(_measure(model, named, runners, texts.windows, memory=memory, tell=tell))
    progress("done", total, total)
    return Comparison(
        model=name,
        kind=kind,
        num_layers=len(shipped),
        context=context,
        memory=memory,
        dtype=dtype,
        threads=torch.get_num_threads(),
        text=texts.source,
        proof=proof,
        rows=rows,
        verdict=verdict(rows, dtype),
        seconds=time.perf_counter() - started,
    )


def _measure(
    model: Any,
    candidates: Sequence[Candidate],
    runners: Mapping[str, Runner | str],
    windows: Int[Tensor, "N L"],
    *,
    memory: int,
    tell: Callable[[str], None],
) -> Iterator[Row]:
    """Every candidate over every window, taking turns, so that a slow minute hits them alike."""
    samples = {each.name: Sample() for each in candidates}
    for turn, window in enumerate(windows):
        tell("reading as shipped")
        reference = hidden_states(model, window[None])
        for each in candidates[:: -1 if turn % 2 else 1]:
            tell(each.name)
            runner = runners[each.name]
            if isinstance(runner, Runner):
                measure_window(runner, samples[each.name], window, reference)
    for each in candidates:
        runner, sample = runners[each.name], samples[each.name]
        if isinstance(runner, str):
            yield Row(each.name, each.exact, remark=runner)
        else:
            context = windows.shape[1]
            yield sample.row(each.name, each.exact, context=context, memory=memory)


@torch.no_grad()
def prove(model: Any, window: Int[Tensor, " L"]) -> Proof:
    """Compare logits over a window with and without `regard.hf.install`; the model stays as it was.

    Where they differ by more than the bound, the model's own forward runs again, without regard. If
    it agrees with the first, the difference is regard's, and so it is where installing regard left
    a change in the model. If not, the model's own forward runs a third time: if the last two agree,
    the first was wrong, and the output under regard is judged against them. Regard's output is
    computed once, and the bound is always that of `Proof`. Two forwards of the model agree if they
    differ by no more than that bound: the order of sums may change from run to run, so equal bits
    cannot be asked for.

    Raises:
        ValueError: if they differ by more than rounding, or if the model's own logits change from
            run to run or are not finite.
    """

    def own() -> Tensor:
        return hidden_states(model, window[None])

    before, first = _fingerprint(model), own()
    install(model)
    try:
        under_regard = own()
    finally:
        uninstall(model)
    proof = _difference(model, first, under_regard)
    if not math.isfinite(proof.largest_logit):
        raise ValueError("the model's own logits are not finite; nothing was compared")
    if not proof.holds and _fingerprint(model) == before:
        second = own()
        if not _difference(model, first, second).holds:
            proof = _judged_by_two(model, under_regard, second, own())
    if not proof.holds:
        raise ValueError(
            f"under regard the model's logits change by up to {proof.largest_difference:.2e}, and "
            f"rounding explains {proof.tolerance:.2e} at most; nothing was compared: please report "
            "this model"
        )
    return proof


def _fingerprint(model: nn.Module) -> tuple[list[str], list[int]]:
    """Equal before and after, unless a weight was changed or a `forward` replaced meanwhile."""
    replaced = [name for name, module in model.named_modules() if "forward" in vars(module)]
    tensors = chain(model.parameters(), model.buffers())
    sums = [each.detach().float().sum() for each in tensors if not each.is_meta]
    return replaced, [int(each.view(torch.int32)) for each in sums]  # bits: nan is not equal to nan


def _judged_by_two(
    model: Any,
    under_regard: Float[Tensor, "1 L E"],
    second: Float[Tensor, "1 L E"],
    third: Float[Tensor, "1 L E"],
) -> Proof:
    """Regard's output against two own forwards that agree: the greater of the differences."""
    repeated = _difference(model, second, third)
    if not repeated.holds:
        raise ValueError(
            "the model's own logits change from run to run, without regard, by up to "
            f"{repeated.largest_difference:.2e}, and rounding explains {repeated.tolerance:.2e} at "
            "most; nothing was compared: give a model whose forward is deterministic"
        )
    proofs = [_difference(model, each, under_regard) for each in (second, third)]
    return max(proofs, key=lambda proof: proof.largest_difference)


def _difference(
    model: Any, hidden: Float[Tensor, "1 L E"], others: Float[Tensor, "1 L E"]
) -> Proof:
    """How far the logits of two runs are apart, and the bound, which is that of the first run.

    A logit that is not a number makes the difference not a number, which no bound holds.
    """
    differences, sizes = [], []
    for start, stop in pieces(hidden.shape[1]):
        logits, changed = (logits_of(model, h[:, start:stop]) for h in (hidden, others))
        differences.append((logits - changed).abs().max())
        sizes.append(logits.abs().max())
    difference, largest = (float(torch.stack(each).max()) for each in (differences, sizes))
    unit = torch.finfo(model.dtype).eps / 2
    tolerance = ROUNDINGS * unit * len(attention_modules(model)) * largest
    return Proof(difference, tolerance, largest)


def _runners(
    model: Any,
    shipped: list[Attention],
    candidates: list[Candidate],
    tokens: Int[Tensor, "M K"],
    progress: Progress,
) -> dict[str, Runner | str]:
    """A runner for each candidate, or the sentence that says why it cannot be made."""
    aims: dict[str, Target | str | None] = {}
    for each in candidates:
        try:
            aims[each.name] = each.aim(shipped)
        except ValueError as objection:
            aims[each.name] = str(objection)
    wanted = list(dict.fromkeys(aim for aim in aims.values() if isinstance(aim, Target)))
    made = _made(model, shipped, wanted, tokens, progress)
    runners: dict[str, Runner | str] = {}
    for each in candidates:
        aim = aims[each.name]
        if isinstance(aim, Target):
            found = made[aim]
            layers = found if isinstance(found, str) else list(found)
        else:
            layers = list(shipped) if aim is None else aim
        runners[each.name] = (
            layers if isinstance(layers, str) else Runner(model, layers, cache=each.cache)
        )
    return runners


def _made(
    model: Any,
    shipped: list[Attention],
    targets: Sequence[Target],
    tokens: Int[Tensor, "M K"],
    progress: Progress,
) -> dict[Target, list[nn.Module] | str]:
    """Layers for each target, from the last time where they are kept, or why there are none."""
    names = {target: kept.name_of(target, shipped, tokens) for target in targets}
    made: dict[Target, list[nn.Module] | str] = {}
    for target in targets:
        found = kept.find(names[target], shipped)
        if found is not None:
            made[target] = found
    missing = [target for target in targets if target not in made]
    try:
        converted = convert(model, missing, tokens, progress=progress) if missing else []
    except ValueError as objection:
        return made | {target: str(objection) for target in missing}
    for each in converted:
        kept.keep(names[each.target], each.layers)
        made[each.target] = each.layers
    return made


def _check_length(model: Any, context: int) -> None:
    longest = getattr(model.config, "max_position_embeddings", None)
    if context < 2:
        raise ValueError(f"context={context} is too short to predict anything; give at least 2")
    if longest is not None and context > longest:
        raise ValueError(f"context={context:,} is more than the {longest:,} positions of the model")
