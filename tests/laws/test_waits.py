"""No prefill and no decoding step waits for the device: none reads a tensor on the host.

Where every operator of a step is queued, a GPU works without a pause; a read empties its queue, in
each layer. A step that reads cannot be recorded in a CUDA graph. There is no GPU here: `unread`
says which device stands for it.
"""

import copy

import pytest
import torch

from kinds import LAYERS, MLA
from regard import (
    EVERYTHING,
    Alibi,
    Attention,
    Causal,
    Chunked,
    Dense,
    Documents,
    KVCache,
    MultiHeadLatentAttention,
    Padding,
    Prefix,
    QuantizedCache,
    RelativeBias,
    Rotary,
    SlidingCache,
    SlidingWindow,
    Span,
    StaticCache,
    attend,
    prepare,
)
from regard.cache.streams import Lengths
from regard.ops.backends import grouped
from regard.ops.block_masks import planned
from unread import DEVICE, Waited, moved, unread

BATCH, PROMPT, STEPS = 2, 9, 3
TOTAL = PROMPT + STEPS
CACHES = {
    "growing": KVCache,
    "fixed": lambda: StaticCache(TOTAL),
    "sliding": lambda: SlidingCache(TOTAL),
    "quantized": lambda: QuantizedCache(bits=8, group=4),
}
KINDS = [layer for layer in LAYERS if getattr(layer, "context_size", None) is None]
KINDS.append(MultiHeadLatentAttention(32, 4, **MLA, form="expanded", mask=Causal()))


def padding(slots: int = TOTAL) -> Padding:
    return Padding(torch.arange(slots) >= torch.tensor([[2], [0]]))


