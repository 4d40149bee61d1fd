"""Timing with a clock of our own, the short benchmark, `regard bench` and `tune`, the scripts."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import regard.bench.timing as timing
import regard.cli.bench as bench_module
import regard.cli.tune as tune_module
from regard.bench import Tuning, bench
from regard.bench.short import TORCH, shapes
from regard.bench.timing import Cold, Store, interleave, product_rate, read_bandwidth, summary
from regard.ops.backends import BACKENDS, fused
from regard.ops.rates import DEFAULT, SPEED, Speed, read_speed
from regard_cli.app import run

ROOT = Path(__file__).parents[2]
TINY = {"heads": 4, "kv_heads": 2, "head_dim": 8, "keys": 32}


class Clock:
    """Time passes when someone works, and only then."""

    def __init__(self, monkeypatch):
        self.now, self.calls = 0.0, []
        monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def worker(self, name, *seconds):
        """Takes these times in turn, then the last for ever."""
        left = list(seconds)

        def work():
            self.calls.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return work


def test_variants_take_turns_forwards_and_backwards(monkeypatch):
    clock = Clock(monkeypatch)
    variants = {name: clock.worker(name, 1.0) for name in "abc"}
    times = interleave(variants, rounds=2, sample=0.0)
    assert "".join(clock.calls) == "aabbcc" + "abc" + "cba"  # the first call is not asked
    assert times == {name: [1.0, 1.0] for name in "abc"}


def test_quick_variants_repeat_until_the_sample_is_full(monkeypatch):
    clock = Clock(monkeypatch)
    variants = {"slow": clock.worker("s", 0.125), "quick": clock.worker("q", 0.0, 0.0078125)}
    times = interleave(variants, rounds=1, sample=0.0625)
    assert "".join(clock.calls) == "ss" + "qq" + "s" + "q" * 8
    assert times == {"slow": [0.125], "quick": [0.0078125]}


def test_no_round_begins_after_the_limit_once_there_are_three(monkeypatch):
    clock = Clock(monkeypatch)
    assert len(interleave({"a": clock.worker("a", 1.0)}, rounds=9, sample=0.0, limit=0.0)["a"]) == 3
    assert len(interleave({"a": clock.worker("a", 1.0)}, rounds=9, sample=0.0, limit=6.5)["a"]) == 5
    assert len(interleave({"a": clock.worker("a", 1.0)}, rounds=9, sample=0.0)["a"]) == 9


def test_a_drifting_clock_and_one_bad_round_change_no_ratio():
    base = [1.0, 2.0, 4.0, 8.0, 16.0]
    times = {"base": base, "half": [0.5, 1.0, 2.0, 4.0, 80.0]}
    rows = summary(times, "base")
    assert rows["base"] == {"ms": 4000.0, "ratio": 1.0, "low": 1.0, "high": 1.0}
    assert rows["half"] == {"ms": 2000.0, "ratio": 0.5, "low": 0.5, "high": 0.5}


def test_cold_buffers_are_taken_in_turn_and_outgrow_the_cache():
    made = iter(range(1000))
    cold = Cold(lambda: next(made), nbytes=100, total=350)
    assert len(cold.buffers) == 4
    assert [cold() for _ in range(6)] == [1, 2, 3, 0, 1, 2]
    assert len(Cold(lambda: 0, nbytes=1 << 40).buffers) == 2
    assert len(Cold(lambda: 0, nbytes=0).buffers) == 512


def test_a_store_cuts_one_tensor_behind_the_other():
    store = Store(torch.bfloat16, total=1 << 10)
    first, second = store(3, 5), store(2, 64)
    assert first.dtype == torch.bfloat16
    assert second.data_ptr() - first.data_ptr() == 64 * 2
    larger = store(store.numbers.numel() + 1)
    assert larger.isfinite().all()
    left = store.numbers.numel() - store.at
    assert store(left + 1).data_ptr() == store.numbers.data_ptr()  # from the start again


def test_limits_of_a_machine_are_positive():
    assert read_bandwidth(1) > 0
    assert product_rate(torch.bfloat16, 16) > 0


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(bench_module, "bench", partial(bench, rounds=1, cold=1 << 16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_shape_is_measured_against_torch(dtype):
    seen = []
    result = bench(
        **TINY, dtype=dtype, rounds=1, cold=1 << 16, progress=lambda *each: seen.append(each)
    )
    assert [measured.shape for measured in result.shapes] == shapes(*TINY.values())
    assert seen[-1][1:] == (6, 7)
    for measured in result.shapes:
        names = [entry.name for entry in measured.entries]
        assert names[:2] == [TORCH, f"regard: {measured.chosen}"]
        assert measured.chosen in BACKENDS
        assert measured.entries[0].ratio == 1.0
        assert all(entry.milliseconds > 0 and entry.of_limit > 0 for entry in measured.entries)
        assert measured.limit in ("reads", "products")
        ran = {measured.chosen, *(name.removeprefix("backend ") for name in names[2:])}
        assert ran | set(measured.absent) == set(BACKENDS)
        assert not ran & set(measured.absent)


def test_work_is_counted():
    decode, _, batch, few, prefill, _ = shapes(32, 8, 128, 4096)
    assert decode.nbytes(torch.float32) == 2 * 8 * 1024 * 128 * 4
    assert decode.flops == 4 * 32 * 1024 * 128
    assert batch.flops == 4 * decode.flops
    assert few.flops == 4 * 32 * 128 * sum(range(4089, 4097))
    assert prefill.flops == 4 * 32 * 128 * 512 * 513 // 2


@pytest.mark.parametrize("wrong", [{"heads": 0}, {"kv_heads": 3}, {"head_dim": 0}, {"keys": 0}])
def test_sizes_that_cannot_be_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        bench(**{**TINY, **wrong})


def command(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["regard", *map(str, arguments)])
    return run()


SIZES = [f"--{name.replace('_', '-')}={size}" for name, size in TINY.items()]


@pytest.mark.usefixtures("tiny")
def test_bench_prints_json_alone(monkeypatch, capsys):
    assert command(monkeypatch, "bench", *SIZES, "--dtype", "bfloat16", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result.keys() == {
        "torch", "threads", "dtype", "read_bandwidth", "product_rate", "shapes",
    }  # fmt: skip
    assert result["dtype"] == "bfloat16"
    for measured in result["shapes"]:
        assert measured.keys() == {
            "shape", "dtype", "chosen", "limit", "limit_milliseconds", "entries", "absent",
        }  # fmt: skip
        for entry in measured["entries"]:
            assert entry.keys() == {"name", "milliseconds", "ratio", "low", "high", "of_limit"}


@pytest.mark.usefixtures("tiny")
def test_bench_prints_a_table_for_people(monkeypatch, capsys):
    assert command(monkeypatch, "bench", *SIZES, "--threads", 1) == 0
    out = capsys.readouterr().out
    assert "1 thread\n" in out
    for shape in shapes(*TINY.values()):
        assert shape.name in out
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.usefixtures("tiny")
def test_bench_says_why_the_compiled_kernel_is_absent(monkeypatch, capsys):
    monkeypatch.setattr(fused, "is_installed", lambda: False)
    assert command(monkeypatch, "bench", *SIZES, "--head-dim", 16, "--threads", 1) == 0
    out = capsys.readouterr().out
    assert "backend fused: fused needs numba: python -m pip install 'regard[cpu]'." in out


@pytest.mark.parametrize(
    "arguments", [["--keys", "0"], ["--dtype", "int8"], ["--kv-heads", "3"], ["--what"]]
)
def test_wrong_options_are_exit_code_2(arguments, monkeypatch, capsys):
    assert command(monkeypatch, "bench", *arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err


@pytest.fixture
def tunable(monkeypatch, tmp_path):
    """A machine twice as fast as the source's, a cache of this test's own, the same rates after."""
    monkeypatch.delenv("REGARD_SPEED")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    now = Speed(2e-6, 320e9, 8e9, 14e9, 4e9)
    tuning = Tuning(now, dict.fromkeys(vars(now), 1.05))
    monkeypatch.setattr(tune_module, "measure_speed", lambda: tuning)
    before = dict(vars(SPEED))
    yield tuning
    vars(SPEED).clear()
    vars(SPEED).update(before)


def test_tune_keeps_what_it_measures_and_forgets_it(monkeypatch, capsys, tunable):
    assert command(monkeypatch, "tune") == 0
    out = capsys.readouterr().out
    assert "GFLOP/s" in out and "320" in out and "1.05x" in out
    assert read_speed() == tunable.speed == SPEED.now()
    assert command(monkeypatch, "tune", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result.keys() == {"path", "source", "before", "now", "spread"}
    assert result["source"] == vars(DEFAULT)
    assert result["before"] == result["now"] == vars(tunable.speed)
    assert command(monkeypatch, "tune", "--forget") == 0
    assert capsys.readouterr().out == f"removed {result['path']}\n"
    assert read_speed() is None
    assert command(monkeypatch, "tune", "--forget") == 0
    assert capsys.readouterr().out == "nothing was kept\n"


def test_tune_keeps_nothing_of_a_busy_machine(monkeypatch, capsys, tunable):
    tunable.spread["call"] = 40.0
    assert command(monkeypatch, "tune") == 2
    assert "busy: call varied 40.0-fold; nothing was kept" in capsys.readouterr().err
    assert read_speed() is None


def script(name, *arguments):
    """The JSON that a benchmark ends with."""
    command = [sys.executable, f"benchmarks/{name}.py", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_the_suite_measures_a_representative_dozen_and_draws_it(tmp_path):
    kept = tmp_path / "results.json"
    last = script("suite", "--quick", "--tiny", "--json", kept)
    assert {"benchmark", "machine", "results"} <= last.keys()
    assert json.loads(kept.read_text())["results"] == last["results"]
    assert 12 <= len(last["results"]) <= 16
    for result in last["results"]:
        assert "remark" not in result, result["remark"]  # every peer computes the same
        assert len(result["rows"]) >= 2
        for row in result["rows"].values():
            assert row.keys() == {"ms", "ratio", "low", "high", "of_limit", "gap"}
        assert result["rows"]["regard"]["ratio"] == 1.0
    pytest.importorskip("matplotlib")
    picture = tmp_path / "results.png"
    drawing = [sys.executable, "benchmarks/picture.py", kept, picture]
    subprocess.run(drawing, cwd=ROOT, check=True)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_choosing_judges_random_shapes(tmp_path):
    lines = tmp_path / "rows.jsonl"
    sizes = ["--shapes", 9, "--keys", 64, "--queries", 8, "--cold", 1, "--rounds", 1]
    (result,) = script("choosing", *sizes, "--dump", lines)["results"]
    assert result["shapes"] == 9
    assert 0 <= result["share"] <= 1
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    assert len(rows) >= 18
    assert {"expanded", "absorbed"} < {row["backend"] for row in rows}
    for row in rows:
        assert row["seconds"] > 0
        assert (row["estimate"] is None) == (row["kind"] == "latent")
