"""The table of laws is complete, and each law is a sentence."""

import importlib
import pkgutil
from dataclasses import fields

from regard_verify import LAWS, Law, laws
from regard_verify.subject.subject import Abilities

MODULES = [
    importlib.import_module(f"{laws.__name__}.{each.name}")
    for each in pkgutil.iter_modules(laws.__path__)
]


def test_the_table_has_the_laws_of_all_modules():
    written = [
        each for module in MODULES for each in vars(module).values() if isinstance(each, Law)
    ]
    assert {each.name for each in written} == set(LAWS)
    assert all(LAWS[each.name] is each for each in written)


def test_the_table_has_55_laws_and_their_names_are_those_of_the_functions():
    assert len(LAWS) == 55
    assert all(name == law.name == law.run.__name__ for name, law in LAWS.items())


def test_a_law_is_stated_in_one_sentence():
    texts = {name: law.statement for name, law in LAWS.items()}
    assert {
        name: text for name, text in texts.items() if not text.endswith(".") or ". " in text
    } == {}


def test_a_law_has_a_kind_and_abilities_that_it_needs():
    kinds = ("exact", "bounded", "statistical", "resource")
    abilities = {each.name for each in fields(Abilities)}
    faults = []
    for law in LAWS.values():
        needs = {name for need in law.needs for name in need.split("|")}
        if law.kind not in kinds or not needs or not needs <= abilities:
            faults.append((law.name, law.kind, law.needs))
    assert faults == []
