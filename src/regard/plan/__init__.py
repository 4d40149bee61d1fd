"""Costs of attention from shapes alone: parameters, cache bytes, FLOPs, bytes moved, time.

Examples:
    >>> from regard.plan import LayerShape, STORAGES, cost_of
    >>> gqa = LayerShape(
    ...     hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128, v_head_dim=128)
    >>> [cost_of(gqa, STORAGES[name], context=1, dtype="bfloat16").cache_bytes
    ...     for name in ("plain", "int8", "int4")]
    [4096, 2176, 1280]
"""

from regard.plan.cost import Cost, cost_of
from regard.plan.describing import describe
from regard.plan.planning import Plan, Row, plan
from regard.plan.sent import Sent, sent_of
from regard.plan.shapes import STORAGES, LayerShape, ModelShape, Storage

__all__ = [
    "STORAGES",
    "Cost",
    "LayerShape",
    "ModelShape",
    "Plan",
    "Row",
    "Sent",
    "Storage",
    "cost_of",
    "describe",
    "plan",
    "sent_of",
]
