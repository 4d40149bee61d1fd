"""Lines are sums of the costs of layers, with the sizes that sliders give."""

from dataclasses import replace

import pytest

from covering import few
from regard.plan.cost import cost_of
from regard.plan.devices import DEVICES, roofline_seconds
from regard.plan.shapes import STORAGES, LayerShape
from regard.see.pages.lines import Slider, line_of

FULL = LayerShape(hidden_size=24, num_heads=6, num_kv_heads=3, head_dim=5, v_head_dim=7)
WINDOWED = replace(FULL, window=11)
STATE = replace(FULL, state_elements=100)
LAYERS = [FULL, WINDOWED, WINDOWED, replace(FULL, keys_of=0), FULL]
FOLLOWS = {"num_heads": "heads", "num_kv_heads": "key_heads"}


def line(layers=LAYERS, **options):
    given = {"dtype": "bfloat16", "follows": FOLLOWS, **options}
    return line_of("GQA-{key_heads}", layers, list(STORAGES.values()), **given)


def costs(layers, storage, **call):
    return [cost_of(each, STORAGES[storage], dtype="bfloat16", **call) for each in layers]


@pytest.mark.parametrize("storage", few(STORAGES, 3))
@pytest.mark.parametrize(("heads", "key_heads", "context"), [(6, 3, 1), (6, 1, 11), (14, 7, 4097)])
def test_totals_are_those_of_the_layers_with_these_sizes(storage, heads, key_heads, context):
    chosen = {
        "storage": storage, "heads": heads, "key_heads": key_heads, "context": context, "batch": 3,
    }  # fmt: skip
    layers = [replace(each, num_heads=heads, num_kv_heads=key_heads) for each in LAYERS]
    found = costs(layers, storage, context=context, batch=3)
    for name in ("cache_bytes", "visible_decode_flops", "decode_bytes"):
        assert line().total(name, chosen) == sum(getattr(each, name) for each in found)
    device = DEVICES["h100"]
    seconds = [
        roofline_seconds(each.visible_decode_flops, each.decode_bytes, device, "bfloat16")[0]
        for each in found
    ]
    assert line().seconds(device, "bfloat16", chosen) == pytest.approx(sum(seconds), rel=1e-12)


def test_layers_that_are_alike_are_one_part():
    assert sorted(part.count for part in line().parts) == [1, 2, 2]


def test_a_state_keeps_its_sizes_and_counts_in_the_cache_alone():
    chosen = {"storage": "plain", "heads": 12, "key_heads": 2, "context": 9, "batch": 2}
    both, full = line([FULL, STATE]), line([FULL])
    assert both.total("cache_bytes", chosen) == full.total("cache_bytes", chosen) + 2 * 100 * 2
    assert both.total("decode_bytes", chosen) == full.total("decode_bytes", chosen)


def test_ranks_divide_heads_and_tokens():
    chosen = {"storage": "plain", "heads": 6, "key_heads": 3, "context": 9, "batch": 1}
    found = line([FULL], tp=2, cp=4).total("cache_bytes", chosen)
    assert (
        found
        == cost_of(FULL, STORAGES["plain"], context=9, dtype="bfloat16", tp=2, cp=4).cache_bytes
    )


def test_a_storage_that_a_line_lacks_leaves_its_own():
    int4 = line_of("int4", [FULL], [STORAGES["int4"]], dtype="float32")
    chosen = {"storage": "plain", "context": 9, "batch": 1}
    assert (
        int4.total("cache_bytes", chosen) == cost_of(FULL, STORAGES["int4"], context=9).cache_bytes
    )


def test_the_name_has_the_values_of_sliders():
    assert line().named({"key_heads": 7, "heads": 14}) == "GQA-7"


@pytest.mark.parametrize("memory", [0, 1, 1000, 123_456])
def test_the_largest_context_fits_and_one_token_more_does_not(memory):
    chosen = {"storage": "int8", "heads": 6, "key_heads": 2, "context": 1, "batch": 2}
    found = line().largest_context(memory, chosen)

    def taken(context):
        return line().total("cache_bytes", {**chosen, "context": context})

    assert found == 0 or taken(found) <= memory
    assert taken(found + 1) > memory


def test_a_window_alone_fits_with_any_context():
    chosen = {"storage": "plain", "heads": 6, "key_heads": 3, "context": 1, "batch": 1}
    assert line([WINDOWED]).largest_context(1 << 20, chosen) is None
    assert line([WINDOWED]).largest_context(100, chosen) is not None


def test_a_slider_that_divides_another_has_its_divisors():
    slider = Slider("key_heads", "Key heads", (1, 2, 3, 4, 6), 2, tuple("12346"), divides="heads")
    assert slider.fitting({"heads": 8}) == [1, 2, 4]
    assert replace(slider, divides="").fitting({"heads": 8}) == [1, 2, 3, 4, 6]
