"""Caches of every kind, driven by random operations beside plain lists of tokens."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cache_faults import OF_CONTIGUOUS, OF_POOLS
from cache_world import World
from listed import STREAMS
from machine_kinds import CONTIGUOUS
from pool_world import PAGE, PAGES, PoolWorld
from regard import PagePool
from regard.cache import format_of
from regard.cache.paging.offloading import Offload
from session import LONG

PHASES = (Phase.generate, Phase.shrink)
STEPS = 50  # operations of one history, of which hypothesis shrinks one that fails
WHICH = st.integers(0, 11)  # which sequence, modulo their number
LENGTHS = st.sampled_from([1, 0, 2, 3, 4, 5, 9, 14])
NUMBERS = st.integers(0, 2**16)
done: dict[str, int] = {}


def has_sequences(machine: "Caches") -> bool:
    return bool(machine.world.sequences)


def has_some(machine: "Caches") -> bool:
    """Some, and not so many that comparing them takes long."""
    return 0 < len(machine.world.sequences) < 6


class Caches(RuleBasedStateMachine):
    """Operations on caches that each hold their own memory."""

    kinds = CONTIGUOUS

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.world = self.made()

    def made(self) -> World:
        return World(self.kinds, Path(self.folder.name))

    @initialize(kind=NUMBERS, streams=st.sampled_from(sorted(STREAMS)))
    def first(self, kind, streams):
        self.begin(kind, streams, 2)

    @precondition(lambda self: len(self.world.sequences) < 4)
    @rule(kind=NUMBERS, streams=st.sampled_from(sorted(STREAMS)), batch=st.integers(1, 3))
    def begin(self, kind, streams, batch):
        names = sorted(self.world.kinds)
        self.world.begin(names[kind % len(names)], streams, batch)

    @precondition(has_sequences)
    @rule(at=WHICH, length=LENGTHS)
    def update(self, at, length):
        self.world.update(at, length)

    @precondition(has_sequences)
    @rule(at=WHICH)
    def step(self, at):
        self.world.update(at, 1)

    @precondition(has_sequences)
    @rule(at=WHICH, length=st.integers(5, 11))
    def prefill(self, at, length):
        self.world.update(at, length)

    @precondition(has_sequences)
    @rule(at=WHICH, length=LENGTHS)
    def peek(self, at, length):
        self.world.peek(at, length)

    @precondition(has_sequences)
    @rule(at=WHICH, length=NUMBERS)
    def truncate(self, at, length):
        self.world.truncate(at, length)

    @precondition(has_sequences)
    @rule(at=WHICH, back=st.integers(0, 6))
    def roll_back(self, at, back):
        self.world.roll_back(at, back)

    @precondition(has_sequences)
    @rule(at=WHICH, seed=NUMBERS)
    def truncate_rows(self, at, seed):
        self.world.truncate_rows(at, seed)

    @precondition(has_sequences)
    @rule(at=WHICH, rows=st.lists(st.integers(0, 2), min_size=1, max_size=4))
    def reorder(self, at, rows):
        self.world.reorder(at, rows)

    @precondition(has_some)
    @rule(at=WHICH)
    def fork(self, at):
        self.world.fork(at)

    @precondition(has_some)
    @rule(at=WHICH, one=st.integers(1, 3), other=st.integers(1, 3))
    def fork_and_diverge(self, at, one, other):
        self.world.fork(at)
        self.world.update(at, one)
        self.world.update(-1, other)

    @precondition(has_some)
    @rule(at=WHICH)
    def copy(self, at):
        self.world.copy(at)

    @precondition(has_sequences)
    @rule(at=WHICH, length=LENGTHS)
    def undo(self, at, length):
        self.world.undo(at, length)

    @precondition(has_sequences)
    @rule(at=WHICH, which=NUMBERS)
    def wrong(self, at, which):
        self.world.wrong(at, which)

    @precondition(has_some)
    @rule(at=WHICH)
    def save(self, at):
        self.world.save(at)

    @precondition(has_sequences)
    @rule(at=WHICH)
    def drop(self, at):
        self.world.drop(at)

    @invariant()
    def agrees_with_lists(self):
        self.world.check()

    def teardown(self):
        for name, count in self.world.names.items():
            done[name] = done.get(name, 0) + count
        if self.world.checked == self.world.done:  # or an operation failed, and says why
            self.world.end()
        self.folder.cleanup()


class Pages(Caches):
    """Operations on caches over one pool, and on what the pool stores."""

    format, cold = "plain", None  # and where pages are offloaded to

    def made(self) -> World:
        folder = Path(self.folder.name)
        offload = Offload(hot_pages=6) if self.cold else None
        pool = PagePool(PAGES, PAGE, format=self.format, offload=offload)
        return PoolWorld(pool, folder)

    @precondition(has_sequences)
    @rule(at=WHICH, row=st.integers(0, 3))
    def store(self, at, row):
        self.world.store(at, row)

    @precondition(lambda self: self.world.stored and len(self.world.sequences) < 6)
    @rule(at=WHICH, more=NUMBERS)
    def share(self, at, more):
        self.world.share(at, more)

    @precondition(has_some)
    @rule(at=WHICH, row=st.integers(0, 3), more=NUMBERS)
    def store_and_share(self, at, row, more):
        self.world.update(at, PAGE + 1)
        self.world.store(at, row)
        self.world.share(-1, more)

    @precondition(lambda self: self.world.stored)
    @rule()
    def evict(self):
        self.world.evict()

    @precondition(has_sequences)
    @rule(at=WHICH)
    def release(self, at):
        self.world.release(at)

    @precondition(has_sequences)
    @rule(at=WHICH)
    def foreign(self, at):
        self.world.foreign(at)


def histories(operations: int) -> settings:
    """So many histories that there are as many operations; in a normal run always the same."""
    return settings(
        max_examples=-(-operations // STEPS),
        stateful_step_count=STEPS,
        deadline=None,
        derandomize=not LONG,
        database=None,
        phases=PHASES,
    )


def driven(machine: type[Caches], operations: int) -> None:
    """So many operations at least, of which some of those that hypothesis draws have no subject."""
    done.clear()
    run_state_machine_as_test(machine, settings=histories(operations * 3 // 2))
    assert sum(done.values()) >= operations, done


@pytest.mark.usefixtures("unchecked")  # annotations are checked by other tests of the same calls
def test_caches_agree_with_lists():
    driven(Caches, 16_000 if LONG else 480)


@pytest.mark.parametrize(
    ("form", "cold"),
    [
        ("plain", None),
        ("K8V8", None),
        ("K8V4", None),
        ("K6V4", None),
        ("K4V4", None),
        (format_of("K4V4")._replace(by_channel_from=PAGE), None),
        ("K8V4", "host"),
        ("plain", "host"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_pages_agree_with_lists(form, cold):
    machine = type("ThesePages", (Pages,), {"format": form, "cold": cold})
    driven(machine, 12_000 if LONG else 250)


@pytest.mark.parametrize(
    ("fault", "machine"),
    [(each, Pages) for each in OF_POOLS] + [(each, Caches) for each in OF_CONTIGUOUS],
    ids=lambda each: each.__name__,
)
@pytest.mark.usefixtures("unchecked")
def test_the_machine_finds_mistakes(fault, machine, monkeypatch):
    fault(monkeypatch)
    examples = 600 if LONG else 60  # other histories in each long run: sixty may miss a fault
    searched = settings(histories(2000), phases=(Phase.generate,), max_examples=examples)
    machine = type("Mistaken", (machine,), {"format": "K8V4"})
    with pytest.raises((AssertionError, IndexError, RuntimeError, ValueError, ExceptionGroup)):
        run_state_machine_as_test(machine, settings=searched)
