"""register: regard among transformers' attention functions, for every model that calls those."""

from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from regard.cache import Part
from regard.hf.loading.loading import require
from regard.hf.running.attending import of_one_dtype, refuse, total, weights_wanted
from regard.hf.running.masks import visible
from regard.hf.running.versions import check_version
from regard.ops.attend import prepare
from regard.ops.explain import weights_of

NAME = "regard"
UNREADABLE = ("cache",)  # transformers' paged cache: keys come in blocks that we do not read


def register() -> str:
    """Make `model.set_attn_implementation("regard")` work; gives that name. Twice is once.

    The mask function is registered too: without it, transformers drops masks without a word.
    Windows, softcaps, sinks and position biases are honoured; what is not raises.

    Raises:
        ImportError: if transformers is missing.

    >>> import regard.hf
    >>> regard.hf.register()
    'regard'
    """
    require("transformers")
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    check_version()
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
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
    """What transformers calls an attention function. `sliding_window` counts only where no mask
    came, because a mask has it in it.

    Raises:
        ValueError: if an argument would change the result and is not honoured.
    """
    refuse(given, also=UNREADABLE)
    query, key, value = of_one_dtype(query, key, value)
    mask, added, span = visible(
        module, attention_mask, query.shape[2], key.shape[2],
        window=sliding_window, is_causal=is_causal,
    )  # fmt: skip
    if position_bias is not None:  # a static cache has more slots than the span has keys
        position_bias = position_bias[..., : span.num_keys]
    call = prepare(
        query,
        key,
        value,
        mask=mask,
        span=span,
        scale=scaling,
        score_bias=total(added, position_bias),
        softcap=softcap,
        sinks=s_aux,
        dropout=dropout,
    )
    parts = (Part(0, key.shape[2], (key, value)),)
    out = call.run(query, parts).transpose(1, 2).contiguous()
    return out, weights_of(call, query, parts) if weights_wanted(given) else None
