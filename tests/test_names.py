"""Caches have one list of names, for Python and for the command line."""

import regard.names as names
from regard.cache import format_of
from regard.compare import CANDIDATES
from regard.hf.generating.caches import NAMES
from regard.plan.shapes import STORAGES


def test_caches_have_one_list_of_names():
    of_python = "condensing"  # a text is condensed between two calls of the model
    assert tuple(each for each in NAMES if each != of_python) == names.CACHES
    assert (*STORAGES,) == names.STORAGES
    assert {each.cache for each in CANDIDATES if isinstance(each.cache, str)} <= {*names.CACHES}
    for each in names.PAGES:
        assert format_of(each).name == each
    for each in names.CODES:
        assert str(STORAGES[each].key_bits) in each
