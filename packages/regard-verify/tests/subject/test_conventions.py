"""Conventions: unknown names and values are refused."""

import pytest
import torch

import subjects
from regard_verify import check


def test_conventions_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match="no convention is called 'polarty'; there are after"):
        check(subjects.right, {"polarty": "keep"})
    with pytest.raises(ValueError, match="polarity is one of keep, drop, additive"):
        check(subjects.right, {"polarity": "keeping"})
    with pytest.raises(ValueError, match="give the object itself"):
        check("some.py:thing", {"options": {"mask": torch.ones(2)}})
    with pytest.raises(ValueError, match="no law is called 'oracle'"):
        check(subjects.right, only=["oracle"])
