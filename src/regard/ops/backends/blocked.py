"""Long sequences: queries in blocks, each with only the keys that are visible to its queries.

Under a window, chunks, documents or a prefix most scores are hidden, and torch's kernel with a
dense mask computes them all. Here each block is a call of its own, run by `sdpa`, or by `eager`
where `sdpa` objects, so that no tensor has queries x keys elements. With gradients a block saves
its inputs only, and backward recomputes it (arXiv:1604.06174), as in FlashAttention
(arXiv:2205.14135).
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from regard.masks import EVERYTHING, Dense, Mask, Span
from regard.masks.visible_runs import Runs, contains, intersection, visible_runs_of, without_gaps
from regard.ops import fast_precision
from regard.ops.backends import eager, sdpa
from regard.ops.call import Call, hides_nothing, is_empty, is_everything
from regard.ops.rates import SPEED
from regard.tracing import is_forward_mode, is_transformed
from regard.versions import ChangedInPlace, Versions

BLOCK = 256  # queries: smaller blocks compute fewer hidden scores, larger start fewer operators
SCORES = 1 << 22  # elements: the most scores in a block that stores them; about the L3 cache
GAP = 128  # hidden keys between visible ones that cost less to compute than to leave out
_OPERATORS = 60  # operators started for a block
_ONE_BLOCK = 10  # operators started in addition to the inner backend's, if there is one block
_SMALLER = 1.2  # times: small matrix products take 1.2 times as long per FLOP
_AGAIN = 1.35  # times: backward recomputes the forward, 4 units of work instead of 3


class Block(NamedTuple):
    """Some of the queries, the runs of keys that any of them may attend to, and the runs of keys
    that all of them may attend to (`full`)."""

    first: int
    queries: int
    runs: Runs
    full: Runs

    @property
    def cells(self) -> int:
        return self.queries * sum(stop - start for start, stop in self.runs)


def objection(call: Call) -> str | None:
    if is_empty(call):
        return "blocked needs at least one query and one visible key"
    if torch.compiler.is_compiling():
        return "blocked plans for the lengths of one call, outside of graphs"
    if is_forward_mode() or (call.needs_grad and is_transformed()):
        return (
            "blocked computes its blocks again in the backward pass, which neither torch.func "
            "transforms nor forward-mode derivatives follow"
        )
    return None


def estimate(call: Call) -> float:
    """The scores of all blocks, the cost of their masks, and some operators for each block."""
    size = _size(call)
    blocks = -(-call.num_queries // size)
    if blocks == 1 and not fast_precision.suits(call):
        inner = sdpa if sdpa.objection(call) is None else eager
        return inner.estimate(call) + _ONE_BLOCK * SPEED.call
    cells = call.num_queries * call.num_keys
    if blocks > 1:
        cells = sum(block.cells for block in plan(call))
    heads, width = call.batch * call.num_heads, call.head_dim + call.v_head_dim
    each = _SMALLER * 2 * width / SPEED.products
    if fast_precision.suits(call):
        each = fast_precision.per_cell(call)
    elif _stores_scores(call):
        each += 8 / SPEED.elements
    seconds = heads * cells * each + blocks * _OPERATORS * SPEED.call
    if not hides_nothing(call):
        of_heads, passes = sdpa.dense_passes(call)
        elements = passes / 2 * cells * of_heads  # half: the mask of a block stays in the cache
        seconds += elements / SPEED.elements
    return seconds * (_AGAIN if _again(call) else 1.0)


def note(call: Call) -> str | None:
    """The precision that is given up for a call with `precision="fast"`."""
    return fast_precision.NOTE if fast_precision.suits(call) else None


def run(
    call: Call,
    q: Float[Tensor, "B H L D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S Dv"],
) -> Float[Tensor, "B H L Dv"]:
    # Split once: the gradient of a view for each block would be as long as the sequence.
    queries, keys, values = q.split(_size(call), 2), Tiles(call, k), Tiles(call, v)
    again, call = _read_again(call, k, v), _with_present_bias(call)
    outs: list[Tensor] = []
    blocks = list(zip(plan(call), queries, strict=True))
    for block, rows in reversed(blocks):  # the widest causal block first: others fit its memory

        def attended(rows: Tensor, block: Block = block) -> Tensor:
            return _attend(call, block, rows, keys, values, again)

        if _again(call):
            random = call.dropout > 0
            out = checkpoint(attended, rows, use_reentrant=False, preserve_rng_state=random)
        else:
            out = attended(rows)
        outs.append(out)
    return outs[0] if len(outs) == 1 else torch.cat(outs[::-1], 2)


def _again(call: Call) -> bool:
    """Whether backward recomputes blocks, because they save their inputs only."""
    return call.needs_grad and not fast_precision.keeps_inputs_only(call)


def plan(call: Call) -> Iterator[Block]:
    """The blocks of queries in order, each with the runs of key slots it needs."""
    runs_of, span, size = visible_runs_of(call.mask), call.span, _size(call)
    here = [(span.kv_start, span.kv_stop)]
    for first in range(0, call.num_queries, size):
        stop = min(first + size, call.num_queries)
        runs, full = runs_of(span.first_query + first, span.last_query - call.num_queries + stop)
        yield Block(first, stop - first, without_gaps(intersection(runs, here), GAP), full)


class Tiles:
    """Keys or values that blocks take slices of. With gradients they are split into tiles once, and
    blocks concatenate tiles, so that no gradient is as long as the sequence."""

    def __init__(self, call: Call, x: Float[Tensor, "B G S D"]) -> None:
        self.first = call.span.kv_start
        self.size = BLOCK if call.needs_grad else max(1, call.num_keys)
        self.tiles = x.split(self.size, 2)

    def take(self, runs: Runs) -> Float[Tensor, "B G R D"]:
        pieces = [self._run(start - self.first, stop - self.first) for start, stop in runs]
        return torch.cat(pieces, 2) if len(pieces) > 1 else pieces[0]

    def _run(self, start: int, stop: int) -> Tensor:
        low = min(start // self.size, len(self.tiles) - 1)
        tiles = self.tiles[low : max(low + 1, -(-stop // self.size))]
        joined = torch.cat(tiles, 2) if len(tiles) > 1 else tiles[0]
        return joined.narrow(2, start - low * self.size, stop - start)


def _size(call: Call) -> int:
    """Queries in a block."""
    if not _stores_scores(call):
        return BLOCK
    rows = SCORES // (call.batch * call.num_heads * call.num_keys)
    return max(BLOCK // 4, min(rows, BLOCK))


def _stores_scores(call: Call) -> bool:
    """Whether a block stores its scores: in `eager`, or in torch's unfused implementation."""
    learned = call.score_bias is not None and call.needs_grad
    return sdpa.objection(call) is not None or call.dropout > 0 or learned


