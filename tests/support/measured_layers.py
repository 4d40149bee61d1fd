"""Layers of random shapes with their caches, run without data: parameters, bytes and FLOPs."""

import random
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch.utils.flop_counter import FlopCounterMode

from regard import (
    Attention,
    Causal,
    KVCache,
    LatentKVAttention,
    MultiHeadLatentAttention,
    PagedCache,
    PagePool,
    QuantizedCache,
    Rotary,
    SlidingCache,
    SlidingWindow,
)
from regard.layers.latent_kv import AbsorbedValues
from regard.names import PAGES
from regard.plan.shapes import STORAGES, LayerShape, Storage
from session import LONG

# Storages whose FLOPs are counted: below 8 bits formats rotate, by products that are left out.
UNROTATED = [STORAGES[name] for name in ("plain", "int8", "int4", "K8V8")]
SHAPES = 500 if LONG else 100
PART = 50  # shapes of a test
KINDS = ("MHA", "GQA", "MQA", "MLA", "LatentKV")


@dataclass(frozen=True)
class Measured:
    """A layer's shape, the call, and what the layer, its cache and the counter said."""

    shape: LayerShape
    storage: Storage
    call: dict
    form: str
    parameters: int
    held: int  # bytes of the cache after the prefill and one token
    allocated: int
    prefill_flops: int
    decode_flops: int


@cache
def measured(part: int) -> list[Measured]:
    """The shapes of one part, measured on the meta device, where no number is computed."""
    return [_measure(random.Random(seed)) for seed in range(part * PART, (part + 1) * PART)]


def layer_of(shape: LayerShape, form: str = "expanded") -> torch.nn.Module:
    """A layer of regard with the sizes of `shape`."""
    mask = Causal() if shape.window is None else Causal() & SlidingWindow(shape.window)
    common = {"mask": mask, "backend": "eager"}  # all of its products are counted
    if shape.kind == "MLA":
        return MultiHeadLatentAttention(
            shape.hidden_size,
            shape.num_heads,
            kv_lora_rank=shape.kv_lora_rank,
            q_lora_rank=shape.q_lora_rank,
            qk_nope_head_dim=shape.head_dim - shape.qk_rope_head_dim,
            qk_rope_head_dim=shape.qk_rope_head_dim,
            v_head_dim=shape.v_head_dim,
            bias=set(shape.bias),
            latent_norm=shape.latent_norm,
            rope=Rotary(shape.qk_rope_head_dim),
            form=form,
            **common,
        )
    heads = {"num_kv_heads": shape.num_kv_heads, "head_dim": shape.head_dim}
    if shape.kind == "LatentKV":
        bias = {"bias": "q_proj" in shape.bias, "out_bias": "o_proj" in shape.bias}
        return LatentKVAttention(
            shape.hidden_size,
            shape.num_heads,
            **heads,
            kv_lora_rank=shape.kv_lora_rank,
            qk_norm=shape.qk_norm,
            **bias,
            **common,
        )
    return Attention(
        shape.hidden_size,
        shape.num_heads,
        **heads,
        bias=set(shape.bias),
        qk_norm=shape.qk_norm,
        sinks=shape.sinks,
        gate=shape.gate,
        **common,
    )


def drawn(rng: random.Random, kind: str) -> LayerShape:
    """A small shape of a kind, with options drawn at random."""
    kv_heads, head_dim = rng.randint(1, 4), rng.randint(1, 40)
    heads = {"MHA": kv_heads, "MQA": rng.randint(2, 6)}.get(kind, kv_heads * rng.randint(2, 4))
    shape = LayerShape(
        hidden_size=rng.randint(1, 48),
        num_heads=heads,
        num_kv_heads=1 if kind == "MQA" else kv_heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        window=rng.choice([None, None, rng.randint(1, 12), rng.randint(12, 400)]),
        qk_norm=rng.choice([None, "head", "width"]),
    )
    if kind == "MLA":
        return _latent(rng, shape)
    if kind == "LatentKV":
        biased = rng.choice([(), ("q_proj", "kv_b_proj"), ("o_proj",)])
        rank = rng.randint(1, 70)
        return replace(shape, kv_lora_rank=rank, keys_by_position=True, bias=biased)
    return replace(
        shape,
        bias=_some(rng, "q_proj", "k_proj", "v_proj", "o_proj"),
        sinks=rng.random() < 0.3,
        gate=rng.choice([None, "head", "channel"]),
    )


def _latent(rng: random.Random, shape: LayerShape) -> LayerShape:
    q_rank, rotary = rng.choice([None, rng.randint(1, 30)]), 2 * rng.randint(1, 5)
    queries = ("q_proj",) if q_rank is None else ("q_a_proj", "q_b_proj")
    return replace(
        shape,
        num_kv_heads=shape.num_heads,
        head_dim=rng.randint(0, 20) + rotary,
        v_head_dim=rng.randint(1, 20),
        kv_lora_rank=rng.randint(1, 70),
        q_lora_rank=q_rank,
        qk_rope_head_dim=rotary,
        qk_norm=None,
        latent_norm=rng.random() < 0.7,
        bias=_some(rng, *queries, "kv_a_proj_with_mqa", "o_proj"),
    )


def _some(rng: random.Random, *names: str) -> tuple[str, ...]:
    return tuple(name for name in names if rng.random() < 0.4)


def _measure(rng: random.Random) -> Measured:
    shape = drawn(rng, rng.choice(KINDS))
    storage = STORAGES["plain"] if shape.window else rng.choice(UNROTATED)
    form = rng.choice(["expanded", "absorbed"])
    dtype = rng.choice(["float64", "float32", "bfloat16", "float16"])
    context = rng.choice([rng.randint(1, 40), rng.randint(250, 260), rng.randint(1, 700)])
    call = {"context": context, "batch": rng.randint(1, 3), "dtype": dtype}
    with torch.device("meta"), torch.no_grad():
        layer = layer_of(shape, form).to(getattr(torch, dtype)).eval()
        if shape.kind == "LatentKV" and form == "absorbed" and layer.kv_b_proj.bias is None:
            values = AbsorbedValues(layer)  # which the layer chooses on the CPU alone
            layer.choose = lambda queries, cache: values
        held = cache_of(shape, storage)
        flops = []
        for tokens in (context, 1):
            x = torch.zeros(call["batch"], tokens, shape.hidden_size, dtype=getattr(torch, dtype))
            with FlopCounterMode(display=False) as counter:
                layer(x, cache=held)
            flops.append(counter.get_total_flops())
    count = sum(each.numel() for each in layer.parameters())
    return Measured(
        shape, storage, call, form, count, held.nbytes, held.allocated_bytes, *flops
    )  # fmt: skip


def cache_of(shape: LayerShape, storage: Storage):
    """The cache that regard has for a layer."""
    if storage.page_size:
        pool = PagePool(1 << 14, storage.page_size, format=storage.name)
        return PagedCache(pool, window=shape.window)
    if storage.name in PAGES and storage.bits:
        return QuantizedCache(group=storage.group, format=storage.name)
    if storage.key_bits is not None:
        return QuantizedCache(storage.key_bits, storage.group)
    return KVCache() if shape.window is None else SlidingCache(shape.window)
