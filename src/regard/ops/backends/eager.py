"""The definition of attention: it does everything, holds all the scores, judges the others."""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from regard.heads import group_heads, ungroup_heads
from regard.ops.call import Call, is_everything
from regard.ops.definition import is_plain, log_sum, scores, weigh
from regard.ops.partial import Partial
from regard.ops.rates import SPEED

_CACHED = 1 << 22  # scores; more do not fit the cache, and are fresh memory every time


def objection(call: Call) -> str | None:
    """Nothing is beyond it."""
    return None


def estimate(call: Call) -> float:
    """Two plain products, and scores that come and go a dozen times; from memory that is slow."""
    cells = call.batch * call.num_heads * call.num_queries * call.num_keys
    products = 2 * cells * (call.head_dim + call.v_head_dim)
    keys = call.batch * call.num_kv_heads * call.num_keys * (call.head_dim + call.v_head_dim)
    passes = 12 if cells <= _CACHED else 40
    elements = passes * cells + 2 * keys
    operators = 12 if is_everything(call.mask) else 42
    return SPEED.call * operators + products / SPEED.products + elements / SPEED.elements


def run(
    call: Call,
    q: Float[Tensor, "B H L D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S Dv"],
) -> Float[Tensor, "B H L Dv"]:
    k, v = _cleaned(call, k, v)
    weights = weigh(scores(call, q, k), call.sinks, plain=is_plain(call))
    if call.dropout:
        weights = F.dropout(weights, call.dropout)
    return _read(call, weights, v).to(call.dtype)


def partial(
    call: Call,
    q: Float[Tensor, "B H L D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S Dv"],
) -> Partial:
    k, v = _cleaned(call, k, v)
    found = scores(call, q, k)
    return Partial(_read(call, weigh(found, None, plain=is_plain(call)), v), log_sum(found))


def _cleaned(call: Call, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return (k, v) if is_everything(call.mask) else call.clean(k, v, call.keep())


def _read(call: Call, weights: Tensor, v: Tensor) -> Tensor:
    grouped = group_heads(weights, call.num_kv_heads)
    return ungroup_heads(grouped @ v.to(weights.dtype).unsqueeze(2))
