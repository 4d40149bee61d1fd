"""Which calls are steps, and when the next call repeats one."""

import pytest
import torch

pytest.importorskip("numba")

from regard import (
    Causal,
    Documents,
    KVCache,
    QuantizedCache,
    SlidingCache,
    SlidingWindow,
    StaticCache,
    prepare,
)
from regard.ops.steps import has_fixed_slots, step_after

Q, K = torch.randn(1, 4, 1, 16), torch.randn(1, 2, 1, 16)


def run(cache, held=5, **options):
    """The step of one call after so many tokens, or None."""
    with torch.no_grad():
        cache.update(torch.randn(1, 2, held, 16), torch.randn(1, 2, held, 16))
        options = {"mask": Causal(), "step": True, "backend": "fused"} | options
        prepared = prepare(Q, K, K, span=cache.span(1), **options)
        prepared.run(Q, cache.update(K, K))
        return step_after(prepared, cache)


@pytest.mark.parametrize("cache", [KVCache(), StaticCache(40)])
def test_the_next_step_runs_and_is_what_the_plain_call_computes(cache):
    step = run(cache)
    with torch.no_grad():
        assert step.fits(cache, Q)
        before, held = cache.length, [each[:, :, :6].clone() for each in cache.buffers]
        out = step.run(cache, Q, K, K, None)
    assert cache.length == before + 1
    keys, values = (torch.cat([each, K], 2) for each in held)
    scores = torch.einsum("bghd,bgsd->bghs", Q.view(1, 2, 2, 16), keys) / 4
    expected = torch.einsum("bghs,bgsd->bghd", scores.softmax(-1), values)
    assert torch.allclose(out, expected.view(1, 4, 1, 16), atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"step": False},
        {"backend": "sdpa"},
        {"mask": Causal() & Documents(torch.zeros(1, 6, dtype=torch.long))},
        {"mask": Causal() & SlidingWindow(3)},
        {"sinks": torch.zeros(4)},
        {"score_bias": torch.zeros(1, 1, 1, 6)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_other_calls_are_no_steps(options):
    assert run(KVCache(), **options) is None


def test_a_step_ends_where_a_window_begins_to_hide():
    step = run(KVCache(), mask=Causal() & SlidingWindow(9))
    assert step.most == 9
    assert run(KVCache(), held=8, mask=Causal() & SlidingWindow(9)).most == 9


def test_a_step_ends_where_the_buffer_does():
    assert run(StaticCache(7)).most == 7


def test_what_changes_between_two_calls():
    cache = KVCache()
    step = run(cache)
    assert not step.fits(cache, Q)  # gradients are on
    with torch.no_grad():
        assert step.fits(cache, Q)
        assert not step.fits(cache, Q.double())
        assert not step.fits(cache, Q.as_subclass(type("Mine", (torch.Tensor,), {})))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert not step.fits(cache, Q)
        other = run(KVCache())
        assert not other.fits(cache, Q)
        cache.truncate(4)
        assert step.fits(cache, Q)
        cache.reorder(torch.tensor([0]))
        assert not step.fits(cache, Q)


def test_rows_of_different_lengths_are_no_step():
    cache, two = KVCache(), torch.randn(2, 2, 5, 16)
    cache.update(two, two)
    cache.truncate(torch.tensor([3, 5]))
    with torch.no_grad():
        q, k = Q.expand(2, -1, -1, -1), K.expand(2, -1, -1, -1)
        prepared = prepare(q, k, k, mask=Causal(), span=cache.span(1), step=True, backend="fused")
        prepared.run(q, cache.update(k, k))
        assert step_after(prepared, cache) is None


def test_caches_whose_keys_stay_where_they_are():
    class Mine(KVCache):
        pass

    kinds = (KVCache(), StaticCache(3), SlidingCache(3), QuantizedCache(), Mine())
    assert [has_fixed_slots(each) for each in kinds] == [True, True, False, False, False]