def _read_again(call: Call, k: Tensor, v: Tensor) -> Versions:
    """The tensors that backward reads again, which autograd's own check of saved tensors misses."""
    if not call.needs_grad:
        return Versions()
    bias = call.score_bias
    learned = list(bias.parameters()) if isinstance(bias, nn.Module) else [bias]
    read = (k, v, call.sinks, *learned)
    return Versions(*(each for each in read if isinstance(each, Tensor)))


def _with_present_bias(call: Call) -> Call:
    """The call with its learned bias bound to the present parameters: `functional_call` replaces
    them only during the forward pass."""
    if call.needs_grad and isinstance(call.score_bias, nn.Module):
        return replace(call, score_bias=_PresentBias(call.score_bias))
    return call


class _PresentBias(nn.Module):
    """A learned rule for score biases, with the parameters that it had when this was made."""

    def __init__(self, rule: nn.Module) -> None:
        super().__init__()
        self.rule = rule
        self._present = dict(self.named_parameters()) | dict(self.named_buffers())

    def bias(
        self, span: Span, *, device: torch.device | str | None = None, dtype: torch.dtype
    ) -> Tensor:
        bias: Tensor = functional_call(self, self._present, (span, device, dtype))
        return bias

    def forward(self, span: Span, device: torch.device, dtype: torch.dtype) -> Tensor:
        bias: Tensor = self.rule.bias(span, device=device, dtype=dtype)  # type: ignore[operator]
        return bias


def _attend(
    call: Call, block: Block, rows: Tensor, keys: Tiles, values: Tiles, again: Versions
) -> Tensor:
    """Attention of one block."""
    runs = block.runs or [(call.span.kv_start,) * 2]
    part = _part(call, block, runs)

    def read() -> tuple[Tensor, Tensor]:
        if again.changed:
            raise ChangedInPlace(
                "keys, values, score_bias or sinks were written in place between the forward and "
                "the backward pass, which reads them again; write to a clone(), or call backward() "
                "first"
            )
        return keys.take(runs), values.take(runs)

    if fast_precision.suits(call) and part.num_keys:
        return fast_precision.run(part, rows, read)
    backend = sdpa if sdpa.objection(part) is None else eager
    return backend.run(part, rows, *read())


def _part(call: Call, block: Block, runs: Runs) -> Call:
    """The call of a block: its queries, and the keys of its runs side by side."""
    bias = call.score_bias
    if isinstance(bias, Tensor) and bias.dim() >= 2 and bias.shape[-2] != 1:
        bias = bias.narrow(-2, block.first, block.queries)
    parts = []
    for start, stop in runs:
        span = _placed(call.span, block, start, stop)
        mask = EVERYTHING if contains(block.full, start, stop) else call.mask.within(span)
        parts.append(replace(call, span=span, mask=mask, score_bias=bias))
    return parts[0] if len(parts) == 1 else _concatenated(parts)


def _placed(span: Span, block: Block, start: int, stop: int) -> Span:
    if not isinstance(span.q_start, Tensor):
        first = span.q_start + block.first
        return Span(first, first + block.queries, start, stop)
    first_query = span.first_query + block.first
    last_query = span.last_query - span.num_queries + 1 + block.first
    return Span.ragged(
        span.q_start + block.first,
        queries=block.queries,
        kv_start=start,
        kv_stop=stop,
        bounds=(first_query, last_query),
    )


def _concatenated(parts: list[Call]) -> Call:
    """One call for several runs of keys, whose masks and biases are concatenated as tensors."""
    call = parts[0]
    span = Span(0, call.num_queries, 0, sum(part.num_keys for part in parts))
    widths = [part.num_keys for part in parts]
    mask: Mask = EVERYTHING
    if not all(is_everything(part.mask) for part in parts):
        mask = Dense(_side_by_side([part.keep() for part in parts], widths)).within(span)
    biases = [bias for part in parts if (bias := part.bias()) is not None]
    bias = _side_by_side(biases, widths) if biases else None
    return replace(call, span=span, whole=span, mask=mask, score_bias=bias)


def _side_by_side(pieces: list[Tensor], widths: list[int]) -> Tensor:
    """Tensors that broadcast to `[B, H, L, S]`, each `widths` keys wide, as one."""
    leading = torch.broadcast_shapes(*(piece.shape[:-1] for piece in pieces))
    wide = zip(pieces, widths, strict=True)
    return torch.cat([piece.expand(*leading, width) for piece, width in wide], dim=-1)
