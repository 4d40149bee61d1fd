"""Compile and export every layer, and count graphs. Run by test_machinery in a process of its own,
because checked annotations cannot be traced. Prints one line of JSON."""

import json
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

warnings.simplefilter("ignore")
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


def masked(layer):
    """With dynamic sizes and masks that hold data."""
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    worst = 0.0
    for batch, length in ((2, 6), (3, 9)):
        x = torch.randn(batch, length, 32)
        valid = torch.arange(length) >= torch.arange(batch)[:, None]
        for mask in (Padding(valid), Documents(valid.int()), Dense(valid[:, None, None, :])):
            worst = max(worst, gap(compiled(x, mask=mask), layer(x, mask=mask)))
    return worst


def exported(layer, strict):
    """One program with a dynamic batch and length, on other sizes."""
    batch, length = torch.export.Dim("batch", min=2), torch.export.Dim("length", min=2, max=512)
    shapes = ({0: batch, 1: length},)
    x = torch.randn(3, 10, 32)
    program = torch.export.export(layer, (x,), dynamic_shapes=shapes, strict=strict).module()
    return max(gap(program(y), layer(y)) for y in (torch.randn(2, 37, 32), torch.randn(5, 2, 32)))


def attended(**options):
    """What `attend` would give to a backend that no graph holds, in a graph."""
    torch._dynamo.reset()
    q, k = torch.randn(1, 8, options["queries"], 16), torch.randn(1, 2, 2048, 16)
    span = Span(2048 - options.pop("queries"), 2048, 0, 2048)

    def run(q, k):
        return attend(q, k, k, span=span, **options)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    name = prepare(q, k, k, span=span, **options).name
    return {"gap": gap(compiled(q, k), run(q, k)), "name": name}


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found = {}
    window = Causal() & SlidingWindow(32)
    for name, make in LAYERS.items():
        layer = make(Causal()).eval()
        found[f"{name}: decode, static"] = decode(layer, StaticCache(80), StaticCache(80))
        found[f"{name}: trained"] = trained(make(Causal()).train())
        found[f"{name}: trained, dynamic"] = trained(make(Causal()).train(), dynamic=True)
        found[f"{name}: masked"] = masked(make(Causal()).eval())
        found[f"{name}: exported"] = exported(make(window).eval(), strict=False)
    for name in ("gqa", "mla"):
        layer = LAYERS[name](window).eval()
        found[f"{name}: decode, window"] = decode(layer, StaticCache(80), StaticCache(80))
        layer = LAYERS[name](Causal()).eval()
        found[f"{name}: decode, growing"] = decode(layer, KVCache(), KVCache())
    for mask in (Causal() | Prefix(3), Causal() & Chunked(4)):
        found[f"{mask!r}: exported"] = exported(LAYERS["gqa"](mask).eval(), strict=False)
    found["gqa: exported, strict"] = exported(LAYERS["gqa"](Causal()).eval(), strict=True)
    found["attend: one query"] = attended(queries=1, mask=Causal())
    found["attend: window"] = attended(queries=2048, mask=window)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
