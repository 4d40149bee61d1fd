"""The shapes that costs are computed from."""

import pytest

from regard.plan.shapes import STORAGES, LayerShape, ModelShape

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
