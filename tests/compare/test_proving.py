"""The proof before a comparison: which differences are due to regard, and which to the model."""

import math

import pytest
import torch

import regard.compare.proving as proving
from regard.compare import prove
from tiny import tiny, tokens

WINDOW = tokens(2, 40)[0]


def test_nothing_is_compared_if_the_logits_change(monkeypatch):
    model = tiny("llama")
    monkeypatch.setattr(
        proving, "install", lambda model: model.base_model.norm.weight.data.add_(1e-3)
    )
    with pytest.raises(ValueError, match="nothing was compared"):
        prove(model, WINDOW)


def test_a_change_that_installing_leaves_is_due_to_regard(monkeypatch):
    monkeypatch.setattr(proving, "uninstall", lambda model: None)
    monkeypatch.setattr(
        proving,
        "install",
        lambda model: [
            setattr(layer.mlp, "forward", torch.zeros_like) for layer in model.base_model.layers
        ],
    )
    with pytest.raises(ValueError, match="under regard the model's logits change"):
        prove(tiny("llama"), WINDOW)


class Disturbed:
    """A tiny model whose rotary angles are off by `error(side, time)`: the side is "own" or "under
    regard", the time counts the forwards of that side from 1."""

    def __init__(self, error):
        self.model, self.counts = tiny("llama"), {"own": 0, "under regard": 0}
        attention, angles = self.model.model.layers[0].self_attn, self.model.model.rotary_emb
        forward = angles.forward

        def disturbed(*args, **given):
            side = "under regard" if "forward" in vars(attention) else "own"
            self.counts[side] += 1
            cos, sin = forward(*args, **given)
            return cos + error(side, self.counts[side]), sin

        angles.forward = disturbed


def test_a_wrong_first_forward_of_the_model_is_not_due_to_regard():
    case = Disturbed(lambda side, time: 1e-3 * ((side, time) == ("own", 1)))
    proof = prove(case.model, WINDOW)
    assert proof == prove(tiny("llama"), WINDOW)
    assert case.counts == {"own": 3, "under regard": 1}


@pytest.mark.parametrize(
    ("error", "own"),
    [
        (lambda side, time: 1e-3 * ((side, time) == ("under regard", 1)), 2),
        (lambda side, time: 1e-3 * (side == "under regard"), 2),
        (lambda side, time: {"under regard": 1e-3, "own": 2e-3 * (time == 1)}[side], 3),
    ],
    ids=["once", "always", "and so was the first own forward"],
)
def test_a_wrong_forward_under_regard_raises_and_is_never_run_again(error, own):
    case = Disturbed(error)
    with pytest.raises(ValueError, match="under regard the model's logits change by up to"):
        prove(case.model, WINDOW)
    assert case.counts == {"own": own, "under regard": 1}
    assert not any("forward" in vars(layer.self_attn) for layer in case.model.model.layers)


@pytest.mark.parametrize(
    "error",
    [
        lambda side, time: 1e-3 * (side == "own" and time % 2 == 1),
        lambda side, time: {"own": 1e-3 * (time % 2 == 0), "under regard": 5e-4}[side],
    ],
    ids=["first and third", "second"],
)
def test_a_model_that_changes_from_run_to_run_is_refused(error):
    case = Disturbed(error)
    with pytest.raises(ValueError, match=r"own logits change from run to run.* by up to \d\.\d+e"):
        prove(case.model, WINDOW)
    assert case.counts == {"own": 3, "under regard": 1}


def test_a_model_without_finite_logits_is_refused():
    case = Disturbed(lambda side, time: math.nan)
    with pytest.raises(ValueError, match="own logits are not finite"):
        prove(case.model, WINDOW)


def test_one_forward_is_enough_where_the_bound_holds():
    case = Disturbed(lambda side, time: 0.0)
    prove(case.model, WINDOW)
    assert case.counts == {"own": 1, "under regard": 1}


def test_logits_that_are_not_numbers_prove_nothing():
    case = Disturbed(lambda side, time: math.nan if side == "under regard" else 0.0)
    with pytest.raises(ValueError, match="change by up to nan"):
        prove(case.model, WINDOW)
