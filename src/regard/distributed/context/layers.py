"""Forward of a layer on this rank's tokens: keys and values of the others arrive as messages.

x_shard -> arrive -> project -> rotate -> attend_shards -> gated -> o_proj
"""

from typing import Any

import torch
from torch import Tensor, nn

from regard.cache import NO_CACHE, Cache
from regard.distributed.context.agreement import agree, text_of
from regard.distributed.context.attending import attend_shards
from regard.distributed.context.plan import ContextParallel
from regard.distributed.context.sending import Call, send, uses_length
from regard.distributed.ranks import Ranks
from regard.distributed.shards import shards_of
from regard.distributed.tensor.heads import ranks_of_both, split_of
from regard.heads import merge_heads
from regard.layers.cache_use import check_use, restored_on_error
from regard.layers.inputs import Arrival, arrive, check_cache
from regard.masks import EVERYTHING, AllOf, AnyOf, Documents, Mask, Not, Padding, Span
from regard.ops.check import check_bias, check_decodable, check_mask_sizes
from regard.tracing import is_autocast


@torch.compiler.disable(reason="sends to other ranks")  # type: ignore[untyped-decorator]
def forward(
    layer: Any,
    x: Tensor,
    *,
    context: object = None,
    mask: Mask = EVERYTHING,
    cache: Cache = NO_CACHE,
    positions: Tensor | None = None,
) -> Tensor:
    """Attention of this rank's queries to the keys of all ranks, the forward of a layer that
    `context_parallel` has changed.

    `x` is `[B, L, hidden_size]`, this rank's tokens: `plan.shard(whole)`. The mask is about the
    whole sequence, the same on every rank; positions are those of this rank's tokens, `[L]` or `[B,
    L]`, their slots if None. A cache keeps each rank's own tokens, and is empty: a call with a
    cache that holds tokens is a decoding step, for which every rank gives the same new tokens.
    `context` is refused. Raises as the layer on one device; and if the ranks' calls differ, on
    every rank, before keys are sent.
    """
    mask = EVERYTHING if mask is None else mask
    cache = NO_CACHE if cache is None else cache
    if cache is not NO_CACHE and getattr(cache, "length", None):
        return _decoded(layer, x, context, mask, cache, positions)
    call = arrive_shard(layer, x, context, mask, cache, positions)
    if cache is not NO_CACHE:
        check_use(layer, cache, call.mask, call.span)
    own = send(layer, x, call)
    with restored_on_error(layer, cache, call.mask):
        if cache is not NO_CACHE:
            cache.store(call.shards, *own.streams)  # type: ignore[attr-defined]
        out = attend_shards(own.q, own.streams, **_arguments(layer, call), **own.options)
        result: Tensor = layer.o_proj(merge_heads(own.read(out)))
        return result


def refuse(layer: Any, *args: object, **options: object) -> Any:
    """Refuse `weights` and `explain`: the keys of a query are on several ranks."""
    raise ValueError(
        "weights() and explain() read all keys of a call, which are on several ranks under context "
        "parallel; call them of a layer on one device: after plan.remove(), or of another "
        f"{type(layer).__name__} with the same state dict; plan.bytes_sent(...) counts messages"
    )


def _decoded(
    layer: Any, x: Tensor, context: object, mask: Mask, cache: Cache, positions: Tensor | None
) -> Tensor:
    _refuse_cache(cache)
    plain: Tensor = type(layer).forward(
        layer, x, context=context, mask=mask, cache=cache, positions=positions
    )
    return plain


def arrive_shard(
    layer: Any, x: Tensor, context: object, mask: Mask, cache: Cache, positions: Tensor | None
) -> Call:
    """Check the arguments of this rank, agree with the others, and complete them."""
    plan: ContextParallel = layer.context_parallel
    facts: dict[str, int | str] = {}
    own, refusal = [0, -1], None
    try:
        _check_call(layer, context, cache)
        both = arrive(layer, x, None, mask, NO_CACHE, positions).mask
        facts = _facts(layer, x, both, cache, positions)
        own = [x.shape[1], _top(layer, positions)]
    except Exception as error:  # whatever it is, the other ranks wait
        refusal = error
    lengths, tops = agree(plan.ranks, facts, own, refusal)
    shards = shards_of(lengths, plan.layout)
    _check_whole(layer, both, shards.length, x, cache)
    if positions is None:
        return Call(both, shards, shards.positions(plan.ranks.rank, x.device), shards.length - 1)
    return Call(both, shards, positions, max(tops))


