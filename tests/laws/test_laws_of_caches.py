"""Every cache against a list of lists, under random operations."""

import copy
import pickle
import random

import pytest
import torch

from regard import NO_CACHE, KVCache, Part, QuantizedCache, SlidingCache, StaticCache
from regard.cache.codes import dequantize, quantize
from session import LONG

STEPS = 34_000 if LONG else 500  # three seeds a kind
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
            for slot in range(part.kv_start, min(part.kv_stop, len(row))):
                for held, want in zip(part.streams, row[slot], strict=True):
                    got = held[b, :, slot - part.kv_start]
                    assert got.dtype == want.dtype
                    gap = (got - want).abs().max()
                    assert gap <= (tolerance if got.is_floating_point() else 0), (b, slot)


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
        if isinstance(cache, KVCache | StaticCache) and cache.nbytes:
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


@pytest.mark.parametrize("size", [1, 4])
def test_a_sliding_cache_can_always_start_again(size):
    cache, new = SlidingCache(size), torch.randn(1, 1, 20, 2)
    cache.update(new)
    cache.truncate(0)
    assert cache.span(3).kv_start == cache.length == 0
    assert torch.equal(cache.update(new[:, :, :3])[0].streams[0], new[:, :, :3])


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


def test_gradients_are_those_of_a_plain_concatenation():
    chunks = [torch.randn(2, 2, n, 3, requires_grad=True) for n in (4, 1, 1, 3)]
    weight, cache, held = torch.randn(2, 2, 9, 3), KVCache(), None
    with torch.no_grad():
        cache.update(torch.randn(2, 2, 5, 3))
    for chunk in chunks:
        held = cache.update(chunk)[0].streams[0][:, :, 5:]
    assert torch.equal(held, torch.cat(chunks, dim=2))
    (held.sin() * weight).sum().backward()
    mine = [chunk.grad.clone() for chunk in chunks]
    wanted = torch.autograd.grad((torch.cat(chunks, dim=2).sin() * weight).sum(), chunks)
    for have, want in zip(mine, wanted, strict=True):
        assert torch.equal(have, want)


def test_gradients_flow_through_a_ragged_past():
    past = torch.randn(2, 1, 3, 2, requires_grad=True)
    cache = KVCache()
    cache.update(past)
    cache.truncate(torch.tensor([3, 1]))
    new = torch.randn(2, 1, 1, 2, requires_grad=True)
    cache.update(new)[0].streams[0].sum().backward()
    assert torch.equal(new.grad, torch.ones_like(new))
    assert past.grad[1, 0, 1].eq(0).all()  # overwritten by the new token


@pytest.mark.parametrize("make", [lambda: StaticCache(9), QuantizedCache])
def test_caches_that_cannot_follow_gradients_say_so(make):
    with pytest.raises(ValueError, match=r"gradients.*KVCache"):
        make().update(torch.randn(1, 1, 2, 4, requires_grad=True))


def test_a_static_cache_never_moves():
    cache = StaticCache(8)
    new = torch.randn(2, 1, 3, 4)
    pointer = cache.update(new)[0].streams[0].data_ptr()
    cache.reorder(torch.tensor([1, 0]))
    cache.truncate(0)
    assert cache.update(new)[0].streams[0].data_ptr() == pointer
    assert cache.allocated_bytes == 2 * 8 * 4 * 4


@pytest.mark.parametrize(("size", "rollback"), [(1, 0), (16, 0), (64, 10)])
def test_a_sliding_cache_stays_within_its_bound(size, rollback):
    cache = SlidingCache(size, rollback)
    for chunk in (500, 1, 1, 30, *[1] * 100):
        cache.update(torch.zeros(1, 1, chunk, 1, dtype=torch.uint8))
        stored = sum(held.untyped_storage().nbytes() for held in cache._held)
        assert stored <= 1.25 * size + chunk + rollback + 1
    assert cache.span(1).kv_start == cache.length - size + 1