def documents() -> Documents:
    return Documents(torch.arange(TOTAL)[None] // torch.tensor([[5], [4]]))


MASKS = {
    "none": lambda: EVERYTHING,
    "padding": padding,
    "documents": documents,
    "window": lambda: SlidingWindow(4),
    "chunks": lambda: Chunked(4, start=torch.tensor([2, 0])),
}


def on_device(layer):
    layer = copy.deepcopy(layer).to(DEVICE, torch.bfloat16).eval()
    layer.mask = Causal() & SlidingWindow(TOTAL) & layer.mask
    return layer


def numbers(*shape, dtype=torch.bfloat16):
    return torch.zeros(shape, device=DEVICE, dtype=dtype)


def generate(layer, cache, masks):
    """A prompt and some steps, with a mask for each call."""
    lengths = [PROMPT] + [1] * (len(masks) - 1)
    for length, mask in zip(lengths, masks, strict=True):
        layer(numbers(BATCH, length, 32), cache=cache, mask=mask)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("kind", KINDS, ids=lambda layer: f"{layer.kind}")
def test_prefill_and_decoding_read_nothing(kind, cache, mask):
    layer, rule = on_device(kind), moved(MASKS[mask]())
    with torch.no_grad():
        generate(layer, CACHES[cache](), [rule] * (1 + STEPS))  # makes what is made once
        with unread():
            generate(layer, CACHES[cache](), [rule] * (1 + STEPS))


@pytest.mark.parametrize("cache", CACHES)
def test_a_new_padding_at_every_step_is_not_read(cache):
    """As generation gives it: the prompt's, with a column for each new token."""
    layer = on_device(Attention(32, 4, num_kv_heads=2))
    masks = [moved(padding(PROMPT + more)) for more in range(STEPS + 1)]
    with torch.no_grad():
        generate(layer, CACHES[cache](), masks)
        with unread():
            generate(layer, CACHES[cache](), masks)


@pytest.mark.parametrize("cache", [StaticCache, KVCache])
@pytest.mark.parametrize("mask", ["none", "padding"])
def test_rows_of_different_lengths_are_not_read(cache, mask):
    layer = on_device(Attention(32, 4, num_kv_heads=2, rope=Rotary(8)))
    rule = moved(Padding(torch.ones(BATCH, TOTAL + 1).bool())) if mask == "padding" else EVERYTHING
    with torch.no_grad():
        for step in range(2):
            held = cache(TOTAL + 1) if cache is StaticCache else cache()
            generate(layer, held, [rule])
            held._lengths = Lengths(PROMPT, PROMPT - 2, torch.zeros(BATCH, device=DEVICE).long())
            if not step:
                layer(numbers(BATCH, 1, 32), cache=held, mask=rule)
                continue
            with unread():
                for _ in range(STEPS):
                    layer(numbers(BATCH, 1, 32), cache=held, mask=rule)


def test_reordering_beams_reads_nothing():
    layer = on_device(Attention(32, 4, num_kv_heads=2))
    with torch.no_grad():
        for cache in (KVCache(), StaticCache(TOTAL), SlidingCache(TOTAL)):
            generate(layer, cache, [EVERYTHING])
            with unread():
                cache.reorder(torch.zeros(BATCH, device=DEVICE, dtype=torch.int64))


CALLS = {
    "sinks": lambda: {"sinks": numbers(8)},
    "softcap": lambda: {"softcap": 30.0},
    "alibi": lambda: {"score_bias": Alibi.for_heads(8)},
    "relative": lambda: {"score_bias": RelativeBias(8).to(DEVICE)},
    "bias": lambda: {"score_bias": numbers(8, 1, 40)},
    "dense": lambda: {"mask": moved(Dense(torch.ones(1, 40).bool()))},
    "prefix": lambda: {"mask": moved(Causal() | Prefix(torch.tensor([30, 3])))},
    "mixed": lambda: {"mask": moved(Causal() & Padding(torch.ones(2, 40).bool()) & Chunked(8))},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("backend", ["auto", "sdpa", "grouped", "eager"])
@pytest.mark.parametrize("call", CALLS)
def test_no_backend_reads_in_a_step(call, backend, dtype, monkeypatch):
    """Also where `grouped` multiplies half precision as it is, as on NVIDIA's GPUs."""
    monkeypatch.setattr(grouped, "_multiplies_half", lambda x: x.dtype.itemsize < 4)
    rounded = ("alibi", "relative", "bias") if dtype == torch.bfloat16 else ()
    if backend == "sdpa" and call in ("sinks", "softcap", *rounded):
        return  # it objects
    q, k = numbers(2, 8, 1, 16, dtype=dtype), numbers(2, 2, 40, 16, dtype=dtype)
    given = CALLS[call]()
    span = Span(30, 31, 0, 40)
    with torch.no_grad():
        attend(q, k, k, **given, span=span, backend=backend)
        with unread():
            assert attend(q, k, k, **given, span=span, backend=backend).shape == q.shape


@pytest.mark.parametrize("mask", [name for name in MASKS if name != "none"])
def test_block_masks_are_planned_without_reading(mask):
    q, rule = numbers(BATCH, 4, TOTAL, 16), Causal() & moved(MASKS[mask]())
    call = prepare(q, q, q, mask=rule, backend="sdpa").call
    planned(call)
    with unread():
        found = planned(prepare(q, q, q, mask=rule & SlidingWindow(11), backend="sdpa").call)
    assert found.blocks.kv_num_blocks.device == DEVICE


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.item(),
        lambda x: bool(x.any()),
        lambda x: x.tolist(),
        lambda x: x.to("cpu"),
        lambda x: x[x > 0],
        lambda x: torch.equal(x, x),
        lambda x: x.nonzero(),
        lambda x: torch.tensor([1.0], device=DEVICE),
        lambda x: torch.zeros(1).to(DEVICE),
        lambda x: Padding(x > 0),
        lambda x: int(x[0]),
        lambda x: x.repeat_interleave(x.long()),
    ],
)
def test_a_read_is_noticed(read):
    with pytest.raises((Waited, RuntimeError, NotImplementedError)), unread():
        read(torch.zeros(1, device=DEVICE))
