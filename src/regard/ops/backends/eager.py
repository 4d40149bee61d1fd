"""The definition of attention: it supports every call and stores all the scores; the reference."""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from regard.ops.backends.common import without_hidden
from regard.ops.call import Call, is_everything
from regard.ops.definition import log_sum_exp, products_of_heads, scores, softmax
from regard.ops.estimates import unfused
from regard.ops.partial import Partial
from regard.rates import SPEED

_CACHED = 1 << 22  # scores that fit the last-level cache; more are read from memory in each pass


def objection(call: Call) -> str | None:
    """It supports every call."""
    return None


def estimate(call: Call) -> float:
    """The time of two matrix products, and of a dozen passes over the scores."""
    cells = call.batch * call.num_heads * call.num_queries * call.num_keys
    products = 2 * cells * (call.head_dim + call.v_head_dim)
    keys = call.batch * call.num_kv_heads * call.num_keys * (call.head_dim + call.v_head_dim)
    passes = 12 if cells <= _CACHED else 40
    queries = call.batch * call.num_heads * call.num_queries * (call.head_dim + call.v_head_dim)
    elements = passes * cells + 2 * keys + queries
    operators = 16 if is_everything(call.mask) else 57
    if call.device.type != "cpu":
        return unfused(call, operators=operators)
    operators += 16 + call.batch * call.num_kv_heads // 6  # small products of each key head
    return SPEED.call * operators + products / SPEED.products + elements / SPEED.elements


def run(
    call: Call,
    q: Float[Tensor, "B H L D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S Dv"],
) -> Float[Tensor, "B H L Dv"]:
    k, v = without_hidden(call, k, v)
    weights = softmax(call, scores(call, q, k))
    if call.dropout:
        weights = F.dropout(weights, call.dropout)
    return products_of_heads(weights, v.to(weights.dtype)).to(call.dtype)


def partial(
    call: Call,
    q: Float[Tensor, "B H L D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S Dv"],
) -> Partial:
    k, v = without_hidden(call, k, v)
    found = scores(call, q, k)
    out = products_of_heads(softmax(call, found), v.to(found.dtype))
    return Partial(out, log_sum_exp(found))
