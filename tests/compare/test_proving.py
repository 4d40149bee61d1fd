"""The proof before a comparison: which differences are due to regard, and which to the model."""

import math

import pytest

import regard.compare.proving as proving
from regard.compare import Runner, chosen, compare, prove
from tiny import tiny, tokens

WINDOW = tokens(2, 40)[0]


def test_nothing_is_compared_if_the_logits_change(monkeypatch):
    model = tiny("llama")
    monkeypatch.setattr(
        proving, "install", lambda model: model.base_model.norm.weight.data.add_(1e-3)
    )
    with pytest.raises(ValueError, match="nothing was compared"):
        prove(model, WINDOW)


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


@pytest.mark.parametrize("size", [1e-3, 0.1])
def test_a_wrong_forward_under_regard_raises(size):
    case = Disturbed(lambda side, time: size * (side == "under regard"))
    with pytest.raises(ValueError, match="under regard the model's logits change by up to"):
        prove(case.model, WINDOW)
    assert case.counts == {"own": 2, "under regard": 1}
    assert not any("forward" in vars(layer.self_attn) for layer in case.model.model.layers)


@pytest.mark.parametrize("time", [1, 2])
def test_a_model_that_changes_from_run_to_run_is_refused(time):
    case = Disturbed(lambda side, at: 1e-3 * ((side, at) == ("own", time)))
    with pytest.raises(ValueError, match=r"own logits change from run to run.* by up to \d\.\d+e"):
        prove(case.model, WINDOW)
    assert case.counts == {"own": 2, "under regard": 0}


def test_a_first_row_that_is_not_the_model_ends_the_comparison(texts, monkeypatch):
    given, own = [], Runner.hidden
    rows = chosen(["int8"])
    case = Disturbed(lambda side, time: 1e-3 * (side == "own" and time % 2))
    with pytest.raises(ValueError, match="own logits change from run to run"):
        compare(case.model, texts, candidates=rows, on_row=given.append)
    monkeypatch.setattr(Runner, "hidden", lambda runner, x: own(runner, x) + 1e-2)
    with pytest.raises(ValueError, match=r"logits of GQA, as shipped differ .* a second run did"):
        compare(tiny("llama"), texts, candidates=rows, on_row=given.append)
    monkeypatch.setattr(Runner, "hidden", lambda runner, x: own(runner, x) * math.nan)
    with pytest.raises(ValueError, match=r"logits of GQA, as shipped differ .* by nan"):
        compare(tiny("llama"), texts, candidates=rows, on_row=given.append)
    assert not given


def test_the_first_row_is_the_proof(texts):
    """No forward runs but that of the model and those of the rows."""
    case = Disturbed(lambda side, time: 0.0)
    result = compare(case.model, texts, candidates=chosen([])[:1], prefills=False)
    assert case.counts["own"] == len(texts.windows)
    assert result.proof.largest_difference == result.rows[0].largest_logit_difference
    assert 0 < result.proof.tolerance < 1e-2


def test_a_model_without_finite_logits_is_refused():
    case = Disturbed(lambda side, time: math.nan)
    with pytest.raises(ValueError, match="own logits are not finite"):
        prove(case.model, WINDOW)


def test_logits_that_are_not_numbers_prove_nothing():
    case = Disturbed(lambda side, time: math.nan if side == "under regard" else 0.0)
    with pytest.raises(ValueError, match="change by up to nan"):
        prove(case.model, WINDOW)
