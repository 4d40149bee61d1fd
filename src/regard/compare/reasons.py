"""Reasons why rows decode faster or slower than the first, estimated from shapes.

A step's bytes and FLOPs come from `regard.plan`, and the machine's rates from the first row: its
step reads its bytes in the time that was measured, its prefill computes its FLOPs. A reason is
given if the additional bytes or FLOPs take at least half of the difference at these rates, on a
logarithmic scale.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial

from torch import nn

from regard.compare.measure import Row
from regard.hf import attention_modules
from regard.plan.cost import Cost, cost_of, total_of
from regard.plan.shapes import DTYPE_BYTES

SHARE = 0.5  # of the logarithm of the measured ratio that the estimate explains at least


def outside(model: nn.Module) -> int:
    """Parameters of a model that are not of its attention."""
    attention = attention_modules(model).values()
    inside = sum(each.numel() for own in attention for each in own.parameters())
    return sum(each.numel() for each in model.parameters()) - inside


def reasons(rows: Sequence[Row], context: int, dtype: str, others: int) -> Mapping[str, str]:
    """The reason of each row whose decode speed differs from the first row's, where there is one;
    `others` are the parameters of the model that are not of its attention."""
    ran = [row for row in rows if row.perplexity is not None]
    return {row.name: why for row in ran if (why := _reason(row, ran[0], context, dtype, others))}


def _reason(row: Row, first: Row, context: int, dtype: str, others: int) -> str:
    own, base = (_cost(each, context, dtype) for each in (row, first))
    if row.decode_speed is None or not row.decode_speed.differs or own is None or base is None:
        return ""
    prefilled, decoded = first.prefill_tokens_per_second, first.decode_tokens_per_second
    assert prefilled is not None and decoded is not None
    step = 1 / decoded
    weights = others * DTYPE_BYTES[dtype]
    reading = (base.decode_bytes + weights) / step
    products = base.visible_prefill_flops / context + 2 * others
    more_bytes = (own.decode_bytes - base.decode_bytes) / reading
    more_flops = (own.visible_decode_flops - base.visible_decode_flops) / (products * prefilled)
    explained = math.log(max(1 + (more_bytes + more_flops) / step, 0.01))
    if explained / -math.log(row.decode_speed.value) < SHARE:
        return ""
    if abs(more_bytes) > abs(more_flops):
        times = (own.decode_bytes + weights) / (base.decode_bytes + weights)
        return f"a step reads an estimated {times:.2f} times as many bytes, weights included"
    times = (own.visible_decode_flops + 2 * others) / (base.visible_decode_flops + 2 * others)
    return f"a step computes an estimated {times:.1f} times as much"


def _cost(row: Row, context: int, dtype: str) -> Cost | None:
    """The attention's costs in the form of MLA that computes less; None if they are not known."""
    if row.storage is None:
        return None
    cost = partial(cost_of, storage=row.storage, context=context, dtype=dtype)
    try:
        forms = [
            total_of(cost(layer, decode_form=form) for layer in row.layers)
            for form in ("absorbed", "expanded")
        ]
    except ValueError:  # a mask or a storage without a formula
        return None
    return min(forms, key=lambda form: form.visible_decode_flops)