def test_a_growing_cache_copies_rarely():
    cache = KVCache()
    pointers = {cache.update(torch.zeros(1, 1, 1, 1))[0].streams[0].data_ptr() for _ in range(2000)}
    assert len(pointers) <= 5


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("width", [1, 6, 64, 65])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_quantised_value_is_off_by_half_a_step(bits, width, dtype):
    x = (torch.randn(2, 3, 5, width) * torch.rand(2, 3, 5, 1) * 10 + 3).to(dtype)
    group = 16
    codes, scale, zero = quantize(x, bits, group)
    back = dequantize(codes, scale, zero, bits, group, width)
    step = scale.float().repeat_interleave(group, -1)[..., :width]
    allowed = step * 0.5 * (1 + 2**-12) + x.float().abs() * 2**-22  # and float32's own rounding
    assert ((back - x.float()).abs() <= allowed).all()


def test_constant_and_zero_groups_survive():
    for value in (0.0, 3.5, -2.0):
        x = torch.full((1, 1, 2, 8), value)
        assert torch.equal(dequantize(*quantize(x, 8, 8), 8, 8, 8), x)


def test_quantised_rows_do_not_know_each_other():
    x = torch.randn(2, 2, 9, 64)
    loud = x.clone()
    loud[1] *= 1e4
    quiet, other = QuantizedCache(), QuantizedCache()
    assert torch.equal(quiet.update(x)[0].streams[0][0], other.update(loud)[0].streams[0][0])


@pytest.mark.parametrize("bits", [8, 4])
def test_an_outlier_channel_spoils_its_group_only(bits):
    x = torch.randn(1, 2, 9, 64)
    loud = x.clone()
    loud[..., 20] = 1e4
    quiet, other = (QuantizedCache(bits, group=16).update(y)[0].streams[0] for y in (x, loud))
    same = (quiet == other).all((0, 1, 2))
    assert same[:16].all() and same[32:].all()
    assert not same[16:32].any()


@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_in_chunks_is_quantised_token_by_token(bits):
    x, whole, steps = torch.randn(2, 2, 9, 12), QuantizedCache(bits, 8), QuantizedCache(bits, 8)
    for token in x.split(1, dim=2):
        (part,) = steps.update(token)
    assert torch.equal(whole.update(x)[0].streams[0], part.streams[0])


def test_the_error_of_a_quantised_cache_does_not_grow():
    cache = QuantizedCache(4)
    x = torch.randn(1, 1, 4096, 64)
    for chunk in x.split(512, dim=2):
        (part,) = cache.update(chunk)
    gaps = (part.streams[0] - x).abs().mean((0, 1, 3))
    assert 0.95 < gaps[:1024].mean() / gaps[-1024:].mean() < 1.05


def test_bytes_are_counted():
    k = torch.zeros(2, 3, 5, 64)
    cache = KVCache()
    cache.update(k, k)
    assert cache.nbytes == 2 * 2 * 3 * 5 * 64 * 4
    cache = QuantizedCache(bits=4, group=32)
    cache.update(k)
    assert cache.nbytes == 2 * 3 * 5 * (32 + 2 * 2 * 2)


def test_no_cache_keeps_nothing():
    k = torch.zeros(1, 1, 2, 3)
    assert NO_CACHE.update(k) == (Part(0, 2, (k,)),)
    assert NO_CACHE.length == 0
    assert copy.deepcopy(NO_CACHE) is NO_CACHE
    assert pickle.loads(pickle.dumps(NO_CACHE)) is NO_CACHE
    with pytest.raises(ValueError, match="length"):
        NO_CACHE.truncate(1)
    NO_CACHE.truncate(0)
    with pytest.raises(ValueError, match="holds nothing"):
        NO_CACHE.reorder(torch.tensor([0]))


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
        (lambda: SlidingCache(2, rollback=-1), "0 or more"),
        (lambda: QuantizedCache(bits=3), "8 or 4"),
        (lambda: QuantizedCache(group=0), "even number"),
    ],
)
def test_wrong_caches_say_what_is_right(wrong, message):
    with pytest.raises(ValueError, match=message):
        wrong()
