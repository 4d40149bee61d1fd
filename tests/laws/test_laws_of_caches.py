"""Every cache against a list of lists, under random operations."""

import copy
import pickle
import random

import pytest
import torch

from regard import KVCache, PagedCache, PagePool, QuantizedCache, SlidingCache, StaticCache
from session import LONG

STEPS = 34_000 if LONG else 200  # three seeds a kind
KINDS = {
    "growing": KVCache,
    "static": lambda: StaticCache(40),
    "sliding": lambda: SlidingCache(5, rollback=3),
    "window of one": lambda: SlidingCache(1),
    "int8": lambda: QuantizedCache(8, group=4),
    "int4": lambda: QuantizedCache(4, group=4),
}


def tokens(rng, batch, length):
    """Two floating streams of different widths and heads, and one of integers."""
    return (
        torch.randn(batch, 2, length, 6),
        torch.randn(batch, 1, length, 3),
        torch.tensor([[[[rng.randint(0, 2**31 - 1)]] * length]] * batch),
    )


class Model:
    """What a cache should hold: for each row, a list of tokens; a token is its streams' columns."""

    def __init__(self, batch):
        self.rows = [[] for _ in range(batch)]

    @property
    def lengths(self):
        return [len(row) for row in self.rows]

    def add(self, new):
        for b, row in enumerate(self.rows):
            row += [tuple(s[b, :, i].clone() for s in new) for i in range(new[0].shape[2])]

    def check(self, parts, tolerance):
        (part,) = parts
        assert all(s.shape[2] == part.kv_stop - part.kv_start for s in part.streams)
        for b, row in enumerate(self.rows):
            slots = range(part.kv_start, min(part.kv_stop, len(row)))
            for i, held in enumerate(part.streams if slots else ()):
                got = held[b, :, : len(slots)]
                want = torch.stack([row[slot][i] for slot in slots], dim=1)
                assert got.dtype == want.dtype
                gap = (got - want).abs().max()
                assert gap <= (tolerance if got.is_floating_point() else 0), (b, slots)


