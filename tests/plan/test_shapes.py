"""The shapes that costs are computed from."""

from dataclasses import replace

import pytest

from regard.plan.shapes import STORAGES, LayerShape, ModelShape, Workload, replicas

PLAIN = LayerShape(hidden_size=64, num_heads=8, num_kv_heads=2, head_dim=8, v_head_dim=8)


@pytest.mark.parametrize(
    ("kv_heads", "extra", "kind"),
    [
        (8, {}, "MHA"),
        (2, {}, "GQA"),
        (1, {}, "MQA"),
        (8, {"kv_lora_rank": 16}, "MLA"),
        (2, {"kv_lora_rank": 16, "keys_by_position": True}, "LatentKV"),
        (8, {"state_elements": 5}, "linear"),
    ],
)
def test_the_kind_follows_from_the_sizes(kv_heads, extra, kind):
    shape = LayerShape(
        hidden_size=64, num_heads=8, num_kv_heads=kv_heads, head_dim=8, v_head_dim=8, **extra
    )
    assert shape.kind == kind


def test_alike_layers_are_listed_together():
    window = LayerShape(
        hidden_size=64, num_heads=8, num_kv_heads=2, head_dim=8, v_head_dim=8, window=5
    )
    model = ModelShape(
        name="m", architecture="llama", layers=(window, PLAIN, window), hidden_size=64
    )
    assert model.distinct() == {window: (0, 2), PLAIN: (1,)}


def test_the_storages_have_the_names_that_users_write():
    assert [each.name for each in STORAGES.values()] == list(STORAGES)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "wrong", [{"context": -1}, {"context": 1.5}, {"batch": 0}, {"tp": 0}, {"cp": True}]
)
def test_numbers_out_of_range_are_refused(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"{name} is a whole number from"):
        Workload(**{"context": 9, **wrong})


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match="dtype='int3' is not one of float64"):
        Workload(context=9, dtype="int3")


def test_a_window_limits_tokens():
    assert PLAIN.within_window(9) == 9
    assert replace(PLAIN, window=5).within_window(9) == 5


def test_the_heads_of_a_rank_cover_all_heads():
    """As many sets of ranks as there are key heads, or the next number that divides the ranks; a
    set shares the query heads of its key heads."""
    for heads, key_heads in ((8, 2), (9, 3), (6, 6), (12, 1), (8, 8)):
        layer = replace(PLAIN, num_heads=heads, num_kv_heads=key_heads)
        for tp in range(1, 14):
            work = Workload(context=1, tp=tp)
            sets = tp // replicas(key_heads, tp)
            assert tp % replicas(key_heads, tp) == 0
            assert sets >= min(key_heads, tp)
            own = work.key_heads(layer)
            assert (own - 1) * sets < key_heads <= own * sets
            fewer = [n for n in range(min(key_heads, tp), sets) if tp % n == 0]
            assert fewer == []
            each = work.query_heads(layer) // own
            assert each * (tp // sets) >= heads // key_heads > (each - 1) * (tp // sets)
