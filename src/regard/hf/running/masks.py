"""What transformers hands its attention as a mask, said as a rule: None, bool or additive."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.hf.families.memoised import remembered
from regard.masks import EVERYTHING, Causal, Dense, Mask, SlidingWindow, Span
from regard.masks.rules import HIDDEN_BELOW
from regard.ops.bias import split_additive


def visible(
    module: nn.Module,
    given: Any,
    queries: int,
    keys: int,
    *,
    window: int | None = None,
    is_causal: bool | None = None,
) -> tuple[Mask, Float[Tensor, "..."] | None, Span]:
    """The mask, the score bias and the span of a call, read the way transformers means them.

    No mask means causal for several queries, unless the module says `is_causal = False`; one query
    sees every key. It comes only where the queries are the sequence's first, so the span starts at
    0 and may hold fewer keys than a static cache has slots. For `eager` it hides nothing.

    Raises:
        TypeError: if the mask is not a tensor (FlexAttention's block masks).
        ValueError: if it is not `[B, H, L, S]`.
    """
    if given is not None:
        mask, bias = _from_tensor(given)
        return mask, bias, Span(keys - queries, keys, 0, keys)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    eager = _implementation(module) == "eager"
    if eager or not causal or queries == 1:
        mask = EVERYTHING if window is None or eager else SlidingWindow(window)
        return mask, None, Span(keys - queries, keys, 0, keys)
    rule: Mask = Causal() if window is None else Causal() & SlidingWindow(window)
    return rule, None, Span(0, queries, 0, queries)


def _implementation(module: nn.Module) -> str | None:
    config: Any = getattr(module, "config", None)
    name: str | None = getattr(config, "_attn_implementation", None)
    return name


def _from_tensor(given: Any) -> tuple[Mask, Tensor | None]:
    if not isinstance(given, Tensor):
        raise TypeError(
            f"attention_mask is a {type(given).__name__}; regard reads None, bool and additive "
            'tensors: call model.set_attn_implementation("sdpa") first'
        )
    if given.ndim != 4:
        raise ValueError(
            f"attention_mask must be [B, H, L, S] here, got shape {tuple(given.shape)}; "
            'call model.set_attn_implementation("sdpa") and give the model its usual [B, S] mask'
        )
    return remembered("_rule_of_regard", given, lambda: _said(given))


def _said(given: Tensor) -> tuple[Mask, Tensor | None]:
    """A tensor as a rule, and what it adds to the scores it shows."""
    if not given.is_floating_point():
        return Dense(given.bool()), None
    if torch.compiler.is_compiling():  # nothing may be read: the bias stays, though it may be zero
        hidden = given <= given.new_full((), HIDDEN_BELOW)
        return Dense(~hidden), given.masked_fill(hidden, 0.0)
    mask, bias = split_additive(given)
    return mask, bias if given.requires_grad or bias.any() else None
