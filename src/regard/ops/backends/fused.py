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
from regard.cache.paging.reading import PagedStream, by_slab
from regard.cache.parts import AnyStream, Part, to_tensor
from regard.heads import fold_heads, unfold_heads
from regard.ops.backends.common import (
    Readable,
    addend,
    columns_contiguous,
    folded_rows,
    four_dims,
    is_finite,
    run_stored_and_check,
)
from regard.ops.call import Call, Reads, hides_nothing, is_empty, is_everything, shown
from regard.ops.estimates import mask_seconds
from regard.ops.mask_tensors import addend_once
from regard.ops.observed import BACKEND_RUNS, report_backend
from regard.ops.partial import Partial, merge
from regard.ops.parts import GATHERED
from regard.ops.rebuilt_keys import RebuiltKeys
from regard.rates import SPEED

_MAX_ROWS = 256  # query rows of a key head; more are a prefill, which matrix products do faster
LEAST_PAGE = 16  # tokens: the kernel's shortest block
_PIECE = GATHERED  # tokens copied out of pages at a time
_LANES = 8  # elements: head dims are multiples of this on every machine, if of no longer vector
_DEQUANTISING = 3  # floating-point operations in the time that one code takes to dequantise
_CALLS = 17  # operators around the kernel
_MASK = 8  # operators that reading a mask takes, made once for all layers of a pass
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
    multiple, of_values = 2 * _LANES if _packs(call) else _LANES, _value_multiple(call)
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
    streamed = elements * (call.storage.bits or 8 * call.dtype.itemsize) / 8
    rows = call.batch * call.num_heads * call.num_queries
    computed = rows * call.num_keys * (2 * width / SPEED.fused + _SOFTMAX / SPEED.scores)
    computed += _DEQUANTISING * elements / SPEED.fused if call.storage.bits else 0
    masked = (0 if is_everything(call.mask) else _MASK) + (0 if call.score_bias is None else 5)
    operators = SPEED.call * (_CALLS + masked + heads / 10)
    return operators + mask_seconds(call) + max(streamed / SPEED.stream, computed)


def run(
    call: Call, q: Float[Tensor, "B H L D"], k: AnyStream, v: AnyStream
) -> Float[Tensor, "B H L Dv"]:
    """Run the kernel. If codes or pages are one stream, its first columns are the values."""
    return _output(call, *_attend(call, q, k, v))


def partial(call: Call, q: Float[Tensor, "B H L D"], k: AnyStream, v: AnyStream) -> Partial:
    return _partial(call, *_attend(call, q, k, v))


def run_parts(
    call: Call, q: Float[Tensor, "B H L D"], parts: Sequence[Part]
) -> Float[Tensor, "B H L Dv"] | None:
    """Run the kernel on codes, on pages, or on one part after another, and merge the results. None
    if keys are hidden, rows of the batch share a part, or a part is not read as it is stored."""
    from regard.ops.kernels.merging import decode_all

    if not hides_nothing(call) or call.sinks is not None:
        return None
    for part in parts:
        if not _reads(part.stored) or (call.batch > 1 and part.is_shared):
            return None
    if BACKEND_RUNS:
        report_backend(run)
    every = [source_of(*streams) for streams in by_slab(part.stored for part in parts)]
    out = decode_all(_rows(call, q), every, scale=call.scale, width=call.v_head_dim)
    return unfold_heads(out, call.num_queries).to(call.dtype)


def _reads(stored: Sequence[AnyStream]) -> bool:
    """Whether the kernel reads streams where they lie: pages, or tensors and codes."""
    if isinstance(stored[0], PagedStream):
        return reads_pages(stored)
    return all(isinstance(each, Tensor | QuantizedStream) for each in stored)


def source_of(k: AnyStream, v: AnyStream | None = None) -> Any:
    """The streams of keys as the kernel reads them; a single stream has the values, too."""
    from regard.ops.kernels.merging import Source

    if isinstance(k, PagedStream):
        pages = _pages_of(k, v or k)
        return Source(k.slab, v.slab if isinstance(v, PagedStream) else None, pages)
    return Source(_where(k), None if v is None else _where(v))


