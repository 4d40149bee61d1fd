"""Plans: costs of rows, least times, and what fits by search, against brute force."""

import random
from dataclasses import replace

import pytest

from regard.plan.cost import cost_of
from regard.plan.devices import DEVICES
from regard.plan.planning import largest, plan
from regard.plan.shapes import USUAL, LayerShape, ModelShape, Storage

GQA = LayerShape(
    hidden_size=64, num_heads=8, num_kv_heads=4, head_dim=8, v_head_dim=8, qk_rope_head_dim=8
)
MLA = replace(GQA, num_kv_heads=8, head_dim=12, kv_lora_rank=16, qk_rope_head_dim=4)


def model_of(*layers, dtype="float32"):
    return ModelShape(
        name="m", architecture="", layers=layers, hidden_size=layers[0].hidden_size, dtype=dtype
    )


def planned(*layers, **options):
    return plan(model_of(*layers), **({"devices": ["h100"]} | options))


def drawn_model(draw):
    """A few layers: windows, shared keys, latents."""
    kinds = (GQA, replace(GQA, window=draw.randint(1, 40)), MLA, replace(GQA, num_kv_heads=2))
    layers = draw.choices(kinds, k=draw.randint(1, 4))
    return model_of(*layers, *([replace(layers[0], keys_of=0)] * draw.randint(0, 1)))


def test_the_largest_number_that_fits_by_counting():
    draw = random.Random(1)
    for _ in range(300):
        steps = [draw.randint(0, 5) * draw.randint(0, 1) for _ in range(60)]
        memory, most = draw.randint(0, 120), draw.randint(1, 60)
        fitting = [n for n in range(1, most + 1) if sum(steps[:n]) <= memory]
        expected = None if len(fitting) == most else len(fitting)
        if memory >= steps[0] or not fitting:
            found = largest(lambda n, taken=steps: sum(taken[:n]), memory, most)
            assert found == expected, (steps, memory, most)


def test_the_search_takes_few_steps():
    asked = []

    def taken(n):
        asked.append(n)
        return n * 1000 + min(n, 50) * 900

    assert largest(taken, 10**14) == 10**11 - 45
    assert len(asked) < 90


def test_what_fits_fits_and_one_more_does_not():
    draw = random.Random(2)
    for _ in range(12):
        model = drawn_model(draw)
        memory, batch, context = draw.randint(10**3, 10**7), draw.randint(1, 3), draw.randint(1, 99)
        sizes = {"context": context, "batch": batch, "memory": memory}
        for row in plan(model, **sizes, devices=["h100"], attentions=["shipped"]).rows:
            shape = replace(model, layers=row.layers)

            def held(tokens, shape=shape, row=row, batch=batch):
                return cost_of(shape, row.storage, context=tokens, batch=batch).cache_bytes

            if row.largest_context is None:
                assert held(10**9) <= memory
                continue
            assert not row.largest_context or held(row.largest_context) <= memory
            assert held(row.largest_context + 1) > memory


def test_windows_alone_never_fill_the_memory():
    row = planned(replace(GQA, window=10), memory=10**6).rows[0]
    assert row.largest_context is None


