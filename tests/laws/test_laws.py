"""What must be true of layers and their caches, in sentences. The names are the specification.

Sizes are small and odd; layers are in float64, so that a law broken by more than rounding shows.
"""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from layers import (
    CACHES,
    LAYERS,
    NARROW,
    PAIRS,
    ROUNDING,
    WINDOW,
    assert_same,
    attention,
    inputs,
    make,
    run_in_pieces,
)
from regard import (
    EVERYTHING,
    Causal,
    KVCache,
    Padding,
    PagedCache,
    PagePool,
    QuantizedCache,
    SlidingCache,
    SlidingWindow,
    StaticCache,
    Where,
)
from session import LONG

CUTS = st.lists(st.integers(1, 10), max_size=4)
TOKENS = 11
DRAWN = 250 if LONG else 6  # examples of each of many pairs of a layer and a cache


@pytest.mark.parametrize(("layer", "cache"), PAIRS)
def test_attending_in_chunks_is_attending_at_once(layer, cache):
    """For every layer, cache and cut. A cache that rounds agrees with itself, token by token."""
    layer, x, fresh = make(layer), inputs(2, TOKENS), CACHES[cache]
    with torch.no_grad():
        exact = cache not in ROUNDING
        whole = layer(x) if exact else run_in_pieces(layer, x, fresh(), list(range(1, TOKENS)))

    @settings(max_examples=DRAWN)
    @given(CUTS)
    def law(cuts):
        assert_same(run_in_pieces(layer, x, fresh(), cuts), whole)

    with torch.no_grad():
        law()


@pytest.mark.parametrize("layer", LAYERS)
def test_a_rounding_cache_is_near_an_exact_one(layer):
    """8 bits a number, and not so near that nothing was rounded."""
    layer, x = make(layer), inputs(2, TOKENS)
    with torch.no_grad():
        rounded = run_in_pieces(layer, x, QuantizedCache(bits=8, group=4), [5, 6, 7])
        exact = layer(x)
    error = (rounded - exact).abs().max() / exact.abs().max()
    assert 1e-6 < error < 0.1


@pytest.mark.parametrize(("layer", "cache"), PAIRS)
def test_truncating_undoes_updating(layer, cache):
    """What was taken back leaves no trace."""
    layer, x = make(layer), inputs(2, TOKENS)
    rolling = {
        "sliding": lambda: SlidingCache(3, rollback=4),
        "pages, window": lambda: PagedCache(PagePool(99, page_size=2), window=3, rollback=4),
    }
    held = rolling.get(cache, CACHES[cache])()
    with torch.no_grad():
        run_in_pieces(layer, x[:, :5], held, [2])
        twin = copy.deepcopy(held)
        run_in_pieces(layer, inputs(2, 3, seed=1), held, [1])
        held.truncate(5)
        assert held.length == twin.length == 5
        assert_same(layer(x[:, 5:], cache=held), layer(x[:, 5:], cache=twin))


@pytest.mark.parametrize(("layer", "cache"), PAIRS)
def test_reordering_rows_is_batching_them_anew(layer, cache):
    """Beams are dropped, repeated and exchanged."""
    layer, x, fresh = make(layer), inputs(3, TOKENS), CACHES[cache]

    @settings(max_examples=DRAWN)
    @given(st.lists(st.integers(0, 2), min_size=1, max_size=5))
    def law(rows):
        rows = torch.tensor(rows)
        held, anew = fresh(), fresh()
        layer(x[:, :6], cache=held)
        held.reorder(rows)
        layer(x[rows, :6], cache=anew)
        assert_same(layer(x[rows, 6:], cache=held), layer(x[rows, 6:], cache=anew))

    with torch.no_grad():
        law()


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("layer", ["everything", "MLA window"])
def test_a_cache_shares_no_storage_with_the_caller(layer, cache):
    """What the caller does to his tensors afterwards changes nothing held."""
    held = CACHES[cache]()
    k, v = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4, 8)
    one = torch.randn(2, 3, 1, 8)
    held.update(k, v)
    before = [x.clone() for part in held.peek(one, one) for x in part.streams]
    k.fill_(torch.nan)
    v.fill_(torch.nan)
    after = [x for part in held.peek(one, one) for x in part.streams]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("layer", LAYERS)
def test_weights_and_explain_leave_the_cache_as_it_was(layer):
    """`layer.weights` and `layer.explain` ask what would be."""
    layer, x = make(layer), inputs(2, TOKENS)
    held = KVCache()
    with torch.no_grad():
        layer(x[:, :6], cache=held)
        weights = layer.weights(x[:, 6:], cache=held)
        assert layer.explain(x[:, 6:], cache=held)
        assert held.length == 6
        whole = layer.weights(x)
        assert_same(layer(x[:, 6:], cache=held), layer(x)[:, 6:])
    assert weights.shape[2:] == (TOKENS - 6, TOKENS)
    assert_same(weights, whole[:, :, 6:])
    assert (whole.sum(-1) <= 1 + 1e-12).all()
    assert (whole.triu(1) == 0).all()


