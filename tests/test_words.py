"""Numbers in sentences: singular, plural, and thousands."""

import pytest

from regard.words import counted


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
def test_a_number_of_things_is_singular_or_plural(number, words, sentence):
    assert counted(number, *words) == sentence
