"""Objects by name: what cannot be found is an error in a sentence."""

from pathlib import Path

import pytest

import subjects
from regard.verify import SubjectError, understand


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("nowhere.py:attention", "there is no file nowhere.py"),
        (f"{Path(subjects.__file__)}:missing", "has no 'missing'; it has"),
        ("no.such.module", "ModuleNotFoundError"),
        ("nothing", "names nothing"),
    ],
)
def test_a_name_that_cannot_be_found_gets_a_sentence(name, problem):
    with pytest.raises(SubjectError, match=problem):
        understand(name)
