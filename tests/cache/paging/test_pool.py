"""`PagePool`: what it says of itself."""

import gc

import pytest
import torch

from regard import Attention, Causal, PagedCache, PagePool, SlidingWindow
from regard.cache import context_of

X = torch.randn(1, 2, 10, 8)


def test_its_code_makes_a_pool_alike():
    for pool in (PagePool(8), PagePool(8, 16), PagePool(8, format="K8V4")):
        again = eval(repr(pool))
        assert (again.num_pages, again.page_size, again.format) == (
            pool.num_pages,
            pool.page_size,
            pool.format,
        )


# ---- prefixes ----


FULL = Attention(16, 2, num_kv_heads=1, mask=Causal()).eval()
WINDOWED = Attention(16, 2, num_kv_heads=1, mask=Causal() & SlidingWindow(6)).eval()
LAYERS = torch.nn.ModuleList([FULL, WINDOWED])
CONTEXT = context_of(LAYERS)
TOKENS = torch.arange(100, 130)
X_PREFIXES = torch.nn.Embedding(200, 16).requires_grad_(False)


def caches_over(pool):
    """With a rollback, the pages before a window are there when the text is stored."""
    return [PagedCache(pool), PagedCache(pool, window=6, rollback=100)]


@torch.no_grad()
def forward(caches, tokens):
    x = X_PREFIXES(tokens)[None]
    for layer, cache in zip(LAYERS, caches, strict=True):
        x = layer(x, cache=cache)
    return x[0]


def stored(pool, tokens=TOKENS):
    caches = caches_over(pool)
    out = forward(caches, tokens)
    assert pool.store(tokens, caches, context=CONTEXT) == len(tokens) // 4 * 4
    return out


@pytest.mark.parametrize("common", [0, 3, 4, 17, 29, 30])
def test_a_found_prefix_continues_as_the_whole_text(common):
    pool = PagePool(100, 4)
    stored(pool)
    tokens = torch.cat([TOKENS[:common], torch.arange(50, 60)])
    whole = forward(caches_over(PagePool(100, 4)), tokens)
    prefix = pool.prefix(tokens, context=CONTEXT)
    assert prefix.length <= common // 4 * 4
    caches = prefix.caches() if prefix.length else caches_over(pool)
    rest = forward(caches, tokens[prefix.length :])
    torch.testing.assert_close(rest, whole[prefix.length :], rtol=1e-5, atol=1e-5)


def test_the_last_token_is_left_to_forward():
    pool = PagePool(100, 4)
    stored(pool, TOKENS[:28])
    assert pool.prefix(TOKENS[:28], context=CONTEXT).length == 24
    assert pool.prefix(TOKENS[:29], context=CONTEXT).length == 28


def test_without_rollback_a_window_layer_resumes_at_the_end_of_the_stored_text_alone():
    pool = PagePool(100, 4)
    caches = [PagedCache(pool), PagedCache(pool, window=6)]
    forward(caches, TOKENS[:28])
    pool.store(TOKENS[:28], caches, context=CONTEXT)
    assert pool.prefix(TOKENS[:27], context=CONTEXT).length == 0
    assert pool.prefix(TOKENS, context=CONTEXT).length == 28


def test_rows_of_a_found_prefix_share_its_pages():
    pool = PagePool(100, 4)
    stored(pool)
    before = pool.pages_in_use
    caches = pool.prefix(TOKENS, context=CONTEXT).caches(rows=5)
    assert pool.pages_in_use == before and len(caches[0].rows) == 5
    assert (
        caches[0].peek(torch.zeros(5, 1, 1, 8), torch.zeros(5, 1, 1, 8))[0].streams[0].stride(0)
        == 0
    )


