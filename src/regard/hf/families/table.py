"""A family of models as a row of data: what its attention is called, and what it computes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from regard.heads import split_heads
from regard.hf.families import rotating
from regard.hf.families.projecting import (
    Projection,
    blocks,
    by_group,
    by_head,
    gpt2,
    separate,
    with_normed_values,
)
from regard.layers.query_scale import UNSCALED, PositionScale, QueryScale
from regard.masks import EVERYTHING, Causal, Mask, SlidingWindow

Reads = Callable[[Any], Any]  # one fact about an attention module


def absent(module: Any) -> None:
    """Of families that do not have it."""


def own(name: str) -> Reads:
    """An attribute of the module."""
    return lambda module: getattr(module, name)


def configured(name: str) -> Reads:
    """An attribute of the module's config, the same for every layer."""
    return lambda module: getattr(module.config, name, None)


def probability(name: str) -> Reads:
    """A dropout probability: an attribute, or a child that holds it."""

    def read(module: Any) -> float:
        value: Any = getattr(module, name)
        return float(getattr(value, "p", value))

    return read


def through(*children: str) -> Callable[[Any, Tensor], Tensor]:
    """The output passes through these children, one after the other."""

    def output(module: Any, merged: Tensor) -> Tensor:
        for child in children:
            merged = getattr(module, child)(merged)
        return merged

    return output


def _starcoder_output(module: Any, merged: Tensor) -> Tensor:
    out: Tensor = module.o_proj(merged)
    return F.dropout(out, p=module.residual_dropout, training=module.training)


def _t5_bias(module: Any, given: Any, queries: int, keys: int, past: Any) -> Tensor | None:
    """Computed by the first layer, passed on to the others."""
    if given.get("position_bias") is not None:
        return given["position_bias"]
    if not module.has_relative_attention_bias:
        return None
    device = module.relative_attention_bias.weight.device
    return module.compute_bias(queries, keys, device=device, past_seen_tokens=past)


def _shared_by_type(module: Any) -> tuple[str, str]:
    """Gemma 3n and 4: the last layers read those of the last layer before them of their type; from
    transformers 5.24 on, the last layer of a type leaves them for assistants in every model."""
    name: str = module.layer_type
    return name * module.is_kv_shared_layer, name * module.store_full_length_kv


def _proportional_runs(module: Any) -> tuple[tuple[int, int], ...] | None:
    """Gemma 4, where one projection makes keys and values that no other layer reads, and where only
    the first channels of each half are rotated."""
    shares = any(_shared_by_type(module)) and module.config.num_kv_shared_layers
    if shares or not module.use_alternative_attention:
        return None
    rope, half = module.config.rope_parameters[module.layer_type], module.head_dim // 2
    rotated = int(rope.get("partial_rotary_factor", 1.0) * half)
    if rope["rope_type"] != "proportional" or rotated == half:
        return None
    return ((0, rotated), (half, half + rotated))


