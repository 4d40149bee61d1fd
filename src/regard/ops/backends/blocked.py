"""Long sequences: queries in blocks, each with only the keys that are visible to its queries.

Under a window, chunks, documents or a prefix most scores are hidden, and torch's kernel with a
dense mask computes them all. Here each block is a call of its own, run by `sdpa`, or by `eager`
where `sdpa` objects, so that no tensor has queries x keys elements. With gradients a block saves
the log-sum-exp of its scores; where torch's kernel cannot run it, its inputs only, and backward
recomputes it (arXiv:1604.06174).
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial as bound

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from regard.constants import accumulating_dtype
from regard.masks.runs import Runs
from regard.ops import block_gradients, fast_precision
from regard.ops.backends import eager, sdpa
from regard.ops.backends.common import columns_contiguous, may_check, same_width
from regard.ops.backends.sdpa import Hiding
from regard.ops.bias import BiasWith
from regard.ops.block_gradients import Step, for_masked, forward_block
from regard.ops.blocks import BLOCK, Block, Gathered, part_of
from regard.ops.blocks import plan as blocks_of
from regard.ops.call import Call, is_empty
from regard.ops.estimates import EFFICIENT, on_device, per_score, visible_share
from regard.ops.partial import Partial, merge
from regard.rates import SPEED
from regard.tracing import has_modes, is_forward_mode, is_transformed
from regard.versions import ChangedInPlace, Versions

SCORES = 1 << 22  # elements: the most scores in a block that stores them; about the L3 cache
_CONVERTED = 1024  # half-precision keys converted to float32 at a time: these stay in the caches
_OPERATORS = 30  # operators started for a block
_OF_A_MASK = 30  # operators started for a block with a mask, in addition
_ONE_BLOCK = 10  # operators started in addition to the inner backend's, if there is one block
_SMALLER = 1.2  # times: the scores of a block take 1.2 times as long as those of a long call
_AGAIN = 1.35  # times: backward recomputes the forward, 4 units of work instead of 3


def objection(call: Call) -> str | None:
    objection = _run_objection(call)
    return _lse_objection(call) if call.partial and objection is None else objection


def _run_objection(call: Call) -> str | None:
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


def _lse_objection(call: Call) -> str | None:
    if call.device.type != "cpu":
        return f"blocked gives no log-sum-exp on {call.device.type}"
    if call.needs_grad:
        return "blocked gives no log-sum-exp with a gradient"
    if fast_precision.suits(call):
        return "blocked gives no log-sum-exp with precision='fast'"
    return None


def estimate(call: Call) -> float:
    """The scores of all blocks, the cost of their masks, and some operators for each block."""
    if call.device.type != "cpu":
        blocks = -(-call.num_queries // BLOCK)
        share, operators = visible_share(call), blocks * (_OPERATORS + _OF_A_MASK)
        copies = sdpa.copies_on_device(call)
        return on_device(
            call, operators=operators, kernel=EFFICIENT, passes=1, share=share, copies=copies
        )
    if call.partial:  # computes in float32
        call = call.but(dtype=accumulating_dtype(call.dtype))
    planned = plan(call)
    if len(planned) == 1 and not fast_precision.suits(call):
        inner = sdpa if sdpa.run_objection(call) is None else eager
        return inner.estimate(call) + _ONE_BLOCK * SPEED.call
    masked = [block for block in planned if not block.plain]
    each = _SMALLER * per_score(call)
    if fast_precision.suits(call):
        each = fast_precision.per_cell(call)
    elif _stores_scores(call):
        each += 8 / SPEED.elements
    seconds = call.num_heads * _cells(planned) * each
    seconds += (len(planned) * _OPERATORS + len(masked) * _OF_A_MASK) * SPEED.call
    dense = planned if call.score_bias is not None else masked
    of_heads, passes = sdpa.dense_passes(call)
    elements = passes / 2 * _cells(dense) * of_heads  # half: a block's mask stays in the cache
    seconds += elements / SPEED.elements
    return seconds * (_AGAIN if _again(call) else 1.0)


def _cells(blocks: list[Block]) -> int:
    return sum(block.cells for block in blocks)


def note(call: Call) -> str | None:
    """A sentence on the precision that a call with `precision="fast"` gives up; None of others."""
    return fast_precision.NOTE if fast_precision.suits(call) else None


def run(
    call: Call,
    q: Float[Tensor, "B H L D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S Dv"],
) -> Float[Tensor, "B H L Dv"]:
    if not _is_fused(call):
        return _one_by_one(call, q, k, v)
    if not call.needs_grad:
        return _inference(call, q, k, v)
    again = _read_again(call, k, v)
    q, k, v = same_width(q, k, v)
    blocks = [block for block in plan(call) if block.runs]
    steps = bound(steps_of, call, blocks)
    out = block_gradients.run(q, k, v, blocks, steps, bound(_check, again))
    return out[..., : call.v_head_dim]


def _inference(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    planned = plan(call)
    blocks = [block for block in planned if block.runs]
    keys, values = Gathered(k, blocks), Gathered(v, blocks)
    written = len(blocks) == len(planned)  # else, some queries may attend to no key
    out = (q.new_empty if written else q.new_zeros)((*q.shape[:3], v.shape[3]))
    for block, part, hiding in steps_of(call, blocks):
        inputs = block.of_queries(q), keys.of(block), values.of(block)
        if hiding is None or not may_check(part):
            result = sdpa.run(part, *inputs)
        else:
            result = sdpa.run_masked(part, *inputs, hiding)
        block.of_queries(out).copy_(result)
    return out


def partial(
    call: Call,
    q: Float[Tensor, "B H L D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S Dv"],
) -> Partial:
    """In half precision some keys at a time are converted to float32: torch's kernel rounds its
    outputs to the dtype of its inputs, and those of parts are rounded when they are merged."""
    dtype = accumulating_dtype(call.dtype)
    if dtype == call.dtype:
        return _partial(call, q, k, v)
    call, q = call.but(dtype=dtype), q.to(dtype)
    found, start = [], call.span.kv_start
    for keys, values in zip(k.split(_CONVERTED, 2), v.split(_CONVERTED, 2), strict=True):
        some = call.of_keys(start, start + keys.shape[2])
        found.append(_partial(some, q, keys.to(dtype), values.to(dtype)))
        start = some.span.kv_stop
    return merge(*found)


def _partial(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Partial:
    """The partial result of queries and keys in float32 or float64."""
    out, lse = q.new_zeros(*q.shape[:3], call.v_head_dim), q.new_full(q.shape[:3], -torch.inf)
    blocks = [] if is_empty(call) else [block for block in plan(call) if block.runs]
    for block, found in _partials(call, blocks, q, k, v):
        block.of_queries(out).copy_(found.out[..., : call.v_head_dim])
        block.of_queries(lse).copy_(found.lse)
    return Partial(out, lse)


def _partials(
    call: Call, blocks: list[Block], q: Tensor, k: Tensor, v: Tensor
) -> Iterator[tuple[Block, Partial]]:
    """The partial results of blocks."""
    fused = _is_fused(call)
    if fused:
        q, k, v = map(columns_contiguous, same_width(q, k, v))
    keys, values = Gathered(k, blocks), Gathered(v, blocks)
    if fused:
        for step in steps_of(call, blocks):
            block = step.block
            out, lse, _ = forward_block(step, block.of_queries(q), keys.of(block), values.of(block))
            yield block, Partial(out, for_masked(step, lse, -torch.inf))
        return
    for block in blocks:
        part = part_of(call, block)
        objection = sdpa.run_objection(part) or sdpa.lse_objection(part)
        backend = sdpa if objection is None else eager
        yield block, backend.partial(part, block.of_queries(q), keys.of(block), values.of(block))


def steps_of(call: Call, blocks: list[Block]) -> Iterator[Step]:
    """The blocks, each with its call and its mask. Where rules depend on distance alone, most
    blocks have the same mask, which is made once."""
    made: dict[tuple[object, ...], Hiding] = {}
    for block in blocks:
        part = part_of(call, block)
        span, hiding = part.span, None
        if block.plain:
            pass
        elif isinstance(span.q_start, Tensor) or not part.mask.relative:
            hiding = sdpa.hiding_of(part)
        else:
            key = (part.mask, span.q_start - span.kv_start, span.num_queries, span.num_keys)
            hiding = made[key] = made.get(key) or sdpa.hiding_of(part)
        yield Step(block, part, hiding)


def _one_by_one(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend to each block by a backend that can run it; with gradients, checkpointed."""
    # Split once: the gradient of a view for each block would be as long as the sequence.
    blocks = plan(call)
    queries = q.split([block.queries for block in blocks], 2)
    keys, values = Tiles(call, k), Tiles(call, v)
    again, call = _read_again(call, k, v), _with_present_bias(call)
    outs: list[Tensor] = []
    for block, rows in reversed(list(zip(blocks, queries, strict=True))):

        def attended(rows: Tensor, block: Block = block) -> Tensor:
            return _attend(call, block, rows, keys, values, again)

        if _again(call):
            random = call.dropout > 0
            out = checkpoint(attended, rows, use_reentrant=False, preserve_rng_state=random)
        else:
            out = attended(rows)
        outs.append(out)  # the widest causal block first: others fit its memory
    return outs[0] if len(outs) == 1 else torch.cat(outs[::-1], 2)


