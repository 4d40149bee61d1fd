"""A pool over a long time and under several threads: nothing is lost, mixed up or left behind."""

import gc
import random
import sys
import threading
from collections import Counter

import pytest
import torch

from pooled_texts import Sequence
from regard import Attention, Causal, PagedCache, PagePool
from regard.cache.paging.tables import pages_of
from session import LONG

FORMATS = ["plain", "K8V8"]
SYSTEM = [[7 * i + prompt for i in range(22)] for prompt in range(4)]


class Traffic:
    """Sequences that arrive and leave at random; some begin alike."""

    def __init__(self, pool, seed):
        self.pool, self.random = pool, random.Random(seed)
        self.live, self.arrived, self.refused, self.hits = [], 0, 0, 0

    def text(self, most):
        return [self.random.randrange(250) for _ in range(self.random.randrange(1, most))]

    def arrive(self):
        """A prompt that others have too is stored before what is different in each text."""
        prompt = self.random.choice(SYSTEM)[: self.random.choice([8, 9, 22])]
        text = prompt + self.text(9)
        self.arrived += 1
        sequence = Sequence(self.pool, text, self.random.choice(["", "", "a"]))
        self.hits += sequence.found > 0
        self.live.append(sequence)
        if sequence.found < len(prompt):
            sequence.append(prompt[sequence.found :])
            sequence.store()
        sequence.append(text[len(sequence.tokens) :])

    def append(self):
        self.random.choice(self.live).append(self.text(12))

    def store(self):
        self.random.choice(self.live).store()

    def fork(self):
        self.live.append(self.random.choice(self.live).fork())

    def truncate(self):
        sequence = self.random.choice(self.live)
        sequence.truncate(self.random.randrange(len(sequence.tokens) + 1))

    def leave(self):
        sequence = self.live.pop(self.random.randrange(len(self.live)))
        sequence.check()
        if self.random.random() < 0.5:
            sequence.release()  # the others are garbage

    def step(self, most=8):
        steps = [self.append, self.append, self.store, self.fork, self.truncate, self.leave]
        full = len(self.live) > most
        step = self.leave if full else self.random.choice([self.arrive, *steps])
        if step != self.arrive and not self.live:
            step = self.arrive
        try:
            step()
        except ValueError as error:
            if "num_pages" not in str(error):  # the pool is not full: a mistake
                raise
            self.refused += 1
            self.live.pop().release()

    def end(self):
        for sequence in self.live:
            sequence.check()
        self.live.clear()


def check_references(pool, sequences):
    """Each page is referenced as often as tables have it, and used if it is in any, or stored."""
    caches = [cache for sequence in sequences for cache in sequence.caches]
    tables = Counter(page for cache in caches for page in pages_of(cache.rows))
    for cache in caches:
        tables.update(cache._rows.retired)
    for page in pool.memory.in_order():
        assert page.references == tables.pop(page, 0)
        assert page.references or page.node is not None
    assert not tables


def check_new(pool):
    """Without sequences, and once stored prefixes are evicted, the pool is as it began."""
    gc.collect()
    assert pool.nbytes.held == 0
    pool.evict()
    assert (pool.pages_in_use, pool.nbytes, len(pool.memory.prefixes)) == (0, (0, 0, 0), 0)
    assert all(slab.in_use == 0 and slab.streams == () for slab in pool.memory.slabs())


@pytest.mark.parametrize("form", FORMATS)
def test_a_pool_is_as_new_after_many_sequences(form):
    pool = PagePool(60, 4, format=form)
    traffic = Traffic(pool, seed=form)
    while traffic.arrived < (2_000 if LONG else 40):
        traffic.step()
        if traffic.random.random() < 0.1:
            check_references(pool, traffic.live)
            assert pool.pages_in_use <= 60
    assert traffic.refused and traffic.hits
    traffic.end()
    check_new(pool)


@pytest.fixture
def impatient_threads():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def run_threads(*programs):
    """Run each program in a thread of its own; raise what any of them raised."""
    errors = []

    def guarded(program):
        try:
            program()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(each,)) for each in programs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error


@pytest.mark.parametrize("form", FORMATS)
def test_threads_that_append_to_sequences_of_their_own_lose_nothing(form, impatient_threads):
    pool = PagePool(2_000, 4, format=form)
    sequences = [Sequence(pool, [thread]) for thread in range(4 if LONG else 2)]

    def append(sequence, thread):
        for i in range(120 if LONG else 40):
            sequence.append([(thread + i * k) % 250 for k in range(1 + i % 6)])
            sequence.check()

    run_threads(*(lambda s=s, t=t: append(s, t) for t, s in enumerate(sequences)))
    for sequence in sequences:
        sequence.check()
    check_references(pool, sequences)


@torch.no_grad()
def decoded(layer, pool, x):
    """The outputs of a layer for one token after another."""
    cache = PagedCache(pool)
    return torch.cat([layer(token, cache=cache) for token in x.split(1, dim=1)], dim=1)


@pytest.mark.parametrize("form", FORMATS)
def test_threads_that_decode_over_one_pool_compute_what_each_does_alone(form, impatient_threads):
    """Buffers grow while others read them."""
    layer = Attention(32, 4, num_kv_heads=2, mask=Causal()).eval()
    texts = [torch.randn(1, 100 if LONG else 20, 32) for _ in range(3 if LONG else 2)]
    alone = [decoded(layer, PagePool(200, 4, format=form), x) for x in texts]
    pool, together = PagePool(200, 4, format=form), {}

    def decode(number):
        together[number] = decoded(layer, pool, texts[number])

    run_threads(*(lambda n=n: decode(n) for n in range(len(texts))))
    for number, wanted in enumerate(alone):
        torch.testing.assert_close(together[number], wanted, rtol=1e-5, atol=1e-6)
    gc.collect()
    check_new(pool)


@pytest.mark.parametrize("form", FORMATS)
def test_threads_share_prefixes_and_evict_them(form, impatient_threads):
    pool = PagePool(150, 4, format=form)
    traffics = [Traffic(pool, seed=f"{form} {thread}") for thread in range(3 if LONG else 2)]

    def run(traffic):
        while traffic.arrived < (150 if LONG else 15):
            traffic.step(most=4)

    run_threads(*(lambda t=t: run(t) for t in traffics))
    gc.collect()
    check_references(pool, [each for traffic in traffics for each in traffic.live])
    assert sum(traffic.hits for traffic in traffics)
    for traffic in traffics:
        traffic.end()
    check_new(pool)
