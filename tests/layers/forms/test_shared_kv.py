"""Layers that read the keys of an earlier one: the same as with copies of its projections."""

import copy

import pytest
import torch

from forms import CACHES, bound_of, float64
from regard import (
    Attention,
    Causal,
    KVCache,
    Padding,
    PositionScale,
    Rotary,
    SharedCache,
    SharedKVAttention,
    SlidingCache,
    SlidingWindow,
)

WINDOW = 3
SIZES = {"num_kv_heads": 2, "qk_norm": "head", "rope": Rotary(4)}
ALL = {**CACHES, "SlidingCache": lambda: SlidingCache(WINDOW)}


def pair(mask, **options):
    """A layer, one that reads its keys, and one that computes the same keys itself."""
    torch.manual_seed(3)
    first = Attention(16, 4, **SIZES, mask=mask)
    second = SharedKVAttention(16, 4, **SIZES, mask=mask, **options)
    whole = Attention(16, 4, **SIZES, mask=mask, **options)
    for layer in (first, second):
        for each in layer.parameters():
            torch.nn.init.normal_(each, std=0.5)
    whole.load_state_dict(second.state_dict(), strict=False)
    for name in ("k_proj", "v_proj", "k_norm"):
        setattr(whole, name, first.get_submodule(name))
    return first, second, whole


def run(first, second, x, shared, follower, **options):
    return second(x + first(x, cache=shared, **options), cache=follower, **options)


class Copied(torch.nn.Module):
    """The queries of one input and the keys of another: `whole` with the keys of `first`."""

    def __init__(self, whole):
        super().__init__()
        self.whole = whole

    def forward(self, x, other):
        whole = self.whole
        q, _, _ = whole.project(other)
        _, k, v = whole.project(x)
        q, k = whole.rope(q, k, torch.arange(x.shape[1]))
        scores = (q.unflatten(1, (2, 2)) @ k.unsqueeze(2).mT).flatten(1, 2) * whole.scale
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        hidden |= torch.ones_like(hidden).tril(-WINDOW) & isinstance(whole.mask, type(WINDOWED))
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out = (weights.unflatten(1, (2, 2)) @ v.unsqueeze(2)).flatten(1, 2)
        return whole.o_proj(out.transpose(1, 2).flatten(2))


WINDOWED = Causal() & SlidingWindow(WINDOW)


@pytest.mark.parametrize("mask", [Causal(), WINDOWED], ids=repr)
def test_it_attends_to_the_keys_of_the_earlier_layer(mask):
    with float64():
        first, second, whole = pair(mask)
        x, shared = torch.randn(2, 8, 16), SharedCache()
        out = run(first, second, x, shared, shared.follow())
        wanted = Copied(whole)(x, x + first(x))
        torch.testing.assert_close(out, wanted)


@pytest.mark.parametrize("name", ALL)
def test_every_cache_gives_the_result_without_one(name):
    mask = WINDOWED if name == "SlidingCache" else Causal()
    with float64(), torch.no_grad():
        options = {"sinks": True, "gate": "head", "query_scale": PositionScale(0.5, 3)}
        first, second, _ = pair(mask, **options)
        x, shared = torch.randn(2, 11, 16), SharedCache()
        wanted = run(first, second, x, shared, shared.follow())
        shared = SharedCache(ALL[name]())
        follower = shared.follow()
        pieces = [run(first, second, each, shared, follower) for each in x.split([6, 1, 4], 1)]
        assert (torch.cat(pieces, 1) - wanted).abs().max() <= bound_of(name)
        assert shared.length == follower.length == 11
        assert follower.nbytes == 0


def test_several_layers_follow_and_gradients_reach_the_first():
    with float64():
        first, second, _ = pair(Causal())
        x, shared = torch.randn(2, 5, 16), SharedCache()
        out = run(first, second, x, shared, shared.follow())
        out = second(out, cache=shared.follow())
        out.sum().backward()
        assert all(each.grad.abs().sum() > 0 for each in first.parameters())


