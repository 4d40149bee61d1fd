"""Decoding with the query heads of a group as rows of one product, so that keys are read once.

torch's kernel reads a key head once for each of its query heads. FlashAttention calls this folding
`pack_gqa`. A single key head of few rows, which one core would read alone, is split into pieces
whose results are merged, as in Flash-Decoding.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from regard.cache.codes import QuantizedStream
from regard.constants import accumulating_dtype
from regard.heads import fold_heads, unfold_heads
from regard.ops.backends.common import (
    NO_BFLOAT16,
    Readable,
    addend,
    columns_contiguous,
    flash_on_cpu,
    folded_rows,
    fully_masked,
    run_and_check,
    run_stored_and_check,
)
from regard.ops.call import Call, Reads, hides_nothing, is_empty, is_everything, shown
from regard.ops.definition import log_sum_exp, scores_of, softmax
from regard.ops.estimates import UNFUSED, kernel_seconds, mask_seconds, on_device
from regard.ops.mask_tensors import addend_once
from regard.ops.partial import Partial, merge
from regard.rates import SPEED

_MAX_ROWS = 256  # query rows of a key head; the scores of more exceed the L2 cache
_UPCAST_KEYS = 512  # half-precision keys converted to float32 at a time: these fit the L2 cache
_OPERATORS_OF_CODES = 30.0  # operators for one block of codes of keys, and one of values
_PASSES_OF_CODES = 4  # over the elements of a block, to convert and to centre its codes
_PASSES = 6  # over the scores, in the memory of a GPU
_STORED = 10  # passes over the scores where they are stored, and as many for their mask
_FEW_ROWS = 1.5  # times: products of few rows take so much longer per FLOP than large ones
_SPLIT_KEYS = 512  # keys: smaller pieces cost more to merge than they gain
_SPLIT_ROWS = 32  # query rows in a block of the kernel: several blocks go to several cores anyway
_PIECES = (
    2  # that a single key head is split into: each is a head to the kernel, and goes to a core
)

READS: Reads = {QuantizedStream: lambda streams: True}


def objection(call: Call) -> str | None:
    rows = call.group * call.num_queries
    if is_empty(call):
        return "grouped needs at least one query and one visible key"
    if rows > _MAX_ROWS:
        return f"grouped is for few queries: {rows} rows a key head, more than {_MAX_ROWS}"
    if call.dropout:
        return f"grouped has no dropout (got {shown(call.dropout)})"
    if call.needs_grad and call.dtype.itemsize < 4:
        return "grouped has no gradient in half precision"
    return None


_CALLS = 12  # operators around torch's kernel
_MASK = 25  # operators that reading a mask takes, which is made once for all layers of a pass


def estimate(call: Call) -> float:
    """The time to read keys and values once, by torch's kernel or by matrix-vector products that
    store the scores."""
    width, rows = call.head_dim + call.v_head_dim, call.group * call.num_queries
    heads, half = call.batch * call.num_kv_heads, call.dtype.itemsize < 4
    read, flops = heads * call.num_keys * width, 2 * heads * rows * call.num_keys * width
    if call.device.type != "cpu":
        some = 12 if is_everything(call.mask) else 42
        return on_device(call, operators=some, kernel=UNFUSED, passes=_PASSES)
    streamed = read / (4 * SPEED.elements / 3)
    masked = not is_everything(call.mask)
    if call.storage.bits is not None:
        operators = _OPERATORS_OF_CODES + 30 * masked
        elements = _PASSES_OF_CODES * read + 4 * heads * rows * call.num_keys
        return SPEED.call * operators + elements / SPEED.elements + flops / SPEED.products
    if _fused(call):
        operators = _CALLS + _MASK * masked + heads / 16
        seconds = kernel_seconds(call, heads=heads, kv_heads=heads, queries=rows)
        seconds += mask_seconds(call)
        return SPEED.call * operators + seconds
    operators = (38 if half else 15) + 30 * masked + heads / 6
    passes = (_STORED + _STORED * masked) * heads * rows * call.num_keys / SPEED.elements
    products = _FEW_ROWS * flops / SPEED.products
    return SPEED.call * operators + streamed + products + passes + mask_seconds(call)


def run(
    call: Call, q: Float[Tensor, "B H L D"], k: Readable, v: Readable
) -> Float[Tensor, "B H L Dv"]:
    if isinstance(k, QuantizedStream) or isinstance(v, QuantizedStream):
        return _of_codes(call, q, k, v)[0].to(call.dtype)

    def compute(k: Tensor, v: Tensor) -> Tensor:
        if not _fused(call):
            return _read(call, softmax(call, _scores(call, q, k)), v)
        found = _through_flash(call, q, k, v)
        if call.sinks is not None:
            found = merge(_unfolded(call, found), Partial.of_sinks(call.sinks))
            return found.out
        return _heads(call, found.out)

    return run_and_check(call, compute, k, v).to(call.dtype)


def partial(call: Call, q: Float[Tensor, "B H L D"], k: Readable, v: Readable) -> Partial:
    if isinstance(k, QuantizedStream) or isinstance(v, QuantizedStream):
        out, found = _of_codes(call, q, k, v)
        return Partial(out, log_sum_exp(found))

    def compute(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if _fused(call) and call.dtype.itemsize >= 4:  # torch's kernel rounds to the queries' dtype
            return _unfolded(call, _through_flash(call, q, k, v))
        found = _scores(call, q, k)
        return _read(call, softmax(call, found), v), log_sum_exp(found)

    return Partial(*run_and_check(call, compute, k, v))


def _of_codes(call: Call, q: Tensor, k: Readable, v: Readable) -> tuple[Tensor, Tensor]:
    """The output and the scores of codes, in the dtype of sums. One block of codes at a time is
    dequantised."""
    rows = fold_heads(q.to(accumulating_dtype(call.dtype)) * call.scale, call.num_kv_heads)

    def compute(keys: Readable, values: Readable) -> tuple[Tensor, Tensor]:
        assert isinstance(keys, QuantizedStream)
        assert isinstance(values, QuantizedStream)
        found = scores_of(call, unfold_heads(keys.product(rows), call.num_queries))
        weights = softmax(call, found)
        out = values.weighted_sum(fold_heads(weights, call.num_kv_heads))
        return unfold_heads(out[..., : call.v_head_dim], call.num_queries), found

    return run_stored_and_check(call, compute, k, v)


def _through_flash(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Partial:
    """Attention of the folded rows by torch's CPU flash kernel; the result is folded, too."""
    rows = fold_heads(q, call.num_kv_heads)
    v = k if call.joined else v
    rows, k, v = columns_contiguous(rows), columns_contiguous(k), columns_contiguous(v)
    size = call.num_keys // _PIECES
    one = call.batch * call.num_kv_heads == 1 and rows.shape[2] <= _SPLIT_ROWS
    if one and size >= _SPLIT_KEYS and hides_nothing(call):
        return _pieces(call, rows, k, v, size)
    return _flash(call, rows, k, v)


