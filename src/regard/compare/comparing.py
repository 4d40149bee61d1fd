"""compare: first the proof that regard computes what the model does, then every candidate."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from regard.attention import Attention
from regard.compare import kept
from regard.compare.candidates import Candidate, chosen
from regard.compare.measure import Row, Sample, measure_window
from regard.compare.runner import Runner
from regard.compare.texts import Texts
from regard.compare.verdict import verdict
from regard.convert.converting import convert
from regard.convert.targets import Target
from regard.hf import attention_modules, attention_of, install, uninstall
from regard.hf.predicting import hidden_states, logits_of, pieces

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

    Raises:
        ValueError: if they differ by more than rounding.
    """
    before = hidden_states(model, window[None])
    install(model)
    try:
        after = hidden_states(model, window[None])
    finally:
        uninstall(model)
    difference, largest = 0.0, 0.0
    for start, stop in pieces(window.shape[0]):
        logits, others = (logits_of(model, h[:, start:stop]) for h in (before, after))
        difference = max(difference, float((logits - others).abs().max()))
        largest = max(largest, float(logits.abs().max()))
    unit = torch.finfo(model.dtype).eps / 2
    tolerance = ROUNDINGS * unit * len(attention_modules(model)) * largest
    proof = Proof(difference, tolerance, largest)
    if not proof.holds:
        raise ValueError(
            f"under regard the model's logits change by up to {difference:.2e}, and rounding "
            f"explains {tolerance:.2e} at most; nothing was compared: please report this model"
        )
    return proof


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
