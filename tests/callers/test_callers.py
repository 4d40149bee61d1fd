"""Every call under every caller: equal to the definition, or refused in a sentence of ours.

A run takes a covering share of the matrix: every caller runs a call of every family, another one
for each caller. REGARD_LONG=1 takes it all.
"""

import zlib

import pytest

from callers.cell import CALLERS, CALLS
from callers.process import Process
from callers.programs import Attend
from callers.table import Caller, Row
from session import LONG

WIDTH = 1  # calls of each family that a caller meets in an ordinary run


def family(name: str, row: Row) -> str:
    """A backend of `attend`, or a group of layers, with a cache or without."""
    if isinstance(row, Attend):
        return row.backend
    group = next((word for word in ("MLA", "LatentKV", "cross") if name.startswith(word)), "heads")
    return group if row.cache is None else f"{group}, cached"


def number(*words: str) -> int:
    """The same for every run and every worker."""
    return zlib.crc32(" / ".join(words).encode())


def chosen(caller: Caller) -> list[str]:
    """The calls that run under a caller; under a plain one, all."""
    fitting = {name: row for name, row in CALLS.items() if caller.fits(row)}
    if LONG or caller.name == "plain":
        return list(fitting)
    if caller.only_long:
        return []
    families: dict[str, list[str]] = {}
    for name, row in fitting.items():
        families.setdefault(family(name, row), []).append(name)
    some = [
        min(calls, key=lambda call: number(caller.name, call, str(turn)))
        for calls in families.values()
        for turn in range(WIDTH)
    ]
    if caller.dear:
        some = sorted(some, key=lambda call: number(call, caller.name))[: caller.dear]
    return list(dict.fromkeys(some))


CELLS = [(caller.name, call) for caller in CALLERS.values() for call in chosen(caller)]


@pytest.fixture(scope="session")
def processes():
    """A process of each kind that is asked for."""
    started: dict[str, Process] = {}

    def process(kind: str) -> Process:
        if kind not in started:
            started[kind] = Process(kind)
        return started[kind]

    yield process
    for each in started.values():
        each.close()


@pytest.mark.parametrize(("caller", "call"), CELLS, ids=[" / ".join(cell) for cell in CELLS])
def test_a_call_is_right_or_refused_under_every_caller(caller, call, processes):
    verdict = processes(CALLERS[caller].process).run(caller, call)
    assert verdict["kind"] != "wrong", verdict["words"]


JUDGED = (
    "eager square causal padding float32",
    "eager square causal float64",
    "GQA",
    "GQA, KVCache",
)
QUICK = [each.name for each in CALLERS.values() if LONG or not each.dear]


@pytest.mark.parametrize("name", QUICK)
def test_every_caller_notices_what_is_off_by_a_tenth(name, processes):
    """Where it gets an answer from the library as it is."""
    caller = CALLERS[name]
    call = next(each for each in JUDGED if caller.fits(CALLS[each]))
    if processes(caller.process).run(name, call)["kind"] == "equal":
        assert processes("wrong").run(name, call)["kind"] == "wrong"


def test_every_call_has_a_caller():
    assert {call for _, call in CELLS} == set(CALLS)
