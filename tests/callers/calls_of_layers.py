"""The table of calls of layers: every kind, with every cache, mask, context and method."""

from collections.abc import Callable

import torch
from torch import Tensor

from callers import definition
from callers.calls_of_attend import RULES
from callers.programs import Layer, drawn, relative_bias
from regard import (
    Alibi,
    Attention,
    Causal,
    Chunked,
    GroupedQueryAttention,
    KVCache,
    LatentKVAttention,
    MultiHeadAttention,
    MultiHeadLatentAttention,
    MultiQueryAttention,
    QuantizedCache,
    Rotary,
    SelfAttention,
    SlidingCache,
    SlidingWindow,
    StaticCache,
)
from session import LONG

WINDOW = Causal() & SlidingWindow(3)
SLOPES = [0.5, 0.25, 0.125, 0.0625]
TOKENS = 7


def everything_at_once() -> Attention:
    """QK-norm, sinks, softcap, window, biases, a gate and T5's bias in one layer."""
    return GroupedQueryAttention(
        32,
        4,
        2,
        head_dim=16,
        bias=True,
        qk_norm="head",
        rope=Rotary(8),
        mask=WINDOW,
        score_bias=relative_bias(4, 0, torch.float32),
        softcap=4.0,
        sinks=True,
        gate="channel",
    )


def score_bias() -> Tensor:
    return drawn(1, 4, TOKENS, TOKENS, seed=77, dtype=torch.float32)


def mla(form: str = "auto", **options: object) -> MultiHeadLatentAttention:
    plain = {
        "kv_lora_rank": 16,
        "q_lora_rank": 10,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 16,
        "v_head_dim": 12,
        "rope": Rotary(16, pairing="pairs"),
        "mask": Causal(),
    }
    return MultiHeadLatentAttention(32, 3, form=form, **{**plain, **options})


def latent_kv() -> LatentKVAttention:
    return LatentKVAttention(
        32, 4, num_kv_heads=2, head_dim=16, kv_lora_rank=12, rope=Rotary(16), mask=Causal()
    )


def fixed(bias: Tensor) -> Callable[..., Tensor]:
    """`definition.layer` with a bias that is no leaf."""

    def defined(w: dict, x: Tensor, **options: object) -> Tensor:
        return definition.layer(w, x, bias=bias.to(x.dtype), **options)

    return defined


def with_alibi(w: dict, x: Tensor, **options: object) -> Tensor:
    slots = torch.arange(x.shape[1])
    bias = definition.alibi(torch.tensor(SLOPES, dtype=x.dtype), slots, x.shape[1])
    return definition.layer(w, x, bias=bias, **options)


def with_relative(w: dict, x: Tensor, **options: object) -> Tensor:
    weight = w.pop("score_bias.relative_attention_bias.weight")
    bias = definition.relative(weight, torch.arange(x.shape[1]), x.shape[1])
    return definition.layer(w, x, bias=bias, **options)


MLA = {"rank": 16, "nope": 8, "rope": 16, "v_dim": 12}
ALL = {"head_dim": 16, "rope": 8, "softcap": 4.0}

