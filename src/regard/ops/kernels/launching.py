"""Running a kernel: torch's tensors as addresses, and memory to work in."""

import ctypes
import functools
import math
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from regard.cache.codes import QuantizedStream
from regard.ops.kernels.decoding import kernel
from regard.ops.kernels.threads import launch
from regard.ops.kernels.tiles import (
    BFLOAT16,
    FLOAT32,
    LINE,
    NIBBLES,
    PACKED,
    Format,
    KeyPages,
    Latents,
    Tile,
    tile_for,
)
from regard.ops.kernels.vectors import (
    machine_lanes,
    memory_streams,
    multiplies_pairs,
    multiplies_words,
)

NARROWEST = 4  # lanes of a vector, NEON's
LOG2E = math.log2(math.e)  # the kernel computes powers of 2; in float64, rounded with the scale
_local = threading.local()


def decode(
    q: Tensor,
    k: Tensor | QuantizedStream,
    v: Tensor | QuantizedStream | None = None,
    *,
    scale: float,
    bias: Tensor | None = None,
    width: int | None = None,
    lanes: int | None = None,
    pages: KeyPages | None = None,
    latents: Latents | None = None,
    results: Sequence[Tensor] | None = None,
    integers: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of q `[B, G, M, D]` over k `[B, G, S, D]` and v `[B, G, S, Dv]`.

    Returns the output `[B, G, M, Dv]` and the log-sum-exps `[B, G, M]`, both float32. Keys and
    values have the dtype of the queries, or are codes, each of their own bits. Without `v`, the
    values are the first `width` columns of the keys. `bias` is float32, broadcasts to
    `[B, G, M, S]`, and hides where it is -inf. `lanes` is the length of a vector, by default the
    longest that fits the machine and the widths. Widths are multiples of the lanes (of twice as
    many for `width` in bfloat16, of 16 for 6-bit and 4-bit codes), but tensors of values have any
    (`readable_beyond`); last dimensions are contiguous; S > 0. With `pages`, keys and values are
    `[1, G, tokens, W]`, and those of a sequence are found through its row of the table. With
    `latents`, keys are latents `[B, G, S, R]`, and they are computed from these and rotated.
    `results` is memory for the output and the log-sum-exps. `integers` says whether queries may be
    rounded to 16 bits where keys or values are codes: those of bfloat16 by default.
    """
    (b, g, m, d), s = q.shape, _tensor(k).shape[2] if pages is None else pages.keys
    dtype = k.dtype if isinstance(k, Tensor) else q.dtype
    dv, biased = (width or d) if v is None else _width(v), bias is not None
    integers = dtype is torch.bfloat16 if integers is None else integers
    at = stored(k, v, (b, g, m, s), dtype, d, dv, biased, lanes, pages, latents, integers)
    q_at, bias_at = place_of("q", q, dtype, (b, g, m, d)), NOWHERE
    if bias is not None:
        bias_at = place_of("bias", bias.expand(b, g, m, s), torch.float32, (b, g, m, s))
    whole = at.code[0].value_width
    results = results or empty_results((b, g, m, whole))
    places = (*q_at, *at.places, *bias_at)
    out, lse = attend_at(at.code, (b, g, m, s), places, scale, results)
    return out if whole == dv else out[..., :dv], lse


class Stored(NamedTuple):
    """Keys and values as a kernel reads them."""

    code: tuple[Tile, int]  # the tile, and the address of its machine code
    places: tuple[int, ...]  # as `Decode` has them from `k` to `positions_row`
    values: Tensor | QuantizedStream | None  # they may be a copy, which lives as long as this


def stored(
    k: Tensor | QuantizedStream,
    v: Tensor | QuantizedStream | None,
    sizes: tuple[int, int, int, int],
    dtype: torch.dtype,
    width: int,
    value_width: int,
    biased: bool = False,
    lanes: int | None = None,
    pages: KeyPages | None = None,
    latents: Latents | None = None,
    integers: bool = False,
) -> Stored:
    """Keys and values for queries of these sizes (B, G, M, S), of a dtype and a width; the other
    arguments are those of `decode`."""
    (b, g, m, s), d, dv = sizes, width, value_width
    rank, turned = (d, 0) if latents is None else (_width(k), latents.cos.shape[1])
    if lanes is None and latents is not None:
        lanes = lanes_of_latents(d, rank, turned)
    elif lanes is None:
        lanes = lanes_for(d, dv, dtype, joined=v is None)
    whole = dv
    if isinstance(v, Tensor):
        whole = -(-dv // lanes) * lanes
        v = readable_beyond(v, whole - dv)
    _check_sizes(s, d, whole, dtype, joined=v is None, lanes=lanes)
    held = (b, g, s) if pages is None else (1, g, _tensor(k).shape[2])
    size = 0 if pages is None else pages.size
    k_form, k_at, k_scales = _stream("k", k, dtype, (*held, rank), size)
    v_form, v_at, v_scales = k_form, k_at, NOWHERE
    if v is not None:
        v_form, v_at, v_scales = _stream("v", v, dtype, (*held, dv), size)
    latents_at = NO_LATENTS
    if latents is not None:
        latents_at = _latents(latents, dtype, (b, g, s, d, rank), lanes)
        k_form = latent_format(dtype, rank, turned, lanes)
    table = NOWHERE if pages is None else table_of(pages, b, held[2])
    half, joined = dtype is torch.bfloat16, v is None
    integers = integers and multiplies_words(lanes)
    code = compiled(m, d, whole, half, joined, biased, lanes, k_form, v_form, size, integers)
    return Stored(code, (*k_at, *v_at, *k_scales, *v_scales, *table, *latents_at), v)


def attend_at(
    code: tuple[Tile, int],
    sizes: tuple[int, int, int, int],
    places: tuple[int, ...],
    scale: float,
    results: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    """Run the code of a tile on tensors of these sizes (B, G, M, S), whose addresses and strides
    are `places`, as `Decode` has them from `q` to `bias_row`."""
    (tile, address), (b, g, m, s), (out, lse) = code, sizes, results
    threads = torch.get_num_threads()
    ranges, range_keys = tile.ranges(s, b * g, threads)
    threads = min(threads, b * g * ranges)
    room = memory(tile, m, b * g, ranges, threads)[:3]
    out_at = place_of("out", out, torch.float32, (b, g, m, tile.value_width))[0]
    # the log-sum-exps are as plain as `out`, since both were made in the same way
    data = PACKED.pack(b, g, m, s, *places, out_at, lse.data_ptr(), *room, ranges,
                       range_keys, scale * LOG2E)  # fmt: skip
    launch(address, data, threads)
    return out, lse


def empty_results(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Memory for an output of this shape, and for its log-sum-exps."""
    out = torch.empty(shape, dtype=torch.float32, device="cpu")
    return out, torch.empty(shape[:-1], dtype=torch.float32, device="cpu")


@functools.cache
def lanes_for(width: int, value_width: int, dtype: torch.dtype, *, joined: bool) -> int:
    """The longest vector of the machine that divides the widths: 16, 8 or 4 lanes."""
    pairs = 2 if joined and dtype is torch.bfloat16 and value_width < width else 1
    together = math.gcd(width, value_width // pairs)
    return max(NARROWEST, math.gcd(machine_lanes(), together))


def lanes_of_latents(width: int, rank: int, rotated: int) -> int:
    """The longest vector of the machine that divides a key, and is no longer than its latent."""
    return min(math.gcd(machine_lanes(), width, rotated // 2), 1 << rank.bit_length() - 1)


def readable_beyond(x: Tensor, count: int) -> Tensor:
    """x, or a copy of it, with so many elements in memory behind its last one. The kernel reads
    whole vectors of a row, and `decode` drops the sums of elements beyond its width."""
    if not count or has_beyond(x, count):
        return x
    return torch.nn.functional.pad(x, (0, count))[..., : x.shape[-1]]


def has_beyond(x: Tensor, count: int) -> bool:
    """Whether so many elements of the same memory are behind the last one of x."""
    spans = (step * (size - 1) for step, size in zip(x.stride(), x.shape, strict=True))
    last = x.storage_offset() + sum(spans)
    return (last + 1 + count) * x.itemsize <= x.untyped_storage().nbytes()


def memory(
    tile: Tile, rows: int, heads: int, ranges: int, threads: int, more: int = 0
) -> tuple[int, int, int, int]:
    """Addresses in one workspace: zeroed counters, partial results, scratch, `more` bytes."""
    of_part, of_thread = bytes_of(tile, rows)
    counters = counters_of(heads)
    parts, scratch = heads * ranges * of_part, threads * of_thread
    start = workspace(counters + parts + scratch + more)
    ctypes.memset(start, 0, counters)
    return start, start + counters, start + counters + parts, start + counters + parts + scratch


def counters_of(heads: int) -> int:
    """Bytes of the int64 counters of a call: tasks, threads, finished tasks of each head."""
    return -(-8 * (heads + 2) // LINE) * LINE


@functools.cache
def bytes_of(tile: Tile, rows: int) -> tuple[int, int]:
    """Bytes of a task's result, and of a thread's scratch."""
    padded = tile.padded(rows)
    return padded * tile.part_bytes, padded * tile.scratch_bytes + tile.block_bytes


def latent_format(dtype: torch.dtype, rank: int, rotated: int, lanes: int) -> Format:
    """How keys that are products with latents are stored."""
    plain = BFLOAT16 if dtype is torch.bfloat16 else FLOAT32
    even = rank >= 2 * lanes and rank % 2 == 0
    pairs = plain is BFLOAT16 and lanes == 16 and even and multiplies_pairs()
    return plain._replace(rank=rank, rotated=rotated, pairs=pairs)


@functools.cache
def compiled(*of_tile: Any) -> tuple[Tile, int]:
    """The tile of these arguments of `tile_for`, and the address of its machine code."""
    tile = tile_for(*of_tile, streams=memory_streams())
    return tile, int(kernel(tile).address)


def _check_sizes(
    keys: int, width: int, value_width: int, dtype: torch.dtype, *, joined: bool, lanes: int
) -> None:
    if dtype is not torch.float32 and dtype is not torch.bfloat16:
        _refuse(f"its elements are float32 or bfloat16, got {dtype}")
    if keys < 1:
        _refuse("it needs at least one key")
    if width % lanes or value_width % lanes or width < 1 or value_width < 1:
        _refuse(f"its widths are multiples of {lanes}, got {width} and {value_width}")
    if joined and value_width > width:
        _refuse(f"values within keys are no wider than the keys, got {value_width} of {width}")


Place = tuple[int, int, int, int]  # an address; the strides of batch, heads and rows
NOWHERE: Place = (0, 0, 0, 0)  # of what a call does not have
NO_LATENTS = (0, 0, 0, 0, 0, 0)
_PLAIN = (Tensor, torch.nn.Parameter)


def _tensor(x: Tensor | QuantizedStream) -> Tensor:
    return x if isinstance(x, Tensor) else x.codes


def _width(x: Tensor | QuantizedStream) -> int:
    return int(x.shape[3]) if isinstance(x, Tensor) else x.width


def _stream(
    name: str,
    x: Tensor | QuantizedStream,
    dtype: torch.dtype,
    shape: tuple[int, int, int, int],
    page: int,
) -> tuple[Format, Place, Place]:
    """The format of keys or values, and addresses and strides of them and their scales."""
    if isinstance(x, Tensor):
        form = BFLOAT16 if dtype is torch.bfloat16 else FLOAT32
        return form, place_of(name, x, dtype, shape), NOWHERE
    (*tokens, width), form = shape, Format(x.bits, x.group, x.run > 1)
    if x.width != width or x.bits not in (4, 6, 8) or (x.bits < 8 and width % NIBBLES):
        _refuse(f"{name} is codes of 8 bits, or of 6 or 4 in multiples of {NIBBLES} channels, "
                f"{width} wide; got {x.bits} bits, {x.width} wide")  # fmt: skip
    if x.run not in (1, page) or x.skipped:
        _refuse(f"scales of {name} belong to a token or to a page of {page}, got {x.run} tokens "
                f"after {x.skipped}")  # fmt: skip
    codes = place_of(name, x.codes, torch.uint8, (*tokens, form.bytes(width)))
    runs, groups = tokens[2] // x.run, -(-width // x.group)
    shape = tokens[0], tokens[1], runs, 2 * groups
    return form, codes, place_of(f"scales of {name}", x.scales, torch.bfloat16, shape)


def place_of(name: str, x: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Place:
    """`place_if_readable`, or an AssertionError that says why the kernel may not use the tensor."""
    place = place_if_readable(x, dtype, shape)
    if place is not None:
        return place
    if not is_plain(x):
        _refuse(f"{name} is no plain tensor on the CPU, but a {type(x).__name__} on {x.device}")
    if x.dtype is not dtype or x.shape != shape:
        _refuse(f"{name} must be {dtype} {tuple(shape)}, got {x.dtype} {tuple(x.shape)}")
    if not x.data_ptr():
        _refuse(f"{name} {tuple(shape)} has no memory")
    _refuse(f"the last dimension of {name} has stride {x.stride(-1)}, not 1")


def place_if_readable(x: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Place | None:
    """A tensor's address and strides, once it is certain that the kernel may use them; else None.

    The kernel reads and writes by address: a wrong one crashes the interpreter or yields wrong
    results. So this is asked at every call, and the answer is not kept: a tensor may move to other
    memory in place, as those do that `torch.multiprocessing` sends. Of a tensor without memory of
    its own (batched, fake, sparse) torch itself refuses the address.
    """
    if type(x) not in _PLAIN or not x.is_cpu or x.is_neg():  # `is_plain`, without a call
        return None
    if x.dtype is not dtype or x.shape != shape:
        return None
    address, strides = x.data_ptr(), x.stride()
    if not address or (strides[-1] != 1 and shape[-1] != 1):
        return None
    return address, strides[0] if shape[0] > 1 else 0, strides[1], strides[2]


def is_plain(*tensors: Tensor) -> bool:
    """Whether tensors are torch's own, on the CPU, without a lazy minus sign."""
    return all(type(x) in _PLAIN and x.is_cpu and not x.is_neg() for x in tensors)


def table_of(pages: KeyPages, batch: int, tokens: int) -> Place:
    """The table's address and row stride, the size of a page, and the tokens that are skipped.

    Checked as `place_of` checks tensors: no number may lead out of the tensors of so many tokens.
    """
    table, size, skipped, keys = pages
    count = -(-(skipped + keys) // size) if size > 0 and skipped >= 0 else 0
    if type(table) is not Tensor or not table.is_cpu or table.dtype is not torch.int64:
        _refuse(f"a table of pages is int64 on the CPU, got a {type(table).__name__}")
    if table.dim() != 2 or len(table) != batch or not 0 < count <= table.shape[1]:
        _refuse(f"{skipped} + {keys} tokens of {batch} rows in pages of {size}, and a table of "
                f"{tuple(table.shape)}")  # fmt: skip
    if table.stride(1) != 1 and table.shape[1] > 1:
        _refuse(f"a row of the table has stride {table.stride(1)}, not 1")
    low, high = (int(x) for x in table.aminmax())
    if low < 0 or (high + 1) * size > tokens:
        _refuse(f"pages {low} to {high} of {size} tokens are not within {tokens} tokens")
    return table.data_ptr(), table.stride(0), size, skipped


def _latents(
    latents: Latents, dtype: torch.dtype, sizes: tuple[int, int, int, int, int], lanes: int
) -> tuple[int, int, int, int, int, int]:
    """The addresses of weights, tables and positions, and the strides of these."""
    b, g, s, d, rank = sizes
    weights, positions, cos, sin = latents
    turned = cos.shape[1]
    if rank < lanes or turned > d or (turned // 2) % lanes or not is_plain(cos, sin):
        _refuse(f"latents have {lanes} numbers at least, and half the rotated channels a multiple, "
                f"got {rank} and {turned} of {d}")  # fmt: skip
    assert cos.shape == sin.shape and cos.is_contiguous() and sin.is_contiguous()
    assert weights.is_contiguous()
    at = place_of("weights", weights[None], dtype, (1, g, d, rank))[0]
    where = place_of("positions", positions, torch.int32, (b, 1, s, 1))
    return at, cos.data_ptr(), sin.data_ptr(), where[0], where[1], where[3]


def _refuse(why: str) -> NoReturn:
    raise AssertionError(f"this must not reach the decoding kernel: {why}")


def workspace(count: int) -> int:
    """The address of so many bytes, the start of a cache line; each calling thread has its own.

    It is NumPy's memory, so that no default, mode or transform of torch affects it.
    """
    size, address, _ = getattr(_local, "space", (0, 0, None))
    if size < count:
        memory = np.empty(count + LINE, np.uint8)
        address = -(-memory.ctypes.data // LINE) * LINE
        _local.space = count, address, memory
    return address
