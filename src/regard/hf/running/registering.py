"""register: regard among transformers' attention functions, for every model that calls those."""

import sys
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.hf.packages import check_version, require
from regard.hf.running.calls import CachedKeys, attended, of_one_dtype, precision_of, refuse
from regard.hf.running.mask_rules import mask_of
from regard.hf.running.masks import among, in_documents, visible
from regard.hf.running.probing import undisturbed
from regard.layers.attending import Keys

NAME = "regard"
UNREADABLE = ("cache",)  # transformers' paged cache, whose blocks of keys are not supported
METHOD = "_attn"
DIVISORS = ("scale_attn", "norm_factor")  # attributes by which modules divide their scores


def register() -> str:
    """Make `model.set_attn_implementation("regard")` work; returns that name. Twice is once.

    The mask function is registered too: without it, transformers leaves out masks, silently.
    Windows, chunks, padding, documents and blocks of images come as rules, not as `L x S` cells.
    Softcaps, sinks, position biases, selected keys and `cu_seq_lens_q` are supported; other
    arguments raise.

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
    """The mask function that `register` gives to transformers: `mask_of`, with cells to be added to
    scores for the models that `sdpa` does not serve, since their code may read and extend them.
    Raises a ValueError if the model computes attention itself: it would add a bool mask to its
    scores."""
    from transformers.masking_utils import eager_mask

    name = type(config).__module__.replace(".configuration_", ".modeling_")
    file = sys.modules.get(name)
    if file is None:
        return mask_of(config=config, **given)
    if not hasattr(file, "ALL_ATTENTION_FUNCTIONS"):
        raise ValueError(
            f"models of {type(config).__name__} compute their attention themselves and do not "
            "call transformers' AttentionInterface, so regard cannot run it; call "
            'model.set_attn_implementation("eager"), then regard.hf.install(model): it knows some'
        )
    own = [each for each in vars(file).values() if getattr(each, "__module__", "") == name]
    if all(getattr(each, "_supports_sdpa", True) for each in own):
        return mask_of(config=config, **given)
    given |= {"allow_is_causal_skip": False}
    return mask_of(eager_mask, config=config, **given)


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
    sinks: Float[Tensor, "B H L 1"] | None = None,
    indices: Int[Tensor, "B L K"] | None = None,
    **given: Any,
) -> tuple[Float[Tensor, "B L H Dv"], Float[Tensor, "B H L S"] | None]:
    """What transformers calls an attention function. `sliding_window` applies only without a mask,
    because a mask contains it; `s_aux` are sinks of heads, `sinks` those of each query besides
    (Inkling), `indices` the keys that a query selects.

    Raises:
        ValueError: if an argument would change the result and is not supported.
    """
    refuse(given, also=UNREADABLE)
    query, key, value = of_one_dtype(query, key, value)
    at = visible(
        module, attention_mask, query.shape[2], key.shape[2],
        window=sliding_window, is_causal=is_causal,
    )  # fmt: skip
    at = among(in_documents(module, at, given), indices, key.shape[2])
    if position_bias is not None:  # a static cache has more slots than the span has keys
        position_bias = position_bias[..., : at.span.num_keys]
    keys, precision = Keys.of(CachedKeys.of(key, value).parts), precision_of(module)
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap}
    options["sinks"] = s_aux if sinks is None else sinks
    options |= {"dropout": dropout, "precision": precision, "bias": position_bias}
    out, weights, _ = attended(query, keys, at, given, **options)
    return out.transpose(1, 2).contiguous(), weights


class NamingRegard:
    """A config of transformers as one module sees it: it names regard as the attention function.
    All else is that of the config itself, whenever it changes."""

    def __init__(self, config: Any) -> None:
        vars(self).update(_config=config, _attn_implementation=register())

    @property
    def _masks_before_regard(self) -> Any:
        return self._config._attn_implementation

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_config"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._config, name, value)

    def __reduce__(self) -> Any:
        return NamingRegard, (self._config,)


# ---- modules that hand their heads to a method `_attn(query, key, value, mask)` ----


def can_attend(module: Any) -> bool:
    """Whether a module has a method `_attn` and `attend` computes the same.

    GPT-J, CodeGen and the Japanese GPT-NeoX have one: their own forward projects, rotates and
    caches. GPT-Neo's method differs: it hides keys itself. Tried on random heads, one of two rows
    padded.
    """
    own, patch = getattr(type(module), METHOD, None), vars(module).get(METHOD)
    if own is None or not any(hasattr(module, each) for each in DIVISORS):
        return False
    if patch is not None and getattr(patch, "func", None) is not attend:
        return False
    made = torch.Generator("cpu").manual_seed(0)
    plain: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}  # whatever the defaults are
    q, k, v = (torch.randn(2, 2, tokens, 4, generator=made, **plain) for tokens in (3, 5, 5))
    mask = torch.zeros(2, 1, 3, 5, **plain)
    mask[0, ..., :2] = torch.finfo(mask.dtype).min
    heads = [each.to(next(module.parameters()).device) for each in (q, k, v, mask)]
    with undisturbed(module):
        try:
            return torch.allclose(own(module, *heads)[0], attend(module, *heads)[0], atol=1e-4)
        except (RuntimeError, TypeError, ValueError):
            return False


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None
) -> tuple[Tensor, Tensor | None]:
    """A replacement of the module's own method `_attn`, computed by `regard.attend`.

    Returns the heads' outputs, and attention weights if the caller wants them.
    """
    query, key = query.to(value.dtype), key.to(value.dtype)
    divisor = next(getattr(module, each) for each in DIVISORS if hasattr(module, each))
    rate = next(each.p for each in module.children() if isinstance(each, nn.Dropout))
    rate, scaling = rate if module.training else 0.0, 1 / float(divisor)
    out, weights = attention(module, query, key, value, attention_mask, rate, scaling)
    return out.transpose(1, 2), weights