LAYERS = {
    "SelfAttention": Layer(
        lambda: SelfAttention(32, head_dim=16, mask=Causal()),
        definition.layer,
        {"head_dim": 16},
        RULES["causal"],
    ),
    "MHA": Layer(
        lambda: MultiHeadAttention(32, 4, rope=Rotary(8), mask=Causal()),
        definition.layer,
        {"head_dim": 8, "rope": 8},
        RULES["causal"],
    ),
    "MQA": Layer(
        lambda: MultiQueryAttention(32, 4, head_dim=16, bias=True, gate="head", mask=Causal()),
        definition.layer,
        {"head_dim": 16},
        RULES["causal"],
    ),
    "GQA": Layer(
        lambda: GroupedQueryAttention(
            32, 4, 2, head_dim=16, qk_norm="head", rope=Rotary(16), mask=Causal()
        ),
        definition.layer,
        {"head_dim": 16, "rope": 16},
        RULES["causal"],
    ),
    "GQA of all options": Layer(everything_at_once, with_relative, ALL, RULES["window"]),
    "GQA chunked": Layer(
        lambda: GroupedQueryAttention(
            32, 4, 2, head_dim=16, mask=Causal() & Chunked(4), score_bias=Alibi(SLOPES)
        ),
        with_alibi,
        {"head_dim": 16},
        RULES["chunked"],
    ),
    "GQA window": Layer(
        lambda: GroupedQueryAttention(
            32, 4, 2, head_dim=16, rope=Rotary(16), mask=WINDOW, sinks=True
        ),
        definition.layer,
        {"head_dim": 16, "rope": 16},
        RULES["window"],
    ),
    "MLA auto": Layer(mla, definition.latent_layer, MLA, RULES["causal"]),
    "MLA absorbed": Layer(
        lambda: mla("absorbed", q_lora_rank=None), definition.latent_layer, MLA, RULES["causal"]
    ),
    "MLA expanded": Layer(lambda: mla("expanded"), definition.latent_layer, MLA, RULES["causal"]),
    "MLA window": Layer(
        lambda: mla("absorbed", mask=WINDOW), definition.latent_layer, MLA, RULES["window"]
    ),
    "LatentKV": Layer(
        latent_kv,
        definition.latent_kv_layer,
        {"head_dim": 16, "kv_heads": 2, "rope": 16},
        RULES["causal"],
    ),
}
CACHES = {
    "KVCache": KVCache,
    "StaticCache": lambda: StaticCache(9),
    "SlidingCache": lambda: SlidingCache(3),
    "QuantizedCache": lambda: QuantizedCache(8, group=8),
}
MASKS = ("padding", "documents", "dense", "where")
# Codes that a normal run reads in float32: each layer has kernels of its own, which take 10 s.
CODED = ("GQA, QuantizedCache", "MLA absorbed, QuantizedCache")


def others() -> dict[str, Layer]:
    """Contexts, memories, weights, and a bias that is a tensor."""
    cross = {
        "make": lambda: MultiHeadAttention(32, 4),
        "defined": definition.layer,
        "options": {"head_dim": 8},
        "pattern": RULES["everything"],
        "context": 5,
    }
    grouped = LAYERS["GQA"]
    only = {**grouped.options, "only_weights": True}
    return {
        "cross-attention": Layer(**cross),
        "cross-attention with a memory": Layer(**cross, memory=True),
        "GQA with a bias tensor": Layer(
            lambda: GroupedQueryAttention(32, 4, 2, score_bias=score_bias()),
            fixed(score_bias()),
            {"head_dim": 8},
            RULES["everything"],
        ),
        "weights of GQA": changed(grouped, method="weights", options=only),
    }


def changed(row: Layer, **new: object) -> Layer:
    return Layer(**{**vars(row), **new})


def fits(name: str, cache: str) -> bool:
    return cache != "SlidingCache" or "window" in name or "all options" in name


def rows() -> dict[str, Layer]:
    """Every call of a layer, by a name that describes it."""
    table = {**LAYERS, **others()}
    for name in ("GQA", "MLA auto", "MLA absorbed", "LatentKV"):
        for mask in MASKS:
            table[f"{name}, {mask}"] = changed(LAYERS[name], rule=RULES[mask])
    for name, row in LAYERS.items():
        for cache, make in CACHES.items():
            if fits(name, cache):
                exact = cache != "QuantizedCache"
                table[f"{name}, {cache}"] = changed(row, cache=make, exact=exact)
    for name in ("GQA", "MLA auto"):
        padding = changed(LAYERS[name], rule=RULES["padding"])
        for cache in ("KVCache", "StaticCache"):
            table[f"{name}, {cache}, padding"] = changed(padding, cache=CACHES[cache])
    for name in ("GQA", "MLA auto", "LatentKV"):
        for what in ("batch", "tokens"):
            table[f"{name}, no {what}"] = changed(LAYERS[name], **{what: 0})
    halves = {
        f"{name} bfloat16": changed(row, dtype=torch.bfloat16)
        for name, row in table.items()
        if row.exact
    }
    doubles = {f"{name} float64": changed(row, dtype=torch.float64) for name, row in table.items()}
    singles = {name: row for name, row in table.items() if row.exact or LONG or name in CODED}
    return {**singles, **halves, **doubles}
