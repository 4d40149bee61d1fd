"""The comparison of a model's attention with every candidate, after the proof that logits agree."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from regard.compare import converted_cache
from regard.compare.candidates import Candidate, chosen
from regard.compare.measure import (
    DECODED,
    MEASURED,
    Row,
    Sample,
    cells,
    decode_steps,
    time_prefills,
    time_steps,
)
from regard.compare.proving import Proof, prove
from regard.compare.reasons import outside, reasons
from regard.compare.runner import Runner
from regard.compare.texts import Texts
from regard.compare.verdict import verdict
from regard.convert.converting import convert
from regard.convert.measuring import compare_all_logits, dtype_name
from regard.convert.targets import Target
from regard.hf import attention_modules, attention_of
from regard.hf.generating.predicting import hidden_states
from regard.hf.placing.placed import window_of
from regard.layers.attention import Attention
from regard.page.page import table
from regard.page.readable import readable_bytes
from regard.words import counted

RATIOS = (
    "Speeds are ratios to the first row's, taken in turns: median (quartiles). same: no measurable "
    "difference, since 1 is between the quartiles. ± of a perplexity: two standard errors of its "
    "ratio to the first row's."
)
Progress = Callable[[str, int, int], None]  # the present step, steps done, their number


@dataclass(frozen=True)
class Comparison:
    """Everything that `regard compare` measured, and the sentence it ends with.

    Attributes:
        model: the model's name.
        kind: its own attention.
        num_layers: its attention layers.
        context: tokens of a window.
        memory: bytes that `context_in_memory` of each row is about.
        dtype: in which the model ran.
        threads: threads of torch.
        text: where the text is from.
        proof: that regard computes what the model computes.
        rows: the measurements of each attention.
        verdict: which attention saves most memory, and what it costs.
        seconds: in total.
        decoded: tokens that `decode_perplexity` of each row is about, over all windows.
        cache_dtype: of the checkpoint, in which `cache_bytes_per_token` and `context_in_memory`
            count the numbers that are not codes; that of the model if empty.

    Examples:
        >>> from regard.compare import Comparison, Proof, Row
        >>> proof = Proof(largest_difference=2e-6, tolerance=1e-4, largest_logit=9.0)
        >>> rows = (Row("MHA, as shipped", exact=True, cache_bytes_per_token=512.0),)
        >>> comparison = Comparison("tiny", "MHA", 2, 64, 1 << 30, "float32", 1, "my text", proof,
        ...     rows, "Nothing to compare with.", 0.5)
        >>> comparison.proof.holds, comparison.rows[0].cache_bytes_per_token
        (True, 512.0)
    """

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
    decoded: int = 0
    cache_dtype: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "cache_dtype", self.cache_dtype or self.dtype)

    @property
    def columns(self) -> dict[str, tuple[str, str]]:
        """The columns of the table: attributes of `Row`, each with its heading and subject.

        Bytes in the dtype in which the model ran are a column if it is not the checkpoint's.
        """
        heads = {"within": readable_bytes(self.memory), "dtype": self.dtype}
        return {
            name: (head.format(**heads), subject)
            for name, (head, subject) in MEASURED.items()
            if name != "run_bytes_per_token" or self.dtype != self.cache_dtype
        }

    @property
    def dtypes(self) -> str:
        """The dtypes of the checkpoint and of the model, for a heading."""
        if self.dtype == self.cache_dtype:
            return self.dtype
        return f"{self.cache_dtype} run in {self.dtype}"

    def _repr_html_(self) -> str:
        """The verdict and the table of what ran, for notebooks and pages."""
        rows = [
            [f"{row.name} (exact)" if row.exact else row.name, *cells(row, self.columns)]
            for row in self.rows
            if row.perplexity is not None
        ]
        heads = ["attention", *(head for head, _ in self.columns.values())]
        return (
            f"<p>{escape(self.verdict)}</p>\n{table(self._circumstances(), heads, rows)}"
            f'<p class="aside">{RATIOS}</p>'
            '<p class="aside">regard computes what the model computes: logits differ by '
            f"{self.proof.largest_difference:.1e} at most, and rounding explains "
            f"{self.proof.tolerance:.1e}.</p>\n"
        )

    def _circumstances(self) -> str:
        layers, threads = counted(self.num_layers, "layer"), counted(self.threads, "thread")
        return (
            f"{layers} of {self.kind}, {self.dtypes}, {threads}; {self.context:,} tokens of "
            f"{self.text}, {self.decoded:,} decoded one at a time, measured in {self.seconds:.0f} s"
        )


@torch.no_grad()
def compare(
    model: Any,
    texts: Texts,
    *,
    name: str = "model",
    memory: int = 1 << 30,
    cache_dtype: torch.dtype | None = None,
    candidates: Sequence[Candidate] | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Comparison:
    """Run a causal language model with each candidate attention.

    Every candidate runs in the model's own dtype on the windows of `texts`; the shipped attention
    is the first row. Times are taken in turns, and speeds are ratios to the first row's in the same
    rounds. The model is not changed.

    Args:
        model: a transformers model of a family that `regard.hf` supports.
        texts: from `texts_for`.
        name: the model's name in the result.
        memory: bytes, for the number of tokens whose cache fits.
        cache_dtype: of the checkpoint, for bytes of caches: a model of float16 may run in float32,
            and its caches are still of 16 bits where it is used. That of the model if None.
        candidates: from `chosen`; the usual ones if None.
        progress: called with the present step, the steps done and their number.

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
    started = time.perf_counter()
    candidates = chosen(()) if candidates is None else candidates
    texts = replace(
        texts,
        windows=texts.windows.to(model.device),
        calibration=texts.calibration.to(model.device),
    )
    candidates = sorted(candidates, key=lambda each: "shipped" not in each.name)
    context, dtype = texts.windows.shape[1], dtype_name(model.dtype)
    _check_length(model, context)
    total = 2 + len(texts.windows) * (2 + len(candidates))
    steps = iter(range(total))

    def report(what: str) -> None:
        progress(what, next(steps), total)

    report("proving that regard computes what the model does")
    proof = prove(model, texts.windows[0])
    shipped = [attention_of(module) for module in attention_modules(model).values()]
    kind, slides = shipped[0].kind, any(window_of(each) is not None for each in shipped)
    named = [replace(each, name=each.name.format(kind=kind)) for each in candidates]
    report("converting")
    stored = cache_dtype or model.dtype
    runners = _runners(model, shipped, named, texts.calibration, stored, progress)
    measured = _measure(
        model, named, runners, texts.windows, memory=memory, dtype=dtype_name(stored), report=report
    )
    rows = tuple(measured)
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
        verdict=verdict(rows, dtype_name(stored), reasons(rows, context, dtype, outside(model))),
        seconds=time.perf_counter() - started,
        decoded=len(texts.windows) * math.prod(decode_steps(context, slides)),
        cache_dtype=dtype_name(stored),
    )


