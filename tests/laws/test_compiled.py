"""Layers and `attend` compiled and exported: as without compiling, in few graphs."""

import json
import os

import pytest
from filelock import FileLock

import traced_layers
from interpreters import run_python
from session import LONG
from traced_layers import DYNAMIC, MASKED, TRACED


def run(name):
    done = run_python(traced_layers.__file__, name)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module", params=TRACED)
def traced(request, tmp_path_factory):
    """The results of one kind of layer: `of(what)` returns those that are about that.

    They take half a minute, so the first worker that needs them writes them for the others.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # then it is this worker's, and its parent the run's
        folder = folder.parent
    file = folder / f"traced {request.param}.json"
    with FileLock(f"{file}.lock"):
        if not file.exists():
            file.write_text(json.dumps(run(request.param)))
    found = json.loads(file.read_text())

    def of(what, count):
        some = {name: each for name, each in found.items() if name.startswith(what)}
        assert len(some) == count(request.param), (request.param, sorted(found))
        return some

    return of


def test_decoding_compiles_to_two_graphs_and_three_when_a_window_binds(traced):
    for name, each in traced(
        "decode", lambda name: 2 + LONG if name in ("gqa", "mla") else 1
    ).items():
        assert each["graphs"] <= (3 if "window" in name else 2), name
        assert each["gap"] <= 1e-6, name


def test_graphs_end_at_a_cache_in_pages(traced):
    in_pages = traced("in pages", lambda name: int(name == "gqa"))
    assert max(in_pages.values(), default=0) <= 1e-6


def test_compiled_layers_train_as_eager_ones(traced):
    trained = traced("trained", lambda name: 2 if name in DYNAMIC else 1)
    assert max(trained.values()) <= 1e-5


@pytest.mark.long
def test_one_graph_takes_masks_of_any_size(traced):
    masked = traced("masked", lambda name: len(MASKED.get(name, ())))
    assert max(masked.values(), default=0) <= 1e-5


def test_one_exported_program_serves_every_batch_and_length(traced):
    exported = traced("exported", lambda name: 4 if LONG and name == "gqa" else 1)
    assert max(exported.values()) <= 1e-6


def test_graphs_give_what_backends_that_stay_out_of_them_give():
    found = run("attend")
    names = {each["name"] for each in found.values()}
    assert "fused" in names and names & {"blocked", "tiled"}
    assert max(each["gap"] for each in found.values()) <= 1e-6
