"""Cosines and sines of RoPE, memoised: a decoding step reads one row of a table.

Rows are computed as without a table, so a result does not depend on whether there is one.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.tracing import is_immediate

Pair = tuple[Tensor, Tensor]  # cosines and signed sines
Compute = Callable[[Tensor, torch.dtype], Pair]

_FIRST = 256  # positions in a new table
_LONGEST = 1 << 14  # positions; after so many tokens, reading the keys takes far longer than angles
_MOST = 16  # tables; a model has one for each of its ropes
_TABLES: dict[tuple[object, torch.dtype], Pair] = {}


def read_table(rope: Any, compute: Compute, positions: Tensor, dtype: torch.dtype) -> Pair | None:
    """`compute(positions, dtype)` of a `Rotary`, read from its table; None where there is none."""
    table = table_for(rope, compute, positions, dtype)
    if table is None:
        return None
    if positions.numel() == 1:
        row = int(positions)
        return table[0][row], table[1][row]
    rows = positions.to(torch.int64)
    cos, sin = torch.embedding(table[0], rows), torch.embedding(table[1], rows)
    return (cos, sin) if rows.dim() == 1 else (cos.unsqueeze(-3), sin.unsqueeze(-3))


def table_for(rope: Any, compute: Compute, positions: Tensor, dtype: torch.dtype) -> Pair | None:
    """Cosines and signed sines `[P, dim]` of a `Rotary` for all positions from 0 up to these.

    None for positions that are fractions, negative or far away, that cannot be read now (traced or
    transformed programs) or only by waiting (on a GPU), and for a scaling that depends on the
    length of the call.
    """
    count = positions.numel()
    if not (count and positions.is_cpu) or positions.is_floating_point():
        return None
    if rope.scaling is not None and rope.scaling.uses_length:
        return None
    if not is_immediate(positions):
        return None
    if count == 1:  # a decoding step
        first = last = int(positions)
    else:
        first, last = map(int, positions.to(torch.int64).aminmax())
    if first < 0 or last >= _LONGEST:
        return None
    table = _TABLES.get((rope, dtype))
    return (
        _grown(rope, compute, last + 1, dtype) if table is None or last >= len(table[0]) else table
    )


def read_row(rope: Any, compute: Compute, position: int) -> Pair:
    """The cosines and signed sines of one position, `[dim]` in float32."""
    table = _TABLES.get((rope, torch.float32))
    if type(position) is int and 0 <= position < _LONGEST:
        if table is None or position >= table[0].shape[0]:
            table = _grown(rope, compute, position + 1, torch.float32)
        return table[0][position], table[1][position]
    cos, sin = compute(torch.tensor([position], device="cpu"), torch.float32)
    return cos.flatten(), sin.flatten()


def _grown(rope: Any, compute: Compute, length: int, dtype: torch.dtype) -> Pair:
    """A table of at least `length` positions, made outside of inference mode, whose tensors
    autograd refuses."""
    if len(_TABLES) >= _MOST:
        _TABLES.clear()
    capacity = max(_FIRST, 1 << (length - 1).bit_length())
    with torch.inference_mode(False), torch.no_grad():
        cos, sin = compute(torch.arange(capacity, device="cpu"), dtype)
        table = cos.squeeze(0), sin.squeeze(0)
    _TABLES[rope, dtype] = table
    return table
