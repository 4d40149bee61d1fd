"""The attentions that a model is compared with: their keys, names and targets."""

import pytest
import torch

from layers import attention
from regard import Rotary
from regard.compare import CANDIDATES, chosen
from regard.convert import Target


def test_rows_are_chosen_by_their_keys():
    assert [each.key for each in chosen(["mqa", "int8"])] == ["shipped", "int8", "mqa"]
    with pytest.raises(ValueError, match=r"attention='nothing' is not one of 'shipped', 'int8'"):
        chosen(["nothing"])


def test_a_few_rows_run_unless_all_are_named():
    few = ["shipped", "int8", "k8v4", "mqa", "latent-50", "deepseek-50"]
    assert [each.key for each in chosen([])] == few
    every = [each.key for each in chosen(["all"])]
    assert set(few) < set(every) and len(every) == 12
    assert "gqa" not in every and len(chosen(["all", "gqa"])) == 13


@pytest.mark.parametrize(
    ("name", "nearest"), [("mla", "deepseek-50"), ("latent", "latent-50"), ("k8v5", "k8v4")]
)
def test_the_name_that_is_meant_stands_in_the_error(name, nearest):
    with pytest.raises(ValueError, match=f"did you mean '{nearest}'"):
        chosen([name])


def target_of(key, **options):
    """The target of a candidate for a layer of width 12 with heads of 6 channels."""
    (candidate,) = (each for each in CANDIDATES if each.key == key)
    return candidate.choose(
        [attention(8, **{"rope": Rotary(6), "head_dim": 6, **options})], torch.float32
    )


def test_targets_have_the_size_of_their_names():
    gqa = {"num_kv_heads": 4}
    assert target_of("shipped", **gqa) is None
    assert target_of("mha", **gqa) == Target("heads", num_kv_heads=8)
    assert target_of("gqa", **gqa) == Target("heads", num_kv_heads=2)
    assert target_of("latent-100", **gqa) == Target("exact-rope", rank=12)
    assert target_of("latent-25", **gqa) == Target("exact-rope", rank=11, by_layer=True)  # of 48
    deepseek = {"kind": "deepseek", "rank": 10, "rope_dim": 2}
    assert target_of("deepseek-50", num_kv_heads=2) == Target(**deepseek)
    assert target_of("portable-50", num_kv_heads=2) == Target(**deepseek, portable=True)


@pytest.mark.parametrize(
    ("key", "heads", "message"),
    [
        ("mha", 8, "the model is MHA as shipped"),
        ("gqa", 2, "2 key heads have no divisor between 1 and themselves"),
        ("mqa", 1, "the model is MQA as shipped"),
    ],
)
def test_attentions_that_a_model_cannot_have_are_refused(key, heads, message):
    with pytest.raises(ValueError, match=message):
        target_of(key, num_kv_heads=heads)
