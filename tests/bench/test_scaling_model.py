"""The model of scaling: by hand, at its limits, against published times and those measured here."""

import importlib
import json
from itertools import pairwise

import pytest

from pages import ROOT, blocks, read
from regard.distributed.ranks import sum_bytes
from regard.plan.cost import cost_of
from regard.plan.devices import device_of
from regard.plan.shapes import STORAGES, LayerShape, Workload

with pytest.MonkeyPatch.context() as _patched:
    _patched.syspath_prepend(str(ROOT / "benchmarks"))
    model = importlib.import_module("scaling_model")

H100, H200 = (
    model.Cluster(device_of(name), model.NVLINK_4, model.INFINIBAND_NDR)
    for name in ("h100", "h200")
)
POINTS = ROOT / "docs" / "distributed.json"
NEAR = (0.6, 1.3)  # modelled over measured on this machine, in float32: docs/scaling.md says so
PUBLISHED = (0.8, 1.2)  # the same of published times


def test_the_longer_of_two_times():
    machine = model.Machine(flops=10.0, bandwidth=100.0, sends=5.0, latency=0.5)
    assert machine.computing(20, 100) == 2.0
    assert machine.computing(5, 100) == 1.0
    assert machine.sending(10, 2) == 3.0


def test_a_ring_by_hand():
    """Four rounds of 2 s with messages of 1 s, of 2 s and of 10 s beside the first three."""
    assert model.ring_seconds(8, 3, 4) == 8
    assert model.ring_seconds(8, 6, 4) == 8
    assert model.ring_seconds(8, 30, 4) == 32
    assert model.ring_seconds(8, 0, 1) == 8


def test_one_rank_computes_all_and_sends_nothing():
    layers = cost_of(model.GQA.shape, STORAGES["plain"], context=4096)
    rate = 0.55 * 989e12
    flops = layers.visible_prefill_flops + 2 * (8.03e9 - layers.parameters) * 4096
    found = model.prefill(model.GQA, H200, 4096, 1)
    assert found.seconds == found.computing == pytest.approx(flops / rate)
    assert found.sending == 0
    assert found.weights == 2 * 8.03e9
    assert found.cache == 4096 * 32 * 2 * 8 * 128 * 2


def test_more_ranks_need_less_memory_and_no_less_than_their_share_of_the_time():
    for each_model in (model.GQA, model.MLA):
        for step in (model.prefill, model.training):
            found = [step(each_model, H200, 1 << 20, ranks) for ranks in (1, 2, 8, 16, 64)]
            memory = [each.memory for each in found]
            assert memory == sorted(memory, reverse=True)
            for ranks, each in zip((1, 2, 8, 16, 64), found, strict=True):
                assert each.seconds * ranks >= 0.999 * found[0].seconds


def test_a_link_of_any_rate_costs_nothing_where_messages_are_hidden():
    slow = model.Link(1e9, 0.0)
    tin = model.Cluster(device_of("h200"), slow, slow)
    assert model.prefill(model.GQA, tin, 10_000_000, 8).seconds == pytest.approx(
        model.prefill(model.GQA, H200, 10_000_000, 8).seconds, rel=1e-3
    )
    assert (
        model.prefill(model.GQA, tin, 8192, 8).seconds
        > 2 * model.prefill(model.GQA, H200, 8192, 8).seconds
    )


def test_latents_are_read_by_each_rank_unless_tokens_are_shared():
    alone = model.decode(model.MLA, H200, 1 << 20, 8, 8, sharded=False)
    shared = model.decode(model.MLA, H200, 1 << 20, 8, 8)
    assert alone.cache == 8 * shared.cache
    keys = model.decode(model.GQA, H200, 1 << 20, 8, 8, sharded=False)
    assert (
        keys.cache == model.decode(model.GQA, H200, 1 << 20, 8, 8).cache
    )  # a key head on each rank


