"""Attention of the queries of one rank to the keys of all ranks."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.distributed.context.exchanging import Exchange, Kind, Streams, Tokens
from regard.distributed.context.needed import needs_of
from regard.distributed.context.passes import (
    Expansion,
    KeysOf,
    Task,
    autocast_of,
    backward_pass,
    forward_pass,
)
from regard.distributed.context.rectangles import Scoring
from regard.distributed.ranks import Ranks
from regard.distributed.shards import Shards
from regard.masks import EVERYTHING, Mask, Span
from regard.ops.attend import prepare
from regard.ops.bias import ScoreBias
from regard.ops.block_gradients import without_derivative
from regard.ops.check import check_tensors, refuse_jit_trace
from regard.ops.partial import Partial
from regard.tracing import is_forward_mode, is_transformed


def attend_shards(
    q: Float[Tensor, "B H Lr D"],
    streams: Sequence[Tensor],
    *,
    ranks: Ranks,
    shards: Shards,
    mask: Mask = EVERYTHING,
    keys_of: KeysOf | None = None,
    parameters: Sequence[Tensor] = (),
    v_head_dim: int | None = None,
    scale: float | None = None,
    score_bias: Tensor | ScoreBias | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " H"] | None = None,
    exchange: Kind = "ring",
    backend: str = "auto",
    precision: str = "strict",
) -> Float[Tensor, "B H Lr Dv"]:
    """Attention of this rank's queries to the keys of all ranks: `attend` of the whole sequence.

    Every rank of `ranks` calls it at the same time, with arguments that differ in the tokens alone;
    so do their backward passes. Which of the arguments need gradients is the same on all ranks.
    Only keys that some query of the receiver may attend to are sent. Sums are kept in float32
    (float64 for float64), those of gradients from other ranks, too. The layers that call it have
    checked mask, options and numbers of tokens.

    Args:
        q: queries of this rank's tokens, `[B, H, Lr, D]`, in the order of `shards.positions`.
        streams: what is sent of this rank's tokens, `[B, G, Lr, W]` each: keys and values, or one
            stream whose first `v_head_dim` columns are the values, or what `keys_of` takes.
        ranks, shards: the ranks that hold the sequence, and the tokens of each.
        keys_of: from streams of some tokens, and `parameters`, to keys and values `[B, G, n, D]`.
            A pure function of these, token by token; it is computed again in the backward pass.
        parameters: tensors that `keys_of` reads. What needs gradients is among them.
        v_head_dim: the width of values that are the first columns of one stream.
        mask, scale, score_bias, softcap, sinks, backend, precision: as for `attend`, of the whole
            sequence; the backend has a log-sum-exp.
        exchange: `"ring"`, which holds the keys of two ranks at a time, and sends while it
            computes, or `"gather"`, which holds all of them, and sends them once.

    Returns:
        `[B, H, Lr, Dv]` in the dtype of `q`. Of the gradients of what ranks share (`score_bias`,
        `sinks`, `parameters`), each rank has the share of its own queries.

    Raises:
        ValueError: before anything is sent, if keys do not fit the queries, or something that
            needs gradients is unknown.
        RankError: if a rank does not answer.
    """
    refuse_recording()
    is_tensor = isinstance(score_bias, Tensor)
    rule = None if isinstance(score_bias, Tensor) else score_bias
    scoring = Scoring(
        mask=mask.within(Span(0, shards.length, 0, shards.length)),
        scale=q.shape[3] ** -0.5 if scale is None else scale,
        softcap=softcap,
        rule=rule,
        biased=score_bias is not None,
        backend=backend,
        precision=precision,
        device=q.device,
    )
    expansion = Expansion(keys_of, v_head_dim, autocast_of(q.device))
    check_keys(scoring, q, expansion, tuple(streams), tuple(parameters))
    learned = learned_of(rule)
    whole = Exchange(ranks, needs_of(scoring.mask, shards), exchange)
    task = Task(whole, scoring, expansion, len(streams), len(parameters))
    bias = score_bias if is_tensor else None
    tensors = (q, sinks, bias, *streams, *parameters, *learned)
    out: Tensor = _Attend.apply(task, *tensors)  # type: ignore[no-untyped-call]
    return out


def refuse_recording() -> None:
    """Refuse calls whose messages a graph or a transform would have to record."""
    refuse_jit_trace()
    if torch.compiler.is_compiling() or is_transformed() or is_forward_mode():
        raise ValueError(
            "context parallel sends messages, which neither torch.compile nor torch.func "
            "transforms nor forward-mode derivatives record; call the layer outside of them"
        )


def check_keys(
    scoring: Scoring, q: Tensor, expansion: Expansion, streams: Streams, parameters: Streams
) -> None:
    """Refuse keys that do not fit the queries, and backends without a log-sum-exp."""
    none = tuple(x.detach()[:, :, :0] for x in streams)
    k, v = expansion.keys(none, tuple(x.detach() for x in parameters))
    check_tensors(q[:, :, :0], k, v)
    if k.requires_grad or v.requires_grad:
        raise ValueError(
            "keys are rebuilt with a tensor that needs gradients and is no parameter of kv_b_proj "
            "or k_norm; make it one, or freeze it"
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


def learned_of(rule: ScoreBias | None) -> tuple[Tensor, ...]:
    """The parameters of a rule for score biases. Raises a ValueError if it reads other tensors that
    need gradients."""
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


class _Attend(torch.autograd.Function):
    """The whole call as one operation, which keeps no key of another rank in a ring."""

    @staticmethod
    def forward(ctx: Any, task: Task, *tensors: Tensor | None) -> Tensor:
        found, kept = forward_pass(task, task.given(tensors))
        ctx.task, ctx.kept_runs = task, kept.runs
        ctx.save_for_backward(*tensors, *found, *kept.streams)
        q = tensors[0]
        assert q is not None
        return found.out.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        task, wanted = ctx.task, ctx.needs_input_grad[1:]
        saved = ctx.saved_tensors  # read once: a checkpoint that is not reentrant allows no more
        tensors, rest = saved[: len(wanted)], saved[len(wanted) :]
        found, kept = Partial(*rest[:2]), Tokens(ctx.kept_runs, rest[2:])
        with torch.no_grad():
            given = task.given(tensors), task.given(wanted)
            grads = backward_pass(task, *given, found, kept, slope)
        return None, *without_derivative(grads, slope, *tensors)
