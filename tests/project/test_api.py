"""The public names and their signatures are those of docs/api.json."""

import json
import runpy
import warnings
from pathlib import Path

import regard

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts/api.py"))
PAGE = json.loads((ROOT / "docs/api.json").read_text())


def test_the_public_names_are_those_of_the_page():
    now = json.loads(SCRIPT["text"]())
    changed = {name for name in {*now, *PAGE} if now.get(name) != PAGE.get(name)}
    assert not changed, "python scripts/api.py writes docs/api.json; say so in CHANGELOG.md"


def test_signatures_without_texts_that_differ_between_processes():
    assert PAGE["regard.attend"].startswith("(q, k, v, *, mask=..., span=None, scale=None,")
    assert PAGE["regard.KVCache"]["truncate"] == "(self, length)"
    assert " at 0x" not in json.dumps(PAGE)


def test_deprecated_names_are_removed_in_time():
    """Of the package's own, found by their attribute; a name that is overdue fails here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        overdue = [
            name
            for name in regard.__all__
            if version(getattr(getattr(regard, name), "deprecated_until", "9999"))
            <= version(regard.__version__)
        ]
    assert overdue == []


def version(text):
    return tuple(int(part) for part in text.split(".")[:2] if part.isdecimal())