def _check_call(layer: Any, context: object, cache: Cache) -> None:
    """Refuse what no rank can do alone."""
    if (objection := heads_objection(layer, layer.context_parallel.ranks)) is not None:
        raise ValueError(f"the layer {objection}")
    if context is not None:
        raise ValueError(
            "context is another sequence, whose tokens are not shared out; call the layer on one "
            "device for cross-attention, or leave it out of context_parallel"
        )
    if layer.training and layer.dropout:
        raise ValueError(
            f"dropout={layer.dropout} drops weights, and those of a query are spread over the "
            "ranks; set layer.dropout = 0.0, or call layer.eval()"
        )
    check_cache(cache)
    _refuse_cache(cache)


def heads_objection(layer: Any, ranks: Ranks) -> str | None:
    """Why the ranks that share the heads of a layer cannot share its tokens; None if they can."""
    split, both = split_of(layer), ranks_of_both(layer, ranks)
    if split is None or not both:
        return None
    return (
        f"has its heads split over ranks {split.ranks.members}, each of which needs all tokens "
        f"that it attends for, but ranks {both} would share the tokens, too; give context_parallel "
        'and tensor_parallel different dimensions of a mesh: mesh["tokens"] and mesh["heads"]'
    )


def _refuse_cache(cache: Cache) -> None:
    if cache is not NO_CACHE and not callable(getattr(cache, "store", None)):
        raise ValueError(
            f"cache={type(cache).__name__} holds all tokens of a sequence, and a rank has its own "
            "alone; give ShardedCache(mesh)"
        )


def _facts(
    layer: Any, x: Tensor, mask: Mask, cache: Cache, positions: Tensor | None
) -> dict[str, int | str]:
    """The facts that are equal on every rank in a valid call."""
    plan: ContextParallel = layer.context_parallel
    bias, device = layer.score_bias, x.device.type
    kind = type(bias).__name__
    heads = f"{layer.num_heads} heads, scale {layer.scale}, softcap {layer.softcap}"
    return {
        "layer": f"{layer.kind} of {heads}, hidden_size {layer.hidden_size}",
        "exchange": plan.exchange,
        "layout": plan.layout,
        "batch": x.shape[0],
        "dtype": str(x.dtype).removeprefix("torch."),
        "autocast": str(torch.get_autocast_dtype(device)) if is_autocast(device) else "off",
        "mode": "train()" if layer.training else "eval()",
        "gradients": _gradients(layer, x),
        "mask": text_of(mask),
        "score_bias": f"{bias.dtype} {list(bias.shape)}" if isinstance(bias, Tensor) else kind,
        "cache": type(cache).__name__,
        "positions": "None" if positions is None else str(positions.dtype),
    }


def _gradients(layer: nn.Module, x: Tensor) -> str:
    """The gradients that the backward pass will compute: it sends messages, too."""
    if not torch.is_grad_enabled():
        return "none, under no_grad"
    bias = layer.score_bias
    trained = sum(each.requires_grad for each in layer.parameters())
    also = " and score_bias" if isinstance(bias, Tensor) and bias.requires_grad else ""
    return f"of {'x and ' if x.requires_grad else ''}{trained} parameters{also}"


def _check_whole(layer: Any, mask: Mask, length: int, x: Tensor, cache: Cache) -> None:
    """Refuse masks and biases that are not about the whole sequence; alike on every rank."""
    span = Span(0, length, 0, length)
    check_mask_sizes(mask, x.shape[0], layer.num_heads)
    mask.within(span)
    for rule in _rules(mask):
        extent = rule.extent
        if isinstance(rule, Padding | Documents) and extent and extent.kv_stop != length:
            raise ValueError(
                f"mask={rule!r} is about {extent.kv_stop} tokens, but the ranks have {length} "
                "together; a mask is about the whole sequence, the same on every rank, and x is "
                "plan.shard(whole)"
            )
    check_bias(layer.score_bias, (x.shape[0], layer.num_heads, length, length), x.device)
    if cache is not NO_CACHE:
        check_decodable(mask, span)


def _rules(mask: Mask) -> list[Mask]:
    if isinstance(mask, AllOf | AnyOf):
        return [rule for part in mask.parts for rule in _rules(part)]
    return _rules(mask.mask) if isinstance(mask, Not) else [mask]


def _top(layer: Any, positions: Tensor | None) -> int:
    """The largest position of this rank, where it matters: it is read from the device."""
    if positions is None or not positions.numel() or not uses_length(layer.rope):
        return -1
    if positions.is_floating_point():
        raise TypeError(
            f"positions are whole numbers for rope={layer.rope}, whose frequencies depend on the "
            f"largest one of all ranks, got {positions.dtype}"
        )
    return int(positions.max())


def _arguments(layer: Any, call: Call) -> dict[str, Any]:
    """The arguments of `attend_shards` that layers of all kinds have."""
    plan: ContextParallel = layer.context_parallel
    options = layer.options(Arrival(call.mask, call.span, call.positions))
    del options["dropout"]  # refused, unless it is 0
    return {"ranks": plan.ranks, "shards": call.shards, "exchange": plan.exchange, **options}
