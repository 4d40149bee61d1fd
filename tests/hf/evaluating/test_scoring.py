"""Scores of decoding are those of a full forward, but for what a cache gives up."""

import pytest
import torch

import regard.hf
from regard.hf.evaluating.scoring import score
from tiny import tiny


def forward(model, context, continuation):
    """By one full forward, without a cache."""
    tokens = torch.tensor([[*context, *continuation]])
    with torch.no_grad():
        logits = model(tokens).logits[0, len(context) - 1 : -1].float()
    targets = torch.tensor(continuation)
    chosen = logits.log_softmax(-1).gather(1, targets[:, None]).sum()
    return float(chosen), bool((logits.argmax(-1) == targets).all())


@pytest.fixture
def model():
    model = tiny("qwen3")
    regard.hf.install(model)
    return model


@pytest.mark.parametrize("kind", ["growing", "paged"])
@pytest.mark.parametrize("length", [1, 2, 7])
def test_an_exact_cache_scores_as_a_full_forward(model, kind, length):
    tokens = [*range(5, 16)]
    context, continuation = tokens[:-length], tokens[-length:]
    found = score(model, lambda: regard.hf.cache(model, kind), context, continuation, max_length=64)
    wanted, greedy = forward(model, context, continuation)
    assert abs(found.log_probability - wanted) < 1e-4
    assert found.is_greedy == greedy


def test_the_most_probable_tokens_are_greedy(model):
    context = [5, 6, 7]
    text = model.generate(torch.tensor([context]), max_new_tokens=3, do_sample=False)
    continuation = text[0, 3:].tolist()
    assert score(
        model, lambda: regard.hf.cache(model), context, continuation, max_length=64
    ).is_greedy
    other = [*continuation[:-1], (continuation[-1] + 1) % 61]
    assert not score(model, lambda: regard.hf.cache(model), context, other, max_length=64).is_greedy


def test_codes_change_the_score(model):
    """The difference that one full forward cannot see."""
    context, continuation = [*range(3, 40)], [*range(40, 48)]
    plain, codes = (
        score(
            model, lambda k=kind: regard.hf.cache(model, k), context, continuation, max_length=64
        ).log_probability
        for kind in ("growing", "int4")
    )
    assert 0 < abs(plain - codes) < 1.0


def test_the_newest_tokens_of_a_long_context_are_read(model):
    context, continuation = [*range(3, 30)], [4, 5]
    short = score(
        model, lambda: regard.hf.cache(model), context, continuation, max_length=9
    ).log_probability
    wanted, _ = forward(model, context[-8:], continuation)
    assert abs(short - wanted) < 1e-4


@pytest.mark.parametrize(("context", "continuation"), [([], [1]), ([1], []), ([1], [2] * 9)])
def test_requests_that_cannot_be_scored(model, context, continuation):
    with pytest.raises(ValueError):
        score(model, lambda: regard.hf.cache(model), context, continuation, max_length=8)
