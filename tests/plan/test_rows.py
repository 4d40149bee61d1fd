"""Plans as values."""

import pytest

from regard.plan.planning import plan
from regard.plan.shapes import LayerShape, ModelShape

LAYER = LayerShape(hidden_size=64, num_heads=8, num_kv_heads=4, head_dim=8, v_head_dim=8)
MODEL = ModelShape(name="m", architecture="llama", layers=(LAYER,), hidden_size=64)


def test_a_plan_cannot_be_changed():
    found = plan(MODEL, devices=["h100"])
    with pytest.raises(AttributeError):
        found.context = 5
