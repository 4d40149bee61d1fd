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


def test_a_module_lists_all_its_laws():
    faults = []
    for module in MODULES:
        written = [each for each in vars(module).values() if isinstance(each, Law)]
        listed = list(getattr(module, "LAWS", ()))
        if listed != written or any(LAWS[each.name] is not each for each in written):
            faults.append(module.__name__)
    assert faults == []


def test_the_table_has_66_laws_and_their_names_are_those_of_the_functions():
    assert len(LAWS) == 66
    assert all(name == law.name == law.run.__name__ for name, law in LAWS.items())


def test_a_law_is_stated_in_one_sentence():
    texts = {name: law.statement for name, law in LAWS.items()}
    assert {
        name: text for name, text in texts.items() if not text.endswith(".") or ". " in text
    } == {}


def test_a_law_has_a_kind_a_mistake_that_it_catches_and_abilities_that_it_needs():
    kinds = ("exact", "bounded", "statistical", "resource")
    abilities = {each.name for each in fields(Abilities)}
    faults = []
    for law in LAWS.values():
        needs = {name for need in law.needs for name in need.split("|")}
        if law.kind not in kinds or not law.catches or not needs or not needs <= abilities:
            faults.append((law.name, law.kind, law.catches, law.needs))
    assert faults == []
