"""The backward pass of a rectangle, from the output and the log-sum-exp over all keys.

Each rectangle's share of the gradients needs no other rectangle: with weights `p = exp(s - lse)`,
where `lse` is over all keys, the gradient of a score is `p * (slope @ v - slope @ out)` and that of
a value `p * slope` (FlashAttention, Dao et al. 2022, arXiv:2205.14135, section 3.1).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.distributed.context.rectangles import (
    Rectangle,
    Scoring,
    from_diagonal,
    fused_steps,
    runs_tiled,
    tiles,
)
from regard.heads import group_heads, ungroup_heads
from regard.ops.backends import tiled
from regard.ops.backends.common import columns_contiguous, without_hidden
from regard.ops.backends.sdpa import clamped
from regard.ops.bias import BiasWith
from regard.ops.block_gradients import backward_block, for_masked
from regard.ops.call import Call, is_empty
from regard.ops.definition import scores
from regard.ops.mask_tensors import intervals_of


class Attended(NamedTuple):
    """The results of the forward pass, and the gradient of the output."""

    q: Tensor  # all queries of this rank, `[B, H, L, D]`
    out: Tensor  # `[B, H, L, Dv]`, over all keys and the sinks
    lse: Tensor  # `[B, H, L]`, the log-sum-exp of all scores and the sinks
    slope: Tensor  # `[B, H, L, Dv]`, the gradient of `out`
    delta: Tensor  # `[B, H, L]`, the sums of `out * slope`
    bias: Tensor | None  # the score bias of the whole sequence, if it is a tensor
    learned: tuple[Tensor, ...]  # the parameters of the rule for score biases


@dataclass
class Sums:
    """Gradients that all rectangles add to, in float32 (float64 for float64)."""

    q: Tensor
    bias: Tensor | None
    learned: tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class OfKeys:
    """The backward pass over some keys, one rectangle after another."""

    scoring: Scoring  # how scores are computed
    known: Attended  # the queries, and the results of the forward pass
    keys: tuple[Tensor, Tensor]  # keys and values
    sums: Sums  # the gradients of the queries and of the score bias
    of_keys: tuple[Tensor, Tensor]  # the gradients of the keys and values

    def add(self, place: Rectangle) -> None:
        """Add a rectangle's share of all gradients."""
        scoring, q = self.scoring, self.known.q
        if q.dtype is torch.float32 and runs_tiled(scoring, place, q, *self.keys):
            self._add_compiled(place)
            return
        if scoring.fused:
            for part in from_diagonal(scoring.mask, place):
                self._add_fused(part)
            return
        for tile in tiles(scoring, place, q.shape[0] * q.shape[1]):
            self._add_tile(tile)

    def _add_compiled(self, place: Rectangle) -> None:
        """By the compiled kernel's backward pass."""
        known, (k, v) = self.known, map(place.of_keys, self.keys)
        given = known.slope, known.q, known.lse, known.delta
        slope, q, lse, delta = map(place.of_queries, given)
        call = self.scoring.call(place.span, q, k, v, None)
        limits = intervals_of(call.mask, call.span)
        assert limits is not None
        grads = tiled.gradients(slope, q, k, v, lse, delta, call.scale, limits)
        totals = place.of_queries(self.sums.q), *map(place.of_keys, self.of_keys)
        for total, grad in zip(totals, grads, strict=True):
            total.add_(grad)

    def _add_fused(self, place: Rectangle) -> None:
        """By the kernel's own backward pass."""
        known, q = self.known, self.known.q
        both = place.of_queries(q), place.of_keys(self.keys[0])
        overflow = any(not torch.equal(x, clamped(x)) for x in both)
        for part, step, inputs in fused_steps(self.scoring, place, q, *self.keys):
            block, width = step.block, inputs[0].shape[3]
            out, lse, slope = (
                block.of_queries(part.of_queries(x)) for x in (known.out, known.lse, known.slope)
            )
            lse = for_masked(step, lse, torch.inf)  # weights of 0
            grads = backward_block(
                step, overflow, _widened(slope, width), _widened(out, width), lse, *inputs
            )
            block.of_queries(part.of_queries(self.sums.q)).add_(grads[0][..., : q.shape[3]])
            for total, grad in zip(self.of_keys, grads[1:], strict=True):
                block.add_to_keys(part.of_keys(total), grad[..., : total.shape[3]])

    def _add_tile(self, tile: Rectangle) -> None:
        """By autograd: the scores are computed again, and differentiated."""
        known, sums = self.known, self.sums
        q, k, v = (_leaf(x) for x in (tile.of_queries(known.q), *map(tile.of_keys, self.keys)))
        totals = tile.of_queries(sums.q), *map(tile.of_keys, self.of_keys)
        pairs = list(zip((q, k, v), totals, strict=True))
        bias = None if known.bias is None else _leaf(tile.of_scores(known.bias))
        if bias is not None and sums.bias is not None:
            pairs.append((bias, tile.of_scores(sums.bias)))
        learned = [_leaf(x) for x in known.learned]
        pairs += zip(learned, sums.learned, strict=True)
        call = self.scoring.call(tile.span, q, k, v, bias)
        if is_empty(call):
            return
        if isinstance(rule := call.score_bias, nn.Module):
            names = (name for name, _ in rule.named_parameters())
            call = call.but(score_bias=BiasWith(rule, dict(zip(names, learned, strict=True))))
        with torch.enable_grad():
            loss = _surrogate(call, tile, known, q, k, v)
        grads = torch.autograd.grad(loss, [leaf for leaf, _ in pairs], allow_unused=True)
        for (_, total), grad in zip(pairs, grads, strict=True):
            if grad is not None:
                total.add_(grad)


def _widened(x: Tensor, width: int) -> Tensor:
    """Pad with columns of zeros to the width of the kernel's values."""
    return columns_contiguous(nn.functional.pad(x, (0, width - x.shape[3])))


def _surrogate(
    call: Call, tile: Rectangle, known: Attended, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """A number with the gradients of attention, for given `lse`, `out` and `slope`."""
    slope, lse, delta = map(tile.of_queries, (known.slope, known.lse, known.delta))
    hidden = call.span.kv_start - tile.span.kv_start
    k, v = (x.narrow(2, hidden, call.num_keys) for x in (k, v))
    k, v = without_hidden(call, k, v)
    lse = lse.masked_fill(lse == -torch.inf, 0.0)  # of fully masked rows: all weights are 0
    weights = torch.exp(scores(call, q, k) - lse.unsqueeze(-1))
    grouped = group_heads(weights, call.num_kv_heads)
    read = ungroup_heads(grouped @ v.to(weights.dtype).unsqueeze(2))
    return (read * slope).sum() - (weights * delta.unsqueeze(-1)).sum()


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


def of_sinks(sinks: Tensor, known: Attended) -> Tensor:
    """The gradient of the sinks, whose values are 0."""
    score = sinks.to(known.lse.dtype)[None, :, None]
    weight = torch.exp(score - known.lse).masked_fill(known.lse == -torch.inf, 0.0)
    return -(weight * known.delta).sum((0, 2))
