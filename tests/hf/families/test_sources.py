"""The text of a class: names do not matter, what is computed does."""

import pytest
from torch import nn

from regard.hf.families.sources import first_difference, text_of


def doubled(x):
    return 2 * x


def twice(number):
    """Twice a number."""
    return 2 * number


def thrice(x):
    return 3 * x


class First(nn.Module):
    def forward(self, x, mask=None):
        """Says nothing."""
        y: int = doubled(x)
        return y + self.more(x)

    def more(self, x):
        return x


class Renamed(First):
    def forward(self, x, mask):
        other = doubled(x)
        return other + self.more(x)


class OtherHelper(First):
    def forward(self, x, mask=None):
        y = thrice(x)
        return y + self.more(x)


class OtherMethod(First):
    def more(self, x):
        return -x


class OnItsBase(First):
    def forward(self, x, mask=None):
        return super().forward(x, mask)


def test_names_annotations_docstrings_and_optional_arguments_do_not_matter():
    assert text_of(First)
    assert text_of(First) == text_of(Renamed)


@pytest.mark.parametrize("other", [OtherHelper, OtherMethod])
def test_a_helper_or_a_method_that_differs_does(other):
    assert text_of(First) != text_of(other)


def test_the_first_difference_is_said():
    said = first_difference(text_of(First), text_of(OtherHelper))
    assert said == "`return 2 * x`, where the other has `return 3 * x`"


def test_the_source_of_a_base_class_is_not_followed_and_nothing_is_said_of_it():
    assert text_of(OnItsBase) == ()
    assert text_of(type("Made", (nn.Module,), {"forward": len})) == ()
