"""torch's FlexAttention: the mask is a function that its kernel evaluates, block by block.

For masks and scores on a GPU for which `sdpa` stores a dense mask or all scores. On a CPU it is the
uncompiled form, which stores all scores, too, and never the cheapest. It has not been run on a GPU.
"""

import functools
import itertools
from collections.abc import Callable
from importlib.util import find_spec
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.constants import accumulating_dtype
from regard.masks import Span
from regard.ops.backends.common import four_dims, without_hidden
from regard.ops.bias import Alibi, RelativeBias
from regard.ops.block_masks import MaskMod, Slots, by_cell, lookup, planned
from regard.ops.call import Call, is_empty, is_everything, shown
from regard.ops.estimates import GENERATED, on_device, visible_share
from regard.ops.partial import Partial, merge
from regard.rates import SPEED

KERNELS = 64  # programs for the lengths and strides of one kind of calls; torch's default is 8
KINDS = 256  # kinds of calls that a process keeps programs of
_STARTED = 100  # operators whose start takes as long as the checks before a compiled program
_PASSES = 60  # over the scores, of the uncompiled form
_SMALLEST, _LARGEST = 16, 256  # head dims of the kernels that torch generates for GPUs
_DEEPEST = 32  # functions and lists inside of one another; a user's may hold itself
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
Kind = tuple[Any, ...]
_numbers = itertools.count()  # of kinds


def objection(call: Call) -> str | None:
    kind = call.device.type
    if is_empty(call):
        return "flex needs at least one query and one visible key"
    if call.dropout:
        return f"flex has no dropout (got {shown(call.dropout)})"
    if torch.compiler.is_compiling():
        return "flex compiles its own kernel for the mask of one call, outside of graphs"
    if not call.immediate:
        return (
            "flex takes plain tensors: no torch.func transform, dispatch mode, tensor subclass or "
            "forward-mode derivative"
        )
    if call.needs_grad and _is_learned(call.score_bias):
        return "flex has no gradient of score_bias"
    if kind == "cpu":
        return "flex has no gradient on a CPU" if call.needs_grad else None
    return _kernel_objection(call) if kind == "cuda" else f"flex is for CUDA and CPU, got {kind}"


def _kernel_objection(call: Call) -> str | None:
    """Why there is no kernel for a GPU."""
    dims = call.head_dim, call.v_head_dim
    if call.dtype.itemsize > 4:
        return f"flex has no kernel for {call.dtype} on a GPU"
    if not _SMALLEST <= min(dims) <= max(dims) <= _LARGEST:
        return f"flex takes head dims of {_SMALLEST} to {_LARGEST} on a GPU, got {dims}"
    return None if has_triton() else "flex needs triton, which compiles its kernels for a GPU"


@functools.cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def _is_learned(bias: object) -> bool:
    learned = list(bias.parameters()) if isinstance(bias, nn.Module) else [bias]
    return any(isinstance(each, Tensor) and each.requires_grad for each in learned)


def estimate(call: Call) -> float:
    """The time of the scores. On a GPU those of visible keys, by a kernel that takes long to start;
    on a CPU all of them, in more passes than `eager` needs."""
    if call.device.type != "cpu":
        share = 1.0 if is_everything(call.mask) else visible_share(call)
        return on_device(call, operators=_STARTED, kernel=GENERATED, share=share)
    cells = call.batch * call.num_heads * call.num_queries * call.num_keys
    width = call.head_dim + call.v_head_dim
    products, keys = 2 * cells * width, call.batch * call.num_kv_heads * call.num_keys * width
    elements = _PASSES * cells + 2 * keys
    return _STARTED * SPEED.call + products / SPEED.products + elements / SPEED.elements


def run(
    call: Call,
    q: Float[Tensor, "B H L D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S Dv"],
) -> Float[Tensor, "B H L Dv"]:
    if call.sinks is not None:
        if call.device.type == "cpu":  # so that the output is rounded once
            q, k, v = (x.to(accumulating_dtype(x.dtype)) for x in (q, k, v))
        return merge(partial(call, q, k, v), Partial.of_sinks(call.sinks)).out.to(call.dtype)
    out: Tensor = _attend(call, q, k, v)
    return out


def partial(
    call: Call,
    q: Float[Tensor, "B H L D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S Dv"],
) -> Partial:
    from torch.nn.attention.flex_attention import AuxRequest

    out, found = _attend(call, q, k, v, return_aux=AuxRequest(lse=True))
    return Partial(out.to(found.lse.dtype), found.lse)