def _gate_of_bailing(module: Any, x: Tensor, out: Tensor) -> Tensor:
    """The sigmoid of a child's output: one factor for each head or each channel."""
    factor = module.g_proj(x).float().sigmoid()
    return out * split_heads(factor, factor.shape[-1] // out.shape[1]).to(out.dtype)


def _ministral_scale(module: Any) -> QueryScale:
    rope = module.config.rope_parameters
    return PositionScale(rope["llama_4_scaling_beta"], rope["original_max_position_embeddings"])


def _llama4_scale(module: Any) -> QueryScale:
    if module.use_rope or not module.attn_temperature_tuning:
        return UNSCALED
    return PositionScale(module.attn_scale, module.floor_scale, offset=1)


def _no_gate(module: Any, x: Tensor, out: Tensor) -> Tensor:
    return out


_THREE = separate()
_O_PROJ = through("o_proj")
_SCALING = own("scaling")
_DROPOUT = probability("attention_dropout")
_ANY_DROPOUT = probability("dropout")
_EVERY_LAYER = configured("sliding_window")
_SOME_LAYERS = own("sliding_window")


@dataclass(frozen=True)
class Family:
    """How one of transformers' attention classes projects, rotates, attends and outputs.

    Args:
        attention: the class's name; its module says which model it belongs to.
        folder: transformers' folder of it, for classes that have the same source; `""` for none.
        project: hidden states to heads.
        output: merged heads to hidden states.
        rotate: what is done to queries and keys with the model's own angles.
        window: reads the sliding window of a module, or None.
        softcap: reads the softcap of a module, or None.
        sinks: reads the sinks of a module, or None.
        scale: reads the factor of the scores.
        dropout: reads the probability of dropping a weight in training.
        bias: what is added to the scores besides the mask, or None.
        query_scale: reads the factor of queries by their positions; `UNSCALED` without one.
        counts_positions: whether that factor counts positions from the cache, whatever the model's
            `position_ids` are (Llama 4).
        sharing: reads the names under which a module takes its keys and values from another layer,
            and under which it leaves them for others; each is "" for none.
        tied: reads the runs of channels that are rotated, of a module whose keys are its values
            but for them; None of others.
        gate: multiplies the outputs of the heads by a gate of the hidden states.
        mask: the argument that holds the mask.
        cache: the argument that holds the cache.
        context: the argument that holds another sequence; `""` if there is none.
        context_mask: the argument that holds the mask of that sequence.
        returns_bias: whether the bias is returned between output and weights, as T5's are.
        latent: whether keys and values are cached as one latent, so that MLA runs.

    Examples:
        >>> from regard.hf import Family
        >>> family = Family("MyAttention")  # the defaults are Llama's
        >>> family.mask, family.cache, family.latent
        ('attention_mask', 'past_key_values', False)
    """

    attention: str
    folder: str = ""
    project: Projection = _THREE
    output: Callable[[Any, Tensor], Tensor] = _O_PROJ
    rotate: rotating.Rotate = rotating.halves
    window: Reads = absent
    softcap: Reads = absent
    sinks: Reads = absent
    scale: Reads = _SCALING
    dropout: Reads = _DROPOUT
    bias: Callable[[Any, Any, int, int, Any], Tensor | None] = (
        lambda module, given, queries, keys, past: None
    )
    query_scale: Callable[[Any], QueryScale] = lambda module: UNSCALED
    counts_positions: bool = False
    sharing: Callable[[Any], tuple[str, str]] = lambda module: ("", "")
    tied: Reads = absent
    gate: Callable[[Any, Tensor, Tensor], Tensor] = _no_gate
    mask: str = "attention_mask"
    cache: str = "past_key_values"
    context: str = ""
    context_mask: str = "attention_mask"
    returns_bias: bool = False
    latent: bool = False

    def beyond_heads(self, module: nn.Module) -> str:
        """In words, what a module does besides projection, rotation and attention, or ""."""
        # a layer of regard in a model has the attribute, which may be None
        shares = any(self.sharing(module)) and getattr(module, "config", None)
        gated = self.gate is not _no_gate and getattr(module, "gate_proj", "") is not None
        for holds, words in (
            (gated, "gates its outputs"),
            (shares and shares.num_kv_shared_layers, "shares its keys with other layers"),
            (self.tied(module) is not None, "has keys that are its values"),
            (self.query_scale(module) is not UNSCALED, "scales queries by their positions"),
        ):
            if holds:
                return words
        return ""

    def window_of(self, module: nn.Module) -> int | None:
        """The sliding window of one attention module, or None."""
        return self.window(module)

    def pattern_of(self, module: nn.Module) -> Mask:
        """The mask of one attention module, without what a call adds to it."""
        mask: Mask = Causal() if getattr(module, "is_causal", True) else EVERYTHING
        window = self.window_of(module)
        return mask if window is None else mask & SlidingWindow(window)

    def sizes(self, module: Any) -> tuple[int, int, int]:
        """Query heads, key heads and the size of a head."""
        heads = _first_of(module, "num_heads", "n_heads", "num_attention_heads")
        if heads is None:
            heads = module.config.num_attention_heads
        kv_heads = heads // getattr(module, "num_key_value_groups", 1)
        widths = "qk_head_dim", "head_dim", "attention_head_size", "key_value_proj_dim", "head_size"
        return heads, getattr(module, "num_kv_heads", kv_heads), _first_of(module, *widths)


def _first_of(module: Any, *names: str) -> Any:
    """The first of these attributes that a module has and that is not None."""
    values = (getattr(module, name, None) for name in names)
    return next((value for value in values if value is not None), None)


def _alike(family: Family, **folders: str) -> Iterator[Family]:
    """The family of classes that compute the same, by their names and folders."""
    for attention, folder in folders.items():
        yield replace(family, attention=attention, folder=folder)


_BERT = Family(
    "BertSelfAttention",
    "bert",
    project=separate(q="query", k="key", v="value", head_dim="attention_head_size"),
    output=through(),
    rotate=rotating.not_rotated,
    dropout=_ANY_DROPOUT,
)
_MEGATRON = replace(  # and its fellows: both kinds in one class, which computes the scale
    _BERT,
    attention="MegatronBertSelfAttention",
    folder="megatron_bert",
    context="encoder_hidden_states",
    scale=lambda module: module.attention_head_size**-0.5,
)
_BERT_CROSS = replace(_BERT, attention="BertCrossAttention", context="encoder_hidden_states")
_BART = Family(
    "BartAttention",
    "bart",
    output=through("out_proj"),
    rotate=rotating.not_rotated,
    dropout=_ANY_DROPOUT,
    context="key_value_states",
)
_DEEPSEEK_V3 = Family(
    "DeepseekV3Attention", "deepseek_v3", rotate=rotating.pairs_or_halves, latent=True
)
_GEMMA4 = Family(
    "Gemma4TextAttention",
    "gemma4",
    project=with_normed_values(),
    window=_SOME_LAYERS,
    sharing=_shared_by_type,
    tied=_proportional_runs,
)
FAMILIES = {
    family.attention: family
    for family in (
        Family("LlamaAttention", "llama"),
        Family("MistralAttention", "mistral", window=_EVERY_LAYER),
        Family("MixtralAttention", window=_EVERY_LAYER),
        Family("Qwen2Attention", "qwen2", window=_SOME_LAYERS),
        Family("Qwen3Attention", "qwen3", project=separate(norm="head"), window=_SOME_LAYERS),
        Family("Phi3Attention", "phi3", project=blocks("qkv_proj"), window=_EVERY_LAYER),
        Family("GemmaAttention"),
        Family(
            "Gemma2Attention", "gemma2", window=_SOME_LAYERS, softcap=own("attn_logit_softcapping")
        ),
        Family("Gemma3Attention", "gemma3", project=separate(norm="head"), window=_SOME_LAYERS),
        _GEMMA4,
        *_alike(_GEMMA4, Gemma4UnifiedTextAttention="gemma4_unified"),
        replace(_GEMMA4, attention="Gemma3nTextAttention", folder="gemma3n", tied=absent),
        Family(
            "SmolLM3Attention", "smollm3", rotate=rotating.halves_where_used, window=_SOME_LAYERS
        ),
        Family("OlmoAttention", "olmo", project=separate(clip="clip_qkv")),
        Family("Olmo2Attention", "olmo2", project=separate(norm="width")),
        Family("Starcoder2Attention", "starcoder2", window=_EVERY_LAYER, output=_starcoder_output),
        Family(
            "GptOssAttention",
            "gpt_oss",
            rotate=rotating.half_angles,
            window=_SOME_LAYERS,
            sinks=own("sinks"),
        ),
        Family(
            "GPT2Attention",
            "gpt2",
            project=gpt2(),
            output=through("c_proj", "resid_dropout"),
            rotate=rotating.not_rotated,
            dropout=probability("attn_dropout"),
            context="encoder_hidden_states",
            context_mask="encoder_attention_mask",
        ),
        Family(
            "GPTNeoXAttention",
            "gpt_neox",
            project=by_head("query_key_value", "head_size"),
            output=through("dense"),
            cache="layer_past",
        ),
        Family(
            "FalconAttention",
            "falcon",
            project=by_group("query_key_value"),
            output=through("dense"),
            rotate=rotating.halves_without_alibi,
            scale=own("inv_norm_factor"),
            dropout=lambda module: module.attention_dropout.p if module.config.alibi else 0.0,
            cache="layer_past",
        ),
        _BERT,
        _BERT_CROSS,
        *_alike(_BERT, RobertaSelfAttention=""),
        *_alike(_BERT_CROSS, RobertaCrossAttention=""),
        Family("ViTAttention", "vit", rotate=rotating.not_rotated),
        _BART,
        *_alike(_BART, WhisperAttention="whisper", XGLMAttention="xglm"),
        *_alike(_BART, TrOCRAttention="trocr", MvpAttention="mvp"),
        _MEGATRON,
        *_alike(_MEGATRON, RemBertSelfAttention="rembert"),
        Family(
            "T5Attention",
            "t5",
            project=separate(q="q", k="k", v="v", head_dim="key_value_proj_dim"),
            output=through("o"),
            rotate=rotating.not_rotated,
            dropout=_ANY_DROPOUT,
            bias=_t5_bias,
            mask="mask",
            context="key_value_states",
            context_mask="mask",
            returns_bias=True,
        ),
        Family("DeepseekV2Attention", "deepseek_v2", rotate=rotating.complex_pairs, latent=True),
        _DEEPSEEK_V3,
        *_alike(_DEEPSEEK_V3, AXK1Attention="axk1"),
        *_alike(replace(_DEEPSEEK_V3, query_scale=_ministral_scale), Mistral4Attention="mistral4"),
        Family("MiniCPM3Attention", "minicpm3", latent=True),
        Family("KimiLinearAttention", "kimi_linear", rotate=rotating.not_rotated, latent=True),
        Family(
            "BailingHybridAttention",
            "bailing_hybrid",
            rotate=rotating.pairs,
            gate=_gate_of_bailing,
            latent=True,
        ),
        Family(
            "Ministral3Attention", "ministral3", window=_EVERY_LAYER, query_scale=_ministral_scale
        ),
        Family(
            "Llama4TextAttention",
            "llama4",
            rotate=rotating.complex_pairs_where_used,
            query_scale=_llama4_scale,
            counts_positions=True,
        ),
    )
}


def is_placed(module: nn.Module) -> bool:
    """Whether this is a layer of regard in a model of transformers: its class holds its family."""
    return isinstance(vars(type(module)).get("family"), Family)
