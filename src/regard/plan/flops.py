"""Floating-point operations of a layer of attention on one rank, a multiply-add counted as 2.

As `torch.utils.flop_counter` counts them: matrix products alone. Softmax, norms and rotation are
not counted, nor is the Hadamard rotation of low-bit caches. Each function takes a layer, and the
workload whose tokens, rows and ranks count; `form` is that of layers with latents: in `"expanded"`
form keys and values of every head are computed, as prefills are run, in `"absorbed"` form queries
attend to the latents, as steps are run; keys of a joint latent are computed in both. A ValueError
is raised for linear attention, another form, and a mask that `visible_pairs` refuses.
"""

from typing import Literal

from regard.plan.shapes import LayerShape, Workload, ceil_div
from regard.plan.weights import matrices

Form = Literal["expanded", "absorbed"]
MULTIPLY_ADD = 2  # operations


def prefill_flops(layer: LayerShape, work: Workload, form: Form = "expanded") -> int:
    """FLOPs of the prefill of `context` tokens, every query with every key.

    Kernels that compute hidden scores do this work, and the counter counts it, whatever the mask;
    `visible_prefill_flops` leaves hidden keys out.
    """
    return _flops(layer, work, form, work.tokens, work.context, work.tokens * work.context)


def decode_flops(layer: LayerShape, work: Workload, form: Form = "absorbed") -> int:
    """FLOPs of one more token after `context` tokens; of a window, with the keys in it."""
    keys = layer.within_window(ceil_div(work.context + 1, work.cp))
    return _flops(layer, work, form, 1, keys, keys)


def visible_prefill_flops(layer: LayerShape, work: Workload, form: Form = "expanded") -> int:
    """FLOPs of a prefill that computes the scores of visible keys only."""
    pairs = ceil_div(visible_pairs(layer, work.context), work.cp)
    return _flops(layer, work, form, work.tokens, work.context, pairs)


def visible_decode_flops(layer: LayerShape, work: Workload, form: Form = "absorbed") -> int:
    """FLOPs of one more token that reads visible keys only."""
    keys = visible_keys(layer, work)
    return _flops(layer, work, form, 1, keys, keys)


def visible_pairs(layer: LayerShape, context: int) -> int:
    """The number of queries and keys of a prefill that the mask leaves visible, of one head. Raises
    a ValueError for a window and chunks together, or one of them in a layer that is not causal."""
    limited = layer.window is not None or layer.chunk is not None
    if layer.window is not None and layer.chunk is not None:
        raise ValueError("visible pairs are known of a window or of chunks, not of both in a layer")
    if not layer.causal and limited:
        raise ValueError("visible pairs of a window or of chunks are known of causal layers only")
    if not layer.causal:
        return context * context
    if layer.chunk is not None:
        chunks, rest = divmod(context, layer.chunk)
        return chunks * _triangle(layer.chunk) + _triangle(rest)
    first = layer.within_window(context)  # queries that see all earlier keys
    return _triangle(first) + (context - first) * (layer.window or 0)


def visible_keys(layer: LayerShape, work: Workload) -> int:
    """The number of keys, its own included, that the token after `context` tokens may attend to."""
    keys = work.context + 1
    if layer.chunk is not None:
        keys = work.context % layer.chunk + 1
    return layer.within_window(ceil_div(keys, work.cp))


def attention_flops(layer: LayerShape, work: Workload, pairs: int, form: Form = "expanded") -> int:
    """FLOPs of the scores and the weighted sums of values, without projections.

    `pairs` of a query and a key are those of one head and one row. Absorbed queries and sums are as
    wide as the latents.
    """
    keys, values = layer.head_dim, layer.v_head_dim
    if _is_absorbed(layer, form):
        values = layer.latent
        keys = keys if layer.kind == "LatentKV" else layer.latent + layer.qk_rope_head_dim
    return MULTIPLY_ADD * work.batch * work.query_heads(layer) * pairs * (keys + values)


def _flops(
    layer: LayerShape, work: Workload, form: Form, tokens: int, keys: int, pairs: int
) -> int:
    """FLOPs of the tokens' projections, of expanding the keys' latents, and of the scores and
    weighted sums of the pairs."""
    products = matrices(layer, work)
    up = products.pop("kv_b_proj", 0) * (tokens if _is_absorbed(layer, form) else keys)
    if layer.kind == "LatentKV" and _is_absorbed(layer, form):
        heads = keys * work.key_heads(layer) + tokens * work.query_heads(layer)
        up = heads * layer.head_dim * layer.latent
    projections = MULTIPLY_ADD * work.batch * (tokens * sum(products.values()) + up)
    return projections + attention_flops(layer, work, pairs, form)


def _is_absorbed(layer: LayerShape, form: str) -> bool:
    if form not in ("expanded", "absorbed"):
        raise ValueError(f"form is 'expanded' or 'absorbed', got {form!r}")
    joint = layer.kind == "LatentKV" and "kv_b_proj" not in layer.bias
    return form == "absorbed" and (joint or layer.kind == "MLA")


def _triangle(tokens: int) -> int:
    """1 + 2 + ... + tokens."""
    return tokens * (tokens + 1) // 2