def test_padding_is_hidden_from_both():
    with float64(), torch.no_grad():
        first, second, _ = pair(Causal())
        x, valid = torch.randn(2, 6, 16), torch.ones(2, 6, dtype=torch.bool)
        valid[1, :2] = False
        shared = SharedCache(KVCache())
        options = {"mask": Padding(valid), "positions": (valid.long().cumsum(1) - 1).clamp(min=0)}
        out = run(first, second, x, shared, shared.follow(), **options)
        alone = SharedCache(KVCache())
        short = run(first, second, x[1:, 2:], alone, alone.follow())
        torch.testing.assert_close(out[1:, 2:], short)


def test_truncation_and_beams_are_those_of_the_shared_cache():
    with float64(), torch.no_grad():
        first, second, _ = pair(Causal())
        x, shared = torch.randn(2, 7, 16), SharedCache(KVCache())
        follower = shared.follow()
        wanted = run(first, second, x, shared, follower)
        for each in (shared, follower):
            each.truncate(4)
            each.reorder(torch.tensor([1, 0]))
        assert shared.length == follower.length == 4
        again = run(first, second, x.flip(0)[:, 4:], shared, follower)
        torch.testing.assert_close(again, wanted.flip(0)[:, 4:])


def test_the_earlier_layer_comes_first_in_every_call():
    first, second, _ = pair(Causal())
    x, shared = torch.randn(1, 3, 16), SharedCache(KVCache())
    follower = shared.follow()
    with pytest.raises(ValueError, match="call that layer first"):
        second(x, cache=follower)
    with torch.no_grad():
        first(x, cache=shared)
        second.weights(x, cache=follower)  # looks, and does not count
        with pytest.raises(ValueError, match=r"has 2 tokens and reads .* that had 3"):
            second(x[:, :2], cache=follower)
        second(x, cache=follower)
        with pytest.raises(ValueError, match="call that layer first"):
            second(x, cache=follower)


@pytest.mark.parametrize("cache", [None, KVCache()])
def test_a_cache_that_follows_none_is_refused(cache):
    _, second, _ = pair(Causal())
    with pytest.raises(TypeError, match=r"cache=shared.follow\(\)"):
        second(torch.randn(1, 3, 16), cache=cache)


def test_a_call_that_fails_leaves_both_as_they_were(monkeypatch):
    first, second, _ = pair(Causal())
    x, shared = torch.randn(1, 3, 16), SharedCache(KVCache())
    follower = shared.follow()
    with torch.no_grad():
        run(first, second, x, shared, follower)
        monkeypatch.setattr(first, "backend", "tiled")
        with pytest.raises(ValueError, match="tiled"):
            first(x[:, :1], cache=shared)
        assert shared.length == 3
        monkeypatch.setattr(first, "backend", "auto")
        first(x[:, :1], cache=shared)
        monkeypatch.setattr(second, "backend", "tiled")
        with pytest.raises(ValueError, match="tiled"):
            second(x[:, :1], cache=follower)
        monkeypatch.setattr(second, "backend", "auto")
        second(x[:, :1], cache=follower)  # it may try again


def test_its_code_builds_it_and_it_has_no_keys():
    import regard
    from regard.plan.modules import shape_of

    _, layer, _ = pair(Causal(), gate="channel")
    again = eval(repr(layer), vars(regard))
    assert sorted(again.state_dict()) == sorted(layer.state_dict())
    assert not any(name.startswith(("k_", "v_")) for name in layer.state_dict())
    assert layer.kind == "GQA" and shape_of(layer).keys_of is not None


def test_a_shared_cache_and_its_follower_are_copied_with_gradients_on():
    first, second = (kind(16, 2, mask=Causal()) for kind in (Attention, SharedKVAttention))
    cache, x = SharedCache(KVCache()), torch.randn(1, 4, 16)
    follower = cache.follow()
    second(first(x[:, :3], cache=cache), cache=follower)
    copied, following = copy.deepcopy((cache, follower))
    outputs = []
    for own, its in ((copied, following), (cache, follower)):
        outputs.append(second(first(x[:, 3:], cache=own), cache=its))
        assert (own.length, its.length) == (4, 4)
    assert torch.equal(*outputs)


def test_a_refused_update_leaves_the_last_one_to_be_read():
    cache, new = SharedCache(KVCache()), torch.randn(1, 2, 3, 4)
    cache.update(new, new)
    with pytest.raises(ValueError, match="batch"):
        cache.update(torch.randn(2, 2, 1, 4), torch.randn(2, 2, 1, 4))
    assert torch.equal(cache.follow().peek()[0].as_tensors().streams[0], new)