def _where(x: AnyStream) -> Readable:
    """A stream as the kernel reads it; codes stay as they are, with their rotation, if they can."""
    if isinstance(x, QuantizedStream):
        return x if is_readable(x) else x.to_tensor()
    columns: Tensor = _columns_together(x)
    return columns


def _rows(call: Call, q: Tensor) -> Tensor:
    """The queries of the heads that share a key head, as rows that lie together."""
    return _columns_together(fold_heads(q, call.num_kv_heads))


def reads_pages(stored: Sequence[AnyStream]) -> bool:
    """Whether the kernel reads these streams through their table: pages of 16 tokens or more, in
    plain memory on the CPU. Others are gathered before."""
    first = stored[0]
    return (
        isinstance(first, PagedStream)
        and first.page_size >= LEAST_PAGE
        and _is_plain(first.table)
        and (first.table.stride(1) == 1 or first.table.shape[1] == 1)
        and all(
            isinstance(each, PagedStream) and is_readable(each.slab, first.page_size)
            for each in stored
        )
    )


def reads_latents(stored: Sequence[AnyStream]) -> bool:
    """Whether the kernel computes keys from these latents, and reads the values beside them."""
    k, v = stored
    if not isinstance(k, RebuiltKeys) or not isinstance(v, Tensor):
        return False
    plain = k.weights.dtype is k.latents.dtype and all(map(_is_plain, (k.latents, k.positions, v)))
    return plain and k.tables is not None and k.tables[0].shape[1] // 2 % _LANES == 0


READS: Reads = {
    QuantizedStream: lambda streams: True,
    PagedStream: reads_pages,
    RebuiltKeys: reads_latents,
}


def _output(call: Call, out: Tensor, lse: Tensor) -> Tensor:
    if call.sinks is not None:
        return merge(_partial(call, out, lse), Partial.of_sinks(call.sinks)).out.to(call.dtype)
    return unfold_heads(out, call.num_queries).to(call.dtype)


def _partial(call: Call, out: Tensor, lse: Tensor) -> Partial:
    heads = unfold_heads(lse.unsqueeze(-1), call.num_queries).squeeze(-1)
    return Partial(unfold_heads(out, call.num_queries), heads)


def _attend(call: Call, q: Tensor, k: AnyStream, v: AnyStream) -> tuple[Tensor, Tensor]:
    """The outputs and log-sum-exps of the folded rows, both float32.

    Non-finite content of hidden keys makes the output non-finite (0 * nan is nan). It is then
    computed once more, with the keys and values that are hidden from all queries set to zero.
    """
    if isinstance(k, PagedStream):
        assert isinstance(v, PagedStream)
        return _attend_pages(call, q, k, v)
    if isinstance(k, RebuiltKeys):
        return _attend_latents(call, q, k, to_tensor(v))
    from regard.ops.kernels.launching import decode

    rows, bias = _rows(call, q), addend_once(call, _addend)

    def compute(k: Readable, v: Readable) -> tuple[Tensor, Tensor]:
        k = _columns_together(k)
        if call.joined:
            return decode(rows, k, scale=call.scale, bias=bias, width=call.v_head_dim)
        return decode(rows, k, _columns_together(v), scale=call.scale, bias=bias)

    return run_stored_and_check(call, compute, _readable(k), _readable(v))