def _unfolded(call: Call, found: Partial) -> Partial:
    lse = unfold_heads(found.lse.unsqueeze(-1), call.num_queries).squeeze(-1)
    return Partial(_heads(call, found.out), lse)


def _heads(call: Call, rows: Tensor) -> Tensor:
    """Unfold rows to heads; of joined keys and values, keep the columns of the values."""
    rows = rows[..., : call.v_head_dim] if call.joined else rows
    return unfold_heads(rows, call.num_queries)


def _fused(call: Call) -> bool:
    """Whether to use torch's CPU flash kernel: where it is right (it has no softcap, and no
    gradient of its log-sum-exp) and faster. In half precision it alone keeps float32 sums, but is
    slow for a single row; in float32 it is faster where there is one key head for all cores."""
    if call.softcap is not None or call.needs_grad or call.device.type != "cpu":
        return False
    if not (call.immediate or torch.compiler.is_compiling()):
        return False
    if not call.joined and call.head_dim != call.v_head_dim:
        return False
    if call.dtype.itemsize < 4:
        raises = NO_BFLOAT16 and call.dtype == torch.bfloat16
        once = call.sinks is None  # its output is rounded, and would be again after the sinks
        return once and call.group * call.num_queries > 1 and not raises
    return call.batch * call.num_kv_heads == 1


