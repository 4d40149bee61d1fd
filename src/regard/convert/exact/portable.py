"""MLA layers as a stock, dense `deepseek_v3` checkpoint, which transformers loads without regard.

DeepSeek's module does three things that a converted layer does not; weights compensate for each:

- It norms the latent. An added latent channel holds a constant so large that the norm divides every
  token by the same number, by which `kv_a_layernorm` and `kv_b_proj` multiply again. The remaining
  relative error is `|latent|^2 / (2 * constant^2)`.
- It scales scores by `qk_head_dim ** -0.5`. The rest of the layer's scale goes into `q_proj`.
- Its frequencies are powers of one base. `longrope` divides each frequency by its own factor, so a
  base of 1 and reciprocal factors represent any list.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from regard.convert.linear import weight_and_bias
from regard.layers.latent import MultiHeadLatentAttention
from regard.layers.query_scale import UNSCALED
from regard.masks import Causal
from regard.rope import Rotary
from regard.rope.frequencies import plain_frequencies

LIKE_LLAMA = ("llama", "mistral", "qwen2", "qwen3")  # model types whose other layers are the same
CONSTANT = 2.0**24  # of the added channel: latents are below it by more than float32's precision
SLOWEST = 1e-30  # radians a position for pairs that are not rotated, since 0 has no reciprocal
SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "num_heads")
COPIED = (  # settings of the model that its new configuration repeats
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads hidden_act "
    "max_position_embeddings initializer_range rms_norm_eps use_cache pad_token_id bos_token_id "
    "eos_token_id tie_word_embeddings"
)


def to_deepseek_v3(
    model: Any, layers: Sequence[MultiHeadLatentAttention], *, constant: float = CONSTANT
) -> Any:
    """A `DeepseekV3ForCausalLM` that computes the same as `model` with these layers.

    It is saved with `save_pretrained`, or `regard.convert.save`. In bfloat16 it is as near to the
    layers in bfloat16 as those are to float32: the norm adds one rounding of the latent.

    Args:
        model: a Llama, Mistral or Qwen; its parameters outside attention are shared.
        layers: one for each of its layers, with equal sizes and frequencies, without latent norms.
        constant: value of the added latent channel; a power of two. The default exceeds float16's
            range, which needs `2.0**15`.

    Raises:
        ValueError: if `deepseek_v3` cannot represent the model or a layer; the error says why.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from regard import Causal, MultiHeadLatentAttention, Rotary
        >>> from regard.convert import to_deepseek_v3
        >>> config = LlamaConfig(hidden_size=16, num_attention_heads=2, vocab_size=20,
        ...     num_hidden_layers=1, intermediate_size=16)
        >>> mla = MultiHeadLatentAttention(16, 2, kv_lora_rank=6, qk_nope_head_dim=8,
        ...     qk_rope_head_dim=4, v_head_dim=8, latent_norm=False, rope=Rotary(4), mask=Causal())
        >>> type(to_deepseek_v3(LlamaForCausalLM(config), [mla])).__name__
        'DeepseekV3ForCausalLM'
    """
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    check_portable(model, layers)
    config = DeepseekV3Config(**_settings(model, layers[0]))
    state = {
        name: tensor for name, tensor in model.state_dict().items() if ".self_attn." not in name
    }
    for index, layer in enumerate(layers):
        for name, tensor in _attention(layer, constant).items():
            state[f"model.layers.{index}.self_attn.{name}"] = tensor
    made, report = DeepseekV3ForCausalLM.from_pretrained(
        None,
        config=config,
        state_dict=state,
        dtype=next(model.parameters()).dtype,
        output_loading_info=True,
    )
    strange = sorted(map(str, (*report["missing_keys"], *report["unexpected_keys"])))
    if strange:
        raise ValueError(
            f"{type(model).__name__} has other weights around its attention than deepseek_v3: "
            f"{', '.join(strange[:3])}; it cannot be written in that form"
        )
    made.config.name_or_path = model.config.name_or_path
    made.generation_config = model.generation_config
    return made.train(model.training)


def check_portable(model: Any, layers: Sequence[Any]) -> None:
    """Raise a ValueError unless a `deepseek_v3` checkpoint can hold the model with these layers."""
    check_surroundings(model)
    count = model.config.num_hidden_layers
    if len(layers) != count:
        raise ValueError(f"the model has {count} layers, got {len(layers)}")
    for index, layer in enumerate(layers):
        found = list(_objections(layer, layers[0]))
        if found:
            raise ValueError(
                f"a deepseek_v3 checkpoint cannot hold layer {index}: {'; '.join(found)}"
            )


def check_surroundings(model: Any) -> None:
    """Raise a ValueError unless the model outside its attention is built as a `deepseek_v3` is."""
    config = model.config
    if config.model_type not in LIKE_LLAMA or getattr(config, "mlp_bias", False):
        raise ValueError(
            f"{type(model).__name__} is not one of {', '.join(LIKE_LLAMA)} without biases in its "
            "MLP, whose other layers are those of deepseek_v3; without portable, regard.hf.load "
            "reads the converted model"
        )


def lacking(layer: Any) -> list[str]:
    """The features of a layer, converted or not, that DeepSeek's module lacks."""
    found = []
    if getattr(layer._modules.get("q_proj"), "bias", None) is not None:
        found.append("its queries have a bias, and q_proj has none there")
    if layer.mask != Causal():
        found.append(f"its mask is {layer.mask!r}, and only Causal() is there")
    if layer.score_bias is not None:
        found.append("it has score_bias")
    return found


