"""RoPE in the spellings of transformers 4 and 5. Frequencies: test_configurations.py."""

from pathlib import Path
from typing import Any

import pytest

from regard import Rotary
from regard.hf.loading.untrusted import CheckpointError
from regard.plan.reading import Keys
from regard.plan.ropes import rotary
from regard.rope.scaling import LinearScaling, Llama3, Yarn


def keys(**values: Any) -> Keys:
    defaults = {"rope_theta": 1e4, "max_position_embeddings": 256, "local": 7.0}
    return Keys(values, Path("config.json"), defaults=defaults)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def test_both_spellings_say_the_same() -> None:
    old = keys(rope_theta=500.0, rope_scaling={"type": "linear", "factor": 2.0})
    new = keys(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0})
    expected = Rotary(8, theta=500.0, scaling=LinearScaling(2.0))
    assert rotary(old, 8) == rotary(new, 8) == expected
    both = keys(rope_parameters={"rope_theta": 3.0}, rope_scaling={"type": "linear", "factor": 2.0})
    assert rotary(both, 8) == Rotary(8, theta=1e4, scaling=LinearScaling(2.0))  # as transformers


def test_original_context() -> None:
    scaled = {"rope_type": "yarn", "factor": 2.0}
    assert rotary(keys(rope_scaling=scaled), 8).scaling == Yarn(2.0, original_max_position=256)
    own = scaled | {"original_max_position_embeddings": 64}
    assert rotary(keys(rope_scaling=own), 8).scaling == Yarn(2.0, original_max_position=64)
    beside = keys(rope_scaling=own, original_max_position_embeddings=32)
    assert rotary(beside, 8).scaling == Yarn(2.0, original_max_position=32)


def test_a_ramp_without_width() -> None:
    """Llama 4 Scout: frequencies are divided below a wavelength, and unchanged above it."""
    step = LLAMA3 | {"rope_type": "llama3", "high_freq_factor": 1.0}
    rope = rotary(keys(rope_scaling=step), 64)
    assert isinstance(rope.scaling, Llama3)
    plain = Rotary(64).scaling or Rotary(64)._frequencies(_at(0))
    ratios = rope.scaling.frequencies(64, 1e4) / plain
    assert set(ratios.tolist()) == {1.0, 0.125}


def _at(position: int) -> Any:
    import torch

    return torch.tensor([position])


def test_part_of_a_head_and_pairs() -> None:
    assert rotary(keys(partial_rotary_factor=0.5), 8).dim == 4
    assert rotary(keys(rope_parameters={"partial_rotary_factor": 0.25}), 8).dim == 2
    assert rotary(keys(), 8, pairing="pairs") == Rotary(8, pairing="pairs")


def test_kinds_of_layers_with_their_own() -> None:
    nested = {"full": {"rope_theta": 9.0, "rope_type": "linear", "factor": 2.0}, "near": {}}
    given = keys(rope_parameters=nested)
    full = rotary(given, 8, kind="full")
    assert full == Rotary(8, theta=9.0, scaling=LinearScaling(2.0))
    assert rotary(given, 8, kind="near", theta="local", scaled=False) == Rotary(8, theta=7.0)
    old = keys(rope_scaling={"rope_type": "linear", "factor": 2.0})
    assert rotary(old, 8, kind="near", theta="local", scaled=False) == Rotary(8, theta=7.0)
    both = keys(rope_parameters=nested, rope_scaling={"rope_type": "linear", "factor": 4.0})
    assert rotary(both, 8, kind="near", theta="local", scaled=False) == Rotary(8, theta=7.0)
    assert rotary(both, 8, kind="full") == Rotary(8, theta=9.0, scaling=LinearScaling(4.0))
    assert rotary(old, 8, kind="full").scaling == LinearScaling(2.0)
    with pytest.raises(CheckpointError, match="made of objects, one for each kind"):
        rotary(keys(rope_parameters={"rope_theta": 9.0}), 8, kind="full")


def test_types_by_another_name() -> None:
    scaled = {"type": "su", "short_factor": [1.0, 2], "long_factor": [2.0, 3]}
    with pytest.raises(CheckpointError, match=r"'rope_scaling\.rope_type' must be one of .*'su'"):
        rotary(keys(rope_scaling=scaled), 4)
    rope = rotary(keys(rope_scaling=scaled), 4, renamed={"su": "longrope"})
    assert rope.scaling is not None and rope.scaling.uses_length


@pytest.mark.parametrize(
    ("rope", "rule"),
    [
        ({"rope_type": "proportional"}, "must be one of"),
        ({"rope_type": ["yarn"]}, "must be one of"),
        ({"rope_type": "linear"}, "KeyError: 'factor'"),
        ({"rope_type": "linear", "factor": "2"}, "'rope_scaling.factor' must be a finite number"),
        ({"rope_type": "linear", "factor": -2.0}, "greater than 0"),
        ({"rope_type": "linear", "factor": 2.0, "mscale": 1.0}, "'rope_scaling.mscale' must be"),
        ({"rope_type": "yarn", "factor": 2.0, "truncate": 1}, "'rope_scaling.truncate' must be"),
        ({"rope_type": "longrope", "short_factor": 2.0}, "must be a list of 1 to"),
        ({"rope_type": "longrope", "short_factor": [None]}, "must be a list of numbers"),
        ({"partial_rotary_factor": 0.4}, "must be even"),
        ({"partial_rotary_factor": 40.0}, "more than"),
    ],
)
def test_what_is_refused(rope: Any, rule: str) -> None:
    with pytest.raises(CheckpointError, match=rule):
        rotary(keys(rope_scaling=rope), 8)
