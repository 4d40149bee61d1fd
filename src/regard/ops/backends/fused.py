"""Decoding with a compiled kernel that reads each key and value once, near the memory's bandwidth.

Scores, softmax and weighted sums of all query heads that share a key head are one loop. Codes of a
quantised cache are read as they are stored. LLVM compiles the loop through numba on the machine, in
about a second for each new head size, and numba caches it on disk. Needs the extra `regard[cpu]`.
"""

import functools
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from regard.cache.codes import QuantizedStream
from regard.heads import fold_heads, unfold_heads
from regard.ops.backends.common import (
    Stored,
    addend,
    columns_contiguous,
    folded_rows,
    four_dims,
    run_stored_and_check,
)
from regard.ops.call import Call, is_empty, is_everything, shown
from regard.ops.flash_cost import mask_seconds
from regard.ops.partial import Partial, merge
from regard.ops.rates import SPEED

_MAX_ROWS = 256  # query rows of a key head; more are a prefill, which matrix products do faster
_LANES = 8  # elements: head dims are multiples of this on every machine, if of no longer vector
_DEQUANTISING = 6  # floating-point operations in the time that one code takes to dequantise
_SOFTMAX = 2.3  # times as long as in torch's kernel: a score is written and read in three passes
DTYPES = (torch.float32, torch.bfloat16)


def objection(call: Call) -> str | None:
    rows = call.group * call.num_queries
    if is_empty(call):
        return "fused needs at least one query and one visible key"
    if rows > _MAX_ROWS:
        return f"fused is for few queries: {rows} rows of a key head are more than {_MAX_ROWS}"
    if call.device.type != "cpu" or call.dtype not in DTYPES:
        return f"fused is for float32 and bfloat16 on a CPU, got {call.dtype} on {call.device}"
    if call.needs_grad:
        return "fused has no gradient; call it under torch.no_grad() or torch.inference_mode()"
    if call.dropout or call.softcap is not None:
        given = f"(got {shown(call.dropout)} and {shown(call.softcap)})"
        return f"fused has neither dropout nor softcap {given}"
    multiple, of_values = 2 * _LANES if call.bits == 4 else _LANES, _value_multiple(call)
    if call.head_dim % multiple or call.v_head_dim % of_values:
        return (
            f"fused takes head dims in multiples of {multiple} (values of {of_values}), got "
            f"{call.head_dim} and {call.v_head_dim}"
        )
    if torch.compiler.is_compiling():
        return "fused cannot be part of a compiled graph"
    if not call.immediate:
        return (
            "fused takes plain tensors: no torch.func transform, dispatch mode, tensor subclass or "
            "forward-mode derivative"
        )
    return None if is_installed() else "fused needs numba: python -m pip install 'regard[cpu]'"


def estimate(call: Call) -> float:
    """The time to read keys and values once, or that of products and softmax where it is longer."""
    width = call.head_dim + call.v_head_dim
    heads = call.batch * call.num_kv_heads
    elements = heads * call.num_keys * (call.head_dim if call.joined else width)
    streamed = elements * (call.bits or 8 * call.dtype.itemsize) / 8
    rows = call.batch * call.num_heads * call.num_queries
    computed = rows * call.num_keys * (2 * width / SPEED.fused + _SOFTMAX / SPEED.scores)
    computed += _DEQUANTISING * elements / SPEED.fused if call.bits else 0
    masked = (0 if is_everything(call.mask) else 31) + (0 if call.score_bias is None else 5)
    operators = SPEED.call * ((3 if call.step else 17) + masked + heads / 10)
    return operators + mask_seconds(call) + max(streamed / SPEED.stream, computed)


def run(call: Call, q: Float[Tensor, "B H L D"], k: Stored, v: Stored) -> Float[Tensor, "B H L Dv"]:
    if call.sinks is not None:
        return merge(partial(call, q, k, v), Partial.of_sinks(call.sinks)).out.to(call.dtype)
    out, _ = _attend(call, q, k, v)
    return unfold_heads(out, call.num_queries).to(call.dtype)


def partial(call: Call, q: Float[Tensor, "B H L D"], k: Stored, v: Stored) -> Partial:
    out, lse = _attend(call, q, k, v)
    heads = unfold_heads(lse.unsqueeze(-1), call.num_queries).squeeze(-1)
    return Partial(unfold_heads(out, call.num_queries), heads)


def quantized(
    call: Call, q: Float[Tensor, "B H L D"], streams: Sequence[QuantizedStream | Tensor]
) -> Float[Tensor, "B H L Dv"]:
    """`run` on codes; of one stream, the first columns of the keys are the values."""
    return run(call, q, streams[0], streams[-1])


def quantized_partial(
    call: Call, q: Float[Tensor, "B H L D"], streams: Sequence[QuantizedStream | Tensor]
) -> Partial:
    """`partial` on codes."""
    return partial(call, q, streams[0], streams[-1])


def step(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Float[Tensor, "B H 1 Dv"]:
    """`regard.ops.kernels.stepping.step`: rotate and append one token, then attend."""
    from regard.ops.kernels import stepping

    return stepping.step(q, k, v, **options)


def _attend(call: Call, q: Tensor, k: Stored, v: Stored) -> tuple[Tensor, Tensor]:
    """The outputs and log-sum-exps of the folded rows, both float32.

    Non-finite content of hidden keys makes the output non-finite (0 * nan is nan). It is then
    computed once more, with the keys and values that are hidden from all queries set to zero.
    """
    from regard.ops.kernels.launching import decode

    rows, bias = _columns_together(fold_heads(q, call.num_kv_heads)), _addend(call)

    def compute(k: Stored, v: Stored) -> tuple[Tensor, Tensor]:
        k = _columns_together(k)
        if call.joined:
            return decode(rows, k, scale=call.scale, bias=bias, width=call.v_head_dim)
        return decode(rows, k, _columns_together(v), scale=call.scale, bias=bias)

    return run_stored_and_check(call, compute, k, v)


def _addend(call: Call) -> Tensor | None:
    """Mask and bias as one float32 tensor for the folded rows; one row where all rows agree."""
    total = call.bias()
    if not is_everything(call.mask):
        total = addend(call.keep(), total, torch.float32)
    if total is None:
        return None
    total = four_dims(total.float())
    if total.shape[1] == total.shape[2] == 1:
        return _columns_together(total.expand(*total.shape[:3], call.num_keys))
    return _columns_together(folded_rows(call, total, call.num_keys))


def _columns_together(x: Any) -> Any:
    """The same values with contiguous columns and without a lazy minus sign; codes are so."""
    return columns_contiguous(x).resolve_neg() if isinstance(x, Tensor) else x


def _value_multiple(call: Call) -> int:
    """What `v_head_dim` must be a multiple of: two vectors where bfloat16 keys hold the values, or
    a byte holds two codes."""
    half = call.dtype.itemsize < 4 and call.v_head_dim < call.head_dim
    return 2 * _LANES if half or call.bits == 4 else _LANES


@functools.cache
def is_installed() -> bool:
    return find_spec("numba") is not None
