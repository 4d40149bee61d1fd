"""A second process compiles the kernels that the rows decode with, and only those."""

import os
import time

import pytest

from regard.compare import chosen, compare
from regard.compare.ahead import compile_kernels, kernels_ahead
from regard.ops.kernels import launching, stepping
from tiny import tiny


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(tiny("llama").config.to_json_string())
    return tmp_path


def test_the_kernels_are_those_that_the_rows_decode_with(folder, texts, monkeypatch):
    """Those of steps, of which a row of a key head is one query, and those that append a token."""
    tiles, steps, own, step = [], [], launching.compiled, stepping.append_kernel
    for module in (launching, stepping):
        monkeypatch.setattr(module, "compiled", lambda *tile: tiles.append(tile) or own(*tile))
    monkeypatch.setattr(stepping, "append_kernel", lambda *it: steps.append(it) or step(*it))
    rows = chosen(["int8", "k8v4", "deepseek-50"])
    compile_kernels(folder, rows, context=texts.windows.shape[1])
    ahead, tiles[:] = list(tiles), []
    assert steps
    compare(tiny("llama"), texts, candidates=rows, prefills=False)
    heads = tiny("llama").config
    groups = heads.num_attention_heads // heads.num_key_value_heads, heads.num_attention_heads
    of_steps = [{tile for tile in each if tile[0] in groups} for each in (ahead, tiles)]
    assert of_steps[0] == of_steps[1] != set()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no process can be forked")
def test_the_process_ends_with_the_block_and_its_errors_are_its_own(
    folder, tmp_path, capfd, monkeypatch
):
    started, fork, children = time.perf_counter(), os.fork, []

    def recorded_fork():
        children.append(fork())
        return children[-1]

    monkeypatch.setattr(os, "fork", recorded_fork)
    with kernels_ahead(folder, chosen(["int8"]), context=2048):
        pass
    with kernels_ahead(tmp_path / "nowhere", chosen(["int8"]), context=2048):
        time.sleep(0.05)
    assert len(children) == 2
    for child in children:
        with pytest.raises(ChildProcessError):
            os.waitpid(child, os.WNOHANG)
    assert time.perf_counter() - started < 60
    assert capfd.readouterr() == ("", "")
