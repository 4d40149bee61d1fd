"""Checks of `attend_shards`, before anything is sent."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from regard.distributed.context.exchanging import Streams
from regard.distributed.context.passes import Expansion
from regard.distributed.context.rectangles import Scoring
from regard.distributed.ranks import Ranks
from regard.distributed.shards import Shards
from regard.masks import Span
from regard.ops.attend import prepare
from regard.ops.bias import ScoreBias
from regard.ops.check import check_tensors, refuse_jit_trace
from regard.tracing import is_forward_mode, is_transformed


def check_call(
    q: Tensor, streams: Sequence[Tensor], *, ranks: Ranks, shards: Shards, exchange: str
) -> None:
    """Refuse tensors that are not this rank's tokens, and calls that cannot be recorded."""
    refuse_jit_trace()
    if torch.compiler.is_compiling() or is_transformed() or is_forward_mode():
        raise ValueError(
            "attend_shards sends messages, which neither torch.compile nor torch.func transforms "
            "nor forward-mode derivatives record; call it outside of them"
        )
    if exchange not in ("ring", "gather"):
        raise ValueError(f"exchange is 'ring' or 'gather', got {exchange!r}")
    if shards.ranks != ranks.size:
        raise ValueError(
            f"shards are of {shards.ranks} ranks, the mesh has {ranks.size}; "
            f"give Shards({shards.length}, {ranks.size})"
        )
    if not streams:
        raise ValueError("streams are one tensor [B, G, L, W] or more, got none")
    number = shards.lengths[ranks.rank]
    for name, x in {"q": q, **{f"streams[{i}]": x for i, x in enumerate(streams)}}.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a tensor [B, heads, L, W], got {type(x).__name__}")
        if x.dim() != 4 or x.shape[2] != number or x.shape[0] != q.shape[0]:
            raise ValueError(
                f"{name} is [B, heads, L, W] with the {number} tokens of rank {ranks.rank} (of "
                f"{shards.length}, layout {shards.layout!r}) and the batch size of q, "
                f"{q.shape[0]}, got {tuple(x.shape)}; shards.take(x, rank, dim) has this rank's"
            )
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, q is on {q.device}; move one of them")


def check_keys(
    scoring: Scoring, q: Tensor, expansion: Expansion, streams: Streams, parameters: Streams
) -> None:
    """Refuse keys that do not fit the queries, and backends without a log-sum-exp."""
    if expansion.keys_of is None:
        _check_plain(streams, expansion.v_head_dim)
    none = tuple(x.detach()[:, :, :0] for x in streams)
    k, v = expansion.keys(none, tuple(x.detach() for x in parameters))
    check_tensors(q[:, :, :0], k, v)
    if k.requires_grad or v.requires_grad:
        raise ValueError(
            "keys_of reads a tensor that needs gradients and is none of its arguments; "
            "give it in parameters"
        )
    if not scoring.fused:
        one = (x.new_zeros(*x.shape[:2], 1, x.shape[3]) for x in (q.detach(), k, v))
        prepare(
            *one,
            span=Span(0, 1, 0, 1),
            softcap=scoring.softcap,
            backend=scoring.backend,
            partial=True,
        )


def _check_plain(streams: Streams, v_head_dim: int | None) -> None:
    if len(streams) > 2 or (len(streams) == 1) != (v_head_dim is not None):
        raise ValueError(
            "streams without keys_of are keys and values, or one stream whose first v_head_dim "
            f"columns are the values, got {len(streams)} with v_head_dim={v_head_dim}"
        )


def learned_of(rule: ScoreBias | None) -> tuple[Tensor, ...]:
    """The parameters of a rule for score biases.

    Raises:
        ValueError: if it reads other tensors that need gradients.
    """
    if rule is None:
        return ()
    learned = tuple(rule.parameters()) if isinstance(rule, nn.Module) else ()
    if not learned and torch.is_grad_enabled():
        bias = rule.bias(Span(0, 1, 0, 1), dtype=torch.float32)
        if bias.requires_grad:
            raise ValueError(
                f"score_bias={rule!r} reads tensors that need gradients; as an nn.Module it names "
                "them as its parameters"
            )
    return learned