def test_rows_of_a_window_of_one_token_are_those_of_the_first_update():
    layers = [FULL, Attention(16, 2, num_kv_heads=1, mask=Causal() & SlidingWindow(1)).eval()]
    pool, context, x = PagePool(100, 4), context_of(layers), X_PREFIXES(TOKENS)[None]
    caches = [PagedCache(pool), PagedCache(pool, window=1)]
    with torch.no_grad():
        whole = [layer(x, cache=cache) for layer, cache in zip(layers, caches, strict=True)]
        assert pool.store(TOKENS, caches, context=context) == 28
        caches = pool.prefix(TOKENS, context=context).caches(rows=3)
        assert [cache.length for cache in caches] == [28, 28]
        with pytest.raises(ValueError, match="has none before its first update"):
            caches[1].truncate(torch.tensor([28, 27, 28]))
        with pytest.raises(ValueError, match=r"caches\[1\] has 0 rows, counted from 0, got row=0"):
            pool.store(TOKENS, caches, context=context)
        for layer, cache, want in zip(layers, caches, whole, strict=True):
            rest = layer(x[:, 28:].expand(3, -1, -1), cache=cache)
            torch.testing.assert_close(rest, want[:, 28:].expand_as(rest), rtol=1e-5, atol=1e-5)
            assert len(cache.rows) == 3


def test_found_caches_of_windows_can_have_a_rollback():
    pool = PagePool(100, 4)
    stored(pool)
    caches = pool.prefix(TOKENS, context=CONTEXT).caches(rollback=50)
    forward(caches, TOKENS[28:])
    forward(caches, TOKENS)
    assert caches[1].can_truncate(28)


def test_stored_pages_are_reusable_until_room_is_needed():
    pool = PagePool(15, 4)
    stored(pool, TOKENS[:16])
    gc.collect()
    held, reusable, _ = pool.nbytes
    assert held == 0 and reusable > 0
    other = caches_over(pool)
    forward(other, TOKENS[:28])
    assert pool.pages_in_use <= 15
    assert other[0].length == 28


def test_evict_frees_every_reusable_page():
    pool = PagePool(100, 4)
    stored(pool)
    gc.collect()
    assert pool.evict() > 0 and pool.nbytes == (0, 0, 0)
    assert pool.prefix(TOKENS, context=CONTEXT).length == 0


@pytest.mark.parametrize("keep", [-1, 1.5, "all", True], ids=str)
def test_a_number_of_pages_that_stay_is_whole(keep):
    pool = PagePool(100, 4)
    stored(pool)
    gc.collect()
    before = pool.nbytes
    with pytest.raises((TypeError, ValueError), match="keep is "):
        pool.evict(keep)
    assert pool.nbytes == before


def test_other_weights_are_refused_and_the_pool_is_unchanged():
    pool = PagePool(100, 4)
    stored(pool)
    before = pool.nbytes
    other = context_of(torch.nn.ModuleList([Attention(16, 2, num_kv_heads=1), WINDOWED]))
    with pytest.raises(ValueError, match="give each model a pool of its own"):
        pool.prefix(TOKENS, context=other)
    assert pool.nbytes == before


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: PagedCache(4096), r"pool is a PagePool, got 4096; PagedCache\(PagePool"),
        (lambda: PagePool(8).prefix([1, 2], context="alice"), "context_of.* got 'alice'"),
        (lambda: PagePool(8).store([1], PagedCache(PagePool(8)), context=CONTEXT), "a list"),
    ],
)
def test_arguments_of_another_type_are_refused(call, message):
    with pytest.raises(TypeError, match=f"{message}|Type-check"):
        call()


def test_caches_of_another_pool_are_refused():
    pool, other = PagePool(100, 4), PagePool(100, 4)
    caches = caches_over(other)
    forward(caches, TOKENS)
    with pytest.raises(ValueError, match="not in this pool"):
        pool.store(TOKENS, caches, context=CONTEXT)
    with pytest.raises(ValueError, match="row=3"):
        other.store(TOKENS, caches, context=CONTEXT, row=3)
    with pytest.raises(ValueError, match="whole numbers"):
        other.store(TOKENS.float(), caches, context=CONTEXT)


def test_no_prefix_has_no_caches():
    with pytest.raises(ValueError, match="no prefix is stored"):
        PagePool(4).prefix(TOKENS, context=CONTEXT).caches()
