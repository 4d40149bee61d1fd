"""What every cache can do: forks that go on by themselves, `can_truncate`, and `describe`."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import session
from filled_caches import KINDS, STREAMS, content, filled, same
from regard import KVCache, PagedCache, PagePool, QuantizedCache, SlidingCache


@pytest.mark.parametrize("kind", KINDS)
def test_a_fork_goes_on_by_itself(kind):
    cache = filled(kind, "keys and values", tokens=(3, 2))
    other = cache.fork()
    assert type(other) is type(cache) and same(content(cache), content(other))
    before = content(cache)
    other.update(*STREAMS["keys and values"](2))
    after = content(other)
    assert same(before, content(cache))
    cache.update(*STREAMS["keys and values"](3))
    cache.reorder(torch.tensor([1]))
    assert same(after, content(other))


@pytest.mark.parametrize("kind", KINDS)
@given(tokens=st.lists(st.integers(1, 4), min_size=1, max_size=3), data=st.data())
@settings(max_examples=200 if session.LONG else 20, deadline=None)
def test_can_truncate_says_what_truncate_does(kind, tokens, data):
    cache = filled(kind, "keys and values", tokens)
    lengths = st.integers(-1, 13) | st.lists(st.integers(-1, 13), min_size=1, max_size=3).map(
        torch.tensor
    )
    for length in (*data.draw(st.lists(lengths, max_size=4)), True):
        before = content(cache)
        if asked(cache, length):
            cache.truncate(length)
            return
        with pytest.raises(ValueError):
            cache.truncate(length)
        assert same(before, content(cache))


def asked(cache, length):
    """The answer of `can_truncate`, which changes nothing."""
    before = content(cache)
    answer = cache.can_truncate(length)
    assert same(before, content(cache))
    return answer


def test_a_fork_follows_gradients_by_itself():
    x = torch.randn(1, 1, 3, 2, requires_grad=True)
    cache = KINDS["growing"]()
    cache.update(x)
    (part,) = cache.fork().update(x * 2)
    part.streams[0].sum().backward()
    assert x.grad.eq(3).all()
    assert cache.length == 3


@pytest.mark.parametrize("kind", KINDS)
def test_copies_are_forks(kind):
    import copy

    cache = filled(kind, "latent", tokens=(3,))
    for made in (copy.copy(cache), copy.deepcopy(cache)):
        made.update(*STREAMS["latent"](2))
        assert (made.length, cache.length) == (5, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_description_has_the_bytes_that_the_cache_counts(kind):
    cache = filled(kind, "latent and positions")
    first, second = cache.describe().splitlines()
    assert first.startswith(f"{cache!r}: 2 rows of 6 tokens")
    assert f"{cache.nbytes:,} bytes held, {cache.allocated_bytes:,} allocated" in first
    assert second == "  streams [2, 1, 6, 7] float64, [2, 1, 6, 1] int32"
    assert KINDS[kind]().describe() == f"{KINDS[kind]()!r}: no tokens"


def test_rows_and_windows_are_described():
    cache, k = KVCache(), torch.zeros(2, 3, 1000, 4)
    cache.update(k, k)
    cache.truncate(torch.tensor([7, 1000]))
    assert "2 rows of 7 to 1,000 tokens, 192,000 bytes held" in cache.describe()
    window = SlidingCache(4)
    window.update(k)
    assert "2 rows of 1,000 tokens, the last 3 held" in window.describe()


def test_codes_are_described_by_the_streams_that_were_given():
    cache, k = QuantizedCache(format="K8V4"), torch.zeros(1, 2, 1, 8).bfloat16()
    cache.update(k, k)
    text = cache.describe()
    assert "QuantizedCache(format='K8V4'" in text and "[1, 2, 1, 8] bfloat16" in text
    assert "1 row of 1 token, " in text


def test_a_paged_cache_is_described():
    cache, k = PagedCache(PagePool(8, 4)), torch.zeros(2, 1, 6, 2)
    cache.update(k, k)
    text = cache.describe()
    assert "2 rows of 6 tokens, 192 bytes held, 256 allocated" in text
    assert "streams [2, 1, 6, 2] float32" in text
