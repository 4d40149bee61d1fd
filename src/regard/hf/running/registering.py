"""register: regard among transformers' attention functions, for every model that calls those."""

import sys
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.hf.packages import check_version, require
from regard.hf.running.calls import (
    attended,
    described,
    of_one_dtype,
    one_part,
    precision_of,
    refuse,
)
from regard.hf.running.mask_rules import RuleMask, mask_of
from regard.hf.running.masks import in_documents, visible
from regard.layers.attending import Keys

NAME = "regard"
# transformers' paged cache, whose blocks of keys are not supported; sinks of each query (Inkling)
UNREADABLE = ("cache", "sinks")


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
    AttentionMaskInterface.register(NAME, mask)
    return NAME


def mask(*, config: Any = None, **given: Any) -> Tensor | None:
    """What transformers calls a mask function: `mask_of`, with cells to be added to scores for the
    models that `sdpa` does not serve, since their code may read and extend them.

    Raises:
        ValueError: if the model computes attention itself: it would add a bool mask to its scores.
    """
    from transformers.masking_utils import eager_mask

    name = type(config).__module__.replace(".configuration_", ".modeling_")
    made, file = mask_of(config=config, **given), sys.modules.get(name)
    if file is None:
        return made
    if not hasattr(file, "ALL_ATTENTION_FUNCTIONS"):
        raise ValueError(
            f"models of {type(config).__name__} compute their attention themselves and do not "
            "call transformers' AttentionInterface, so regard cannot run it; call "
            'model.set_attn_implementation("eager"), then regard.hf.install(model): it knows some'
        )
    own = [each for each in vars(file).values() if getattr(each, "__module__", "") == name]
    if all(getattr(each, "_supports_sdpa", True) for each in own):
        return made
    added = partial(eager_mask, config=config, **given)
    if not isinstance(made, RuleMask):
        return added()
    dtype = given.get("dtype", torch.float32)
    return RuleMask(made.rule, made.span, made.shape[0], added, made.device, dtype)


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
        "precision": precision_of(module),
    }
    call = described(query, keys, at, bias=position_bias, **options)
    out, weights = attended(call, query, keys, given)
    return out.transpose(1, 2).contiguous(), weights
