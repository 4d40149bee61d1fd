"""Lines are sums of the costs of layers, and their tables have them for every slider."""

from dataclasses import replace

import pytest

from covering import few
from regard.plan.cost import cost_of
from regard.plan.devices import DEVICES, roofline_seconds
from regard.plan.shapes import STORAGES, LayerShape
from regard.see.pages.lines import line_of

FULL = LayerShape(hidden_size=24, num_heads=6, num_kv_heads=3, head_dim=5, v_head_dim=7)
WINDOWED = replace(FULL, window=11)
STATE = replace(FULL, state_elements=100)
LAYERS = [FULL, WINDOWED, WINDOWED, replace(FULL, keys_of=0), FULL]


def line(layers=LAYERS, **options):
    return line_of("GQA-3", layers, list(STORAGES.values()), **({"dtype": "bfloat16"} | options))


def costs(layers, storage, **call):
    return [cost_of(each, STORAGES[storage], dtype="bfloat16", **call) for each in layers]


@pytest.mark.parametrize("storage", few(STORAGES, 3))
@pytest.mark.parametrize("context", [1, 11, 4097])
def test_totals_are_those_of_the_layers(storage, context):
    chosen = {"storage": storage, "context": context, "batch": 3}
    found = costs(LAYERS, storage, context=context, batch=3)
    assert line().cache_bytes(chosen) == sum(each.cache_bytes for each in found)
    device = DEVICES["h100"]
    seconds = [
        roofline_seconds(each.visible_decode_flops, each.decode_bytes, device, "bfloat16")[0]
        for each in found
    ]
    assert line().seconds(device, chosen) == pytest.approx(sum(seconds), rel=1e-12)


def test_layers_that_are_alike_are_one_part():
    assert sorted(count for _, count in line().layers) == [1, 2, 2]


def test_a_state_counts_in_the_cache_alone():
    chosen, device = {"storage": "plain", "context": 9, "batch": 2}, DEVICES["h100"]
    both, full = line([FULL, STATE]), line([FULL])
    assert both.cache_bytes(chosen) == full.cache_bytes(chosen) + 2 * 100 * 2
    assert both.seconds(device, chosen) == full.seconds(device, chosen)


def test_ranks_divide_heads_and_tokens():
    chosen = {"storage": "plain", "context": 9, "batch": 1}
    found = line([FULL], tp=2, cp=4).cache_bytes(chosen)
    one = cost_of(FULL, STORAGES["plain"], context=9, dtype="bfloat16", tp=2, cp=4)
    assert found == one.cache_bytes


@pytest.mark.parametrize("storage", few(STORAGES, 3))
def test_tables_have_the_values_of_every_batch(storage):
    contexts, memories = [1, 11, 300], [1000, 54_321]
    drawn = line([*LAYERS, STATE])
    table = drawn.tables(contexts, memories)[storage]
    for batch in (1, 7):
        for at, context in enumerate(contexts):
            chosen = {"storage": storage, "context": context, "batch": batch}
            assert batch * table["cache_bytes"][at] == drawn.cache_bytes(chosen)
            for (layer, count), part in zip(drawn.layers, table["parts"], strict=True):
                (cost,) = costs([layer], storage, context=context, batch=batch)
                moved = part["fixed"] + batch * part["moved"][at]
                assert moved == count * cost.decode_bytes
                assert batch * part["flops"][at] == count * cost.visible_decode_flops
    chosen = {"storage": storage, "batch": 2}
    assert table["largest"][1000] == drawn.largest_context(2001, chosen)


def test_a_storage_that_a_line_lacks_leaves_its_own():
    int4 = line_of("int4", [FULL], [STORAGES["int4"]], dtype="float32")
    chosen = {"storage": "plain", "context": 9, "batch": 1}
    assert int4.cache_bytes(chosen) == cost_of(FULL, STORAGES["int4"], context=9).cache_bytes


@pytest.mark.parametrize("memory", [0, 1, 1000, 123_456])
def test_the_largest_context_fits_and_one_token_more_does_not(memory):
    chosen = {"storage": "int8", "context": 1, "batch": 2}
    found = line().largest_context(memory, chosen)

    def taken(context):
        return line().cache_bytes({**chosen, "context": context})

    assert found == 0 or taken(found) <= memory
    assert taken(found + 1) > memory


def test_a_window_alone_fits_with_any_context():
    chosen = {"storage": "plain", "context": 1, "batch": 1}
    assert line([WINDOWED]).largest_context(1 << 20, chosen) is None
    assert line([WINDOWED]).largest_context(100, chosen) is not None
