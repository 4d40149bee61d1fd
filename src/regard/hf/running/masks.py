"""The mask that transformers passes to attention, as a rule: it is None, bool or additive."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.hf.families.rotating import memoised
from regard.masks import EVERYTHING, Causal, Dense, Mask, SlidingWindow, Span
from regard.masks.rules import HIDDEN_BELOW
from regard.ops.bias import split_additive


class Visible(NamedTuple):
    """Which keys the queries of a call may attend to, and what its mask adds to the scores."""

    mask: Mask
    bias: Float[Tensor, "..."] | None
    span: Span


def visible(
    module: nn.Module,
    given: Any,
    queries: int,
    keys: int,
    *,
    window: int | None = None,
    is_causal: bool | None = None,
) -> Visible:
    """The mask, the score bias and the span of a call, as transformers defines them.

    No mask means causal for several queries, unless the module has `is_causal = False`; one query
    may attend to every key. It is left out only where the queries are the sequence's first, so the
    span starts at 0 and may hold fewer keys than a static cache has slots. For `eager` it hides
    nothing.

    Raises:
        TypeError: if the mask is not a tensor (FlexAttention's block masks).
        ValueError: if it is not `[B, H, L, S]`.
    """
    if given is not None:
        return Visible(*_rule_and_bias(given), Span(keys - queries, keys, 0, keys))
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    eager = getattr(getattr(module, "config", None), "_attn_implementation", None) == "eager"
    if eager or not causal or queries == 1:
        mask: Mask = EVERYTHING if window is None or eager else SlidingWindow(window)
        return Visible(mask, None, Span(keys - queries, keys, 0, keys))
    mask = Causal() if window is None else Causal() & SlidingWindow(window)
    return Visible(mask, None, Span(0, queries, 0, queries))


def _rule_and_bias(given: Any) -> tuple[Mask, Tensor | None]:
    if not isinstance(given, Tensor):
        raise TypeError(
            f"attention_mask is a {type(given).__name__}; regard reads None, bool and additive "
            'tensors: call model.set_attn_implementation("sdpa") first'
        )
    if given.ndim != 4:
        raise ValueError(
            f"attention_mask must be [B, H, L, S] here, got shape {tuple(given.shape)}; "
            'call model.set_attn_implementation("sdpa") and pass the model its usual [B, S] mask'
        )
    return memoised("_rule_of_regard", given, lambda: _split(given))


def _split(given: Tensor) -> tuple[Mask, Tensor | None]:
    """A tensor as a rule, and what it adds to the visible scores."""
    if not given.is_floating_point():
        return Dense(given.bool()), None
    if torch.compiler.is_compiling():  # values are unknown: the bias stays, though it may be zero
        hidden = given <= given.new_full((), HIDDEN_BELOW)
        return Dense(~hidden), given.masked_fill(hidden, 0.0)
    mask, bias = split_additive(given)
    return mask, bias if given.requires_grad or bias.any() else None
