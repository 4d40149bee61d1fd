"""Every generating model of the installed transformers, tiny and random, and what it reads.

Each is built from its configuration class, its sizes shrunk by rules that know no model.
"""

import copy
import inspect
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.auto import modeling_auto as known
from transformers.models.auto.configuration_auto import model_type_to_module_name

HEAD, HEADS, LAYERS, VOCABULARY, WINDOW = 16, 4, 2, 99, 5
WIDE = HEAD * HEADS
RULES: tuple[tuple[str, int], ...] = (  # of a configuration: what ends like this is as large
    (r"vocab_size|vocab_size_per_layer_input", VOCABULARY),
    (r"(num|n|encoder|decoder|h)_(hidden_|decoder_|encoder_)?layers?|depth", LAYERS),
    (r"(encoder_|decoder_)?attention_heads|n_heads?|num_(attention_)?heads", HEADS),
    (r"(v_|swa_v_|swa_|global_|attention_)?head_dim|kv_channels|d_kv|attention_head_size", HEAD),
    (r"qk_(nope|rope)_head_dim", HEAD // 2),
    (r"qk_head_dim", HEAD),
    (r"(kv|q|o)_lora_rank", WIDE // 2),
    (
        r"d_model|n_embd|embed_dim|embedding_size|word_embed_proj_dim|dim|emb_dim|base_channels",
        WIDE,
    ),
    (r".*hidden_(size|dim)|\w*projection_dim|condition_dim|upsample_groups", WIDE),
    (r"num_filters|n_filters|num_embeddings", HEADS),
    (r".*(intermediate|ffn|ff|inner|expert|mlp)\w*(size|dim|hidden)?|n_inner|d_ff", WIDE),
    (r"max_position_embeddings|n_positions|max_seq_len|n_ctx|max_target_positions", 128),
    (r"(sliding_window|window_size|local_window_size|attention_chunk_size|swa_window)", WINDOW),
    (r"(num|n)_(local_|routed_|hash_)?experts|moe_num_experts|num_experts", 8),
    (r".*experts_per_tok(en)?|moe_top_?k|top_k_experts|moe_k|top_k", 2),
    (r"rotary_dim", HEAD // 2),
    (r"codebook_size", 64),
    (r"n_group|num_expert_group|n_groups", 2),
    (r"topk_group|num_selected_groups", 1),
    # keys that a query of sparse attention selects, fewer than there are, and keys of a pool
    (r"index_topk|index_kpool", 3),
)


OTHERS = (  # mappings with models that generate, besides that of language models
    "SEQ_TO_SEQ_CAUSAL_LM",
    "MULTIMODAL_LM",
    "SPEECH_SEQ_2_SEQ",
    "TEXT_TO_WAVEFORM",
)
COUNTS = {"num_experts_per_tok": 2, "num_key_value_heads": HEADS // 2, "head_dim": HEAD}  # if None
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
OVERRIDES: dict[str, dict[str, Any]] = {  # where the sizes of one model depend on one another
    "bamba": {"attn_layer_indices": [1]},
    "chameleon": {"vocabulary_map": {"<image>": 90}},
    "cohere_compass_text": {
        "rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), ROPE)
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8.0}},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse"]}},
    "dots1": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
    },
    "florence2": {
        "vision_config": {
            "embed_dim": [16, 16, 16, 64],
            "num_heads": [4] * 4,
            "num_groups": [4] * 4,
        }
    },
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": WIDE // 4}},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.0] * 4,
        "intermediate_size": [64] * 4,
    },
    "granite4_vision": {"deepstack_layer_map": [], "downsample_rate": "4/8"},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 98},
    "smollm3": {
        "use_sliding_window": False,
        "layer_types": ["full_attention"] * 2,
        "no_rope_layers": [1, 0],
    },
    "zamba2": {"attention_hidden_size": 2 * WIDE, "attention_head_dim": 2 * HEAD},
}