def _measure(
    model: Any,
    candidates: Sequence[Candidate],
    runners: Mapping[str, Runner | str],
    windows: Int[Tensor, "N L"],
    *,
    memory: int,
    dtype: str,
    report: Callable[[str], None],
) -> Iterator[Row]:
    """Every candidate over every window; the first that runs and another take turns when timed."""
    samples = {name: Sample(each) for name, each in runners.items() if isinstance(each, Runner)}
    first = next(iter(samples), "")
    for index, window in enumerate(windows):
        report("reading as shipped")
        reference, hidden = hidden_states(model, window[None]), {}
        order = candidates[:: -1 if index % 2 else 1]
        for each in sorted(order, key=lambda each: each.name != first):
            report(each.name)
            if each.name in samples:
                hidden[each.name] = samples[each.name].read(window)
            if each.name in samples and (each.name != first or len(samples) == 1):
                time_steps([samples[name] for name in dict.fromkeys((first, each.name))], window)
                samples[each.name].runner.reset()
        found, _ = compare_all_logits(model, window, list(hidden.values()), reference)
        for name, (losses, difference) in zip(hidden, found, strict=True):
            samples[name].judge(losses, difference)
        report("reading in turns")
        time_prefills(list(samples.values()), window)
    for each in candidates:
        runner = runners[each.name]
        if isinstance(runner, str):
            yield Row(each.name, each.exact, remark=runner)
        else:
            yield samples[each.name].row(
                each.name,
                each.exact,
                samples[first],
                context=windows.shape[1],
                memory=memory,
                dtype=dtype,
            )


def _runners(
    model: Any,
    shipped: list[Attention],
    candidates: list[Candidate],
    tokens: Int[Tensor, "M K"],
    dtype: torch.dtype,
    progress: Progress,
) -> dict[str, Runner | str]:
    """A runner for each candidate, or the reason why the model cannot have that attention."""
    targets: dict[str, Target | str | None] = {}
    for each in candidates:
        try:
            targets[each.name] = each.choose(shipped, dtype)
        except ValueError as objection:
            targets[each.name] = str(objection)
    wanted = list(
        dict.fromkeys(target for target in targets.values() if isinstance(target, Target))
    )
    made = _made(model, shipped, wanted, tokens, progress)
    runners: dict[str, Runner | str] = {}
    for each in candidates:
        target = targets[each.name]
        found = made[target] if isinstance(target, Target) else target
        layers = list(shipped) if found is None else found
        runners[each.name] = (
            layers
            if isinstance(layers, str)
            else Runner(model, layers, cache=each.cache, rollback=DECODED)
        )
    return runners


def _made(
    model: Any,
    shipped: list[Attention],
    targets: Sequence[Target],
    tokens: Int[Tensor, "M K"],
    progress: Progress,
) -> dict[Target, list[nn.Module] | str]:
    """Layers for each target, read from disk if they were converted before; or the objection."""
    names = {target: converted_cache.name_of(target, shipped, tokens) for target in targets}
    stored = {target: converted_cache.find(names[target], shipped) for target in targets}
    made: dict[Target, list[nn.Module] | str] = {
        target: layers for target, layers in stored.items() if layers is not None
    }
    missing = [target for target in targets if target not in made]
    try:
        converted = convert(model, missing, tokens, progress=progress) if missing else []
    except ValueError as objection:
        return made | {target: str(objection) for target in missing}
    for each in converted:
        converted_cache.store(names[each.target], each.layers)
        made[each.target] = each.layers
    return made


def _check_length(model: Any, context: int) -> None:
    longest = getattr(model.config, "max_position_embeddings", None)
    if context < 2:
        raise ValueError(f"context={context} is too short to predict anything; give at least 2")
    if longest is not None and context > longest:
        raise ValueError(f"context={context:,} is more than the {longest:,} positions of the model")
