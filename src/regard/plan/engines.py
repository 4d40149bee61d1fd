"""What named engines reserve for a cache, each by its own rule, with the source of the rule.

An engine that cannot hold a kind of layer, or whose format is not known here, objects in a
sentence; no figure is guessed. Sizes are those of `context` tokens of which the last was decoded.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from regard.plan.formula import Formula, ceil_div, minimum
from regard.plan.rows import Reserved
from regard.plan.shapes import LayerShape, Storage
from regard.plan.sizes import (
    BATCH,
    CHUNK,
    CONTEXT,
    HEAD,
    ITEMSIZE,
    KEY_HEADS,
    LATENT,
    ROTARY,
    TOKENS,
    VALUE,
    WINDOW,
    sizes,
)

BLOCK, MLA_BLOCK = 16, 64  # tokens of a block of vLLM
ENOUGH = 1.5  # vLLM: kinds of layers whose numbers differ less form groups as large as the larger
CELLS = 256  # llama.cpp pads contexts to a multiple of so many tokens
UBATCH = 512  # tokens that llama.cpp computes at a time, by default
BLOCK_BYTES = {8: 34, 4: 18}  # of 32 numbers of q8_0 and q4_0: a float16 scale and the codes


@dataclass(frozen=True)
class Ranks:
    """How an engine divides a model: heads among `tp` ranks, tokens among `cp`."""

    tp: int = 1
    cp: int = 1


@dataclass(frozen=True)
class Engine:
    """How an engine reserves memory for a cache.

    Args:
        name: with the version or the date that the rule is of.
        rule: in a sentence.
        source: where the rule stands.
        layer_bytes: the formula of a layer.
        objection: why a layer with a storage, a dtype and ranks cannot be held; None if it can.
        layers_reserved: how many layers of each kind are reserved, of a model's layers; raises a
            ValueError if they do not go together.
    """

    name: str
    rule: str
    source: str
    layer_bytes: Callable[[LayerShape, Storage], Formula]
    objection: Callable[[LayerShape, Storage, str, Ranks], str | None]
    layers_reserved: Callable[[Sequence[LayerShape]], Mapping[LayerShape, int]] = Counter


@dataclass(frozen=True)
class Part:
    """What an engine reserves for layers that are alike.

    Args:
        layer: one of them.
        layers: how many are reserved; more than there are where groups are padded.
        formula: bytes of one, on one rank.
    """

    layer: LayerShape
    layers: int
    formula: Formula


def parts_of(
    engine: str,
    layers: Sequence[LayerShape],
    storage: Storage,
    *,
    dtype: str,
    tp: int = 1,
    cp: int = 1,
) -> tuple[Part, ...]:
    """The formulas of what an engine reserves for a model.

    Args:
        engine: a key of `ENGINES`.
        layers: of the model.
        storage: of its caches.
        dtype: of plain caches.
        tp: ranks that the heads are divided among.
        cp: ranks that the tokens are divided among.

    Raises:
        ValueError: with the engine's objection, if it cannot hold this cache.

    Examples:
        >>> from regard.plan.engines import parts_of
        >>> from regard.plan.shapes import STORAGES, LayerShape
        >>> mqa = LayerShape(hidden_size=64, num_heads=8, num_kv_heads=1, head_dim=8, v_head_dim=8)
        >>> (part,) = parts_of("vllm", [mqa, mqa], STORAGES["plain"], dtype="bfloat16")
        >>> part.layers, part.formula.with_numbers(num_kv_heads=1, head_dim=8, v_head_dim=8, tp=1)
        (2, 'batch x 16 x ceil(ceil(context / cp) / 16) x 1 x (8 + 8) x itemsize')
    """
    rule = ENGINES[engine]
    caching = [layer for layer in layers if layer.keys_of is None]
    for layer in dict.fromkeys(caching):
        objection = _general_objection(layer, dtype) or rule.objection(
            layer, storage, dtype, Ranks(tp, cp)
        )
        if objection is not None:
            raise ValueError(objection)
    return tuple(
        Part(layer, count, rule.layer_bytes(layer, storage))
        for layer, count in rule.layers_reserved(caching).items()
    )


def reserved(
    engine: str,
    layers: Sequence[LayerShape],
    storage: Storage,
    *,
    context: int,
    batch: int = 1,
    dtype: str = "float32",
    tp: int = 1,
    cp: int = 1,
) -> Reserved:
    """What an engine reserves for a model's cache on one rank, or why it cannot hold it.

    Args:
        engine: a key of `ENGINES`.
        layers: of the model.
        storage: of its caches.
        context: tokens of each row.
        batch: rows.
        dtype: of plain caches.
        tp: ranks that the heads are divided among.
        cp: ranks that the tokens are divided among.

    Examples:
        >>> from regard.plan.engines import reserved
        >>> from regard.plan.shapes import STORAGES, LayerShape
        >>> mqa = LayerShape(hidden_size=64, num_heads=8, num_kv_heads=1, head_dim=8, v_head_dim=8)
        >>> reserved("vllm", [mqa], STORAGES["plain"], context=17, dtype="bfloat16").bytes
        1024
    """
    try:
        parts = parts_of(engine, layers, storage, dtype=dtype, tp=tp, cp=cp)
    except ValueError as objection:
        return Reserved(engine, None, str(objection))
    total = 0
    for part in parts:
        numbers = sizes(
            part.layer, storage, context=context, batch=batch, dtype=dtype, tp=tp, cp=cp
        )
        total += part.layers * int(part.formula.evaluate(**numbers))
    return Reserved(engine, total)


def _general_objection(layer: LayerShape, dtype: str) -> str | None:
    if layer.kind == "linear":
        return "the states of linear attention that it holds do not follow from the sizes given"
    if layer.kind == "LatentKV":
        return "it has no layer with a joint latent whose keys are rotated when they are read"
    if dtype == "float64":
        return "it has no cache in float64"
    if layer.window is not None and layer.chunk is not None:
        return "its rule for a layer with a window and chunks is not known here"
    return None


def _limited(layer: LayerShape) -> Formula | None:
    """The size of a window or of chunks; None without."""
    if layer.window is not None:
        return WINDOW
    return None if layer.chunk is None else CHUNK


def _token_numbers(layer: LayerShape) -> Formula:
    """Numbers that a token of a layer takes: the latent once, or the keys and values of a rank."""
    return LATENT + ROTARY if layer.kind == "MLA" else KEY_HEADS * (HEAD + VALUE)


def _vllm_bytes(layer: LayerShape, storage: Storage) -> Formula:
    if layer.kind == "MLA":
        return BATCH * MLA_BLOCK * ceil_div(TOKENS, MLA_BLOCK) * (LATENT + ROTARY) * ITEMSIZE
    blocks = ceil_div(TOKENS, BLOCK)
    if layer.window is not None:
        blocks = minimum(blocks, ceil_div(WINDOW - 1, BLOCK) + 1)
    elif layer.chunk is not None:
        blocks = minimum(blocks, ceil_div(CHUNK, BLOCK))
    per_head = (HEAD + VALUE) * ITEMSIZE if storage.key_bits is None else HEAD + VALUE + 2 * 4
    return BATCH * BLOCK * blocks * KEY_HEADS * per_head


def _vllm_objection(layer: LayerShape, storage: Storage, dtype: str, ranks: Ranks) -> str | None:
    mla, limited = layer.kind == "MLA", _limited(layer) is not None
    if storage.key_bits == 8 and mla:
        return "its int8 format for latents is not known here"
    if storage.bits not in ((), (8, 8)):
        return f"its format for {storage.name} is not known here"
    if limited and mla:
        return "it has no MLA with a window"
    if limited and layer.head_dim != layer.v_head_dim:
        return "its pages of windows have keys and values of one width"
    heads, tp, cp = layer.num_kv_heads, ranks.tp, ranks.cp
    if layer.num_heads % tp or (not mla and heads % tp and tp % heads):
        return f"it divides {layer.num_heads} query and {heads} key heads evenly, not among {tp}"
    if cp > 1 and limited:
        return "it does not divide the tokens of windows"
    if cp > 1 and (tp % cp or (not mla and tp < heads * cp)):
        return (
            f"it divides tokens among ranks that would hold the same heads: tp={tp} has no groups "
            f"of cp={cp}"
        )
    return None


def _vllm_layers(layers: Sequence[LayerShape]) -> Mapping[LayerShape, int]:
    """Layers of each kind, padded to whole groups of one size where there are several kinds."""
    kinds = Counter(map(_cache_alone, layers))
    if len(kinds) < 2:
        return kinds
    pages = {(layer.kind == "MLA", _width(layer)) for layer in kinds}
    if len(pages) > 1:
        raise ValueError("its rule for layers whose tokens differ in size is not known here")
    least, most = min(kinds.values()), max(kinds.values())
    group = most if most < ENOUGH * least else least
    return {layer: -(-count // group) * group for layer, count in kinds.items()}


def _cache_alone(layer: LayerShape) -> LayerShape:
    """The layer with what its cache depends on, and nothing else that could tell it apart."""
    return LayerShape(
        hidden_size=layer.hidden_size,
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        v_head_dim=layer.v_head_dim,
        kv_lora_rank=layer.kv_lora_rank,
        qk_rope_head_dim=layer.qk_rope_head_dim if layer.kind == "MLA" else 0,
        window=layer.window,
        chunk=layer.chunk,
    )


def _width(layer: LayerShape) -> tuple[int, ...]:
    if layer.kv_lora_rank is not None:
        return (layer.kv_lora_rank + layer.qk_rope_head_dim,)
    return layer.num_kv_heads, layer.head_dim, layer.v_head_dim


def _llama_bytes(layer: LayerShape, storage: Storage) -> Formula:
    cells = CELLS * ceil_div(CONTEXT, CELLS)
    limit = _limited(layer)
    if limit is not None:
        cells = CELLS * ceil_div(minimum(cells, limit + UBATCH), CELLS)
    numbers = _token_numbers(layer)
    if storage.key_bits is None:
        return BATCH * cells * numbers * ITEMSIZE
    return BATCH * cells * ceil_div(numbers, 32) * BLOCK_BYTES[storage.key_bits]


def _llama_objection(layer: LayerShape, storage: Storage, dtype: str, ranks: Ranks) -> str | None:
    if ranks != Ranks():
        return "it divides layers among devices, not heads or tokens"
    if storage.key_bits is None:
        return None
    if storage.key_bits not in BLOCK_BYTES or storage.key_bits != storage.value_bits:
        return f"its format for {storage.name} is not known here"
    mla = layer.kind == "MLA"
    widths = _width(layer) if mla else (layer.head_dim, layer.v_head_dim)
    if any(width % 32 for width in widths):
        return f"its quantised formats have blocks of 32 numbers, which do not divide {widths[0]}"
    return None


def _dynamic_bytes(layer: LayerShape, storage: Storage) -> Formula:
    limit = _limited(layer)
    whole = limit is None or 1 in (layer.window, layer.chunk)  # its slice from -0 on keeps all
    tokens = CONTEXT if whole or limit is None else minimum(CONTEXT, limit)
    return BATCH * tokens * _token_numbers(layer) * ITEMSIZE


def _static_bytes(layer: LayerShape, storage: Storage) -> Formula:
    limit = _limited(layer)
    tokens = CONTEXT if limit is None else minimum(CONTEXT, limit)
    return BATCH * tokens * _token_numbers(layer) * ITEMSIZE


def _expanded_bytes(layer: LayerShape, storage: Storage) -> Formula:
    """As transformers 4 does: keys and values of every head are cached, of MLA, too."""
    return _dynamic_bytes(replace(layer, kv_lora_rank=None), storage)


def _transformers_objection(
    layer: LayerShape, storage: Storage, dtype: str, ranks: Ranks
) -> str | None:
    if storage.key_bits is not None:
        return "its quantised caches have the formats of other packages, not known here"
    if ranks.cp > 1:
        return "its caches hold all tokens on every rank"
    if layer.num_heads % ranks.tp or (layer.kind != "MLA" and layer.num_kv_heads % ranks.tp):
        return f"it divides heads evenly, and {ranks.tp} does not divide {layer.num_kv_heads}"
    return None


ENGINES: Mapping[str, Engine] = {
    "vllm": Engine(
        "vLLM (2026)",
        "whole blocks of 16 tokens (64 for MLA with FlashMLA); MLA's latent once, on every rank; "
        "of windows, while decoding, the blocks that the window can touch; where kinds of layers "
        "are mixed, groups of equal numbers of layers, padded",
        "vllm/v1/kv_cache_interface.py, vllm/v1/core/kv_cache_utils.py, vllm/platforms/cuda.py",
        _vllm_bytes,
        _vllm_objection,
        _vllm_layers,
    ),
    "llama.cpp": Engine(
        "llama.cpp (2026)",
        "the whole context from the start, padded to 256 tokens; of windows the window and a batch "
        "of 512, padded to 256, without --swa-full, where it knows of them (it takes those of "
        "Mistral 7B 0.1 for full layers); MLA's latent once (since January 2026; before, "
        "part of it twice); int8 and int4 are q8_0 and q4_0",
        "src/llama-context.cpp, src/llama-kv-cache-iswa.cpp, pull requests 12801 and 19067",
        _llama_bytes,
        _llama_objection,
    ),
    "transformers": Engine(
        "transformers 5.23, DynamicCache",
        "live tokens; of windows as many as the window once a token was decoded; MLA's latent once",
        "src/transformers/cache_utils.py, models/deepseek_v3/modeling_deepseek_v3.py",
        _dynamic_bytes,
        _transformers_objection,
    ),
    "transformers-static": Engine(
        "transformers 5.23, StaticCache",
        "max_cache_len tokens from the start, which is the context here; of windows the smaller "
        "of both; MLA's latent once",
        "src/transformers/cache_utils.py",
        _static_bytes,
        _transformers_objection,
    ),
    "transformers-4": Engine(
        "transformers 4.57, DynamicCache",
        "as transformers 5.23, but of MLA the keys and values of every head, computed from the "
        "latent before they are cached",
        "src/transformers/models/deepseek_v3/modeling_deepseek_v3.py of that version",
        _expanded_bytes,
        _transformers_objection,
    ),
}