def test_the_faster_plan_is_chosen():
    for each_model in (model.GQA, model.MLA):
        plans = [model.decode(each_model, H200, 1 << 20, 64, tp).seconds for tp in (8, 64)]
        assert model.fastest_decode(each_model, H200, 1 << 20, 64).seconds == min(plans)


@pytest.mark.parametrize(("tokens", "seconds"), [(1_000_000, 77), (128 * 1024, 3.8)])
def test_published_prefills(tokens, seconds):
    """Yang et al. 2024, arXiv:2411.01783: Llama 3 405B on 128 H100 in 16 nodes."""
    ratio = model.prefill(model.LARGE, H100, tokens, 128, 8).seconds / seconds
    assert PUBLISHED[0] < ratio < PUBLISHED[1]


MEASURED = json.loads(POINTS.read_text()) if POINTS.exists() else {}
WRITTEN = pytest.mark.skipif(
    not MEASURED.get("points"), reason="python benchmarks/distributed.py --docs writes it"
)


@pytest.fixture
def checks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("scaling")


@WRITTEN
def test_points_measured_on_two_ranks(checks):
    found = [each for each in checks.checks(MEASURED) if each.dtype == "float32"]
    assert len(found) >= 5
    assert [each for each in found if not NEAR[0] < each.ratio < NEAR[1]] == []


@WRITTEN
@pytest.mark.parametrize("page", ["docs/scaling.md", "docs/zh/scaling.md"])
def test_the_page_shows_what_was_measured(checks, page):
    rows = [*checks.table(checks.checks(MEASURED))]
    below = read(page).partition(f"{checks.RULE}\n")[2].splitlines()
    assert below[: len(rows) + 1] == [*rows, ""]


def test_points_of_a_machine_by_hand(checks):
    """One process takes 8 s and two processes that send nothing 5 s instead of 4; the ring's
    messages, a million bytes a second, are longer than the first round, and the last is 2.5 s."""
    layer = {"tokens": 8192, "dtype": "float32", "case": "prefill: causal attention"}
    report = {
        "points": [
            {"what": "rate of gloo, each way", "bytes_a_second": 1e6},
            {"what": "latency of gloo", "seconds": 0.25},
            {**layer, "what": "one process", "seconds": 8.0},
            {**layer, "what": "two ranks", "seconds": 10.0},
            {**layer, "what": "two halves, nothing sent", "seconds": 5.0},
        ]
    }
    (found,) = checks.checks(report)
    nbytes = 4096 * 2 * 4 * 64 * 4 + 32
    assert found.modelled == pytest.approx(2 * 0.25 + nbytes / 1e6 + 2.5)
    assert found.ratio == found.modelled / 10


@pytest.mark.parametrize("page", ["docs/scaling.md", "docs/zh/scaling.md"])
@pytest.mark.parametrize("table", model.TABLES)
def test_the_page_shows_what_is_printed(table, page):
    command = f"python benchmarks/scaling_model.py {table}"
    shown = next(
        after.code for before, after in pairwise(blocks(page)) if before.code.strip() == command
    )
    assert shown.rstrip() == "\n".join(model.TABLES[table]())


def test_heads_and_tokens_of_the_same_ranks_by_hand():
    """Two of 6 heads on each of 3 ranks, and of MLA its latents on all; 5 channels of a query."""
    sizes = {"hidden_size": 24, "num_heads": 6, "head_dim": 5, "v_head_dim": 3}
    gqa = LayerShape(**sizes, num_kv_heads=3)
    mla = LayerShape(**sizes, num_kv_heads=6, kv_lora_rank=7, qk_rope_head_dim=2)
    work = Workload(context=24, tp=3, batch=2, dtype="bfloat16")
    layers = ((gqa, 2 * 5 + 1 * (5 + 3), 3), (mla, 2 * (7 + 2), 7))
    for layer, gathered, width in layers:
        found = model.sharded_decode_sent(layer, work)
        outputs = 4 * (width + 1) * 4
        assert found == 2 * (2 * gathered * 2 + outputs) + sum_bytes(2 * 24 * 4, 3)
