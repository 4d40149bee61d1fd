"""Counts with their nouns, and the code that builds a dataclass."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from regard.words import code_of, counted


@pytest.mark.parametrize(
    ("number", "words", "sentence"),
    [
        (0, ("key",), "0 keys"),
        (1, ("key",), "1 key"),
        (2, ("query", "queries"), "2 queries"),
        (1, ("query", "queries"), "1 query"),
        (1_234_567, ("token",), "1,234,567 tokens"),
    ],
)
def test_a_noun_is_singular_or_plural(number, words, sentence):
    assert counted(number, *words) == sentence


@dataclass
class Scaling:
    factor: Any
    low: Any = 1.0
    high: Any = 4.0


def test_the_code_of_a_dataclass_leaves_out_defaults_and_derived_values():
    assert code_of(Scaling(2.0), 1) == "Scaling(2.0)"
    assert code_of(Scaling(2.0)) == "Scaling(factor=2.0)"
    assert code_of(Scaling(2.0, high=8.0), 1) == "Scaling(2.0, high=8.0)"
    assert code_of(Scaling(2.0, 3.0), 2) == "Scaling(2.0, 3.0)"
    assert code_of(Scaling(2.0, high=9.0), 1, high=9.0) == "Scaling(2.0)"
    assert code_of(Scaling(2.0), 1, high=9.0) == "Scaling(2.0, high=4.0)"


def test_the_code_of_a_dataclass_has_the_shapes_of_tensors():
    found = code_of(Scaling(torch.zeros(2), high=torch.ones(1, 3) > 0), 1)
    assert found == "Scaling(<[2] float32>, high=<[1, 3] bool>)"