REFUSED = {
    "a mask that looks ahead": lambda x: {"x": x, "mask": EVERYTHING},
    "a mask of another batch": lambda x: {"x": x, "mask": Padding(torch.ones(7, 20).bool())},
    "another batch": lambda x: {"x": torch.cat([x, x])},
    "another dtype": lambda x: {"x": x.half()},
    "a tensor for a mask": lambda x: {"x": x, "mask": torch.ones(3, 3).bool()},
    "positions of another length": lambda x: {"x": x, "positions": torch.arange(7)},
}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("refusal", REFUSED)
@pytest.mark.parametrize("layer", ["window", "everything", "MLA window", "latent KV"])
def test_a_refused_call_leaves_its_cache_as_it_was(layer, refusal, cache):
    if layer == "latent KV" and cache in NARROW:
        return
    layer, x, held = make(layer), inputs(2, TOKENS), CACHES[cache]()
    wrong = REFUSED[refusal](inputs(2, 3, seed=1))
    if refusal == "a mask that looks ahead":
        layer.mask = EVERYTHING
    right = WINDOW if cache in NARROW else Causal()
    with torch.no_grad():
        layer(x[:, :4], cache=held, mask=right)
        twin = copy.deepcopy(held)
        with pytest.raises((ValueError, TypeError, RuntimeError)):
            layer(wrong.pop("x"), cache=held, **wrong)
        assert held.length == twin.length == 4
        same = {"mask": right}
        assert_same(layer(x[:, 4:], cache=held, **same), layer(x[:, 4:], cache=twin, **same))


def test_a_full_static_cache_refuses_and_stays():
    layer, x, held = make("GQA"), inputs(2, TOKENS), StaticCache(6)
    with torch.no_grad():
        layer(x[:, :5], cache=held)
        with pytest.raises(ValueError, match="6"):
            layer(x[:, 5:7], cache=held)
        assert held.length == 5
        assert_same(layer(x[:, 5:6], cache=held), layer(x)[:, 5:6])


@pytest.mark.parametrize("mask", [EVERYTHING, Where(lambda b, h, q, kv: kv <= q + 1), ~Causal()])
@pytest.mark.parametrize("cache", ["growing", "static", "int8"])
def test_a_mask_of_future_keys_is_refused_with_a_cache(cache, mask):
    """Decoding would silently differ from the full forward."""
    layer = attention(mask=mask).double()
    with pytest.raises(ValueError, match=r"Causal\(\)"):
        layer(inputs(2, 4), cache=CACHES[cache]())


@pytest.mark.parametrize("mask", [Causal(), Causal() & SlidingWindow(5)])
@pytest.mark.parametrize("cache", NARROW)
def test_a_mask_of_keys_that_the_cache_dropped_is_refused(mask, cache):
    """A window in the cache needs a window in the mask, and no wider one."""
    layer, held, x = attention(mask=mask).double(), CACHES[cache](), inputs(2, 30)
    with torch.no_grad(), pytest.raises(ValueError, match="SlidingWindow"):
        run_in_pieces(layer, x, held, list(range(1, 30)))
    assert held.length < 30


@pytest.mark.parametrize("cache", [name for name in CACHES if name not in NARROW])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_ragged_batch_decodes_as_each_of_its_rows_alone(layer, cache):
    """Right-padded prefill, `truncate` to each row's length, then token by token."""
    layer, x, lengths = make(layer), inputs(3, TOKENS), [5, 2, 4]
    held = CACHES[cache]()
    valid = torch.arange(5) < torch.tensor(lengths)[:, None]
    with torch.no_grad():
        first = layer(x[:, :5], cache=held, mask=Padding(valid))
        held.truncate(torch.tensor(lengths))
        places = [torch.tensor([n + i for n in lengths]) for i in range(4)]
        steps = [layer(x[torch.arange(3), at].unsqueeze(1), cache=held) for at in places]
        for row, length in enumerate(lengths):
            alone, own = x[row : row + 1], CACHES[cache]()
            expected = run_in_pieces(layer, alone[:, : length + 4], own, list(range(length, 15)))
            assert_same(first[row : row + 1, :length], expected[:, :length])
            for i, step in enumerate(steps):
                assert_same(step[row : row + 1], expected[:, length + i : length + i + 1])
