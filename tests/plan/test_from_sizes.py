"""Models from numbers on the command line."""

import pytest

from regard.plan.from_sizes import model_from_sizes


def test_what_is_left_out_follows():
    model = model_from_sizes(hidden_size=576, num_heads=9, num_kv_heads=3, num_layers=30)
    (layer,) = model.distinct()
    assert len(model.layers) == 30
    assert (layer.head_dim, layer.v_head_dim, layer.qk_rope_head_dim) == (64, 64, 64)
    assert (layer.kind, model.dtype) == ("GQA", "float32")


def test_the_values_of_mla_are_as_wide_as_keys_without_rope():
    model = model_from_sizes(
        hidden_size=7168,
        num_heads=128,
        head_dim=192,
        kv_lora_rank=512,
        q_lora_rank=1536,
        qk_rope_head_dim=64,
    )
    layer = model.layers[0]
    assert (layer.kind, layer.v_head_dim, layer.q_lora_rank) == ("MLA", 128, 1536)


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"num_heads": 0}, "num_heads is a whole number from 1 to 1,000,000, got 0"),
        ({"hidden_size": 10**15}, "hidden_size is a whole number from 1"),
        ({"num_heads": 7}, "num_heads=7 does not divide hidden_size=64; give head_dim"),
        ({"num_kv_heads": 3}, "num_kv_heads=3 does not divide num_heads=8"),
        ({"qk_rope_head_dim": 9}, "qk_rope_head_dim=9 is more than head_dim=8"),
        ({"q_lora_rank": 4}, "give kv_lora_rank"),
        ({"kv_lora_rank": 4}, "MLA needs qk_rope_head_dim"),
        ({"kv_lora_rank": 4, "qk_rope_head_dim": 2, "num_kv_heads": 2}, "leave num_kv_heads out"),
        ({"window": 0}, "window is a whole number from 1"),
        ({"num_layers": 0}, "num_layers is a whole number from 1"),
        ({"dtype": "int8"}, "dtype='int8' is not one of float64, float32"),
    ],
)
def test_sizes_that_cannot_be_are_refused(sizes, reason):
    with pytest.raises(ValueError, match=reason):
        model_from_sizes(**({"hidden_size": 64, "num_heads": 8} | sizes))
