"""Masks for FlexAttention: a function of indices, and the blocks of scores that it leaves visible.

FlexAttention (Dong et al. 2024, arXiv:2412.05496) evaluates a function of the indices of a query
and a key in its kernel, and skips blocks of scores that are hidden. A kernel is compiled for each
function. What changes between calls, such as slots and the size of a window, is a tensor that the
function reads, so that equal kinds of masks share a kernel. The host reads no tensor here.
"""

from collections.abc import Callable
from functools import reduce
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from regard.masks import AllOf, AnyOf, Everything, Mask, Not, Span, Where
from regard.masks.runs import FAR, NEAR
from regard.ops.call import Call, narrowed
from regard.ops.mask_tensors import make_once

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128  # queries and keys of a block: FlexAttention's default, a multiple of its tiles
CELLS = 1 << 24  # scores whose mask is evaluated at once: 128 MiB for each operator, in int64

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Planned(NamedTuple):
    """The mask of a call for FlexAttention.

    Attributes:
        blocks: the function, and lists of the blocks that are visible in part and as a whole.
        keys: the keys that some query may attend to, a mask for a single query; None if it is known
            without reading a tensor that these are all.
    """

    blocks: "BlockMask"
    keys: Bool[Tensor, "B H 1 S"] | None


def planned(call: Call) -> Planned:
    """The mask of a call, memoised: all layers with equal masks and spans share it."""
    if call.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return _plan(call)  # a captured graph owns what it computes
    shape = call.batch, call.num_heads, call.device
    return make_once(call.mask, call.span, lambda: _plan(call), "blocks", *shape)


def _plan(call: Call) -> Planned:
    from torch.nn.attention.flex_attention import BlockMask

    some, every, keys = visible_blocks(call)
    blocks = BlockMask.from_kv_blocks(
        *_ordered(some & ~every),
        *_ordered(every),
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_mod(call),
        seq_lengths=(call.num_queries, call.num_keys),
    )
    return Planned(blocks, None if all_keys_visible(call.mask, call.span) else keys)


def _ordered(blocks: Bool[Tensor, "B H Lb Sb"]) -> tuple[Int[Tensor, "B H Lb"], Tensor]:
    """The number of chosen blocks in each row, and the row's blocks, chosen ones first."""
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), order.to(torch.int32)


