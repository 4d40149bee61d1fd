"""Every call under every caller: equal to the definition, or refused in a sentence of ours.

An ordinary run takes a share of the matrix: every call under the plain caller and under one other,
every caller with one call at least. `--all` takes every cell of the callers that take milliseconds
a call; those that compile take a second or more, and share the calls among them: each call under
one, drawn by the names of both.
"""

import zlib

import pytest

from callers.cell import CALLERS, CALLS
from callers.process import Process
from callers.table import Caller
from session import LONG


def number(*words: str) -> int:
    """The same for every run and every worker."""
    return zlib.crc32(" / ".join(words).encode())


def chosen() -> dict[str, list[str]]:
    """The calls that run under each caller."""
    quick = [each for each in CALLERS.values() if not each.dear and each.name != "plain"]
    dear = [each for each in CALLERS.values() if each.dear and (LONG or not each.only_long)]
    cells: dict[str, list[str]] = {"plain": list(CALLS)}
    if LONG:
        cells |= {each.name: fitting(each) for each in quick}
        share(dear, cells)
    else:
        share(quick, cells)
    for caller in (*quick, *dear):
        if caller.name not in cells:
            one = min(fitting(caller), key=lambda call, name=caller.name: number(name, call))
            cells[caller.name] = [one]
    return cells


def fitting(caller: Caller) -> list[str]:
    """The calls that a caller takes."""
    return [call for call, row in CALLS.items() if caller.fits(row)]


def share(callers: list[Caller], cells: dict[str, list[str]]) -> None:
    """Add each call under one of these callers."""
    for call, row in CALLS.items():
        names = [caller.name for caller in callers if caller.fits(row)]
        cells.setdefault(min(names, key=lambda name: number(name, call)), []).append(call)


CELLS = chosen()
SHARES = [  # an item of pytest has at most so many cells
    pytest.param(caller, calls[first : first + 100], id=f"{caller} {first}")
    for caller, calls in CELLS.items()
    for first in range(0, len(calls), 100)
]


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


@pytest.mark.parametrize(("caller", "calls"), SHARES)
def test_calls_are_right_or_refused_under_every_caller(caller, calls, processes):
    process = processes(CALLERS[caller].process)
    verdicts = {call: process.run(caller, call) for call in calls}
    wrong = {call: each["words"] for call, each in verdicts.items() if each["kind"] == "wrong"}
    assert wrong == {}


JUDGED = (
    "eager square causal padding float32",
    "eager square causal float64",
    "GQA",
    "GQA, KVCache",
)
NOTICING = [name for name in CALLERS if LONG or not number(name) % 16]


@pytest.mark.parametrize("name", NOTICING)
def test_callers_notice_what_is_off_by_a_tenth(name, processes):
    """Where it gets an answer from the library as it is."""
    caller = CALLERS[name]
    call = next(each for each in JUDGED if caller.fits(CALLS[each]))
    if processes(caller.process).run(name, call)["kind"] == "equal":
        assert processes("wrong").run(name, call)["kind"] == "wrong"


def test_every_call_has_a_caller():
    assert set(CELLS["plain"]) == set(CALLS)
    others = {call for name, calls in CELLS.items() if name != "plain" for call in calls}
    assert others == set(CALLS)
