"""A text like the command line's `--to` becomes a target, or is refused with the reason."""

import re

import pytest
import torch

from layers import attention
from regard import Rotary
from regard.compare import CANDIDATES
from regard.convert import Target, target_of

HALF = torch.float16


def shipped(**options):
    return [attention(8, **{"num_kv_heads": 4, "rope": Rotary(6), "head_dim": 6, **options})]


@pytest.mark.parametrize(
    ("to", "options", "wanted"),
    [
        ("mha", {}, Target("heads", num_kv_heads=8)),
        ("gqa:2", {}, Target("heads", num_kv_heads=2)),
        ("GQA-2", {}, Target("heads", num_kv_heads=2)),  # as some write it
        ("mqa", {}, Target("heads", num_kv_heads=1)),
        ("mla:7", {}, Target("exact-rope", rank=7)),
        ("mla:7", {"form": "deepseek"}, Target("deepseek", rank=7, rope_dim=6)),
        ("mla:7+4", {}, Target("deepseek", rank=7, rope_dim=4)),
        ("mla:7+4", {"portable": True}, Target("deepseek", rank=7, rope_dim=4, portable=True)),
        (
            "mla",
            {"budget": 0.25},
            Target("exact-rope", rank=11, by_layer=True),
        ),  # 48 bytes: 11 numbers, a position
        ("mla", {"budget": 1.0}, Target("exact-rope", rank=12)),  # the width: no loss
        (
            "mla",
            {"budget": 0.25, "dtype": HALF, "stored": HALF},
            Target("exact-rope", rank=10, by_layer=True),
        ),
        ("mla", {"budget": 0.25, "stored": HALF}, Target("exact-rope", rank=5, by_layer=True)),
        (
            "mla",
            {"budget": 0.5, "stored": HALF, "form": "deepseek"},
            Target("deepseek", rank=6, rope_dim=6),  # 48 bytes of float32
        ),
        ("mla", {"budget": 0.25, "form": "deepseek"}, Target("deepseek", rank=10, rope_dim=2)),
        ("mla", {"budget": 1.0, "form": "deepseek"}, Target("deepseek", rank=12, rope_dim=8)),
    ],
)
def test_a_text_is_read_as_its_target(to, options, wanted):
    assert target_of(to, shipped(), **options) == wanted


def test_rows_of_compare_are_targets_of_the_same_name():
    for candidate in CANDIDATES:
        if re.fullmatch(r"(latent|deepseek|portable)-\d+|mha|mqa", candidate.key):
            wanted = candidate.choose(shipped(num_kv_heads=2), torch.float32)
            found = target_of(candidate.key, shipped(num_kv_heads=2))
            assert found == wanted
            if found.kind != "heads":
                assert found.name.partition(",")[0] in candidate.name
    with pytest.raises(ValueError, match="to='latent-50' has no budget"):
        target_of("latent-50", shipped(), budget=0.5)


@pytest.mark.parametrize(
    ("to", "options", "message"),
    [
        ("mla:", {}, "is not one of mha, gqa:N"),
        ("gqa", {}, "is not one of .* did you mean 'gqa:2'?"),
        ("mla-50", {}, "did you mean 'deepseek-50'?"),  # as some write it
        ("joint latent", {}, "did you mean 'latent-50'?"),
        ("latent-75-int8", {}, "did you mean 'latent-75'?"),
        ("deepsek", {}, "did you mean 'deepseek-50'?"),
        ("K8V4", {}, "k8v4 is a cache of the model as it is: regard generate --cache k8v4"),
        ("gqa:3", {}, "the model has 4 for 8 query heads, and can have 1, 2, 4, 8"),
        ("gqa:16", {}, "can have 1, 2, 4, 8"),
        ("mqa", {"budget": 0.5}, "has no budget"),
        ("mha", {"form": "deepseek", "portable": True}, "has no form, portable"),
        ("mla", {}, re.escape("give either a rank, as in mla:128, or budget=0.5 (--budget)")),
        ("mla:7", {"budget": 0.5}, "give either"),
        ("mla:7", {"form": "exact-rope", "portable": True}, "exact-rope needs regard"),
        ("mla:7+4", {"form": "exact-rope"}, "exact-rope rotates all of them"),
        ("mla:13", {}, "rank=13 is not in 1..12"),
        ("mla:7+5", {}, "rope_dim=5 is not an even number in 2..24"),
        ("mla:7+26", {}, "in 2..24"),
        ("mla", {"budget": 1.5}, "over 0 and at most 1, got 1.5"),
        (
            "mla",
            {"budget": 0.05, "form": "deepseek"},
            "192 bytes a token is 9, and 8 of them are the rotary key",
        ),
    ],
)
def test_contradictions_are_refused(to, options, message):
    with pytest.raises(ValueError, match=message):
        target_of(to, shipped(), **options)


def test_one_layer_is_no_list_of_layers():
    with pytest.raises(TypeError, match=r"give \[layer\] for one|Type-check"):
        target_of("mqa", shipped()[0])
    with pytest.raises(TypeError, match=r"not empty"):
        target_of("mqa", [])


@pytest.mark.parametrize("to", [3, None])
def test_a_target_is_text(to, unchecked):
    with pytest.raises(TypeError, match=f"to is text, such as 'mqa' or 'mla:128', got {to}"):
        target_of(to, shipped())