def tolerance_of(cache):
    """Half a step of the largest range that normal numbers span here, and bfloat16's rounding."""
    if isinstance(cache, QuantizedCache):
        return 12 / (2**cache.bits - 1)
    return 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_random_operations_agree_with_lists(kind, seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    batch, furthest = 3, 0  # a rollback counts from the furthest that the cache has been
    cache, model = KINDS[kind](), Model(batch)
    for _ in range(STEPS):
        choice = rng.random()
        longest = max(model.lengths)
        furthest = max(furthest, longest) if longest else 0
        if choice < 0.5:
            new = tokens(rng, batch, rng.choice((1, 1, 1, 2, 7)))
            if isinstance(cache, StaticCache) and longest + new[0].shape[2] > cache.max_length:
                with pytest.raises(ValueError, match="max_length"):
                    cache.update(*new)
                assert cache.length == longest
                cache.truncate(0)
                model = Model(batch)
                continue
            span = cache.span(new[0].shape[2])
            starts = span.positions().reshape(-1, span.num_queries)[:, 0].expand(batch)
            assert starts.tolist() == model.lengths
            peeked = cache.peek(*new)
            model.add(new)
            model.check(peeked, tolerance_of(cache))
            assert cache.length == longest
            parts = cache.update(*new)
            assert (parts[0].kv_start, parts[0].kv_stop) == (span.kv_start, span.kv_stop)
            model.check(parts, tolerance_of(cache))
            for stream in new:
                stream.zero_()
        elif choice < 0.7:
            length = rng.randint(0, longest)
            try:
                cache.truncate(length)
            except ValueError:
                assert isinstance(cache, SlidingCache)
                assert furthest - length > cache.rollback
                assert length > 0 and cache.size > 1
                continue
            model.rows = [row[:length] for row in model.rows]
        elif choice < 0.78 and not isinstance(cache, SlidingCache):
            lengths = [rng.randint(0, n) for n in model.lengths]
            cache.truncate(torch.tensor(lengths))
            model.rows = [row[:n] for row, n in zip(model.rows, lengths, strict=True)]
        elif choice < 0.9:
            rows = [rng.randrange(batch) for _ in range(rng.choice((batch, batch, 2, 4)))]
            cache.reorder(torch.tensor(rows))
            batch = len(rows)
            model.rows = [list(model.rows[r]) for r in rows]
        elif choice < 0.95:
            cache = copy.deepcopy(cache)
        else:
            cache = pickle.loads(pickle.dumps(cache))
        assert cache.length == max(model.lengths)
        if type(cache) in (KVCache, StaticCache) and cache.nbytes:
            assert cache.nbytes == batch * cache.length * (2 * 6 * 4 + 3 * 4 + 8)
        if longest > 60:
            cache, model = KINDS[kind](), Model(batch)


@pytest.mark.parametrize("kind", KINDS)
def test_a_refused_update_changes_nothing(kind):
    cache = KINDS[kind]()
    good = (torch.randn(2, 2, 4, 6), torch.randn(2, 2, 4, 6))
    cache.update(*good)
    before = [s.clone() for s in cache.peek(*good)[0].streams]
    wrong = [
        (),
        good[:1],
        (good[0][:1], good[1][:1]),
        (good[0][:, :1], good[1]),
        (good[0][..., :5], good[1]),
        (good[0].double(), good[1]),
        (good[0].to("meta"), good[1].to("meta")),
        (good[0], good[1][:, :, :3]),
        (good[0][0], good[1][0]),
    ]
    for streams in wrong:
        for call in (cache.update, cache.peek):
            with pytest.raises(ValueError, match=r"stream|batch|length"):
                call(*streams)
    lengths = [torch.tensor(n) for n in ([1, 9], [1.0, 2.0], [1, 2, 3], [3], 3)]
    for length in (-1, 5, *lengths):
        with pytest.raises(ValueError, match=r"length|rows of one length"):
            cache.truncate(length)
    for rows in (torch.tensor([0, 2]), torch.tensor([0.0]), torch.tensor([[0]])):
        with pytest.raises(ValueError, match="rows"):
            cache.reorder(rows)
    assert cache.length == 4
    for have, want in zip(cache.peek(*good)[0].streams, before, strict=True):
        assert torch.equal(have, want)


@pytest.mark.parametrize("kind", ["growing", "static", "int8"])
def test_ragged_lengths_of_another_batch_are_refused(kind):
    cache = KINDS[kind]()
    cache.update(torch.randn(2, 1, 6, 4))
    cache.truncate(torch.tensor([3, 5]))
    for lengths in ([1], [1, 2, 3]):
        with pytest.raises(ValueError, match="each of the 2 rows"):
            cache.truncate(torch.tensor(lengths))
    assert cache.span(1).positions().tolist() == [[3], [5]]


@pytest.mark.parametrize("kind", ["growing", "static", "int8"])
def test_lengths_are_not_shared_with_the_caller(kind):
    cache, lengths = KINDS[kind](), torch.tensor([3, 5])
    cache.update(torch.randn(2, 1, 6, 4))
    cache.truncate(lengths)
    lengths.zero_()
    cache.span(1).q_start.zero_()
    assert cache.span(1).positions().tolist() == [[3], [5]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_filled_in_inference_mode_goes_on_outside(kind):
    cache, new = KINDS[kind](), torch.randn(2, 1, 6, 4)
    with torch.inference_mode():
        cache.update(new)
        cache.reorder(torch.tensor([1, 0]))
    cache.update(new)
    cache.reorder(torch.tensor([1, 0]))
    assert cache.update(new)[0].kv_stop == 18


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_copies_what_it_is_given(kind):
    cache = KINDS[kind]()
    new = torch.randn(1, 1, 4, 6)
    first = cache.update(new)[0].streams[0].clone()
    new.fill_(99.0)
    held = cache.peek(new[:, :, :0])[0]
    assert torch.equal(held.streams[0], first[:, :, held.kv_start :])


@pytest.mark.parametrize("make", [KVCache, lambda: SlidingCache(3)])
def test_gradients_flow_through_the_past(make):
    past = torch.randn(1, 2, 4, 3, requires_grad=True)
    new = torch.randn(1, 2, 2, 3, requires_grad=True)
    cache = make()
    cache.update(past)
    held = cache.update(new)[0].streams[0]
    held.square().sum().backward()
    visible = past[:, :, -(held.shape[2] - 2) :]
    expected = torch.zeros_like(past)
    expected[:, :, -visible.shape[2] :] = 2 * visible.detach()
    assert torch.equal(past.grad, expected)
    assert torch.equal(new.grad, 2 * new.detach())


@pytest.mark.parametrize("make", [lambda: StaticCache(9), QuantizedCache])
def test_caches_that_cannot_follow_gradients_say_so(make):
    with pytest.raises(ValueError, match=r"gradients.*KVCache"):
        make().update(torch.randn(1, 1, 2, 4, requires_grad=True))


def test_bytes_are_counted():
    k = torch.zeros(2, 3, 5, 64)
    cache = KVCache()
    cache.update(k, k)
    assert cache.nbytes == 2 * 2 * 3 * 5 * 64 * 4
    cache = QuantizedCache(bits=4, group=32)
    cache.update(k)
    assert cache.nbytes == 2 * 3 * 5 * (32 + 2 * 2 * 2)


@pytest.mark.parametrize(
    "cache",
    [
        KVCache(),
        StaticCache(7),
        SlidingCache(3),
        SlidingCache(3, rollback=2),
        QuantizedCache(bits=4, group=32),
    ],
)
def test_a_repr_pastes_back(cache):
    assert repr(eval(repr(cache))) == repr(cache)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: StaticCache(0), "at least 1"),
        (lambda: SlidingCache(0), "at least 1"),
        (lambda: StaticCache(True), "whole number"),
        (lambda: SlidingCache(2, rollback=True), "whole number"),
        (lambda: KVCache().truncate(False), "whole number"),
        (lambda: SlidingCache(2, rollback=-1), "at least 0"),
        (lambda: QuantizedCache(bits=3), "8 or 4"),
        (lambda: QuantizedCache(group=0), "even number"),
    ],
)
def test_errors_of_wrong_caches_state_what_is_right(wrong, message):
    with pytest.raises(ValueError, match=message):
        wrong()