def _flash(call: Call, rows: Tensor, k: Tensor, v: Tensor) -> Partial:
    mask, masked = addend_once(call, _addend)
    out, lse = flash_on_cpu(rows, k, v, attn_mask=mask, scale=call.scale)
    if masked is None:
        return Partial(out, lse)
    return Partial(out.masked_fill(masked, 0.0), lse.masked_fill(masked.squeeze(-1), -torch.inf))


def _pieces(call: Call, rows: Tensor, k: Tensor, v: Tensor, size: int) -> Partial:
    """One key head split into equal pieces, as if they were heads, and a short remainder."""
    whole = _PIECES * size
    out, lse = flash_on_cpu(
        rows.expand(-1, _PIECES, -1, -1),
        k[:, 0, :whole].unflatten(1, (_PIECES, size)),
        v[:, 0, :whole].unflatten(1, (_PIECES, size)),
        scale=call.scale,
    )
    found = [Partial(o, s) for o, s in zip(out.split(1, 1), lse.split(1, 1), strict=True)]
    if call.num_keys > whole:
        rest = k[:, :, whole:], v[:, :, whole:]
        found.append(Partial(*flash_on_cpu(rows, *rest, scale=call.scale)))
    return merge(*found)


def _addend(call: Call) -> tuple[Tensor | None, Tensor | None]:
    """Mask and bias as one addend for the folded rows, and which of these are fully masked."""
    bias = call.bias()
    if is_everything(call.mask):
        return (None if bias is None else folded_rows(call, bias, call.num_keys)), None
    keep = call.keep()
    masked = fully_masked(keep)
    total = addend(keep | masked, bias, accumulating_dtype(call.dtype))
    return folded_rows(call, total, call.num_keys), folded_rows(call, masked, 1)


def _scores(call: Call, q: Tensor, k: Tensor) -> Float[Tensor, "B H L S"]:
    """Keys times queries, not queries times keys: BLAS is fastest with the narrow matrix last."""
    dtype = accumulating_dtype(call.dtype)
    if _multiplies_half(k):
        rows, keys = fold_heads(q, call.num_kv_heads).flatten(0, 1), k.flatten(0, 1)
        raw = torch.bmm(rows, keys.mT, out_dtype=dtype) * call.scale
        raw = raw.unflatten(0, (call.batch, call.num_kv_heads))
        return scores_of(call, unfold_heads(raw, call.num_queries))
    rows = fold_heads(q.to(dtype) * call.scale, call.num_kv_heads)
    queries, keys = rows.flatten(0, 1).mT, k.flatten(0, 1)  # [BG, D, M], [BG, S, D]
    if k.dtype == dtype:
        raw = torch.bmm(keys, queries)
    else:
        pieces = keys.split(_UPCAST_KEYS, dim=1)
        raw = torch.cat([torch.bmm(piece.to(dtype), queries) for piece in pieces], dim=1)
    raw = raw.mT.contiguous().unflatten(0, rows.shape[:2])
    return scores_of(call, unfold_heads(raw, call.num_queries))


def _read(call: Call, weights: Tensor, v: Tensor) -> Float[Tensor, "B H L Dv"]:
    rows = fold_heads(weights, call.num_kv_heads)
    values, flat = v.flatten(0, 1), rows.flatten(0, 1)  # [BG, S, Dv], [BG, M, S]
    if v.dtype == flat.dtype:
        out = torch.bmm(flat, values)
    elif _multiplies_half(v):
        out = torch.bmm(flat.to(v.dtype), values, out_dtype=flat.dtype)
    else:
        pieces = zip(flat.split(_UPCAST_KEYS, 2), values.split(_UPCAST_KEYS, 1), strict=True)
        out = torch.stack([torch.bmm(w, piece.to(flat.dtype)) for w, piece in pieces]).sum(0)
    return unfold_heads(out.unflatten(0, rows.shape[:2]), call.num_queries)


def _multiplies_half(x: Tensor) -> bool:
    """Whether products of half precision can be summed and returned in float32: on NVIDIA's GPUs.
    Weights are rounded to half precision for it, as in FlashAttention."""
    return x.is_cuda and x.dtype.itemsize < 4 and torch.version.hip is None
