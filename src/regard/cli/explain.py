"""regard explain: which backend runs a call, and why the others do not; nothing is computed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from regard.cli.describe import by_words
from regard.cli.layout import tabulate
from regard.cli.loading import device_named
from regard.cli.terminal import printable, ranges, say, wrapped
from regard.layers.latent_forms import Absorbed, choose_form
from regard.masks import EVERYTHING, Causal, Chunked, Mask, SlidingWindow, Span
from regard.ops.attend import prepare
from regard.ops.explain import Explanation, explanation
from regard.plan.shapes import LayerShape, ModelShape
from regard.see.grammar import mask_from

MOST_NUMBERS = 2**62  # of a tensor: torch counts them in 64 bits
STATE = "their state is no cache of keys and values"
NAME = 9  # columns of the names that lines begin with
COLUMNS = ("", "layers", "attention", "keys read", "backend", "estimate")
NEXT = (
    "The backend with the least estimated time runs. Next: --why says what each mask became, and "
    "what every other backend would take or objects to."
)


@dataclass(frozen=True)
class Explained:
    """A call of some layers, or of none in particular.

    Args:
        layers: their indices.
        kind: of their attention.
        phase: what the call does, in words.
        form: of MLA, the form that it is computed in, and why.
        call: which backend runs it.
    """

    layers: tuple[int, ...]
    kind: str
    phase: str
    form: str
    call: Explanation


def of_sizes(
    layer: LayerShape, rule: str, queries: int, keys: int, batch: int, dtype: str, device: str
) -> Explained:
    """The call of a layer of these sizes, for the newest queries of so many keys."""
    mask, span = mask_from(rule), _span(queries, keys)
    return Explained((), "", "", "", _call(layer, mask, span, batch, dtype, device_named(device)))


def of_model(
    model: ModelShape, context: int, queries: int, batch: int, dtype: str, device: str
) -> list[Explained]:
    """The prefill and a decoding step of every layer that regard computes, those alike as one."""
    return _merged(_calls(model, context, queries, batch, dtype, device_named(device)))


def show(
    title: str,
    found: Sequence[Explained],
    missing: dict[str, list[int]],
    console: Console,
    *,
    why: bool = False,
) -> None:
    """Print a line for each call of a model; with `why`, or of sizes, all that is known of it."""
    if title:
        say(console, title, bold=title)
        console.print()
    if title and not why:
        tabulate(console, COLUMNS, [_cells(each) for each in found])
        console.print()
    else:
        for each in found:
            _show_call(each, console)
    for reason, layers in missing.items():
        say(console, f"regard does not compute {_listed(layers)}: {reason.rstrip('.')}.")
    if title and not why:
        say(console, NEXT, style="dim")


def _show_call(each: Explained, console: Console) -> None:
    if each.phase:
        say(console, f"{each.phase}, {each.kind} in {_listed(each.layers)}", style="bold")
    if each.form:
        _say_line(console, f"{'form':<{NAME}}{each.form}")
    first, *lines = str(each.call).splitlines()
    say(console, first)
    for line in lines:
        _say_line(console, line)
    if each.phase:
        console.print()


def _cells(each: Explained) -> list[str]:
    """The call of some layers in a line."""
    form = f", {each.form.partition(':')[0]}" if each.form else ""
    call = each.call
    (runs,) = (verdict for verdict in call.backends if verdict.name == call.runs)
    read, time = f"{call.kv_stop - call.kv_start:,}", str(runs).removeprefix("about ")
    return [
        each.phase.partition(" ")[0],
        ranges(each.layers),
        f"{each.kind}{form}",
        read,
        call.runs,
        time,
    ]


def _say_line(console: Console, line: str) -> None:
    """Print a line that begins with a name; when it is wrapped, further lines are indented to its
    text."""
    line = printable(line)
    text = wrapped(line[NAME:], console.width - NAME, margin="").splitlines()
    margin = "\n" + " " * NAME
    console.print(line[:NAME] + margin.join(text), markup=False, soft_wrap=True)


def _listed(layers: Sequence[int]) -> str:
    return f"layer{'s' * (len(layers) > 1)} {ranges(layers)}"


def _span(queries: int, keys: int) -> Span:
    """The newest queries of so many tokens."""
    if queries > keys:
        raise ValueError(
            f"the queries are the newest of the keys, so at most as many; got {queries:,} queries "
            f"and {keys:,} keys"
        )
    return Span(keys - queries, keys, 0, keys)


def _calls(
    model: ModelShape, context: int, queries: int, batch: int, dtype: str, device: torch.device
) -> Iterator[Explained]:
    """The prefill and a decoding step of every different layer that regard computes."""
    step = "a token" if queries == 1 else f"{queries:,} tokens"
    phases = {
        f"Prefill of {context:,} tokens": _span(context, context),
        f"Decoding {step} at {context:,}": _span(queries, context),
    }
    for phase, span in phases.items():
        for layer, indices in model.distinct().items():
            if not (layer.unsupported or layer.kind == "linear"):
                yield _of_layer(layer, indices, phase, span, batch, dtype, device)


def refused(model: ModelShape) -> dict[str, list[int]]:
    """Layers that regard does not compute by attention, by the reason."""
    return by_words(model, lambda layer: layer.unsupported or STATE * (layer.kind == "linear"))


def _merged(calls: Iterator[Explained]) -> list[Explained]:
    """Join calls that are alike, with the layers of all of them."""
    layers: dict[Explained, list[int]] = {}
    for each in calls:
        layers.setdefault(replace(each, layers=()), []).extend(each.layers)
    return [replace(each, layers=tuple(sorted(found))) for each, found in layers.items()]


def _of_layer(
    layer: LayerShape,
    indices: tuple[int, ...],
    phase: str,
    span: Span,
    batch: int,
    dtype: str,
    device: torch.device,
) -> Explained:
    mask, form, joined = mask_of(layer), "", False
    if layer.kind == "MLA":
        chosen = choose_form(_latent(layer, dtype), span)
        form, joined = f"{chosen.name}: {chosen.why}", isinstance(chosen, Absorbed)
    call = _call(layer, mask, span, batch, dtype, device, absorbed=joined)
    return Explained(indices, layer.kind, phase, form, call)


def mask_of(layer: LayerShape) -> Mask:
    """The mask of a layer: what its tokens may attend to, whatever the call."""
    mask: Mask = Causal() if layer.causal else EVERYTHING
    if layer.window is not None:
        mask &= SlidingWindow(layer.window)
    return mask if layer.chunk is None else mask & Chunked(layer.chunk)


def _latent(layer: LayerShape, dtype: str) -> Any:
    """The sizes of an MLA layer by the names of a module, with a weight that takes no memory."""
    assert layer.kv_lora_rank is not None
    nope = layer.head_dim - layer.qk_rope_head_dim
    rank, width = layer.kv_lora_rank, layer.num_heads * (nope + layer.v_head_dim)
    up = nn.Linear(rank, width, bias=False, device="meta", dtype=getattr(torch, dtype))
    return SimpleNamespace(
        kv_lora_rank=rank,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=layer.qk_rope_head_dim,
        v_head_dim=layer.v_head_dim,
        kv_b_proj=up,
    )


def _call(
    layer: LayerShape,
    mask: Mask,
    span: Span,
    batch: int,
    dtype: str,
    device: torch.device,
    *,
    absorbed: bool = False,
) -> Explanation:
    """The call of a layer, on tensors of one element each."""
    kv_heads, width, values = layer.num_kv_heads, layer.head_dim, layer.v_head_dim
    if absorbed:
        assert layer.kv_lora_rank is not None
        kv_heads, values = 1, layer.kv_lora_rank
        width = values + layer.qk_rope_head_dim

    if batch * layer.num_heads * span.num_keys * max(width, values) > MOST_NUMBERS:
        raise ValueError(
            f"a tensor has at most {MOST_NUMBERS:.1e} numbers, got {batch:,} rows x "
            f"{layer.num_heads:,} heads x {span.num_keys:,} keys x {max(width, values):,} channels"
        )

    def light(*shape: int) -> Tensor:
        return torch.zeros((), dtype=getattr(torch, dtype), device=device).expand(shape)

    keys = span.num_keys
    prepared = prepare(
        light(batch, layer.num_heads, span.num_queries, width),
        light(batch, kv_heads, keys, width),
        light(batch, kv_heads, keys, values),
        mask=mask,
        span=span,
        scale=layer.head_dim**-0.5 if layer.scale is None else layer.scale,
        softcap=layer.softcap,
        sinks=light(layer.num_heads) if layer.sinks else None,
    )
    return explanation(prepared)
