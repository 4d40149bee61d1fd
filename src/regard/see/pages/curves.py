"""Pages to explore a plan or a comparison: curves of its attentions over context lengths."""

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from regard.compare.result import Comparison
from regard.page.page import Section, table, write_page
from regard.page.readable import readable_bytes
from regard.plan.devices import DEVICES
from regard.plan.rows import Plan
from regard.plan.shapes import DTYPE_BYTES, Storage
from regard.see.pages.curves_html import Curves, curves
from regard.see.pages.lines import Slider, line_of
from regard.see.pages.scatter import scatter
from regard.words import counted

CONTEXTS = tuple(1 << power for power in range(8, 21))  # tokens: 256 to 1,048,576
BATCHES = tuple(1 << power for power in range(9))  # rows: 1 to 256
MEMORIES = tuple(1 << power for power in range(26, 41))  # bytes: 64 MiB to 1 TiB


def write_plan(plan: Plan, path: Path) -> None:
    """Write a page that explores a plan: its attentions as curves.

    Args:
        plan: from `regard.plan`.
        path: of the HTML file.

    Raises:
        ImportError: if Bokeh is missing.
        OSError: if the file cannot be written.
    """
    write_page(path, f"{plan.model.name}: what each attention costs", sections_of_plan(plan))


def sections_of_plan(plan: Plan) -> list[Section]:
    """The sections of the page of a plan."""
    sections = [curves(curves_of_plan(plan))]
    if plan.left_out:
        rows = [(name, reason) for name, reason in plan.left_out.items()]
        left_out = table("Attentions that are no lines", ["attention", "reason"], rows)
        sections.append(Section("left-out", "Left out", html=left_out))
    return sections


def write_comparison(result: Comparison, path: Path) -> None:
    """Write a page of a comparison: what was measured, and curves of the caches that ran.

    Args:
        result: from `regard.compare`.
        path: of the HTML file.

    Raises:
        ImportError: if Bokeh is missing.
        OSError: if the file cannot be written.
    """
    write_page(path, f"{result.model}: its attentions, compared", sections_of_comparison(result))


def sections_of_comparison(result: Comparison) -> list[Section]:
    """The sections of the page of a comparison. Speeds are measured, and not in the curves."""
    drawn = scatter(result.rows)
    sections = [Section("picture", "Cache against perplexity", html=drawn)] if drawn else []
    sections.append(Section("measured", "Measured", html=result._repr_html_()))
    missing = [(row.name, row.remark) for row in result.rows if row.remark]
    if missing:
        not_run = table("Attentions that did not run", ["attention", "reason"], missing)
        sections.append(Section("not-run", "Not run", html=not_run))
    if any(row.storage for row in result.rows):
        sections.append(curves(curves_of_comparison(result), heading="The caches"))
    return sections


def curves_of_comparison(result: Comparison) -> Curves:
    """A line for each row that ran and whose cache bytes are known from shapes."""
    lines = tuple(
        line_of(row.name, row.layers, [row.storage], dtype=result.cache_dtype)
        for row in result.rows
        if row.storage is not None
    )
    return Curves(
        lines=lines,
        sliders=(
            _tokens(result.context),
            _slider("batch", "Batch, rows", BATCHES, 1),
            _memory(result.memory),
        ),
        devices=(),
        dtype=result.cache_dtype,
        introduction=(
            "Computed from the sizes of the layers and caches that ran. How fast each of them "
            "decodes was measured, and stands in the table above."
        ),
    )


def curves_of_plan(plan: Plan) -> Curves:
    """The lines and sliders of a plan: each of its attentions."""
    storages = list({row.storage.name: row.storage for row in plan.rows}.values())
    attentions = {row.attention: row.layers for row in plan.rows}
    common = partial(line_of, dtype=plan.dtype, tp=plan.tp, cp=plan.cp)
    sliders = (
        _tokens(plan.context),
        _slider("batch", "Batch, rows", BATCHES, plan.batch),
        _bits(storages, plan.dtype),
        _memory(plan.memory),
    )
    devices = {each.name: each for each in (*plan.devices.values(), *DEVICES.values())}
    return Curves(
        lines=tuple(common(name, layers, storages) for name, layers in attentions.items()),
        sliders=sliders,
        devices=tuple(devices.values()),
        dtype=plan.dtype,
        beyond=plan.model.max_positions,
        introduction=_introduction(plan),
    )


def _introduction(plan: Plan) -> str:
    layers = counted(len(plan.model.layers), "layer")
    ranks = "" if plan.tp == plan.cp == 1 else f", on one rank of tp {plan.tp} x cp {plan.cp}"
    return (
        f"{layers} of {plan.model.architecture} together{ranks}, in {plan.dtype}: as shipped, and "
        "with other attentions that the model could have."
    )


def _slider(name: str, label: str, values: Sequence[int], start: int) -> Slider:
    """A slider of whole numbers, with the one that it starts at."""
    steps = tuple(sorted({*values, start}))
    return Slider(name, label, steps, start, tuple(f"{each:,}" for each in steps))


def _tokens(start: int) -> Slider:
    return _slider("context", "Context, tokens", CONTEXTS, start)


def _memory(start: int) -> Slider:
    steps = tuple(sorted({*MEMORIES, start}))
    texts = tuple(map(readable_bytes, steps))
    return Slider("memory", "Memory for the cache", steps, start, texts)


def _bits(storages: Iterable[Storage], dtype: str) -> Slider:
    """The slider over storages, from the smallest to the largest; it starts at the plain one, if it
    is there."""
    own = 8 * DTYPE_BYTES[dtype]
    bits = {each.name: sum(each.bits or (own, own)) / 2 for each in storages}
    names = tuple(sorted(bits, key=lambda name: bits[name]))
    texts = tuple(f"{bits[name]:g} ({dtype if name == 'plain' else name})" for name in names)
    start = "plain" if "plain" in names else names[-1]
    return Slider("storage", "Bits of the cache", names, start, texts)
