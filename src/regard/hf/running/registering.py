"""register: regard among transformers' attention functions, for every model that calls those."""

from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from regard.hf.packages import check_version, require
from regard.hf.running.calls import attended, described, of_one_dtype, one_part, refuse
from regard.hf.running.mask_rules import mask_of
from regard.hf.running.masks import in_documents, visible
from regard.layers.attending import Keys

NAME = "regard"
UNREADABLE = ("cache",)  # transformers' paged cache, whose blocks of keys are not supported


def register() -> str:
    """Make `model.set_attn_implementation("regard")` work; returns that name. Twice is once.

    The mask function is registered too: without it, transformers leaves out masks, silently.
    Windows, chunks, padding, documents and blocks of images come as rules, not as `L x S` cells.
    Softcaps, sinks, position biases and `cu_seq_lens_q` are supported; other arguments raise.

    Raises:
        ImportError: if transformers is missing.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from regard.hf import register
        >>> config = LlamaConfig(hidden_size=16, num_attention_heads=2, vocab_size=20,
        ...     num_hidden_layers=1, intermediate_size=16)
        >>> model = LlamaForCausalLM(config)
        >>> model.set_attn_implementation(register())
        >>> model.config._attn_implementation
        'regard'
    """
    require("transformers")
    from transformers import AttentionInterface, AttentionMaskInterface

    check_version()
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask_of)
    return NAME


def attention(
    module: nn.Module,
    query: Float[Tensor, "B H L D"],
    key: Float[Tensor, "B G S D"],
    value: Float[Tensor, "B G S Dv"],
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Float[Tensor, " H"] | None = None,
    position_bias: Float[Tensor, "..."] | None = None,
    **given: Any,
) -> tuple[Float[Tensor, "B L H Dv"], Float[Tensor, "B H L S"] | None]:
    """What transformers calls an attention function. `sliding_window` applies only without a mask,
    because a mask contains it.

    Raises:
        ValueError: if an argument would change the result and is not supported.
    """
    refuse(given, also=UNREADABLE)
    query, key, value = of_one_dtype(query, key, value)
    at = visible(
        module, attention_mask, query.shape[2], key.shape[2],
        window=sliding_window, is_causal=is_causal,
    )  # fmt: skip
    at = in_documents(module, at, given)
    if position_bias is not None:  # a static cache has more slots than the span has keys
        position_bias = position_bias[..., : at.span.num_keys]
    keys = Keys.of(one_part(key, value))
    options: dict[str, Any] = {
        "scale": scaling,
        "softcap": softcap,
        "sinks": s_aux,
        "dropout": dropout,
    }
    call = described(query, keys, at, bias=position_bias, **options)
    out, weights = attended(call, query, keys, given)
    return out.transpose(1, 2).contiguous(), weights