def _attend(call: Call, q: Tensor, k: Tensor, v: Tensor, **wanted: Any) -> Any:
    """FlexAttention's result. Its rows that are fully masked are 0, with a log-sum-exp of -inf."""
    blocks = None
    if not is_everything(call.mask):
        blocks, visible = planned(call)
        if visible is not None:
            k, v = without_hidden(call, k, v, visible)
    # Each a new tensor: for one given twice Dynamo compiles again, and may fail to compare it with
    # others. Detached without gradients: Dynamo takes a view of a leaf for one that needs them.
    q, k, v = (x.view_as(x) if call.needs_grad else x.detach() for x in (q, k, v))
    added = score_mod(call)
    kind = _kind_of(call, added, None if blocks is None else blocks.mask_mod, tuple(wanted))
    with torch._dynamo.config.patch(recompile_limit=KERNELS):
        return _compiled("eager" if call.device.type == "cpu" else "inductor", kind)(
            q,
            k,
            v,
            score_mod=added,
            block_mask=blocks,
            scale=call.scale,
            enable_gqa=call.group > 1,
            **wanted,
        )


@functools.lru_cache(KINDS)
def _compiled(backend: str, kind: Kind) -> Callable[..., Any]:
    """FlexAttention compiled for a GPU, or traced only ("eager"), for one kind of calls.
    `fullgraph`: a call that cannot be compiled is an error, not a slow form that stores all scores.

    Each kind has a function with code of its own, for which alone Dynamo counts how often it has
    compiled, and compares what it has compiled with the present call.
    """
    from torch.nn.attention.flex_attention import flex_attention

    def attended(*tensors: Tensor, **options: Any) -> Any:
        return flex_attention(*tensors, **options)  # type: ignore[call-overload]

    attended.__code__ = attended.__code__.replace(co_name=f"flex_{next(_numbers)}")
    return torch.compile(attended, backend=backend, fullgraph=True)


def _kind_of(call: Call, *rest: Any) -> Kind:
    """A key of a compiled program: the shape of a head, and the functions of the mask and the
    scores, but no lengths."""
    heads = call.num_heads, call.num_kv_heads, call.head_dim, call.v_head_dim
    one = call.num_queries == 1
    return (heads, one, call.dtype, call.device, call.needs_grad, *map(_structure, rest))


def _structure(x: Any, depth: int = _DEEPEST) -> Kind:
    """The code of a function and what its closure holds, without elements and sizes of tensors."""
    if isinstance(x, FunctionType) and depth:
        cells = (cell.cell_contents for cell in x.__closure__ or ())
        return x.__code__, *(_structure(each, depth - 1) for each in cells)
    if isinstance(x, MethodType):
        return (type(x.__self__),)
    if isinstance(x, list | tuple) and depth:
        return tuple(_structure(each, depth - 1) for each in x)
    if isinstance(x, Tensor):
        return x.dtype, x.dim()
    return (x,) if isinstance(x, str | BuiltinFunctionType) or x is None else (type(x),)


def score_mod(call: Call) -> ScoreMod | None:
    """Soft cap and bias as a function of a score and its indices; None without both."""
    softcap, bias, dtype = call.softcap, _bias(call), accumulating_dtype(call.dtype)
    # A score is traced in the dtype of the queries, but computed in float32: `to` rounds nothing.
    if bias is None:
        if softcap is None:
            return None
        return lambda score, *index: softcap * torch.tanh(score.to(dtype) / softcap)
    added = bias
    if softcap is None:
        return lambda score, *index: score.to(dtype) + added(*index)
    return lambda score, *index: softcap * torch.tanh(score.to(dtype) / softcap) + added(*index)


def _bias(call: Call) -> MaskMod | None:
    """The bias of a score as a function of its indices."""
    if isinstance(call.score_bias, Alibi | RelativeBias):
        return _by_distance(call, call.score_bias)
    bias = call.bias()
    return None if bias is None else by_cell(four_dims(bias))


def _by_distance(call: Call, rule: Alibi | RelativeBias) -> MaskMod:
    """A rule that depends on the slot of a key less that of its query: the values of all such
    differences for each head, from those of the last query."""
    span, last = call.span, call.span.last_query
    keys = Span(last, last + 1, span.kv_start, span.kv_stop + last - span.first_query)
    dtype = accumulating_dtype(call.dtype)
    table = lookup(rule.bias(keys, device=call.device, dtype=dtype)[0, :, 0])  # [H, L + S - 1]
    before = lookup(last - Slots(call).query)
    return lambda b, h, q_idx, kv_idx: table(h, kv_idx + before(b, q_idx))