def plan(call: Call) -> list[Block]:
    """The blocks of queries that a call is cut into, each with the keys that it reads."""
    return blocks_of(call, _size(call), whole=_is_fused(call))


def _is_fused(call: Call) -> bool:
    """Whether torch's CPU kernel computes every block, and stores no scores."""
    if call.device.type != "cpu" or call.score_bias is not None or call.scale <= 0:
        return False
    if _stores_scores(call) or fast_precision.suits(call):
        return False
    return call.immediate or has_modes()


def _again(call: Call) -> bool:
    """Whether backward recomputes blocks, because they save their inputs only."""
    return call.needs_grad and not (_is_fused(call) or fast_precision.keeps_inputs_only(call))


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
    """The number of queries in a block."""
    if not _stores_scores(call):
        return BLOCK
    rows = SCORES // (call.batch * call.num_heads * call.num_keys)
    return max(BLOCK // 4, min(rows, BLOCK))


def _stores_scores(call: Call) -> bool:
    """Whether a block stores its scores: in `eager`, or in torch's unfused implementation."""
    learned = call.score_bias is not None and call.needs_grad
    return sdpa.run_objection(call) is not None or call.dropout > 0 or learned


def _read_again(call: Call, k: Tensor, v: Tensor) -> Versions:
    """The tensors that backward reads again, which autograd's own check of saved tensors misses."""
    if not call.needs_grad:
        return Versions()
    bias = call.score_bias
    learned = list(bias.parameters()) if isinstance(bias, nn.Module) else [bias]
    read = (k, v, call.sinks, *learned)
    return Versions(*(each for each in read if isinstance(each, Tensor)))


def _check(again: Versions) -> None:
    """Raise if a tensor that backward reads again was written in place."""
    if again.changed:
        raise ChangedInPlace(
            "keys, values, score_bias or sinks were written in place between the forward and the "
            "backward pass, which reads them again; write to a clone(), or call backward() first"
        )


def _with_present_bias(call: Call) -> Call:
    """The call with its learned bias bound to the present parameters: `functional_call` replaces
    them only during the forward pass."""
    if call.needs_grad and isinstance(call.score_bias, nn.Module):
        rule = call.score_bias
        present = dict(rule.named_parameters()) | dict(rule.named_buffers())
        return replace(call, score_bias=BiasWith(rule, present))
    return call


def _attend(
    call: Call, block: Block, rows: Tensor, keys: Tiles, values: Tiles, again: Versions
) -> Tensor:
    """Attention of one block."""
    runs = block.runs or [(call.span.kv_start,) * 2]
    part = part_of(call, block)

    def read() -> tuple[Tensor, Tensor]:
        _check(again)
        return keys.take(runs), values.take(runs)

    if fast_precision.suits(call) and part.num_keys:
        return fast_precision.run(part, rows, read)
    backend = sdpa if sdpa.run_objection(part) is None else eager
    return backend.run(part, rows, *read())
