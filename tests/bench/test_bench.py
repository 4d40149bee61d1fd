"""The commands `regard bench` and `tune`, and the scripts of the benchmarks."""

import json
import re
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from interpreters import run_python
from regard.bench import bench
from regard.bench.short import shapes
from regard.cli.app import run
from regard.ops.backends import BACKENDS, fused

ROOT = Path(__file__).parents[2]
TINY = {"heads": 4, "kv_heads": 2, "head_dim": 16, "keys": 32}


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr("regard.bench.bench", partial(bench, rounds=1, cold=1 << 16))


def command(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["regard", *map(str, arguments)])
    return run()


SIZES = ["--num-heads=4", "--num-kv-heads=2", "--head-dim=16", "--keys=32"]


@pytest.mark.usefixtures("tiny")
def test_bench_prints_json_alone(monkeypatch, capsys):
    assert command(monkeypatch, "bench", *SIZES, "--dtype", "bfloat16", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result.keys() == {
        "processor", "torch", "threads", "dtype", "read_bandwidth", "product_rate", "shapes",
    }  # fmt: skip
    assert result["dtype"] == "bfloat16"
    for measured in result["shapes"]:
        assert measured.keys() == {
            "shape", "dtype", "chosen", "limit", "limit_milliseconds", "entries", "absent",
        }  # fmt: skip
        for entry in measured["entries"]:
            assert entry.keys() == {
                "name", "milliseconds", "ratio", "low", "high", "of_limit", "pairs",
            }  # fmt: skip


@pytest.mark.long
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
    assert command(monkeypatch, "bench", *SIZES, "--threads", 1, "--all") == 0
    out = capsys.readouterr().out
    assert "backend fused: fused needs numba: python -m pip install 'regard[cpu]'." in out


@pytest.mark.parametrize(
    "arguments", [["--keys", "0"], ["--dtype", "int8"], ["--num-kv-heads", "3"], ["--what"]]
)
def test_wrong_options_are_exit_code_2(arguments, monkeypatch, capsys):
    assert command(monkeypatch, "bench", *arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err


def script(name, *arguments):
    """The JSON that a benchmark ends with."""
    done = run_python(f"benchmarks/{name}.py", *arguments, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


PEERS = ("onnx", "onnxruntime", "openvino")
WITHOUT_PEERS = f"""
import runpy, sys
sys.path.insert(0, "benchmarks")
sys.modules.update(dict.fromkeys({PEERS}))  # importing them fails, installed or not
runpy.run_path("benchmarks/suite.py", run_name="__main__")
"""


def tiny_suite(*arguments):
    """The suite in tiny sizes, where no optional peer is installed."""
    return run_python("-c", WITHOUT_PEERS, "--tiny", *arguments, cwd=ROOT)


@pytest.mark.long
def test_the_suite_measures_a_representative_dozen_and_draws_it(tmp_path):
    kept = tmp_path / "results.json"
    last = script("suite", "--quick", "--tiny", "--json", kept)
    assert {"benchmark", "machine", "results"} <= last.keys()
    assert json.loads(kept.read_text())["results"] == last["results"]
    assert {"processor", "vectors", "threads", "packages"} <= last["machine"].keys()
    assert 12 <= len(last["results"]) <= 16
    for result in last["results"]:
        assert "remark" not in result, result["remark"]  # every peer computes the same
        assert len(result["rows"]) >= 2
        for target in result["targets"]:
            assert target["ratio"] == result["rows"][target["contestant"]]["ratio"]
            assert target["met"] == (target["ratio"] <= target["most"])
        for row in result["rows"].values():
            assert row.keys() == {"ms", "ratio", "low", "high", "of_limit", "gap"}
        assert result["rows"]["regard"]["ratio"] == 1.0
    pytest.importorskip("matplotlib")
    picture = tmp_path / "results.png"
    drawing = [sys.executable, "benchmarks/picture.py", kept, picture]
    subprocess.run(drawing, cwd=ROOT, check=True)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_installed_peers_run_where_they_can():
    """ONNX Runtime and OpenVINO, on a machine that has them."""
    has = {name for name in PEERS if find_spec(name) is not None}
    if not has:
        pytest.skip(f"none of {', '.join(PEERS)} is installed")
    results = script("suite", "--tiny", "--only", "4K, 32/8, float32")["results"]
    names = {name.partition(",")[0] for result in results for name in result["rows"]}
    assert ("OpenVINO" in names) == ("openvino" in has)
    assert ("ONNX Runtime" in names) == ({"onnx", "onnxruntime"} <= has)
    assert [result["remark"] for result in results if "remark" in result] == []


def test_a_run_in_parts_without_peers_fills_one_file(tmp_path):
    file = tmp_path / "results.json"
    done = tiny_suite("--only", "decode 4K, 32/1, bfloat16", "--json", file)
    assert done.returncode == 0, done.stderr[-3000:]
    (told,) = re.findall(r"^without (.*): not installed \((.*)\)$", done.stdout, re.MULTILINE)
    assert set(PEERS) <= set(told[0].split(", "))
    assert told[1] == "python -m pip install -r benchmarks/requirements.txt"

    done = tiny_suite("--only", "decode 4K, 32/1", "--resume", "--json", file)
    assert done.returncode == 0, done.stderr[-3000:]
    cases = ["decode 4K, 32/1, float32", "decode 4K, 32/1, bfloat16"]
    assert [row["case"] for row in json.loads(done.stdout.splitlines()[-1])["results"]] == cases[:1]
    whole = json.loads(file.read_text())
    assert [row["case"] for row in whole["results"]] == cases
    assert set(PEERS) & {name for name, one in whole["machine"]["packages"].items() if one} == set()

    whole["machine"]["processor"] = "another"
    file.write_text(json.dumps(whole))
    done = tiny_suite("--only", "decode 4K, 32/1", "--json", file)
    assert done.returncode == 2
    assert "one file holds one machine (processor: another, now " in done.stderr
    assert json.loads(file.read_text()) == whole


@pytest.mark.long
def test_a_whole_model_writes_the_same_by_each():
    (result,) = script("whole_model", "--tiny", "--formats", "F32")["results"]
    has = find_spec("xllamacpp") is not None
    assert ("llama.cpp, F32" in result["rows"]) == has
    for name, row in result["rows"].items():
        assert row["same"] == 1 or "float32" not in name or "int4" in name


@pytest.mark.long
def test_the_benchmark_for_gpus_runs_without_one():
    """What it times there cannot be tested here: that it runs, compares and prints can."""
    (result,) = script("gpu", "--device", "cpu", "--tiny")["results"]
    assert not result["left_out"]
    assert len(result["cases"]) == 5
    for case in result["cases"]:
        rows = case["rows"]
        assert {f"regard {name}" for name in BACKENDS} < rows.keys()
        timed = [row for row in rows.values() if "ms" in row]
        assert len(timed) >= 5
        assert all(row["error"] <= 1.5 and row["share"] > 0 for row in timed)
        assert all("ms" in row or "objects" in row for row in rows.values())  # none is wrong


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_benchmark_for_gpus_says_that_there_is_none():
    done = run_python("benchmarks/gpu.py", cwd=ROOT)
    assert done.returncode == 1
    assert "torch sees no GPU here; --device cpu --tiny" in done.stderr


@pytest.mark.long
def test_choosing_compares_backends_on_random_shapes(tmp_path):
    lines = tmp_path / "rows.jsonl"
    sizes = ["--shapes", 9, "--keys", 64, "--queries", 8, "--cold", 1, "--rounds", 1, "--tries", 0]
    (result,) = script("choosing", *sizes, "--dump", lines)["results"]
    assert result["shapes"] <= 9 and result["over"] >= 0
    assert 0 <= result["share"] <= 1
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    assert (
        len({tuple(row[name] for name in ("keys", "heads", "mask", "dtype")) for row in rows}) > 5
    )
    assert len(rows) >= 18
    assert {"expanded", "absorbed"} < {row["backend"] for row in rows}
    for row in rows:
        assert row["seconds"] > 0
        assert (row["estimate"] is None) == (row["kind"] == "latent")