def test_ideal_bytes_by_hand():
    found = planned(GQA, replace(GQA, window=5), context=100, batch=3)
    by_key = {(row.key, row.storage.name): row for row in found.rows}
    numbers = {
        "shipped": 64,
        "mha": 128,
        "gqa-2": 32,
        "mqa": 16,
        "deepseek-50": 32,
        "deepseek-25": 16,
    }
    for key, each in numbers.items():
        assert by_key[key, "plain"].cost.cache_bytes == 3 * (100 + 5) * each * 4, key
    assert by_key["latent-50", "plain"].cost.cache_bytes == 3 * 105 * (31 * 4 + 4)
    # a byte a number, and 4 for the scale and the zero of each head's key and value
    assert by_key["shipped", "int8"].cost.cache_bytes == 3 * 105 * (64 + 4 * 2 * 4)
    assert by_key["shipped", "K8V4"].cost.cache_bytes == 3 * 105 * (32 + 16 + 4 * 2 * 4)
    assert by_key["shipped", "int4"].cost.cache_bytes == 3 * 105 * (64 // 2 + 4 * 2 * 4)


def test_costs_are_those_of_the_layers():
    found = planned(GQA, GQA, replace(GQA, window=5), MLA, context=50, batch=2)
    for row in found.rows:
        shape = replace(found.model, layers=row.layers)
        assert row.cost == cost_of(shape, row.storage, context=50, batch=2, dtype="float32")


def test_ranks_share_heads_and_tokens():
    whole = planned(GQA, context=128)
    heads = planned(GQA, context=128, tp=4)
    tokens = planned(GQA, context=128, cp=4)
    for one, by_heads, by_tokens in zip(whole.rows, heads.rows, tokens.rows, strict=True):
        share = {"shipped": 4, "mha": 4, "gqa-2": 2}.get(one.key, 1)
        assert by_heads.cost.cache_bytes * share == one.cost.cache_bytes, one.key
        assert by_tokens.cost.cache_bytes * 4 == one.cost.cache_bytes, one.key


def test_times_are_sums_of_the_larger_of_two():
    found = planned(GQA, GQA, MLA, context=500, devices=["h100", "mi300x"])
    for row in found.rows[:6]:
        for phase, times in (("prefill", row.prefill), ("decode", row.decode)):
            for duration in times:
                device, expected = DEVICES[duration.device], 0.0
                for layer in row.layers:
                    cost = cost_of(layer, row.storage, context=500)
                    flops = getattr(cost, f"visible_{phase}_flops") / device.flops["float32"]
                    moved = getattr(cost, f"{phase}_bytes") / device.memory_bandwidth
                    expected += max(flops, moved)
                assert duration.seconds == pytest.approx(expected)
    assert found.rows[0].decode[0].bound == "memory"


def test_linear_layers_are_counted_as_far_as_they_are_known():
    linear = replace(GQA, state_elements=500)
    mixed, alone = planned(linear, GQA, context=100), planned(linear, context=100)
    assert mixed.rows[0].cost.cache_bytes == 500 * 4 + 100 * 64 * 4
    assert mixed.rows[0].cost.uncounted == 1
    assert mixed.rows[0].decode == planned(GQA, context=100).rows[0].decode
    assert [row.key for row in alone.rows] == ["shipped"] * len(USUAL)
    assert alone.rows[0].largest_context is None


def test_blocks_are_in_every_row_of_a_plan_that_has_them():
    for row in planned(GQA, replace(GQA, window=20), context=100, block=16).rows:
        numbers = row.cost.cache_bytes // (100 + 20)  # bytes of a token in one layer
        assert row.block_bytes == numbers * (112 + 16 * 3), row.key
    without = planned(GQA).rows[0]
    assert without.block_bytes is None


def test_rows_can_be_chosen():
    found = planned(GQA, attentions=["mqa", "shipped"])
    assert [(row.key, row.storage.name) for row in found.rows] == [
        (key, storage) for key in ("shipped", "mqa") for storage in USUAL
    ]
    found = planned(GQA, storages=["K4V4", "plain"], attentions=["mqa"], page_size=64)
    assert [row.storage for row in found.rows] == [
        Storage("K4V4", 4, 4, 64, page_size=64),
        Storage("plain", page_size=64),
    ]
    with pytest.raises(ValueError, match=r"attention='gqa:2' is not one of .* mean 'gqa-2'\?"):
        planned(GQA, attentions=["gqa:2"])
    with pytest.raises(ValueError, match=r"did you mean 'deepseek-50'\?"):
        planned(GQA, attentions=["mla"])
    for written in ("Deepseek-50", "MLA-50"):  # the name that `compare` and `convert` have, or not
        assert planned(GQA, attentions=[written]).rows[0].key == "deepseek-50"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"storages": ["int3"]}, "storage='int3' is not one of 'plain', 'int8', 'int4', 'K8V8'"),
        (
            {"storages": ["int8"], "page_size": 8},
            "format of pages='int8' is not one of 'plain', 'K8V8', 'K8V4'",
        ),
        ({"page_size": -1}, "page_size is a whole number from 0 to 1,000,000, got -1"),
        ({"context": 0}, "context is a whole number from 1 to 1,000,000,000,000, got 0"),
        ({"context": 10**15}, "got 1000000000000000"),
        ({"context": 1.5}, "context is a whole number"),
        ({"batch": -1}, "batch is a whole number"),
        ({"memory": 0}, "memory is a whole number"),
        ({"memory": float("nan")}, "memory is a whole number .* got nan"),
        ({"tp": 0}, "tp is a whole number"),
        ({"cp": True}, "cp is a whole number"),
        ({"dtype": "int8"}, "dtype='int8' is not one of"),
        ({"block": -1}, "block is a whole number from 0 to 1,000,000, got -1"),
        ({"block": 16, "page_size": 64}, "pages of 64 tokens are blocks of their own"),
        ({"devices": ["x"]}, "device='x' is not one of"),
        ({"devices": ["t4"], "dtype": "bfloat16"}, "no rate of Tesla T4 in bfloat16"),
    ],
)
def test_what_cannot_be_planned_is_refused(options, reason):
    with pytest.raises(ValueError, match=reason):
        planned(GQA, **options)


def test_the_largest_numbers_stay_exact():
    found = planned(GQA, context=10**12, batch=10**9, memory=10**18)
    assert found.rows[0].cost.cache_bytes == 10**12 * 10**9 * 64 * 4


def test_an_encoder_has_no_plan():
    layer = LayerShape(
        hidden_size=8, num_heads=2, num_kv_heads=2, head_dim=4, v_head_dim=4, causal=False
    )
    model = ModelShape(name="bert", architecture="bert", layers=(layer,), hidden_size=8)
    with pytest.raises(ValueError, match="bert is an encoder"):
        plan(model, context=10)


def test_a_plan_cannot_be_changed():
    with pytest.raises(AttributeError):
        planned(GQA).context = 5