ALL = {
    **KINDS,
    "4 bits, rotated": lambda: QuantizedCache(format="K4V4", group=4),
    "pages": lambda: PagedCache(PagePool(64, 4)),
    "pages of a window": lambda: PagedCache(PagePool(64, 4), window=5, rollback=9),
    "pages of codes": lambda: PagedCache(PagePool(64, 4, format="K4V4")),
}
EMPTY = {
    "cut": lambda cache, make, path: cache,
    "forked": lambda cache, make, path: cache.fork(),
    "reordered": lambda cache, make, path: cache.reorder(torch.tensor([1, 0])) or cache,
    "restored": lambda cache, make, path: cache.restore(cache.snapshot()) or cache,
    "loaded": lambda cache, make, path: loaded(loaded(cache, make, path), make, path),
}


def loaded(cache, make, path):
    cache.save(path, weights="mine")
    again = make()
    again.load(path, weights="mine")
    return again


@pytest.mark.parametrize("empty", EMPTY)
@pytest.mark.parametrize("kind", ALL)
def test_a_cache_cut_to_nothing_takes_the_streams_it_held_and_no_others(tmp_path, kind, empty):
    k, v = torch.randn(2, 2, 3, 6), torch.randn(2, 2, 3, 4)
    cache = ALL[kind]()
    cache.update(k, v)
    cache.truncate(0)
    cache = EMPTY[empty](cache, ALL[kind], tmp_path / "cache.safetensors")
    others = [
        ((k[:1], v[:1]), "a batch of 1, the cache one of 2"),
        ((k[[0, 1, 1]], v[[0, 1, 1]]), "a batch of 3, the cache one of 2"),
        ((k[:0], v[:0]), "a batch of 0, the cache one of 2"),
        ((k, k), r"\(heads, width\) = \(2, 6\), the cache \(2, 4\)"),
        ((k[:, :1], v), r"\(heads, width\) = \(1, 6\), the cache \(2, 6\)"),
        ((k.double(), v.double()), "float64 on cpu, the cache torch.float32"),
        ((k,), "holds 2 streams, got 1"),
    ]
    for new, message in others:
        for call in (cache.update, cache.peek):
            with pytest.raises(ValueError, match=message):
                call(*new)
    assert (cache.length, cache.nbytes) == (0, 0)
    for rows in ([2], [-1, 0]):
        with pytest.raises(ValueError, match="2 rows are held"):
            cache.reorder(torch.tensor(rows))
    parts = cache.update(k, v)
    assert torch.cat([part.streams[1] for part in parts], 2).shape == v.shape
    cache.truncate(0)
    cache.reorder(torch.tensor([1, 1, 0]))
    assert cache.update(k[[0, 1, 1]], v[[0, 1, 1]])[-1].kv_stop == 3
