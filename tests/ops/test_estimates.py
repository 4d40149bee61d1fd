"""Estimates of torch's CPU kernel and of calls on a GPU: what they grow with, and the choices that
follow from rates; no GPU is needed for them."""

from dataclasses import replace

import pytest
import torch

from interpreters import run_python
from regard import EVERYTHING, Causal, SlidingWindow, Span, explain, prepare
from regard.devices import UNKNOWN
from regard.ops import estimates
from regard.ops.backends import BACKENDS, fused
from regard.ops.call import begins_with
from regard.ops.estimates import (
    kernel_seconds,
    mask_seconds,
    on_device,
    per_score,
    rates_note,
    visible_share,
)
from regard.rates import DEFAULT, SPEED, Speed

# Measured on one core of an Intel Xeon with AMX: bfloat16 products are seven times as fast.
AMX = Speed(
    call=2e-6, products=1.85e11, elements=1.7e9, row_float=3.3e9, row_half=4.9e9, rows_half=2.7e9,
    products_half=1.2e12, scores=2e9, stream=1.5e10, fused=1.28e11, tiled=1.2e12,
)  # fmt: skip
HALF = torch.bfloat16


@pytest.fixture
def rates():
    before = SPEED.now()
    yield SPEED.use
    SPEED.use(before)


def call(queries=1, keys=4096, heads=8, kv_heads=8, dim=128, dtype=torch.float32, **options):
    q = torch.empty(1, dtype=dtype).expand(1, heads, queries, dim)
    k = torch.empty(1, dtype=dtype).expand(1, kv_heads, keys, dim)
    return prepare(q, k, k, span=Span(keys - queries, keys, 0, keys), **options)


def seconds(queries, *, heads=8, kv_heads=8, **of):
    made = call(queries, heads=heads, kv_heads=kv_heads, **of).call
    return kernel_seconds(made, heads=heads, kv_heads=kv_heads, queries=queries)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_more_work_takes_longer(dtype, rates):
    rates(AMX)
    times = [seconds(queries, dtype=dtype) for queries in (1, 8, 16, 128, 512, 2048)]
    assert times == sorted(times)
    assert seconds(8, heads=32, dtype=dtype) > seconds(8, dtype=dtype)
    assert seconds(8, keys=8192, dtype=dtype) > 1.5 * seconds(8, dtype=dtype)


def test_few_queries_take_the_time_of_reading_and_many_that_of_products(rates):
    rates(AMX)
    elements = 8 * 4096 * 2 * 128
    assert seconds(1) == pytest.approx(elements / AMX.row_float, rel=0.2)
    assert seconds(4, dtype=HALF) == pytest.approx(elements / AMX.rows_half, rel=0.2)
    scores = 8 * 2048 * 4096
    products = scores * 4 * 128 / AMX.products + scores / AMX.scores
    assert seconds(2048) == pytest.approx(products, rel=0.2)


def test_one_block_of_one_head_keeps_one_thread_busy(rates):
    """Two heads take as long as one on two threads, and two blocks of queries as long as one."""
    torch.set_num_threads(2)
    rates(AMX)
    assert seconds(1, heads=1, kv_heads=1) == pytest.approx(seconds(1, heads=2, kv_heads=2))
    assert seconds(1, heads=4, kv_heads=4) == pytest.approx(2 * seconds(1, heads=2, kv_heads=2))
    one, two = (seconds(queries, heads=1, kv_heads=1) for queries in (32, 64))
    assert two < 1.3 * one


def test_the_softmax_of_a_score_takes_the_same_time_in_heads_of_every_width(rates):
    rates(AMX)
    narrow, wide = (per_score(call(dim=dim, dtype=HALF).call) for dim in (32, 64))
    assert 2 * narrow - wide == pytest.approx(1 / AMX.scores)


def test_keys_are_packed_once_for_many_queries_and_converted_for_each_block_of_few(rates):
    rates(replace(AMX, products_half=1e15, scores=1e12))  # reading alone
    one, two, packed = (seconds(queries, dtype=HALF, keys=2048) for queries in (32, 63, 64))
    assert two > 1.4 * one
    assert packed < 1.2 * one


@pytest.mark.skipif(not fused.is_installed(), reason="no numba")
def test_absorbed_latents_of_many_heads_use_products_where_these_are_fast(rates):
    """128 query heads on one key head, as a latent of 512 and 64 has them."""
    span = Span(4095, 4096, 0, 4096)

    def chosen(dtype):
        q, k = torch.empty(1, 128, 1, 576, dtype=dtype), torch.empty(1, 1, 1, 576, dtype=dtype)
        made = prepare(q, k, k[..., :512], span=span)
        assert made.call.joined
        return made.name

    rates(AMX)
    assert (chosen(HALF), chosen(torch.float32)) == ("grouped", "fused")
    rates(DEFAULT)
    assert (chosen(HALF), chosen(torch.float32)) == ("fused", "fused")


