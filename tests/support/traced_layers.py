"""Compile and export the layers of one kind, count graphs, and print the results as a line of JSON.

`test_compiled` runs it in a process of its own, because checked annotations cannot be traced:
`python traced_layers.py NAME`, a key of LAYERS or "attend".
"""

import json
import sys
import warnings

import torch
from torch._dynamo.testing import CompileCounter

from regard import (
    Alibi,
    Attention,
    Causal,
    Chunked,
    Dense,
    Documents,
    KVCache,
    LatentKVAttention,
    MultiHeadLatentAttention,
    Padding,
    Prefix,
    Rotary,
    SlidingWindow,
    Span,
    StaticCache,
    attend,
    prepare,
)
from regard.cache import PagedCache, PagePool
from session import LONG

LAYERS = {
    "gqa": lambda mask: Attention(32, 4, num_kv_heads=2, rope=Rotary(8), mask=mask),
    "everything": lambda mask: Attention(
        32,
        4,
        num_kv_heads=2,
        rope=Rotary(4),
        mask=mask,
        qk_norm="head",
        softcap=20.0,
        sinks=True,
        gate="channel",
        score_bias=Alibi.for_heads(4),
    ),
    "mla": lambda mask: MultiHeadLatentAttention(
        32,
        4,
        kv_lora_rank=12,
        q_lora_rank=10,
        qk_nope_head_dim=6,
        qk_rope_head_dim=4,
        v_head_dim=5,
        rope=Rotary(4, pairing="pairs"),
        mask=mask,
    ),
    "latent kv": lambda mask: LatentKVAttention(
        32, 4, num_kv_heads=2, head_dim=8, kv_lora_rank=12, rope=Rotary(8), mask=mask
    ),
}
WINDOW = Causal() & SlidingWindow(32)
MASKS = {
    "padding": Padding,
    "documents": lambda valid: Documents(valid.int()),
    "dense": lambda valid: Dense(valid[:, None, None, :]),
}
# Tracing takes 5 to 15 s for each layer, and with symbolic sizes as long again for each mask. A
# normal run does it for these; a long run for all.
TRACED = tuple(LAYERS) if LONG else ("gqa",)
DYNAMIC = tuple(LAYERS) if LONG else ()  # in a normal run, sizes are dynamic from the second on
MASKED = dict.fromkeys(LAYERS, tuple(MASKS)) if LONG else {}


def gap(a, b):
    return (a - b).abs().max().item()


def decode(layer, cache, other, steps=64, past=5):
    """Graphs over 64 steps after an eager prefill, and the largest difference from eager."""
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    x, worst = torch.randn(2, past + steps, 32), 0.0
    with torch.no_grad():
        layer(x[:, :past], cache=cache)
        layer(x[:, :past], cache=other)
        for i in range(past, past + steps):
            token = x[:, i : i + 1]
            worst = max(worst, gap(compiled(token, cache=cache), layer(token, cache=other)))
    return {"graphs": counter.frame_count, "gap": worst}


def over_pages(layer):
    """A cache in pages, whose tables no graph holds: graphs end there."""
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="eager")
    cache = PagedCache(PagePool(num_pages=8, page_size=4))
    starts = (0, 3, 6) if LONG else (0, 3)
    x = torch.randn(2, starts[-1] + 3, 32)
    with torch.no_grad():
        out = [compiled(x[:, at : at + 3], cache=cache) for at in starts]
        return gap(torch.cat(out, 1), layer(x))


def trained(layer, dynamic=None):
    """Whole and backward, where batch, heads and length are the same number."""
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    worst = 0.0
    for batch, length in ((4, 4), (2, 7)):
        x = torch.randn(batch, length, 32)
        grads = []
        for run in (layer, compiled):
            layer.zero_grad()
            run(x).square().sum().backward()
            grads.append([p.grad.clone() for p in layer.parameters()])
        worst = max(worst, gap(compiled(x), layer(x)), *map(gap, *grads))
    return worst


def masked(layer, make):
    """With dynamic sizes and a mask that holds data."""
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    worst = 0.0
    for batch, length in ((2, 6), (3, 9)):
        x = torch.randn(batch, length, 32)
        mask = make(torch.arange(length) >= torch.arange(batch)[:, None])
        worst = max(worst, gap(compiled(x, mask=mask), layer(x, mask=mask)))
    return worst


def exported(layer, strict=False):
    """One program with a dynamic batch and length, on other sizes."""
    batch, length = torch.export.Dim("batch", min=2), torch.export.Dim("length", min=2, max=512)
    shapes = ({0: batch, 1: length},)
    x = torch.randn(3, 10, 32)
    program = torch.export.export(layer, (x,), dynamic_shapes=shapes, strict=strict).module()
    return max(gap(program(y), layer(y)) for y in (torch.randn(2, 37, 32), torch.randn(5, 2, 32)))


def attended(**options):
    """What `attend` would give to a backend that no graph holds, in a graph."""
    torch._dynamo.reset()
    q, k = torch.randn(1, 8, options["queries"], 64), torch.randn(1, 2, 2048, 64)
    span = Span(2048 - options.pop("queries"), 2048, 0, 2048)

    def run(q, k):
        return attend(q, k, k, span=span, **options)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    name = prepare(q, k, k, span=span, **options).name
    return {"gap": gap(compiled(q, k), run(q, k)), "name": name}


def traced(name):
    """The results of one kind of layer: what was done, and with what."""
    make = LAYERS[name]
    causal = make(Causal()).eval()
    found = {
        "decode, static": decode(causal, StaticCache(80), StaticCache(80)),
        "trained": trained(make(Causal()).train()),
        "exported": exported(make(WINDOW).eval()),
    }
    if name in DYNAMIC:
        found["trained, dynamic"] = trained(make(Causal()).train(), dynamic=True)
    for mask in MASKED.get(name, ()):
        found[f"masked, {mask}"] = masked(causal, MASKS[mask])
    if name in ("gqa", "mla"):
        layer = make(WINDOW).eval()
        found["decode, window"] = decode(layer, StaticCache(80), StaticCache(80))
    if name == "gqa":
        found["in pages"] = over_pages(causal)
    if name in ("gqa", "mla") and LONG:
        found["decode, growing"] = decode(causal, KVCache(), KVCache())
    if name == "gqa" and LONG:
        found["exported, strict"] = exported(causal, strict=True)
        for mask in (Causal() | Prefix(3), Causal() & Chunked(4)):
            found[f"exported, {mask!r}"] = exported(make(mask).eval())
    return found


def traced_attend():
    return {
        "one query": attended(queries=1, mask=Causal()),
        "window": attended(queries=2048, mask=WINDOW),
    }


def main(name):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(json.dumps(traced_attend() if name == "attend" else traced(name)))


if __name__ == "__main__":
    main(sys.argv[1])
