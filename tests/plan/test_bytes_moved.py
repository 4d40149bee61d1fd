"""Bytes moved, counted by hand."""

from dataclasses import replace

import pytest

from costs import REAL as real_cost
from regard.plan.shapes import STORAGES, LayerShape, storages_of

PLAIN, INT8 = STORAGES["plain"], STORAGES["int8"]
(PAGES,) = storages_of(["K8V4"], page_size=4)
GQA = LayerShape(hidden_size=64, num_heads=8, num_kv_heads=2, head_dim=8, v_head_dim=8)
WEIGHTS = 64 * (64 + 16 + 16 + 64)  # parameters of GQA
TOKEN = 2 * (8 + 8)  # numbers of keys and values


@pytest.fixture
def cost():
    """The module: tests/plan/test_wrong_formulas.py gives the same tests a wrong one."""
    return real_cost


def step_of(cost, layer, storage=PLAIN, **call):
    return cost.decode_bytes(layer, storage, cost.Workload(**call))


def prefill_of(cost, layer, storage=PLAIN, **call):
    return cost.prefill_bytes(layer, storage, cost.Workload(**call))


def test_a_step_reads_weights_and_cache_once(cost):
    found = step_of(cost, GQA, context=9, batch=3)
    assert found == 4 * (WEIGHTS + 3 * (2 * 64 + (10 + 1) * TOKEN))
    codes = step_of(cost, GQA, INT8, context=9, batch=3)
    assert codes == 4 * (WEIGHTS + 3 * 2 * 64) + 3 * 11 * 2 * (8 + 4 + 8 + 4)


def test_a_step_reads_visible_keys(cost):
    for layer, keys in ((replace(GQA, window=4), 4), (replace(GQA, chunk=6), 4)):
        found = step_of(cost, layer, context=9)
        assert found == 4 * (WEIGHTS + 2 * 64 + (keys + 1) * TOKEN)


def test_a_prefill_writes_and_reads_every_token(cost):
    for layer in (GQA, replace(GQA, window=4)):
        found = prefill_of(cost, layer, context=9, batch=3)
        assert found == 4 * (WEIGHTS + 3 * 9 * (2 * 64 + 2 * TOKEN))


def test_shared_keys_are_read_and_not_written(cost):
    shared = replace(GQA, keys_of=0)
    weights = 64 * (64 + 64)
    step = step_of(cost, shared, context=9)
    assert step == 4 * (weights + 2 * 64 + 10 * TOKEN)
    prefill = prefill_of(cost, shared, context=9)
    assert prefill == 4 * (weights + 9 * (2 * 64 + TOKEN))


def test_ranks_share_heads_and_tokens(cost):
    a_rank = 64 * (32 + 8 + 8 + 32)
    step = step_of(cost, GQA, context=9, tp=2, cp=3)
    assert step == 4 * (a_rank + 2 * 64 + (4 + 1) * TOKEN // 2)
    prefill = prefill_of(cost, GQA, context=9, tp=2, cp=3)
    assert prefill == 4 * (a_rank + 3 * 2 * 64 + (9 + 3) * TOKEN // 2)


def test_linear_attention_is_refused(cost):
    for kind in (prefill_of, step_of):
        for storage in (PLAIN, PAGES):
            with pytest.raises(ValueError, match="do not follow from its sizes"):
                kind(cost, replace(GQA, state_elements=5), storage, context=9)


def test_a_step_reads_pages_as_they_are_stored(cost):
    """14 tokens in pages of 4: two of codes between the first page and the open one."""
    plain, codes = 4 * TOKEN, 2 * (8 + 4 + 4 + 4)
    step = step_of(cost, GQA, PAGES, context=14, batch=3)
    cached = 8 * codes + (4 + 3) * plain + plain  # read with the new token, and written
    assert step == 4 * (WEIGHTS + 3 * 2 * 64) + 3 * cached
    windowed = replace(GQA, window=6)  # slots 9..14
    step = step_of(cost, windowed, PAGES, context=14)
    assert step == 4 * (WEIGHTS + 2 * 64) + 3 * codes + 3 * plain + plain
    whole = replace(PAGES, name="plain", key_bits=None, value_bits=None)
    step = step_of(cost, GQA, whole, context=14)
    assert step == step_of(cost, GQA, context=14)


def test_a_prefill_in_pages_reads_its_tokens_before_they_are_rounded(cost):
    found = prefill_of(cost, GQA, PAGES, context=14)
    cached = 14 * 4 * TOKEN + 8 * 2 * (8 + 4 + 4 + 4) + 6 * 4 * TOKEN
    assert found == 4 * (WEIGHTS + 14 * 2 * 64) + cached
