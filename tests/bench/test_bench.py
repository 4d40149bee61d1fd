"""The commands `regard bench` and `tune`, and the scripts of the benchmarks."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

import regard.cli.bench as bench_module
from regard.bench import bench
from regard.bench.short import shapes
from regard.ops.backends import fused
from regard_cli.app import run
from session import LONG

ROOT = Path(__file__).parents[2]
TINY = {"heads": 4, "kv_heads": 2, "head_dim": 8, "keys": 32}


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(bench_module, "bench", partial(bench, rounds=1, cold=1 << 16))


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


@pytest.mark.skipif(not LONG, reason="takes ten seconds")
def test_choosing_compares_backends_on_random_shapes(tmp_path):
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
