"""The shapes that the header of a GGUF describes: its keys, and the names and sizes of its tensors.

Sizes come from keys and are compared with those of the tensors; biases, norms and sinks come from
the names of tensors. What no key says (which layers have a window, how channels are paired) is the
rule of llama.cpp for the architecture.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from regard.hf.loading.untrusted import refused
from regard.hf.loading.untrusted_gguf import Header, read_header
from regard.plan.building import FULL, SLIDING
from regard.plan.differences import shared_keys
from regard.plan.gguf_blocks import delta_block, latent_block
from regard.plan.gguf_keys import (
    HARMLESS,
    Described,
    blocks_of,
    check_projections,
    per_layer,
    qk_norm_of,
    rope_of_layer,
    windows,
)
from regard.plan.reading import LONGEST, Keys
from regard.plan.shapes import LayerShape, ModelShape
from regard.rope import Pairing

Rotated = Literal["all", "none", "windows", "three of four"]
WINDOW = "attention.sliding_window"
LINEAR = "ssm_conv1d.weight"  # a tensor that only blocks with a gated delta net have
CHUNK = 8192  # tokens; llama.cpp's constant for Llama 4, which no key holds


# architectures whose GGUF transformers reads: its GGUF_CONFIG_MAPPING, by llama.cpp's names
LOADED = frozenset(
    {"llama", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "phi3", "gemma2", "gemma3", "gpt-oss"}
    | {"falcon", "gpt2", "starcoder2"}
)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What llama.cpp knows of an architecture and no key says.

    Args:
        pairing: of the channels of RoPE.
        period: every layer but each `period`-th has the window; 0 for all layers, 1 for none.
        chunked: whether those layers have chunks instead of a window.
        rotated: the layers with RoPE.
        defaults: what llama.cpp takes for keys that are left out.
        local_theta: the base of RoPE in layers with a window, where it is another one.
        needs_window: whether the size of the window must be given.
        scale: the factor of the scores.
        unsupported: why no layer of regard computes a layer, from whether it has RoPE.
        remarks: sentences about such a file.
    """

    pairing: Pairing = "halves"
    period: int = 1
    chunked: bool = False
    needs_window: bool = True
    rotated: Rotated = "all"
    defaults: Mapping[str, Any] = field(default_factory=dict)
    local_theta: float | None = None
    scale: Callable[[Described], float | None] = lambda model: None
    unsupported: Callable[[bool], str] = lambda rotated: ""
    remarks: tuple[str, ...] = ()


