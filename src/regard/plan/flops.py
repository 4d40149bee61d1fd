"""Floating-point operations of a layer of attention on one rank, a multiply-add counted as 2.

As `torch.utils.flop_counter` counts them: matrix products alone. Softmax, norms and rotation are
not counted, nor is the Hadamard rotation of low-bit caches.
"""

from typing import Literal

from regard.plan.formula import Formula, ceil_div, minimum, number, size
from regard.plan.shapes import LayerShape
from regard.plan.sizes import (
    BATCH,
    CHUNK,
    CONTEXT,
    HEAD,
    LATENT,
    QUERY_HEADS,
    ROTARY,
    TOKENS,
    VALUE,
    WINDOW,
    within_window,
)
from regard.plan.weights import matrices, total

Form = Literal["expanded", "absorbed"]
MULTIPLY_ADD = 2  # operations


def prefill_flops(layer: LayerShape, form: Form = "expanded") -> Formula:
    """FLOPs of the prefill of `context` tokens, every query with every key.

    Kernels that compute hidden scores do this work, and the counter counts it, whatever the mask;
    `visible_prefill_flops` leaves hidden keys out.

    Args:
        layer: of any kind but linear attention.
        form: of MLA, whether the keys of every head are computed (`"expanded"`, as prefills are
            run) or queries attend to the latents (`"absorbed"`). Other layers have one form.

    Raises:
        ValueError: for linear attention, or another form.

    Examples:
        >>> from regard.plan.cost import prefill_flops, sizes
        >>> from regard.plan.shapes import STORAGES, LayerShape
        >>> mha = LayerShape(hidden_size=64, num_heads=8, num_kv_heads=8, head_dim=8, v_head_dim=8)
        >>> count = prefill_flops(mha).evaluate(**sizes(mha, STORAGES["plain"], context=10))
        >>> count == 2 * 10 * 4 * 64 * 64 + 2 * 10 * 10 * 8 * (8 + 8)  # projections and scores
        True
    """
    return _flops(layer, form, TOKENS, CONTEXT, TOKENS * CONTEXT)


def decode_flops(layer: LayerShape, form: Form = "absorbed") -> Formula:
    """FLOPs of one more token after `context` tokens; of a window, with the keys in it.

    Args:
        layer: of any kind but linear attention.
        form: as for `prefill_flops`; steps of MLA are usually absorbed.

    Raises:
        ValueError: for linear attention, or another form.
    """
    keys = within_window(layer, ceil_div(CONTEXT + 1, size("cp")))
    return _flops(layer, form, number(1), keys, keys)


def visible_prefill_flops(layer: LayerShape, form: Form = "expanded") -> Formula:
    """FLOPs of a prefill that computes the scores of visible keys only.

    Args:
        layer: of any kind but linear attention.
        form: as for `prefill_flops`.

    Raises:
        ValueError: for linear attention, another form, or a mask that `visible_pairs` refuses.
    """
    return _flops(layer, form, TOKENS, CONTEXT, ceil_div(visible_pairs(layer), size("cp")))


def visible_decode_flops(layer: LayerShape, form: Form = "absorbed") -> Formula:
    """FLOPs of one more token that reads visible keys only.

    Args:
        layer: of any kind but linear attention.
        form: as for `decode_flops`.

    Raises:
        ValueError: for linear attention, or another form.
    """
    keys = visible_keys(layer)
    return _flops(layer, form, number(1), keys, keys)


def visible_pairs(layer: LayerShape) -> Formula:
    """The number of queries and keys of a prefill that the mask leaves visible, of one head.

    Args:
        layer: causal, with a window or chunks or neither; or not causal, with neither.

    Raises:
        ValueError: for a window and chunks together, or one of them in a layer that is not causal.

    Examples:
        >>> from regard.plan.flops import visible_pairs
        >>> from regard.plan.shapes import LayerShape
        >>> windowed = LayerShape(
        ...     hidden_size=8, num_heads=1, num_kv_heads=1, head_dim=8, v_head_dim=8, window=2)
        >>> visible_pairs(windowed).evaluate(context=4, window=2)  # 1 + 2 + 2 + 2
        7
    """
    limited = layer.window is not None or layer.chunk is not None
    if layer.window is not None and layer.chunk is not None:
        raise ValueError("visible pairs are known of a window or of chunks, not of both in a layer")
    if not layer.causal and limited:
        raise ValueError("visible pairs of a window or of chunks are known of causal layers only")
    if not layer.causal:
        return CONTEXT * CONTEXT
    if layer.chunk is not None:
        whole = _whole_chunks(CONTEXT)
        return whole * _triangle(CHUNK) + _triangle(CONTEXT - whole * CHUNK)
    if layer.window is None:
        return _triangle(CONTEXT)
    first = minimum(CONTEXT, WINDOW)  # queries that see all earlier keys
    return _triangle(first) + (CONTEXT - first) * WINDOW


def visible_keys(layer: LayerShape) -> Formula:
    """The number of keys, its own included, that the token after `context` tokens may attend to.

    Args:
        layer: of any kind.
    """
    if layer.chunk is None:
        return within_window(layer, ceil_div(CONTEXT + 1, size("cp")))
    in_chunk = CONTEXT + 1 - _whole_chunks(CONTEXT) * CHUNK
    return within_window(layer, ceil_div(in_chunk, size("cp")))


def attention_flops(layer: LayerShape, pairs: Formula, form: Form = "expanded") -> Formula:
    """FLOPs of the scores and the weighted sums of values, without projections.

    Args:
        layer: of any kind but linear attention.
        pairs: of a query and a key, of one head and one row.
        form: of MLA; absorbed queries and sums are as wide as the latents.

    Raises:
        ValueError: for another form.
    """
    widths = LATENT + ROTARY + LATENT if _is_absorbed(layer, form) else HEAD + VALUE
    return MULTIPLY_ADD * BATCH * QUERY_HEADS * pairs * widths


def _flops(
    layer: LayerShape, form: Form, tokens: Formula, keys: Formula, pairs: Formula
) -> Formula:
    """Of projections of the tokens, of latents of the keys, and of scores and sums of the pairs."""
    absorbed = _is_absorbed(layer, form)
    products = matrices(layer)
    up = products.pop("kv_b_proj", None)
    terms = [MULTIPLY_ADD * BATCH * tokens * total(list(products.values()))]
    if up is not None:
        terms.append(MULTIPLY_ADD * BATCH * (tokens if absorbed else keys) * up)
    return total([*terms, attention_flops(layer, pairs, form)])


def _is_absorbed(layer: LayerShape, form: str) -> bool:
    if form not in ("expanded", "absorbed"):
        raise ValueError(f"form is 'expanded' or 'absorbed', got {form!r}")
    return layer.kind == "MLA" and form == "absorbed"


def _triangle(tokens: Formula) -> Formula:
    """1 + 2 + ... + tokens: one of two neighbours is even, so nothing is rounded."""
    return ceil_div(tokens * (tokens + 1), 2)


def _whole_chunks(tokens: Formula) -> Formula:
    """The number of chunks that are full, which is rounded down."""
    return ceil_div(tokens + 1, CHUNK) - 1
