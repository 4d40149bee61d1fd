"""The numbers that formulas are evaluated with."""

from dataclasses import replace

import pytest

from regard.plan.formula import size
from regard.plan.shapes import STORAGES, LayerShape
from regard.plan.sizes import KEY_HEADS, QUERY_HEADS, replicas, sizes, within_window

GQA = LayerShape(hidden_size=64, num_heads=8, num_kv_heads=2, head_dim=8, v_head_dim=8)


def test_every_size_of_the_layer_and_the_call_has_a_name():
    found = sizes(GQA, STORAGES["int4"], context=9, batch=3, dtype="bfloat16", tp=2, cp=5)
    assert found == {
        "hidden_size": 64,
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 8,
        "v_head_dim": 8,
        "qk_rope_head_dim": 0,
        "state_elements": 0,
        "context": 9,
        "batch": 3,
        "itemsize": 2,
        "key_bits": 4,
        "value_bits": 4,
        "group": 32,
        "page_size": 0,
        "tp": 2,
        "cp": 5,
        "rank": 4,
        "replicas": 1,
        "capacity": 10,
        "block": 1,
    }


def test_plain_numbers_have_the_bits_of_the_dtype():
    found = sizes(GQA, STORAGES["plain"], context=9, dtype="float64", capacity=30)
    assert (found["key_bits"], found["value_bits"], found["capacity"]) == (64, 64, 30)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "wrong",
    [{"context": -1}, {"context": 1.5}, {"batch": 0}, {"tp": 0}, {"cp": True}, {"capacity": 0}],
)
def test_numbers_out_of_range_are_refused(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"{name} is a whole number, at least"):
        sizes(GQA, STORAGES["plain"], **{"context": 9, **wrong})


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match="dtype='int3' is not one of float64"):
        sizes(GQA, STORAGES["plain"], context=9, dtype="int3")


def test_a_window_limits_tokens():
    tokens = size("context")
    assert within_window(GQA, tokens) is tokens
    windowed = LayerShape(
        hidden_size=64, num_heads=8, num_kv_heads=2, head_dim=8, v_head_dim=8, window=5
    )
    assert within_window(windowed, tokens).evaluate(context=9, window=5) == 5


def test_the_heads_of_a_rank_cover_all_heads():
    """As many sets of ranks as there are key heads, or the next number that divides the ranks; a
    set shares the query heads of its key heads."""
    for heads, key_heads in ((8, 2), (9, 3), (6, 6), (12, 1), (8, 8)):
        layer = replace(GQA, num_heads=heads, num_kv_heads=key_heads)
        for tp in range(1, 14):
            numbers = sizes(layer, STORAGES["plain"], context=1, tp=tp)
            sets = tp // replicas(key_heads, tp)
            assert tp % replicas(key_heads, tp) == 0
            assert sets >= min(key_heads, tp)
            own = KEY_HEADS.evaluate(**numbers)
            assert (own - 1) * sets < key_heads <= own * sets
            fewer = [n for n in range(min(key_heads, tp), sets) if tp % n == 0]
            assert fewer == []
            each = QUERY_HEADS.evaluate(**numbers) // own
            assert each * (tp // sets) >= heads // key_heads > (each - 1) * (tp // sets)
