"""What every cache can do: forks that go on by themselves, and `can_truncate`."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import session
from filled_caches import KINDS, STREAMS, content, filled, same


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
