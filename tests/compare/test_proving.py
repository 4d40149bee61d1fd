"""The proof before a comparison: which differences are due to regard, and which to the model."""

import math
from types import MethodType

import pytest

from regard.compare import Runner, chosen, compare
from tiny import tiny


class Disturbed:
    """A tiny model whose rotary angles are off by `error(side, time)`: the side is "own" or "under
    regard", the time counts the forwards of that side from 1."""

    def __init__(self, error):
        self.model, self.counts = tiny("llama"), {"own": 0, "under regard": 0}
        angles = self.model.model.rotary_emb
        angles.beside = (self.model.model.layers[0].self_attn,)  # a copy has that of the copy

        def disturbed(module, *args, **given):
            side = "under regard" if "forward" in vars(module.beside[0]) else "own"
            self.counts[side] += 1
            cos, sin = type(module).forward(module, *args, **given)
            return cos + error(side, self.counts[side]), sin

        angles.forward = MethodType(disturbed, angles)


def test_a_first_row_that_is_not_the_model_ends_the_comparison(texts, monkeypatch):
    given, own = [], Runner.hidden
    rows = chosen(["int8"])
    case = Disturbed(lambda side, time: 1e-3 * (side == "own" and time % 2))
    with pytest.raises(ValueError, match="own logits change from run to run"):
        compare(case.model, texts, candidates=rows, on_row=given.append)
    monkeypatch.setattr(Runner, "hidden", lambda runner, x: own(runner, x) + 1e-2)
    with pytest.raises(ValueError, match="under regard the model's logits change by up to"):
        compare(tiny("llama"), texts, candidates=rows, on_row=given.append)
    monkeypatch.setattr(Runner, "hidden", lambda runner, x: own(runner, x) * math.nan)
    with pytest.raises(ValueError, match="under regard the model's logits change by up to nan"):
        compare(tiny("llama"), texts, candidates=rows, on_row=given.append)
    assert not given


def test_the_first_row_is_the_proof(texts):
    """No forward runs but that of the model and those of the rows."""
    case = Disturbed(lambda side, time: 0.0)
    result = compare(case.model, texts, candidates=chosen([])[:1], prefills=False)
    assert case.counts["own"] == len(texts.windows)
    assert result.proof.largest_difference == result.rows[0].largest_logit_difference
    assert 0 < result.proof.tolerance < 1e-2


def test_a_model_without_finite_logits_is_refused(texts):
    case = Disturbed(lambda side, time: math.nan * (side == "own"))
    with pytest.raises(ValueError, match="own logits are not finite"):
        compare(case.model, texts, candidates=chosen(["shipped"]))


def test_the_shipped_attention_runs_first_even_if_it_is_not_named(texts):
    rows = compare(tiny("llama"), texts, candidates=chosen(["int8"])[1:], prefills=False).rows
    assert [row.name for row in rows] == ["GQA, as shipped", "GQA, int8 cache"]
