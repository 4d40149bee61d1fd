"""A reason for a speed stands where bytes or FLOPs of the layers that ran support it, else none."""

from dataclasses import replace

import pytest

from regard.compare.measure import Row
from regard.compare.reasons import outside, reasons
from regard.plan.shapes import STORAGES, LayerShape
from regard.turns import Ratio
from tiny import tiny

CONTEXT, OTHERS = 1024, 1_000
GQA = LayerShape(hidden_size=64, num_heads=8, num_kv_heads=2, head_dim=8, v_head_dim=8)
MHA = replace(GQA, num_kv_heads=8)
REBUILT = replace(GQA, kv_lora_rank=32, keys_by_position=True)


def row(name, layer, storage="plain", *, speed=None, noise=0.02):
    ratio = None if speed is None else Ratio(speed, speed - noise, speed + noise, 24)
    return Row(
        name,
        False,
        prefill_tokens_per_second=10_000.0,
        decode_tokens_per_second=1_000.0,
        decode_speed=ratio,
        perplexity=9.0,
        layers=(layer,) * 2,
        storage=storage and STORAGES[storage],
    )


def reason(layer, storage="plain", *, others=OTHERS, **speed):
    rows = [row("shipped", GQA), row("other", layer, storage, **speed)]
    found = reasons(rows, CONTEXT, "float32", others)
    assert set(found) <= {"other"}
    return found.get("other")


def test_more_bytes_are_the_reason_of_a_slower_step():
    weights = 2 * 2 * 64 * 64
    shipped = weights + 2 * 2 * 16 * 64 + 2 * 2 * 16 * (CONTEXT + 1) + 2 * 2 * 64
    more = weights + 2 * 2 * 64 * 64 + 2 * 2 * 64 * (CONTEXT + 1) + 2 * 2 * 64
    times = (more + OTHERS) / (shipped + OTHERS)
    said = f"a step reads an estimated {times:.2f} times as many bytes, weights included"
    assert reason(MHA, speed=1 / times) == said
    assert reason(MHA, speed=0.99 / times**2) is None  # they explain less than half of it
    assert reason(GQA, "int8", speed=1.5) is not None  # fewer bytes, and faster


@pytest.mark.parametrize(
    ("layer", "storage", "speed", "noise"),
    [
        (GQA, "int8", 0.63, 0.02),  # slower, and fewer bytes
        (MHA, "plain", 1.2, 0.02),  # faster, and more bytes
        (GQA, "plain", 0.63, 0.02),  # the same work
        (MHA, "plain", 0.9, 0.2),  # no difference was measured
        (MHA, None, 0.4, 0.02),  # a cache without a formula
    ],
)
def test_without_an_estimate_in_that_direction_there_is_no_reason(layer, storage, speed, noise):
    assert reason(layer, storage, speed=speed, noise=noise) is None


def test_more_arithmetic_is_the_reason_of_a_slower_step():
    """Keys are rebuilt from the latents of 1,024 tokens, at the rate of the shipped prefill."""
    found = reason(REBUILT, speed=0.6)
    assert found is not None and found.startswith("a step computes an estimated ")
    assert reason(REBUILT, speed=0.01) is None


def test_what_is_around_attention_dilutes_a_reason():
    assert reason(MHA, speed=0.6, others=0) is not None
    assert reason(MHA, speed=0.6, others=10_000_000) is None


def test_parameters_outside_of_attention_are_counted():
    model = tiny("llama")
    named = dict(model.named_parameters())
    assert outside(model) == sum(p.numel() for n, p in named.items() if ".self_attn." not in n)