@cache
def models() -> dict[str, str]:
    """Every model type with a causal decoder, and its class; of a folder without a language model,
    the first type of the first of the other mappings that has one."""
    found: dict[str, str] = dict(known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    for each in OTHERS:
        folders = set(map(folder, found))
        for name, kind in getattr(known, f"MODEL_FOR_{each}_MAPPING_NAMES").items():
            if folder(name) not in folders:
                found[name] = kind
                folders.add(folder(name))
    return found


def folder(name: str) -> str:
    """The folder of transformers that has the model of this type."""
    return str(model_type_to_module_name(name))


def shrunk(config: Any, layers: int | None = None) -> dict[str, Any]:
    """The values of a configuration with which its model is tiny."""
    given = config.to_dict()
    own = next(
        (given[name] for name in ("num_hidden_layers", "n_layer", "num_layers") if name in given), 0
    )
    types = given.get("layer_types") or []
    kinds = list(dict.fromkeys(types))
    small: dict[str, Any] = {}
    if given.get("use_sliding_window") is False:
        small |= {"use_sliding_window": True, "sliding_window": WINDOW}
        kinds = kinds and ["sliding_attention", "full_attention"]
    layers = layers or max(LAYERS, len(kinds))
    heads = given.get("num_attention_heads") or given.get("n_head") or given.get("num_heads") or 0
    if given.get("is_decoder") is False:
        small["is_decoder"] = True
    if "sliding_attention" in types and given.get("sliding_window", 0) is None:
        small["sliding_window"] = WINDOW
    rope = given.get("rope_parameters")
    if isinstance(rope, dict):
        if "mrope_section" not in rope and "mrope_section" in _source(config):
            rope = rope | {"mrope_section": [1, 1, 2]}
        small["rope_parameters"] = _rotating(rope)
    for name, value in given.items():
        if name in ("model_type", "transformers_version"):
            continue
        if name in getattr(config, "sub_configs", {}) and isinstance(value, dict):
            part = getattr(config, name)
            small[name] = {**value, **shrunk(part)}
        elif isinstance(value, list) and own and len(value) == own:
            small[name] = (
                (kinds * layers)[:layers] if name == "layer_types" else list(_spread(value, layers))
            )
        elif name.endswith(("token_id", "token_index")) and isinstance(value, int):
            small[name] = (
                min(value, 2) if name.startswith(("pad", "bos", "eos")) else 90 + len(small) % 9
            )
        elif name in (
            "num_key_value_heads",
            "n_head_kv",
            "num_kv_heads",
            "swa_num_key_value_heads",
            "num_global_key_value_heads",
        ):
            small[name] = value if value in (None, 1) else HEADS if value == heads else HEADS // 2
        elif isinstance(value, dict) and value and all(str(each).isdigit() for each in value):
            small[name] = {key: each for key, each in value.items() if int(key) < layers}
        elif name == "mrope_section":
            small[name] = _sections(value, HEAD // 2)
        elif name.endswith("feature_layer") and isinstance(value, list):
            small[name] = [-1 - at for at in range(len(value))][:layers]
        elif name in COUNTS and value is None:
            small[name] = COUNTS[name]
        elif isinstance(value, int) and not isinstance(value, bool) and value > 1:
            sizes = [size for rule, size in RULES if re.fullmatch(rule, name)]
            small |= dict.fromkeys([name][: len(sizes)], sizes[-1] if sizes else 0)
    if "qk_rope_head_dim" in small and given.get("head_dim") == given["qk_rope_head_dim"]:
        small["head_dim"] = small["qk_rope_head_dim"]  # a size that is computed
    for name in ("num_hidden_layers", "n_layer", "num_layers", "n_layers"):
        if name in small:
            small[name] = layers
    return {name: value for name, value in small.items() if value != given.get(name)}


def _source(config: Any) -> str:
    """The text of the file with the models of a configuration."""
    own = Path(inspect.getfile(type(config)))
    file = own.with_name(own.name.replace("configuration_", "modeling_"))
    return file.read_text() if file.exists() else ""


def _rotating(rope: dict[str, Any]) -> dict[str, Any]:
    """Parameters of rotation, of one kind of layer or of several, for heads of size `HEAD`."""
    small = {
        name: _rotating(each) if isinstance(each, dict) else each for name, each in rope.items()
    }
    if small.get("rope_theta", 0) is None:
        small["rope_theta"] = 10_000.0
    if "mrope_section" in small:
        width = HEAD * (rope.get("partial_rotary_factor") or 1)
        small["mrope_section"] = _sections(small["mrope_section"] or [1, 1, 2], int(width) // 2)
    return small


def _sections(before: list[int], total: int) -> list[int]:
    """So many parts of so many angles."""
    each = total // len(before)
    return [each] * (len(before) - 1) + [total - each * (len(before) - 1)]


def _spread(values: list[Any], count: int) -> Iterator[Any]:
    """So many of these values: each kind once before any comes twice."""
    firsts = [i for i, each in enumerate(values) if each not in values[:i]]
    chosen = sorted((firsts + [i for i in range(len(values)) if i not in firsts])[:count])
    return (values[i] for i in chosen)


def _merged(values: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """The values of two configurations, the second's where both have one, part by part."""
    parts = {
        name: _merged(values[name], each)
        for name, each in others.items()
        if name.endswith("_config") and name in values
    }
    return values | others | parts


def configured(name: str) -> Any:
    """A tiny configuration of this type."""
    whole = type(AutoConfig.for_model(name))
    config = whole(**_merged(shrunk(whole()), OVERRIDES.get(name, {})))
    wanted = getattr(transformers, models()[name]).config_class
    if isinstance(config, wanted):
        return config
    parts = [getattr(config, each) for each in config.sub_configs]
    return next((each for each in parts if isinstance(each, wanted)), config)


def built(name: str, config: Any, implementation: str) -> nn.Module:
    """The same random model at every call, with this implementation of attention."""
    kind = getattr(transformers, models()[name])
    config = copy.deepcopy(config)
    torch.manual_seed(7)
    with torch.device("meta"):
        size = sum(each.numel() for each in kind._from_config(copy.deepcopy(config)).parameters())
    if size > 60_000_000:
        raise ValueError(f"its shrunk model still has {size:,} parameters")
    torch.manual_seed(7)
    model = kind._from_config(config, attn_implementation=implementation).eval().float()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for each in model.parameters():
            noise = torch.randn(each.shape, generator=generator)
            if each.ndim == 2 and each.is_floating_point():
                each.copy_(noise * 1.2 / each.shape[-1] ** 0.5)
            elif each.ndim == 1:
                each.add_(0.2 * noise)
    generation = model.generation_config
    generation.eos_token_id, generation.pad_token_id = None, 0
    generation.bos_token_id = generation.decoder_start_token_id = 1
    return model


def tokens() -> tuple[Tensor, Tensor, Tensor]:
    """Two rows of tokens, and masks that pad one of them at the left and at the right."""
    ids = torch.randint(5, 85, (2, 11), generator=torch.Generator().manual_seed(3))
    left, right = torch.ones_like(ids), torch.ones_like(ids)
    left[0, :4], right[0, -3:] = 0, 0
    return ids, left, right


def read(model: Any, mask: Tensor | None) -> dict[str, Any]:
    """What `forward` reads: tokens and their mask, and the same ones once more in a decoder; or
    features in the place of the tokens of an encoder."""
    ids, *_ = tokens()
    if not model.config.is_encoder_decoder:
        return prompt(model, mask)
    takes = inspect.signature(model.forward).parameters
    given = _masked(prompt(model, mask), "decoder_attention_mask", mask)
    if "decoder_attention_mask" not in takes:
        given.pop("decoder_attention_mask", None)
    return given | {"decoder_input_ids": ids}


def prompt(model: Any, mask: Tensor | None) -> dict[str, Any]:
    """What `generate` continues: tokens and their mask, or the features that an encoder reads."""
    main = model.main_input_name
    if main == "input_ids" or not model.config.is_encoder_decoder:
        given = _masked({"input_ids": tokens()[0]}, "attention_mask", mask)
        return given if main == "input_ids" else given | {main: features(model, main)}
    return {main: features(model, main)}


def _masked(given: dict[str, Any], name: str, mask: Tensor | None) -> dict[str, Any]:
    return given if mask is None else given | {name: mask}


def features(model: Any, name: str) -> Tensor:
    """Random features that the encoder of a model reads."""
    return _taken(getattr(model, "vision_model", None) or model.get_encoder(), name)[0]


def towers(model: nn.Module) -> Iterator[Tensor]:
    """The outputs of the parts of a model that read images or sound and need nothing besides."""
    inside: list[nn.Module] = []
    for part in model.modules():
        name = getattr(part, "main_input_name", "")
        if part is model or name not in SHAPES or any(each is part for each in inside):
            continue
        inside += part.modules()
        try:
            out = _taken(part, name)[1]
        except (AttributeError, TypeError, ValueError):
            continue
        yield from (each for each in out.values() if isinstance(each, Tensor))


def _taken(encoder: Any, name: str) -> tuple[Tensor, Any]:
    """Random features of a shape that an encoder takes, and its output.

    Raises:
        ValueError: if it takes none of the usual shapes.
    """
    sizes = {"image_size": 32, "patch_embed_hidden_size": 64} | dict(_numbers(encoder.config))
    dtype = next(encoder.parameters()).dtype
    for shape in SHAPES[name](sizes):
        made = torch.randn(shape, generator=torch.Generator().manual_seed(5))
        if name == "flattened_patches":  # each begins with its row and column
            made[..., :2] = torch.arange(shape[1]).view(-1, 1) % 4
        try:
            with torch.no_grad():
                return made.to(dtype), encoder(made.to(dtype))
        except (RuntimeError, IndexError):
            continue
    raise ValueError(f"no {name} of a usual shape are taken")


def _pictures(sizes: dict[str, int]) -> list[tuple[int, ...]]:
    """Two pictures; none where they would have a million pixels."""
    side = sizes["image_size"]
    return [(2, 3, side, side)] if side < 600 else []


def _sounds(sizes: dict[str, int]) -> list[tuple[int, ...]]:
    """Spectrograms, with frequencies before time or after."""
    mels = [sizes.get(each, 80) for each in ("num_mel_bins", "input_feat_per_channel")]
    times = (256, 2 * sizes.get("max_source_positions", 128))
    shapes = [((2, mel, time), (2, 64, mel)) for mel in mels for time in times]
    return [each for pair in shapes for each in pair]


SHAPES: dict[str, Callable[[dict[str, int]], list[tuple[int, ...]]]] = {  # of features, by name
    "pixel_values": _pictures,
    "input_values": lambda sizes: [(2, 1600), (2, 1, 1600)],
    "flattened_patches": lambda sizes: [(2, 12, sizes["patch_embed_hidden_size"] + 2)],
    "input_features": _sounds,
}


def _numbers(config: Any) -> Iterator[tuple[str, int]]:
    """All whole numbers of a configuration and of its parts, by name."""
    for name, value in vars(config).items():
        if hasattr(value, "sub_configs"):
            yield from _numbers(value)
        elif type(value) is int:
            yield name, value