def test_values_that_begin_the_keys_are_seen():
    k = torch.empty(1, 1, 3, 8)
    assert begins_with(k, k[..., :4])
    for v in (k, k[..., 1:4], k[..., :4].clone(), k[..., ::2], k[:, :, ::2, :4]):
        assert not begins_with(k, v)
    one = k[..., :1]
    assert not begins_with(one.expand(-1, -1, -1, 8), one.expand(-1, -1, -1, 4))
    assert not torch.func.vmap(lambda x: torch.tensor(begins_with(x, x[..., :4])))(k).any()


def test_a_prefill_by_tiles_computes_whole_blocks_of_a_window(rates, monkeypatch):
    """32 queries whose windows are one key wide still compute a block of 32 keys, at least."""
    tiled = BACKENDS["tiled"]
    rates(AMX)
    one, block = (
        tiled.estimate(call(4096, mask=Causal() & SlidingWindow(size), dtype=HALF).call)
        for size in (1, 2)
    )
    whole = tiled.estimate(call(4096, mask=Causal(), dtype=HALF).call)
    assert one < block < 0.2 * whole
    assert block < 2.1 * one


def test_a_mask_takes_time_to_make_and_to_copy_for_each_head(rates):
    rates(AMX)
    made = [call(64, mask=mask).call for mask in (EVERYTHING, Causal())]
    none, causal = (mask_seconds(each) for each in made)
    assert none == 0
    assert causal > 64 * 4096 * 8 / AMX.elements  # 8 heads
    for name in ("grouped", "fused"):
        if name == "grouped" or fused.is_installed():
            plain, masked = (BACKENDS[name].estimate(each) for each in made)
            assert masked > plain + causal


COMPILED = """
import torch
from regard import Causal, SlidingWindow, attend
q = torch.zeros(1, 8, 40, 32, device="meta", dtype=torch.bfloat16)
k = torch.zeros(1, 2, 40, 32, device="meta", dtype=torch.bfloat16)
run = lambda q, k: attend(q, k, k, mask=Causal() & SlidingWindow(8))
print(tuple(torch.compile(run, fullgraph=True, backend="eager", dynamic=True)(q, k).shape))
"""


def on_meta(queries=4096, keys=4096, dtype=torch.bfloat16, **options):
    q = torch.empty(1, 32, queries, 128, dtype=dtype, device="meta")
    k = torch.empty(1, 8, keys, 128, dtype=dtype, device="meta")
    options.setdefault("span", Span(keys - queries, keys, 0, keys))
    return prepare(q, k, k, **options)


def test_estimates_scale_with_the_device(monkeypatch):
    fast = UNKNOWN._replace(memory=10 * UNKNOWN.memory, half=10 * UNKNOWN.half, single=1e15)
    made = on_meta(mask=Causal())
    slow = {name: BACKENDS[name].estimate(made.call) for name in ("sdpa", "blocked", "eager")}
    monkeypatch.setattr(estimates, "rates_of", lambda device: fast)
    for name, seconds in slow.items():
        assert BACKENDS[name].estimate(made.call) < 0.8 * seconds


def test_float32_is_estimated_as_torch_computes_it():
    made = on_meta(dtype=torch.float32).call
    exact = on_device(made, operators=1, kernel=0.5)
    torch.set_float32_matmul_precision("high")
    try:
        assert on_device(made, operators=1, kernel=0.5) < 0.5 * exact
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"mask": Causal()}, "sdpa"),
        ({"queries": 1, "mask": Causal()}, "sdpa"),
        ({"queries": 1, "mask": Causal(), "softcap": 30.0}, "grouped"),
        ({"queries": 1, "mask": Causal(), "sinks": torch.empty(32, device="meta")}, "grouped"),
    ],
)
def test_choices_on_a_device(options, name):
    assert on_meta(**options).name == name


def test_the_share_of_visible_scores():
    assert visible_share(on_meta(mask=Causal()).call) == pytest.approx(0.5, abs=0.05)
    window = on_meta(mask=Causal() & SlidingWindow(512)).call
    assert visible_share(window) == pytest.approx(512 / 4096, abs=0.02)
    assert visible_share(on_meta().call) == 1.0
    assert visible_share(on_meta(queries=1, mask=Causal()).call) == 1.0


def test_explain_says_what_the_estimates_rest_on():
    assert "shares of them as on an H100" in explain(on_meta()).splitlines()[-1]
    assert rates_note(torch.device("cpu")) is None


@pytest.mark.long
def test_calls_on_a_device_compile_in_one_graph():
    """The estimates are computed while a graph is traced, without a look at the driver. In another
    process, whose annotations are not checked: torch does not trace the checks."""
    done = run_python("-c", COMPILED)
    assert done.stdout.strip() == "(1, 8, 40, 32)", done.stderr[-3000:]