def _objections(layer: Any, first: Any) -> list[str]:
    """The reasons why a layer does not fit a checkpoint whose first layer is `first`."""
    if not isinstance(layer, MultiHeadLatentAttention):
        return [f"it is {type(layer).__name__}, not MultiHeadLatentAttention"]
    found = lacking(layer)
    if layer.q_lora_rank is not None:
        found.append("its queries have a latent; give q_lora_rank=None")
    if not isinstance(layer.kv_a_layernorm, nn.Identity):
        found.append(
            "its latent is normed, and the added channel would replace that norm by a constant"
        )
    for name in ("sinks", "gate_proj"):
        if getattr(layer, name) is not None:
            found.append(f"it has {name}")
    if layer.query_scale is not UNSCALED:
        found.append(f"its queries are scaled by {layer.query_scale!r}")
    for name in SIZES:
        if getattr(layer, name) != getattr(first, name):
            found.append(f"{name} is {getattr(layer, name)}, in layer 0 {getattr(first, name)}")
    rope, other = layer.rope, first.rope
    if not isinstance(rope, Rotary) or (rope.scaling is not None and rope.scaling.uses_length):
        found.append(f"its rope is {rope!r}, which has no fixed frequencies")
    elif not found and (
        rope.pairing != other.pairing or not torch.equal(_frequencies(rope), _frequencies(other))
    ):
        found.append("its frequencies are not those of layer 0, and one list serves all layers")
    elif not found and (rope.attention_factor != 1.0 or float(_frequencies(rope).min()) < 0):
        found.append("its rope scales queries and keys, or has negative frequencies")
    return found


def _frequencies(rope: Rotary) -> Float64[Tensor, " half"]:
    if rope.scaling is None:
        return plain_frequencies(rope.dim, rope.theta)
    return rope.scaling.frequencies(rope.dim, rope.theta)


def _settings(model: Any, layer: MultiHeadLatentAttention) -> dict[str, Any]:
    """The configuration: the model's settings, the layer's sizes and frequencies, no experts."""
    config = model.config
    assert isinstance(layer.rope, Rotary)
    factors = _frequencies(layer.rope).clamp(min=SLOWEST).reciprocal().tolist()
    return {
        **{name: getattr(config, name) for name in COPIED.split()},
        "num_key_value_heads": layer.num_heads,
        "q_lora_rank": None,
        "kv_lora_rank": layer.kv_lora_rank + 1,
        "qk_nope_head_dim": layer.qk_nope_head_dim,
        "qk_rope_head_dim": layer.qk_rope_head_dim,
        "v_head_dim": layer.v_head_dim,
        "attention_bias": True,
        "attention_dropout": layer.dropout,
        "rope_interleave": layer.rope.pairing == "pairs",
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1.0,
            "short_factor": factors,
            "long_factor": factors,
            "factor": 1.0,
            "attention_factor": 1.0,
            "original_max_position_embeddings": config.max_position_embeddings,
        },
        "first_k_dense_replace": config.num_hidden_layers,
        "moe_intermediate_size": config.intermediate_size,
        "num_nextn_predict_layers": 0,
        **dict.fromkeys(("n_routed_experts", "n_shared_experts", "num_experts_per_tok"), 1),
        **dict.fromkeys(("n_group", "topk_group"), 1),
    }


def _attention(layer: MultiHeadLatentAttention, constant: float) -> dict[str, Tensor]:
    """The parameters with which DeepSeek's module computes the same as the layer."""
    q = weight_and_bias(layer, "q_proj")[0]
    down, down_bias = _with_bias(layer, "kv_a_proj_with_mqa")
    up, up_bias = _with_bias(layer, "kv_b_proj")
    out, out_bias = _with_bias(layer, "o_proj")
    rank, dtype = layer.kv_lora_rank, q.dtype
    weight, factor = _norm_of(rank, constant)
    # after the norm, the added channel has this value: by it a bias of kv_b_proj is multiplied
    normed = torch.tensor((rank + 1) ** 0.5).to(dtype).double()
    norm = torch.full((rank + 1,), weight)
    norm[rank] = float(up_bias.any())
    children = {
        "q_proj.weight": q.double() * (layer.scale * layer.qk_head_dim**0.5),
        "kv_a_proj_with_mqa.weight": _inserted(down, rank, 0.0),
        "kv_a_proj_with_mqa.bias": _inserted(down_bias, rank, constant),
        "kv_a_layernorm.weight": norm,
        "kv_b_proj.weight": torch.cat([up.double() * factor, (up_bias / normed)[:, None]], dim=1),
        "o_proj.weight": out,
        "o_proj.bias": out_bias,
    }
    return {name: tensor.to(dtype).contiguous() for name, tensor in children.items()}


def _norm_of(rank: int, constant: float) -> tuple[float, float]:
    """The norm's weight, a power of two and so exact in every dtype, and the remaining factor: the
    norm divides by `constant / sqrt(rank + 1)`."""
    divided = constant * (rank + 1) ** -0.5
    weight = 2.0 ** round(torch.tensor(divided).log2().item())
    return weight, divided / weight


def _with_bias(layer: nn.Module, name: str) -> tuple[Tensor, Tensor]:
    weight, bias = weight_and_bias(layer, name)
    return weight, weight.new_zeros(weight.shape[0]) if bias is None else bias


def _inserted(rows: Float[Tensor, "R *rest"], at: int, value: float) -> Float[Tensor, "R1 *rest"]:
    """Insert one row of a constant value."""
    return torch.cat([rows[:at], torch.full_like(rows[:1], value), rows[at:]])