def _scale_of_27b(layers: int) -> Callable[[Described], float | None]:
    """Of Gemma's 27B, known by its number of layers, the root of hidden_size / num_heads."""

    def scale(model: Described) -> float | None:
        if model.layers != layers:
            return None
        return float((model.hidden_size // model.heads[0]) ** -0.5)

    return scale


def _given_scale(model: Described) -> float | None:
    return model.keys.optional_number("attention.scale")


def _llama4(rotated: bool) -> str:
    if rotated:
        return "queries and keys may be normalised after RoPE"
    return "queries are scaled by their position"


_PAIRS = Rule(pairing="pairs")
RULES: Mapping[str, Rule] = {
    "llama": _PAIRS,
    "qwen2": Rule(),
    "qwen2moe": Rule(),
    "qwen3": Rule(),
    "qwen3moe": Rule(),
    "qwen3next": Rule(),
    "phi3": Rule(period=0, needs_window=False),
    "gemma": Rule(),
    "gemma2": Rule(
        period=2,
        scale=_scale_of_27b(46),
        defaults={"attention.sliding_window": 4096, "attn_logit_softcapping": 50.0},
    ),
    "gemma3": Rule(period=6, local_theta=1e4, scale=_scale_of_27b(62)),
    "gemma3n": Rule(
        period=5,
        local_theta=1e4,
        scale=lambda model: 1.0,
        unsupported=lambda rotated: "values are normalised",
    ),
    "smollm3": Rule(pairing="pairs", rotated="three of four"),
    "olmo2": Rule(period=4, needs_window=False),
    "starcoder2": Rule(period=0, needs_window=False),
    "gpt-oss": Rule(period=2),
    "gpt2": Rule(rotated="none"),
    "gptneox": Rule(),
    "falcon": Rule(),
    "deepseek2": _PAIRS,
    "command-r": Rule(pairing="pairs"),
    "cohere2": Rule(pairing="pairs", period=4, rotated="windows"),
    "granite": Rule(pairing="pairs", scale=_given_scale),
    "glm4": Rule(pairing="pairs"),
    "llama4": Rule(
        pairing="pairs", period=4, chunked=True, rotated="three of four", unsupported=_llama4
    ),
}


def describe_gguf(file: Path) -> ModelShape:
    """The shapes that a GGUF's header describes.

    Args:
        file: the GGUF.

    Raises:
        CheckpointError: if the architecture or a key about attention is not known, sizes do not fit
            the tensors, or the header is damaged.
    """
    header = read_header(file)
    architecture = str(header.values["general.architecture"])
    rule = RULES.get(architecture)
    if rule is None:
        known = f"those that are known are {', '.join(RULES)}"
        raise refused(file, "'general.architecture' cannot be described", architecture, known)
    model = _read(header, architecture, file, rule.defaults)
    layers = _layers(model, rule)
    model.keys.check_unread(HARMLESS)
    return ModelShape(
        name=file.stem,
        architecture=architecture,
        layers=layers,
        hidden_size=model.hidden_size,
        dtype="float16",
        max_positions=model.keys.optional_size("context_length", LONGEST),
        weight_bytes=file.stat().st_size - header.size,
        remarks=(*rule.remarks, *_remarks(model)),
    )


def _read(header: Header, architecture: str, file: Path, defaults: Mapping[str, Any]) -> Described:
    """The keys of the architecture, and the sizes that all layers share."""
    prefix = f"{architecture}."
    values = {
        name.removeprefix(prefix): value
        for name, value in header.values.items()
        if name.startswith(prefix)
    }
    names = {"num_kv_shared_layers": "attention.shared_kv_layers"}
    keys = Keys(values, file, names=names, defaults=defaults, inside=prefix)
    layers, hidden = keys.layers("block_count"), keys.size("embedding_length")
    heads = per_layer(keys, "attention.head_count", layers, None)
    kv_heads = per_layer(keys, "attention.head_count_kv", layers, heads)
    length = keys.optional_size("attention.key_length")
    if length is None:
        if hidden % heads[0]:
            rule = f"a divisor of {hidden}, the embedding_length"
            raise keys.refused("attention.head_count", rule, heads[0])
        length = hidden // heads[0]
    values_length = keys.optional_size("attention.value_length") or length
    for queries, shared in zip(heads, kv_heads, strict=True):
        if queries % shared:
            rule = f"a divisor of the {queries} query heads"
            raise keys.refused("attention.head_count_kv", rule, shared)
    blocks = blocks_of(header)
    return Described(
        header, keys, architecture, layers, hidden, heads, kv_heads, length, values_length, blocks
    )


def _layers(model: Described, rule: Rule) -> tuple[LayerShape, ...]:
    if model.architecture == "deepseek2":
        return (latent_block(model),) * model.layers
    sliding = windows(model.keys, model.layers, rule.period)
    if rule.period != 1 and not rule.chunked and model.keys.get(WINDOW) is None:
        if rule.needs_window:
            raise model.keys.refused(WINDOW, "a number of tokens", None)
        sliding = [False] * model.layers
    _check_interval(model)
    shared: list[int | None] = [None] * model.layers
    if model.architecture == "gemma3n":
        shared = shared_keys(model.keys, [SLIDING if each else FULL for each in sliding])
    made: dict[Any, LayerShape] = {}
    layers = []
    for index in range(model.layers):
        block = model.block(index)
        facts = (
            model.heads[index],
            model.kv_heads[index],
            sliding[index],
            _is_rotated(rule.rotated, index, sliding[index]),
            shared[index],
            frozenset(block.tensors.items()),
        )
        if facts not in made:
            made[facts] = _layer(model, rule, index, sliding[index], shared[index])
        layers.append(made[facts])
    return tuple(layers)


def _check_interval(model: Described) -> None:
    """Raise unless the blocks that are linear are those that the key says (Qwen3-Next)."""
    interval = model.keys.optional_size("full_attention_interval")
    if interval is None:
        return
    linear = [LINEAR in model.block(index).tensors for index in range(model.layers)]
    expected = [(index + 1) % interval != 0 for index in range(model.layers)]
    if linear != expected:
        rule = "the distance of the blocks that have attention, as their tensors say"
        raise model.keys.refused("full_attention_interval", rule, interval)


def _is_rotated(rule: Rotated, index: int, sliding: bool) -> bool:
    if rule == "windows":
        return sliding
    if rule == "three of four":
        return (index + 1) % 4 != 0
    return rule == "all"


def _layer(
    model: Described, rule: Rule, index: int, sliding: bool, keys_of: int | None
) -> LayerShape:
    """The layer of one block."""
    block = model.block(index)
    if model.architecture == "qwen3next" and LINEAR in block.tensors:
        return delta_block(model)
    check_projections(model, index, gated=model.architecture == "qwen3next")
    rotated = _is_rotated(rule.rotated, index, sliding)
    rope = (
        rope_of_layer(
            model, rule.pairing, sliding=sliding, local=rule.local_theta, dim=model.key_length
        )
        if rotated
        else None
    )
    norm = qk_norm_of(model, block, model.heads[index])
    own = len(block.tensors.get("attn_q_norm.weight", ())) == 2
    causal = model.keys.get("attention.causal")
    bias = block.bias()
    return LayerShape(
        hidden_size=model.hidden_size,
        num_heads=model.heads[index],
        num_kv_heads=model.kv_heads[index],
        head_dim=model.key_length,
        v_head_dim=model.value_length,
        qk_rope_head_dim=0 if rope is None else rope.dim,
        window=model.keys.size(WINDOW) if sliding and not rule.chunked else None,
        chunk=CHUNK if sliding and rule.chunked else None,
        causal=causal is None or model.keys.flag("attention.causal"),
        keys_of=keys_of,
        bias=bias if keys_of is None else tuple(set(bias) & {"q_proj", "o_proj"}),
        qk_norm=norm,
        sinks="attn_sinks.weight" in block.tensors,
        gate="channel" if model.architecture == "qwen3next" else None,
        softcap=model.keys.optional_number("attn_logit_softcapping"),
        scale=rule.scale(model),
        rope="" if rope is None else repr(rope),
        unsupported="each head has a LayerNorm of its own" if own else rule.unsupported(rotated),
    )


def _remarks(model: Described) -> tuple[str, ...]:
    remarks = ["Sizes are those of a float16 cache, which llama.cpp has if nothing else is given."]
    if "rope_freqs.weight" in model.header.tensors:
        remarks.append("RoPE's frequencies are divided by the numbers in rope_freqs.weight, too.")
    if "rope_factors_long.weight" in model.header.tensors:
        remarks.append("RoPE's frequencies are divided by the numbers in rope_factors_*, too.")
    if model.architecture in LOADED:
        remarks.append("regard.hf.load reads it through transformers, if its sizes are usual ones.")
    else:
        remarks.append("transformers does not read a GGUF of this architecture, so regard cannot.")
    return tuple(remarks)
