"""Counts with their nouns, and the code that builds a dataclass."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from regard.words import code_of, counted, one_of, without_controls


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


def test_every_verb_and_function_has_the_same_names_of_caches():
    """`hf.cache`, `regard generate`, `compare` and `plan` name the same storage in one way."""
    pytest.importorskip("transformers")
    from regard.cli import generate, plan
    from regard.compare import CANDIDATES
    from regard.hf.generating.caches import NAMES
    from regard.plan import STORAGES

    of_python = {"condensing"}  # a text is condensed between two calls of the model
    assert {*generate.CACHES} == {*NAMES} - of_python
    assert {*plan.STORAGES} == {*STORAGES} == {*NAMES} & {*STORAGES} | {"plain"}
    compared = {each.key for each in CANDIDATES} & {each.lower() for each in STORAGES}
    assert compared == {each.lower() for each in STORAGES} - {"plain", "k8v8"}  # which is int8


@pytest.mark.parametrize("name", ["int8", "INT8", "Quantised", "quantized", "K8v4", "growing"])
def test_case_and_spelling_of_a_name_do_not_matter(name):
    names = ["growing", "quantized", "int8", "K8V4"]
    assert one_of("kind", name, names) == one_of("kind", name.upper(), names) in names


def test_an_unknown_name_is_answered_with_the_list_and_the_nearest():
    message = "kind='k8v5' is not one of 'int8', 'K8V4'; did you mean 'K8V4'"
    with pytest.raises(ValueError, match=message):
        one_of("kind", "k8v5", ["int8", "K8V4"])


def test_documents_hold_no_characters_that_control_a_terminal():
    shown = without_controls("a\x1b[31m\x9b\x7f\u202eb\u2066\n\tc\u200dd\u3000é")
    assert shown == "a\\x1b[31m\\x9b\\x7f\\u202eb\\u2066\n\tc\u200dd\u3000é"
