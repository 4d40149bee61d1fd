"""Every mutant breaks the law that names its cause; right subjects break none."""

import pytest
import torch

from covering import few
from mutants import callers, defects, functions, good, layers, things
from regard_verify import check
from session import LONG

MUTANTS = [*functions.MUTANTS, *layers.MUTANTS, *things.MUTANTS, *callers.MUTANTS, *defects.MUTANTS]
RIGHT = {
    "function": (good.Steps().function(), good.LIKE),
    "layer": (good.Layer, good.LAYER_LIKE),
    "layer with dropout": (lambda: good.Layer(p=0.1), good.LAYER_LIKE),
    "layer with a window": (
        lambda: good.Layer(good.LayerSteps(window=3)),
        {**good.LAYER_LIKE, "window": 3},
    ),
    "reference": (good.Layer, {**good.LAYER_LIKE, "reference": "mutants.layers:reference"}),
    "MLA": (good.MLA, good.MLA_LIKE),
    "cross-attention": (good.Cross, {"pairing": "none"}),
    "layer with a cache object": (things.Serving, {**things.WHOLE, "new_cache": good.ListCache}),
    "layer with a window cache": (
        things.ServingWindow,
        {**things.SERVING, "window": 4, "new_cache": good.WindowCache},
    ),
    "pages": (good.paged, {"kind": "paged"}),
    **callers.RIGHT,
}
MADE = {"layer", "layer with dropout", "layer with a window", "reference", "MLA", "cross-attention"}


def test_there_are_many_and_no_two_are_alike():
    assert len(MUTANTS) >= 200
    names = [(mutant.name, mutant.like.get("kind"), mutant in layers.MUTANTS) for mutant in MUTANTS]
    assert len(set(names)) == len(names)


CHOSEN = MUTANTS if LONG else [mutant for mutant in MUTANTS if not mutant.slow][::2]


@pytest.mark.parametrize("mutant", CHOSEN, ids=lambda mutant: mutant.name)
def test_a_mutant_is_killed(mutant):
    report = check(mutant.make(), mutant.like, only=mutant.kills)
    assert not report.problem
    for outcome in report.outcomes:
        assert outcome.status in ("failed", "follows", "advice"), f"{outcome.law}: {outcome.reason}"
        assert outcome.example.cause
        assert "the call ended in" not in outcome.example.cause, outcome.example


@pytest.mark.parametrize("name", few(RIGHT, 2))
def test_a_right_subject_keeps_every_law(name):
    """And some laws apply."""
    subject, like = RIGHT[name]
    torch.manual_seed(0)
    report = check(subject() if name in MADE else subject, like, quick=not LONG)
    assert not report.problem
    assert report.failed == report.advice == []
    assert report.having("passed")


def test_every_law_kills_a_mutant():
    """A law that no mutant breaks would be of no use."""
    from regard_verify import LAWS

    idle = set(LAWS) - {name for mutant in MUTANTS for name in mutant.kills}
    assert idle == set()