def visible_blocks(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """The blocks of which some and of which all scores are visible, `[B or 1, H or 1, Lb, Sb]`, and
    the keys that some query may attend to, `[B or 1, H or 1, 1, S]`.

    A block that reaches beyond the last query or key is never visible as a whole. The mask is
    evaluated for one block of queries by the keys in their reach, some at a time.
    """
    span, lengths = call.span, (call.num_queries, call.num_keys)
    shape = _keep(call, call.mask, span.part(0, 1, span.kv_start, span.kv_start + 1)).shape[:2]
    counts = [-(-length // BLOCK) for length in lengths]
    some = torch.zeros(*shape, *counts, dtype=torch.bool, device=call.device)
    every = torch.zeros_like(some)
    keys = torch.zeros(*shape, 1, lengths[1], dtype=torch.bool, device=call.device)
    most = max(1, CELLS // (shape[0] * shape[1] * BLOCK**2))
    for row in range(counts[0]):
        first, last = row * BLOCK, min((row + 1) * BLOCK, lengths[0])
        reach = narrowed(span.part(first, last, span.kv_start, span.kv_stop), call.mask)
        begin, end = (slot - span.kv_start for slot in (reach.kv_start, reach.kv_stop))
        for column in range(begin // BLOCK, -(-end // BLOCK), most):
            columns = slice(column, min(column + most, -(-end // BLOCK)))
            start, stop = column * BLOCK, min(columns.stop * BLOCK, lengths[1])
            here = span.part(first, last, span.kv_start + start, span.kv_start + stop)
            keep = _keep(call, call.mask.within(here), here)
            keys[..., start:stop] |= keep.any(-2, keepdim=True)
            keep = F.pad(keep, (0, (start - stop) % BLOCK, 0, first + BLOCK - last))
            blocks = keep.unflatten(-1, (-1, BLOCK))  # [B, H, 128, Sb, 128]
            some[..., row, columns] = blocks.any(-1).any(-2)
            every[..., row, columns] = blocks.all(-1).all(-2)
    return some, every, keys


def _keep(call: Call, mask: Mask, span: Span) -> Bool[Tensor, "B H L S"]:
    """The mask in a rectangle as a tensor of four axes, of which the first two may be of size 1."""
    keep = mask.dense(span, batch=call.batch, heads=call.num_heads, device=call.device)
    return keep[(None,) * (4 - keep.dim())]


def all_keys_visible(mask: Mask, span: Span) -> bool:
    """Whether every key is certainly visible to some query: the query at the last key of a block,
    or else the nearest query, must see the whole block."""
    if isinstance(span.q_start, Tensor):
        return False
    for start in range(span.kv_start, span.kv_stop, BLOCK):
        stop = min(start + BLOCK, span.kv_stop)
        query = min(max(stop - 1, span.first_query), span.last_query)
        if not isinstance(mask.within(Span(query, query + 1, start, stop)), Everything):
            return False
    return True


def mask_mod(call: Call) -> MaskMod:
    """The mask as a function of `(b, h, q_idx, kv_idx)`, counted from the first query and key of
    the call's span, that reads tensors on the call's device."""
    return _mod(call.mask, Slots(call))


class Slots:
    """The slots of a call as tensors on its device: `query` is `[B or 1, L]`, `key` is `[1, S]`."""

    def __init__(self, call: Call) -> None:
        query, span = call.span.positions(call.device), call.span
        self.call = call
        self.query = (query if query.dim() == 2 else query[None]).to(torch.int32)
        self.key = torch.arange(span.kv_start, span.kv_stop, dtype=torch.int32, device=call.device)[
            None
        ]


Lookup = Callable[[Tensor, Tensor], Tensor]  # (b, index) -> element


def lookup(data: Tensor) -> Lookup:
    """Elements of `[B or 1, n]` by row and index."""
    if data.shape[0] > 1:
        data = data.contiguous()
        return lambda b, index: data[b, index]
    row = data[0].contiguous()
    return lambda b, index: row[index]


def _mod(mask: Mask, slots: Slots) -> MaskMod:
    """Translate a mask to a `mask_mod`: a combination part by part, a rule of distance by its
    limits, and another rule unchanged if it cannot change later."""
    match mask:
        case Not(mask=inner):
            hidden = _mod(inner, slots)
            return lambda *index: ~hidden(*index)
        case AllOf(parts=parts):
            return _joined([_mod(part, slots) for part in parts], torch.logical_and)
        case AnyOf(parts=parts):
            return _joined([_mod(part, slots) for part in parts], torch.logical_or)
        case Where():  # whose checks FlexAttention cannot trace
            return _called(mask.mask_mod, slots)
    if mask.relative and (limits := _limits(mask, slots)):
        return _joined(limits, torch.logical_and)
    if mask.lasting:
        return _called(mask.__call__, slots)  # torch 2.11 asks an object for its truth
    return by_cell(_keep(slots.call, mask, slots.call.span))


def _limits(mask: Mask, slots: Slots) -> list[MaskMod]:
    """The first and the last key that a query sees, for a rule that depends on distance alone."""
    limits = []
    for low, high in mask.runs(0, 0).some:
        if low is not NEAR:
            limits.append(_compared(slots, torch.ge, low))
        if high is not FAR:
            limits.append(_compared(slots, torch.lt, high))
    return limits


def _compared(slots: Slots, compare: Callable[[Tensor, Tensor], Tensor], distance: int) -> MaskMod:
    key, limit = lookup(slots.key), lookup(slots.query + distance)
    return lambda b, h, q_idx, kv_idx: compare(key(b, kv_idx), limit(b, q_idx))


def _called(mod: MaskMod, slots: Slots) -> MaskMod:
    """Call a function of slots, and make a plain True or False that it returns a tensor."""
    query, key = lookup(slots.query), lookup(slots.key)
    return lambda b, h, q_idx, kv_idx: (
        (kv_idx == kv_idx) & mod(b, h, query(b, q_idx), key(b, kv_idx))
    )


def by_cell(data: Shaped[Tensor, "B H L S"]) -> MaskMod:
    """Elements of a tensor, whose axes may be of size 1, as a function of `(b, h, q_idx,
    kv_idx)`."""
    wide = [axis for axis in range(4) if data.shape[axis] > 1]
    data = data.reshape([data.shape[axis] for axis in wide] or [1]).contiguous()
    if not wide:  # one element for all cells
        return lambda b, h, q_idx, kv_idx: data[0 * b]
    return lambda *index: data[tuple(index[axis] for axis in wide)]


def _joined(mods: list[MaskMod], join: Callable[[Tensor, Tensor], Tensor]) -> MaskMod:
    return lambda *index: reduce(join, [mod(*index) for mod in mods])
