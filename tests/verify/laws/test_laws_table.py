"""The table of laws is complete, and each law is a sentence."""

import importlib
import pkgutil
from dataclasses import fields

import pytest

from regard.verify import LAWS, Law, laws
from regard.verify.subject.subject import Abilities

MODULES = [
    importlib.import_module(f"{laws.__name__}.{each.name}")
    for each in pkgutil.iter_modules(laws.__path__)
]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.split(".")[-1])
def test_a_module_lists_all_its_laws(module):
    written = [each for each in vars(module).values() if isinstance(each, Law)]
    assert list(getattr(module, "LAWS", ())) == written
    assert all(LAWS[each.name] is each for each in written)


def test_the_table_has_83_laws_and_their_names_are_those_of_the_functions():
    assert len(LAWS) == 83
    assert all(name == law.name == law.run.__name__ for name, law in LAWS.items())


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
def test_a_law_is_stated_in_one_sentence(law):
    assert law.statement.endswith(".")
    assert law.statement.count(". ") == 0
    assert law.kind in ("exact", "bounded", "statistical", "resource")
    assert law.catches
    abilities = {each.name for each in fields(Abilities)}
    assert {name for need in law.needs for name in need.split("|")} <= abilities
    assert law.needs
