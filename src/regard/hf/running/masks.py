"""The mask that transformers passes to attention, as a rule: it is None, bool or additive."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.hf.families.rotating import memoised
from regard.hf.running.mask_rules import RuleMask
from regard.masks import EVERYTHING, Causal, Dense, Documents, Mask, SlidingWindow, Span
from regard.masks.dense import HIDDEN_BELOW
from regard.ops.bias import split_additive
from regard.tracing import is_concrete

# where a config names the implementation whose masks the model makes: of one that `install` has set
# aside, and of all others
IMPLEMENTATIONS = ("_masks_before_regard", "_attn_implementation")


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
    nothing, as for modules of transformers without a config, which compute attention themselves.

    Raises:
        TypeError: if the mask is not a tensor (FlexAttention's block masks).
        ValueError: if it is not `[B, H, L, S]`.
    """
    last = Span(keys - queries, keys, 0, keys)
    if isinstance(given, RuleMask):
        if given.cells is None and given.shape[-2:] == (queries, keys):
            return Visible(given.rule, None, given.span)
        if given.cells is None and given.rule is EVERYTHING:  # sdpa gets None, for any number
            return Visible(EVERYTHING, None, last)
        given = given.made()
    if given is not None:
        _check(given)
        return _simplest(module, given, queries, keys, window)
    if queries == 1 and window is None:  # whatever the module is: reading its config takes 10 us
        return Visible(EVERYTHING, None, last)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    config = getattr(module, "config", None)
    eager = "eager" in (getattr(config, each, None) for each in IMPLEMENTATIONS)
    eager = eager or (config is None and type(module).__module__.startswith("transformers."))
    if eager or not causal or queries == 1:
        mask: Mask = EVERYTHING if window is None or eager else SlidingWindow(window)
        return Visible(mask, None, last)
    mask = Causal() if window is None else Causal() & SlidingWindow(window)
    return Visible(mask, None, Span(0, queries, 0, queries))


def in_documents(module: nn.Module, at: Visible, given: Mapping[str, Any]) -> Visible:
    """The same within each of the documents that `cu_seq_lens_q` and `cu_seq_lens_k` pack in one
    row, as collators without padding pass them on. Raises a ValueError if queries and keys have
    other documents, or those of another number of tokens."""
    lengths, of_keys = given.get("cu_seq_lens_q"), given.get("cu_seq_lens_k")
    if lengths is None and of_keys is None:
        return at
    if lengths is None or of_keys is None or not lengths.equal(of_keys):
        raise ValueError(
            "cu_seq_lens_q and cu_seq_lens_k pack the same documents here, got "
            f"{_listed(lengths)} and {_listed(of_keys)}; give both, without a cache"
        )
    documents = memoised(
        "_documents_of_regard", module, lambda: Documents.from_cu_seqlens(lengths), lengths
    )
    tokens = documents.ids.shape[1]
    if not tokens == at.span.num_queries == at.span.num_keys:
        raise ValueError(
            f"cu_seq_lens_q ends at the number of tokens of the only row, got {tokens} for "
            f"{at.span.num_queries} queries and {at.span.num_keys} keys"
        )
    return at._replace(mask=at.mask & documents)


def among(at: Visible, indices: Int[Tensor, "B L K"] | None, keys: int) -> Visible:
    """The same, of the keys that each query selects, `[B, L, K]` slots below `keys`
    (DeepSeek-V3.2). Raises a ValueError if `indices` have another shape."""
    if indices is None:
        return at
    if indices.ndim != 3 or indices.shape[1] != at.span.num_queries:
        raise ValueError(
            f"indices= are keys of each query, [B, L, K] with L = {at.span.num_queries}, got shape "
            f"{tuple(indices.shape)}; paged keys are not supported by regard.hf"
        )
    none = indices.new_zeros(*indices.shape[:2], keys, dtype=torch.bool)
    keep = none.scatter(-1, indices.long(), True)[..., : at.span.num_keys]
    return at._replace(mask=at.mask & Dense(keep.unsqueeze(1)))


def _listed(lengths: Tensor | None) -> Any:
    return None if lengths is None else lengths.tolist()


def _check(given: Any) -> None:
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


def _simplest(
    module: nn.Module, given: Tensor, queries: int, keys: int, window: int | None
) -> Visible:
    """A tensor as a rule if it is the usual mask of a decoder, else as a mask that holds it.

    A static cache has slots for later tokens, which its masks hide: under a rule they are not read.
    """
    mask, bias, rules = memoised("_rules_of_regard", module, lambda: (*_split(given), {}), given)
    if not may_read(given):
        return Visible(mask, bias, Span(keys - queries, keys, 0, keys))
    size = queries, keys, window
    if size not in rules:
        rules[size] = _rule(mask, *size)
    rule, span = rules[size]
    return Visible(rule, bias, span)


def _rule(mask: Dense, queries: int, keys: int, window: int | None) -> tuple[Mask, Span]:
    """A rule that is visible where `mask` is, and the slots it speaks of."""
    rule = Causal() if window is None else Causal() & SlidingWindow(window)
    shown = mask.keep[0, 0, 0].nonzero() if 0 not in mask.keep.shape[:3] else mask.keep[:0]
    # keys before the first query's own, if that is its last visible one
    past = int(shown[-1]) if len(shown) else None
    if mask.keep.shape[-2:] == (queries, keys) and past is not None and past + queries <= keys:
        span = Span(past, past + queries, 0, keys)
        if bool((mask.keep == rule.dense(span)).all()):
            return rule, span
    return mask, Span(keys - queries, keys, 0, keys)


def may_read(given: Tensor) -> bool:
    """Whether the elements of a tensor can be read now without waiting for a device."""
    return given.device.type == "cpu" and is_concrete(given)


def _split(given: Tensor) -> tuple[Dense, Tensor | None]:
    """A tensor as a mask, and what it adds to the visible scores."""
    if not given.is_floating_point():
        return Dense(given.bool()), None
    if torch.compiler.is_compiling():  # values are unknown: the bias stays, though it may be zero
        hidden = given <= given.new_full((), HIDDEN_BELOW)
        return Dense(~hidden), given.masked_fill(hidden, 0.0)
    mask, bias = split_additive(given)
    return mask, bias if given.requires_grad or bias.any() else None
