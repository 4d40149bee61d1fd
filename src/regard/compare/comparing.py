"""The comparison of a model's attention with every candidate."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.compare.candidates import CANDIDATES, Candidate, chosen
from regard.compare.measure import DECODED, Row, Sample, time_prefills
from regard.compare.proving import proved
from regard.compare.reasons import outside, reasons
from regard.compare.result import Comparison
from regard.compare.runner import PREFILLING, ROW, Progress, Runner, Runners, Work
from regard.compare.texts import Texts
from regard.compare.verdict import verdict
from regard.convert.measuring import LOGITS, dtype_name, last_logits
from regard.hf import attention_modules, attention_of
from regard.hf.generating.predicting import hidden_states


@torch.no_grad()
def compare(
    model: Any,
    texts: Texts,
    *,
    name: str = "model",
    memory: int = 1 << 30,
    cache_dtype: torch.dtype | None = None,
    candidates: Sequence[Candidate] | None = None,
    prefills: bool = True,
    on_row: Callable[[Comparison], None] = lambda so_far: None,
    progress: Progress = lambda what, done, total: None,
) -> Comparison:
    """Run a causal language model with each candidate attention.

    Every candidate runs in the model's own dtype on the windows of `texts`; the shipped attention
    is the first row. Times are taken in turns with the first row, and speeds are ratios to its in
    the same rounds. Layers are converted, all in one pass over the text, when a row needs them. The
    model is not changed.

    Args:
        model: a transformers model of a family that `regard.hf` supports.
        texts: from `texts_for`.
        name: the model's name in the result.
        memory: bytes, for the number of tokens whose cache fits.
        cache_dtype: of the checkpoint, for bytes of caches: a model of float16 may run in float32,
            and its caches are still of 16 bits where it is used. That of the model if None.
        candidates: from `chosen`; the usual ones if None.
        prefills: whether prefills take turns, too, after all rows: six of each.
        on_row: called after each row with the comparison so far.
        progress: called with the present step, the work done, and all of it or 0 where that is not
            known yet.

    Raises:
        ValueError: if the model's attention is unknown, its positions are too few for the windows,
            or its logits change under regard by more than rounding.

    Examples:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from regard.compare import Texts, chosen, compare
        >>> config = LlamaConfig(hidden_size=16, num_attention_heads=2, vocab_size=20,
        ...     num_hidden_layers=1, intermediate_size=16)
        >>> model = LlamaForCausalLM(config).eval()
        >>> texts = Texts(torch.randint(20, (2, 24)), torch.randint(20, (2, 24)), "random tokens")
        >>> shipped, int8 = compare(model, texts, candidates=chosen(["int8"])).rows
        >>> shipped.name, int8.cache_bytes_per_token / shipped.cache_bytes_per_token
        ('MHA, as shipped', 0.375)
    """
    started, windows = time.perf_counter(), texts.windows.to(model.device)
    context, stored = windows.shape[1], cache_dtype or model.dtype
    longest = getattr(model.config, "max_position_embeddings", None)
    if context < 2:
        raise ValueError(f"context={context} is too short to predict anything; give at least 2")
    if longest is not None and context > longest:
        raise ValueError(f"context={context:,} is more than the {longest:,} positions of the model")
    progress("reading the text with the model's own attention", 0, 0)
    share = LOGITS // len(windows)
    wanted = [last_logits(model, hidden_states(model, each[None])[0], share) for each in windows]
    shipped = [attention_of(module) for module in attention_modules(model).values()]
    named = _named(chosen(()) if candidates is None else candidates, shipped[0].kind)
    calibration = texts.calibration.to(model.device)
    runners = Runners(model, shipped, named, calibration, stored, DECODED + 1)
    work = Work(progress, len(named) * (ROW + PREFILLING * prefills) + runners.seconds)
    measured: dict[str, Sample | str] = {}
    settings: dict[str, Any] = {
        "model": name,
        "kind": shipped[0].kind,
        "num_layers": len(shipped),
        "context": context,
        "memory": memory,
        "dtype": dtype_name(model.dtype),
        "threads": torch.get_num_threads(),
        "text": texts.source,
        "decoded": len(windows) * min(DECODED, context - 1),
        "cache_dtype": dtype_name(stored),
    }
    for each in named:
        runner = runners.of(each, work)
        work.begin(each.name, ROW)
        measured[each.name] = _measured(runner, windows, wanted, _ran(measured))
        if "proof" not in settings:
            settings["proof"] = proved(model, _ran(measured)[0].difference, windows[-1], wanted)
        on_row(_result(model, named, measured, settings, started))
    if prefills:
        work.begin("prefills in turns", PREFILLING * len(named))
        time_prefills(_ran(measured), windows[-1])
    work.end()
    return _result(model, named, measured, settings, started)


def _named(candidates: Sequence[Candidate], kind: str) -> list[Candidate]:
    """The candidates with their names in the table; first the shipped one, which is the proof."""
    shipped = next((each for each in candidates if each.key == "shipped"), CANDIDATES[0])
    ordered = [shipped, *(each for each in candidates if each is not shipped)]
    return [replace(each, name=each.name.format(kind=kind)) for each in ordered]


def _ran(measured: dict[str, Sample | str]) -> list[Sample]:
    return [each for each in measured.values() if isinstance(each, Sample)]


def _measured(
    runner: Runner | str,
    windows: Int[Tensor, "N L"],
    wanted: Sequence[Float[Tensor, "K V"]],
    before: Sequence[Sample],
) -> Sample | str:
    """The measurements of one runner, whose steps over the last window take turns with those of the
    first row; or why there is none."""
    if isinstance(runner, str):
        return runner
    sample = Sample(runner)
    first = before[0] if before else sample
    for at, (window, logits) in enumerate(zip(windows, wanted, strict=True), start=1):
        sample.read(window, logits)
        sample.decode(window, first if at == len(windows) else None)
    if before:
        runner.reset()
    return sample


def _result(
    model: Any,
    candidates: Sequence[Candidate],
    measured: dict[str, Sample | str],
    settings: dict[str, Any],
    started: float,
) -> Comparison:
    """The comparison of the rows so far."""
    rows, first, stored = [], _ran(measured)[0], settings["cache_dtype"]
    sizes = {"context": settings["context"], "memory": settings["memory"], "dtype": stored}
    for each in candidates[: len(measured)]:
        found = measured[each.name]
        if isinstance(found, str):
            rows.append(Row(each.name, each.exact, remark=found))
        else:
            rows.append(found.row(each.name, each.exact, first, **sizes))
    because = reasons(rows, settings["context"], settings["dtype"], outside(model))
    sentence, seconds = verdict(rows, stored, because), time.perf_counter() - started
    return Comparison(**settings, rows=tuple(rows), verdict=sentence, seconds=seconds)
