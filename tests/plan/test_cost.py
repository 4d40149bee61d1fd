"""All costs of a layer or model together, against real layers, caches and torch's FLOP counter."""

from dataclasses import replace

import pytest

from costs import REAL as real_cost
from measured_layers import PART, SHAPES, measured
from regard.plan.shapes import STORAGES, LayerShape, ModelShape

PLAIN, INT8 = STORAGES["plain"], STORAGES["int8"]
GQA = LayerShape(hidden_size=64, num_heads=8, num_kv_heads=2, head_dim=8, v_head_dim=8)
LINEAR = replace(GQA, state_elements=100)


@pytest.fixture
def cost():
    """The module: tests/plan/test_wrong_formulas.py gives the same tests a wrong one."""
    return real_cost


def differences(each, cost):
    """The costs of a shape that are not what was measured, each with both numbers."""
    forms = {"prefill_form": each.form, "decode_form": each.form}
    found = cost.cost_of(each.shape, each.storage, **each.call, **forms)
    after = {**each.call, "context": each.call["context"] + 1}
    pairs = {
        "parameters": (found.parameters, each.parameters),
        "cache_bytes": (cost.cost_of(each.shape, each.storage, **after).cache_bytes, each.held),
        "allocated_bytes": (found.allocated_bytes, each.allocated),
        "prefill_flops": (found.prefill_flops, each.prefill_flops),
        "decode_flops": (found.decode_flops, each.decode_flops),
    }
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


@pytest.mark.parametrize("part", range(SHAPES // PART))
def test_costs_are_those_of_real_layers_and_caches(part, cost):
    for each in measured(part):
        assert differences(each, cost) == {}, each


def test_the_shapes_are_of_every_kind():
    drawn = [each for part in range(SHAPES // PART) for each in measured(part)]
    kinds = [each.shape.kind for each in drawn]
    assert len(drawn) == SHAPES
    assert all(kinds.count(kind) > SHAPES / 10 for kind in ("MHA", "GQA", "MQA", "MLA", "LatentKV"))
    assert sum(each.shape.window is not None for each in drawn) > SHAPES / 5
    assert sum(each.storage.key_bits is not None for each in drawn) > SHAPES / 5


def model(*layers):
    return ModelShape(name="m", architecture="llama", layers=layers, hidden_size=64)


def test_costs_of_layers_add_up(cost):
    window = replace(GQA, window=16)
    call = {"context": 100, "batch": 3, "dtype": "bfloat16"}
    one, other = (cost.cost_of(each, INT8, **call) for each in (GQA, window))
    assert cost.cost_of(model(GQA, window, GQA), INT8, **call) == one + other + one
    assert cost.cost_of(model(), INT8, context=5) == cost.Cost()


def test_layers_that_use_the_keys_of_another_cache_nothing(cost):
    shared = replace(GQA, keys_of=0)
    both = cost.cost_of(model(GQA, shared), PLAIN, context=10)
    own = cost.cost_of(model(GQA), PLAIN, context=10)
    assert both.cache_bytes == own.cache_bytes == 10 * 2 * (8 + 8) * 4
    assert both.allocated_bytes == own.allocated_bytes
    assert both.decode_flops > own.decode_flops


def test_of_linear_layers_the_state_alone_is_counted(cost):
    found = cost.cost_of(model(LINEAR, GQA, LINEAR), PLAIN, context=7, batch=2)
    full = cost.cost_of(GQA, PLAIN, context=7, batch=2)
    states = 2 * 2 * 100 * 4  # layers, rows, elements, bytes
    assert found.uncounted == 2
    assert found.cache_bytes == full.cache_bytes + states
    assert found.allocated_bytes == full.allocated_bytes + states
    assert found.prefill_flops == full.prefill_flops
    assert found.parameters == full.parameters


def test_the_dtype_is_the_models_own(cost):
    half = replace(model(GQA), dtype="bfloat16")
    own, given = (cost.cost_of(half, PLAIN, context=9, dtype=d) for d in (None, "float32"))
    assert given.cache_bytes == 2 * own.cache_bytes


def test_intensity_is_flops_of_a_byte(cost):
    found = cost.cost_of(GQA, PLAIN, context=50)
    assert found.prefill_intensity == found.visible_prefill_flops / found.prefill_bytes
    assert found.decode_intensity == found.visible_decode_flops / found.decode_bytes
    assert cost.Cost().prefill_intensity == cost.Cost().decode_intensity == 0.0
