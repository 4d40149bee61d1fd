"""Which keys are attended to, measured from outside, and what is wrong with them in words."""

import pytest
import torch

from regard_verify.visibility import explain, read_dependence, read_weights


def test_weights_and_dependence_are_measured_from_outside():
    q, k = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 5, 4)
    expected = (q @ k.mT).softmax(-1)
    weights = read_weights(lambda q, k, v: (q @ k.mT).softmax(-1) @ v, q, k)
    torch.testing.assert_close(weights, expected)
    narrow = read_weights(lambda q, k, v: (q @ k.mT).softmax(-1) @ v, q, k, width=2)
    torch.testing.assert_close(narrow, expected)
    lower = torch.ones(4, 4).tril()
    assert read_dependence(lambda x: lower @ x, torch.randn(1, 4, 3)).equal(lower.bool())


def grid(text):
    return torch.tensor([[cell == "1" for cell in row] for row in text.split()])


@pytest.mark.parametrize(
    ("expected", "actual", "mistake"),
    [
        ("110 111 111", "001 000 000", "the mask is read the wrong way round"),
        ("110 011 111", "111 111 111", "key 2 is visible to query 0: the mask is ignored"),
        ("110 011 111", "101 111 011", "queries and keys change places in the mask"),
        (
            "100 110 111",
            "111 111 111",
            "keys 1..2 are visible to query 0: the causal rule is ignored",
        ),
        ("100 110 111", "000 100 110", "the causal rule hides each query's own key"),
        ("100 110 111", "110 111 111", "the causal rule leaves one future key visible"),
        ("100 110 111", "111 011 001", "keeps the wrong triangle, that of the future"),
        ("1110 1111", "1000 1100", "the causal rule is counted from the top-left corner"),
        ("1000 1100 0110 0011", "1000 1100 1110 0111", "the window keeps one key too many"),
        ("1000 1100 1110 0111", "1000 1100 0110 0011", "the window keeps one key too few"),
        ("1000 1100 0110 0011", "1000 1100 1110 1111", "only the causal rule is kept, the window"),
        ("101 111 111", "111 111 101", "key 1 is visible to query 0."),
    ],
)
def test_a_wrong_visibility_is_explained_in_words(expected, actual, mistake):
    words = explain(grid(expected), grid(actual))
    assert mistake in words
    assert words.endswith(".")