def _attend_pages(call: Call, q: Tensor, k: PagedStream, v: PagedStream) -> tuple[Tensor, Tensor]:
    """Attend to keys and values in pages. Where the output is not finite, hidden tokens may be the
    reason: the pages are then copied, some tokens at a time."""
    from regard.ops.kernels.launching import decode

    rows, bias, pages = _rows(call, q), addend_once(call, _addend), _pages_of(k, v)
    of_values, width = (None, call.v_head_dim) if call.joined else (v.slab, None)
    out, lse = decode(
        rows, k.slab, of_values, scale=call.scale, bias=bias, width=width, pages=pages
    )
    if is_everything(call.mask) or is_finite(out):
        return out, lse
    found = merge(*(_piece(call, q, (k, v), at) for at in range(0, k.length, _PIECE)))
    heads = call.num_kv_heads
    return fold_heads(found.out, heads), fold_heads(found.lse.unsqueeze(-1), heads).squeeze(-1)


def _pages_of(k: PagedStream, v: AnyStream) -> Any:
    """Where keys and values lie in the memory of pages, as the kernel is told."""
    from regard.ops.kernels.tiles import KeyPages

    assert isinstance(v, PagedStream)
    same = v.table is k.table or v.table.equal(k.table)
    assert same and v[2:5] == k[2:5], "keys and values share their pages"
    return KeyPages(*k[1:5])


def _attend_latents(call: Call, q: Tensor, k: RebuiltKeys, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attend to keys that the kernel computes from latents. Where the output is not finite, hidden
    tokens may be the reason: the keys are then computed before."""
    from regard.ops.kernels.launching import decode
    from regard.ops.kernels.tiles import Latents

    rows, bias = _rows(call, q), addend_once(call, _addend)
    assert k.tables is not None, "reads_latents has found them"
    # transformers' caches count positions in int64; each is a row of the tables
    latents = Latents(k.by_head, k.positions.to(torch.int32), *k.tables)
    stored, v = (_columns_together(x) for x in (k.latents.expand(-1, k.heads, -1, -1), v))
    out, lse = decode(rows, stored, v, scale=call.scale, bias=bias, latents=latents)
    if is_everything(call.mask) or is_finite(out):
        return out, lse
    return _attend(call, q, k.to_tensor(), v)


def _piece(call: Call, q: Tensor, streams: tuple[PagedStream, PagedStream], start: int) -> Partial:
    """Attention to a copy of the tokens from `start` on, `_PIECE` at most."""
    size = min(_PIECE, call.num_keys - start)
    first = call.span.kv_start + start
    copies = [each.narrow(start, size).copied() for each in streams]
    return partial(call.of_keys(first, first + size), q, *copies)


def _readable(x: AnyStream) -> Readable:
    """A stream as the kernel reads it: codes that fill no whole bytes of a vector are dequantised.
    Where codes stand for values after a Hadamard rotation, the queries are rotated already."""
    if not isinstance(x, QuantizedStream):
        return to_tensor(x)
    plain = x._replace(rotation=())
    return plain if is_readable(plain) else plain.to_tensor()


def is_readable(x: Readable, page_size: int = 0) -> bool:
    """Whether the kernel may read memory where it lies, or codes of this width whose scales belong
    to a token, or to a page through whose table they are read."""
    if isinstance(x, Tensor):
        return _is_plain(x) and x.stride(-1) == 1
    return x.run in (1, page_size) and (x.bits == 8 or x.width % (2 * _LANES) == 0)


def _is_plain(x: Tensor) -> bool:
    return type(x) is Tensor and x.is_cpu and not x.is_neg() and not x.requires_grad


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
    return columns_contiguous(x) if isinstance(x, Tensor) else x


def _value_multiple(call: Call) -> int:
    """The number that divides a `v_head_dim` which the kernel reads: the elements of a vector; of
    two, where bfloat16 keys hold the values or a byte holds bits of several codes. Latents have
    any number, of a vector at least."""
    if RebuiltKeys in call.storage.kinds and call.v_head_dim >= _LANES:
        return 1
    half = call.dtype.itemsize < 4 and call.v_head_dim < call.head_dim
    return 2 * _LANES if half or _packs(call) else _LANES


def _packs(call: Call) -> bool:
    """Whether a byte holds bits of several codes."""
    return call.storage.bits is not None and call.storage.bits < 8


@functools.cache
def is_installed() -> bool:
    return find_spec("numba") is not None
