"""A second process compiles the kernels that the rows decode with, and only those."""

import os
import time

import pytest

from regard.compare import chosen, compare
from regard.compare.ahead import compile_kernels, kernels_ahead
from regard.ops.kernels import launching
from tiny import tiny


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(tiny("llama").config.to_json_string())
    return tmp_path


def test_the_kernels_are_those_that_the_rows_decode_with(folder, texts, monkeypatch):
    """Of rows without a conversion; those of the others are compiled when they are needed."""
    tiles, own = [], launching.compiled
    monkeypatch.setattr(launching, "compiled", lambda *tile: tiles.append(tile) or own(*tile))
    rows = chosen(["int8", "k8v4"])
    compile_kernels(folder, [*rows, *chosen(["mqa"])], context=texts.windows.shape[1])
    ahead, tiles[:] = set(tiles), []
    compare(tiny("llama"), texts, candidates=rows, prefills=False)
    heads = tiny("llama").config
    group = heads.num_attention_heads // heads.num_key_value_heads
    assert ahead == {tile for tile in tiles if tile[0] == group} != set()  # one query, no prefill


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
