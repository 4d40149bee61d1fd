"""Keys that hold one number for all layers, or a list. The rest: test_gguf.py."""

from pathlib import Path
from typing import Any

import pytest

from regard.hf.loading.untrusted import CheckpointError
from regard.hf.loading.untrusted_gguf import Header
from regard.plan.gguf_keys import Block, blocks_of, per_layer, windows
from regard.plan.reading import Keys


def keys(value: Any = None) -> Keys:
    return Keys({} if value is None else {"attention.x": value}, Path("a.gguf"), inside="llama.")


def test_one_number_or_a_list() -> None:
    assert per_layer(keys(3), "attention.x", 2, None) == (3, 3)
    assert per_layer(keys([3, 4]), "attention.x", 2, None) == (3, 4)
    assert per_layer(keys(), "attention.x", 2, (5, 5)) == (5, 5)
    for value in (None, 0, True, "3", [3], [3, 0], [3, True], [3, 4.0], (2,)):
        with pytest.raises(CheckpointError, match=r"'llama\.attention\.x' must be"):
            per_layer(keys(value), "attention.x", 2, None)


def test_windows() -> None:
    assert windows(keys(), 3, 0) == [True] * 3
    assert windows(keys(), 3, 1) == [False] * 3
    assert windows(keys(), 3, 2) == [True, False, True]
    given = Keys({"attention.sliding_window_pattern": [1, 0, 1]}, Path("a.gguf"))
    assert windows(given, 3, 0) == [True, False, True]


def test_tensors_by_block() -> None:
    tensors = {
        "blk.0.attn_q.weight": ((8, 12), 0, 0),
        "blk.11.attn_qkv.bias": ((12,), 0, 0),
        "output.weight": ((8, 9), 0, 0),
        "v.blk.0.attn_q.weight": ((8, 12), 0, 0),
    }
    found = blocks_of(Header({}, tensors, 0))
    assert found == {
        0: Block({"attn_q.weight": (8, 12)}),
        11: Block({"attn_qkv.bias": (12,)}),
    }
    assert found[0].outputs("attn_q") == 12 and found[0].outputs("attn_k") is None
    assert found[11].bias() == ("q_proj", "k_proj", "v_proj")
