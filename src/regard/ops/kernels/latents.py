"""Decoding over latents on a GPU, in Triton: a latent is read once, as a key and as a value.

An absorbed latent is a key of all heads, and its first columns are the value. Programs share the
keys of a sequence, as in Flash-Decoding; another kernel merges their results.
"""

import functools

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

_LOG2_E = 1.4426950408889634
_LEAST_KEYS = 128  # of a program: merging costs more than fewer keys gain
_MOST_PARTS = 64  # results that are merged at a time
_SHARED = 200_000  # bytes: less than a multiprocessor of an H100 shares, more than of an A100
_SMALL = 128_000  # more than of other GPUs since the A100


@triton.jit
def _attend(
    q,
    k,
    out,
    lse,
    factor,
    rows,
    groups,
    keys,
    share,
    q_batch,
    q_row,
    k_batch,
    k_group,
    k_key,
    WIDTH: tl.constexpr,
    VALUES: tl.constexpr,
    FIRST: tl.constexpr,
    REST: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One block of query rows over one share of the keys of a key head."""
    block, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = block * ROWS + tl.arange(0, ROWS)
    first, rest = tl.arange(0, FIRST), VALUES + tl.arange(0, REST)
    there = (row < rows)[:, None]
    of_query = q + head * q_batch + row[:, None] * q_row
    q_first = tl.load(of_query + first[None, :], mask=there & (first < VALUES)[None, :], other=0.0)
    q_rest = tl.load(of_query + rest[None, :], mask=there & (rest < WIDTH)[None, :], other=0.0)
    stream = k + (head // groups).to(tl.int64) * k_batch + (head % groups) * k_group
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    found = tl.zeros([ROWS, FIRST], tl.float32)
    stop = tl.minimum((part + 1) * share, keys)
    for start in tl.range(part * share, stop, KEYS, num_stages=STAGES):
        key = start + tl.arange(0, KEYS)
        seen = key < stop
        of_key = stream + key.to(tl.int64)[:, None] * k_key
        latent = tl.load(
            of_key + first[None, :], mask=seen[:, None] & (first < VALUES)[None, :], other=0.0
        )
        others = tl.load(
            of_key + rest[None, :], mask=seen[:, None] & (rest < WIDTH)[None, :], other=0.0
        )
        scores = tl.dot(q_rest, tl.trans(others))
        scores = tl.dot(q_first, tl.trans(latent), scores) * factor
        scores = tl.where(seen[None, :], scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        kept, weights = tl.exp2(top - higher), tl.exp2(scores - higher[:, None])
        total = total * kept + tl.sum(weights, 1)
        found = tl.dot(weights.to(latent.dtype), latent, found * kept[:, None])
        top = higher
    place = (head * tl.num_programs(2) + part).to(tl.int64) * rows + row
    tl.store(
        out + place[:, None] * VALUES + first[None, :],
        (found / total[:, None]).to(out.dtype.element_ty),
        mask=there & (first < VALUES)[None, :],
    )
    tl.store(lse + place, (top + tl.log2(total)) * 0.6931471805599453, mask=row < rows)


@triton.jit
def _merge(
    parts,
    logs,
    out,
    lse,
    rows,
    count,
    VALUES: tl.constexpr,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
):
    """The results of all programs of one query row."""
    row, head = tl.program_id(0), tl.program_id(1)
    column, part = tl.arange(0, FIRST), tl.arange(0, COUNT)
    base = head.to(tl.int64) * count * rows + row
    log = tl.load(logs + base + part * rows, mask=part < count, other=-float("inf"))
    top = tl.max(log, 0)
    total = tl.sum(tl.exp(log - top), 0)
    found = tl.zeros([FIRST], tl.float32)
    for index in range(count):
        weight = tl.exp(tl.load(logs + base + index * rows) - top) / total
        here = parts + (base + index * rows) * VALUES + column
        found += weight * tl.load(here, mask=column < VALUES, other=0.0)
    place = head * rows + row
    tl.store(out + place * VALUES + column, found.to(out.dtype.element_ty), mask=column < VALUES)
    tl.store(lse + place, top + tl.log(total))


def attend_latents(
    q: Float[Tensor, "B G M D"], k: Float[Tensor, "B G S D"], values: int, scale: float
) -> tuple[Float[Tensor, "B G M Dv"], Float[Tensor, "B G M"]]:
    """The output in float32, and the log-sum-exp, of query rows over latents whose first `values`
    columns are the values. `k` has its columns side by side, and at least one key."""
    batch, groups, rows, width = q.shape
    keys = k.shape[2]
    q = q.contiguous()
    processors, shared = _facts(q.device)
    block, tile, warps, stages = settings(rows, shared)
    blocks = -(-rows // block)
    count = max(1, min(processors // (blocks * batch * groups), keys // _LEAST_KEYS, _MOST_PARTS))
    share = -(-keys // (count * tile)) * tile
    count = -(-keys // share)
    heads = batch * groups
    found = torch.empty(heads, count, rows, values, dtype=torch.float32, device=q.device)
    logs = torch.empty(heads, count, rows, dtype=torch.float32, device=q.device)
    first, rest = (max(16, triton.next_power_of_2(size)) for size in (values, width - values))
    _attend[(blocks, heads, count)](
        q, k, found, logs, scale * _LOG2_E, rows, groups, keys, share, q.stride(1), width,
        k.stride(0), k.stride(1), k.stride(2), width, values, first, rest, block, tile, stages,
        num_warps=warps,
    )  # fmt: skip
    if count > 1:
        parts, some = found, logs
        found = torch.empty(heads, rows, values, dtype=torch.float32, device=q.device)
        logs = torch.empty(heads, rows, dtype=torch.float32, device=q.device)
        _merge[(rows, heads)](
            parts, some, found, logs, rows, count, values, first, triton.next_power_of_2(count),
            num_warps=4,
        )  # fmt: skip
    return found.view(batch, groups, rows, values), logs.view(batch, groups, rows)


def settings(rows: int, shared: int) -> tuple[int, int, int, int]:
    """Query rows and keys of a tile, warps, and tiles in the making, for a GPU whose programs may
    share so many bytes: the fastest of fourteen on an H100; elsewhere such as fit, not timed."""
    stages = 3 if shared >= _SHARED else 2
    if shared < _SMALL:
        return 16, 32, 4, stages
    return (16, 64, 4, stages) if rows <= 32 else (64, 32, 8, stages)


@functools.cache
def _facts(device: torch.device) -> tuple[int, int]:
    """The multiprocessors of a GPU, and the bytes that a program may share on one."""
    if device.type == "cpu":  # Triton's interpreter
        return 8, _SHARED
    found = torch.cuda.get_device_properties(device)
    return found.multi_processor_count, getattr(found, "shared_memory_per_block_optin", 0)
