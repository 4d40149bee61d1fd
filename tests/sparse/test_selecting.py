"""`SelectingCache`: full attention where all pages are read, the definition where few are."""

import math

import pytest
import torch

from regard import (
    Attention,
    Causal,
    LatentKVAttention,
    MultiHeadLatentAttention,
    Padding,
    PagedCache,
    PagePool,
    Rotary,
    attend,
)
from regard.cache import Offload, load_all, save_all
from regard.sparse import SelectingCache

HEADS, GROUPS, WIDTH, SIZE = 4, 2, 16, 16
LENGTH = 200


def _layer(**options):
    torch.manual_seed(1)
    layer = Attention(
        32, HEADS, num_kv_heads=GROUPS, head_dim=WIDTH, rope=Rotary(WIDTH), mask=Causal(), **options
    )
    return layer.eval()


def _x(rows=2, length=LENGTH + 12):
    torch.manual_seed(2)
    return torch.randn(rows, length, 32)


def _cache(pages, format="plain"):
    return SelectingCache(PagedCache(PagePool(200, page_size=SIZE, format=format)), pages)


@torch.no_grad()
def _run(layer, x, cache, first=LENGTH, mask=None):
    chunks = [first, *[1] * (x.shape[1] - first)]
    return torch.cat([layer(some, cache=cache, mask=mask) for some in x.split(chunks, 1)], 1)


@pytest.mark.parametrize("format", ["plain", "K8V8", "K8V4"])
def test_all_pages_are_full_attention(format):
    layer, x = _layer(), _x()
    for pages in (1.0, 500):
        plain = PagedCache(PagePool(200, page_size=SIZE, format=format))
        assert torch.equal(_run(layer, x, _cache(pages, format)), _run(layer, x, plain))


@torch.no_grad()
def _step_by_definition(layer, x, count, valid=None):
    """The last token's output: each key head reads the pages of its highest bounds."""
    q, k, v = layer.project(x, None)
    q, k = layer.rope(q, k, torch.arange(x.shape[1]))
    length, out = x.shape[1], []
    for row in range(len(x)):
        heads = []
        for g in range(GROUPS):
            starts = range(0, length, SIZE)
            shares = []
            for h in range(g * 2, g * 2 + 2):
                bounds = []
                for start in starts[1:-2]:
                    keys = k[row, g, start : start + SIZE]
                    query = (q[row, h, -1] / WIDTH**0.5).bfloat16().float()
                    spread = (2 * math.log(SIZE) * keys.var(0, correction=0)).bfloat16().float()
                    mean = keys.mean(0).bfloat16().float()
                    bounds.append(query @ mean + (query.square() @ spread).sqrt())
                shares.append(torch.stack(bounds).log_softmax(0))
            best = torch.stack(shares).amax(0).topk(count - 3).indices + 1
            pages = sorted({0, *best.tolist(), len(starts) - 2, len(starts) - 1})
            slots = torch.cat([torch.arange(length)[p * SIZE : (p + 1) * SIZE] for p in pages])
            if valid is not None:
                slots = slots[valid[row, slots]]
            its = slice(g * 2, g * 2 + 2)
            heads.append(
                attend(
                    q[row : row + 1, its, -1:],
                    *(y[row : row + 1, g : g + 1, slots] for y in (k, v)),
                )
            )
        out.append(torch.cat(heads, 1))
    return layer.o_proj(torch.cat(out).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("count", [4, 6, 9])
@pytest.mark.parametrize("length", [LENGTH + 9, 13 * SIZE, 13 * SIZE + 1])
def test_a_step_reads_the_pages_of_the_highest_bounds(count, length):
    layer, x = _layer(), _x(length=length)
    cache = _cache(count)
    got = _run(layer, x, cache, first=length - 1)[:, -1:]
    assert cache.selected.shape == (2, GROUPS, count)
    assert (got - _step_by_definition(layer, x, count)).abs().max() < 1e-5


def test_padding_is_hidden_at_the_slots_of_the_pages():
    layer, x = _layer(), _x()
    valid = torch.ones(2, x.shape[1], dtype=torch.bool)
    valid[1, :21] = False
    cache = _cache(5)
    got = _run(layer, x, cache, first=x.shape[1] - 1, mask=Padding(valid))[:, -1:]
    assert (got - _step_by_definition(layer, x, 5, valid)).abs().max() < 1e-5


@pytest.mark.parametrize("format", ["K8V8", "K8V4"])
def test_codes(format):
    layer, x = _layer(), _x()
    got, plain = (_run(layer, x, _cache(6, each))[:, LENGTH:] for each in (format, "plain"))
    assert 0 < (got - plain).abs().median() < 0.02


@pytest.mark.parametrize("format", ["plain", "K8V4"])
@pytest.mark.parametrize("hot_pages", [2, 7, 12])
def test_pages_are_read_wherever_the_pool_has_moved_them(format, hot_pages):
    layer, x = _layer(), _x()
    pool = PagePool(200, page_size=SIZE, format=format, offload=Offload(hot_pages))
    cache = SelectingCache(PagedCache(pool), pages=6)
    assert (_run(layer, x, cache) - _run(layer, x, _cache(6, format))).abs().max() < 1e-6
    assert pool.cold_pages


@torch.no_grad()
def test_no_token_and_no_row():
    layer, x, cache = _layer(), _x(), _cache(4)
    layer(x, cache=cache)
    assert layer(x[:, :0], cache=cache).shape == (2, 0, 32)
    cache.reorder(torch.tensor([], dtype=torch.long))
    assert layer(x[:0, :1], cache=cache).shape == (0, 1, 32)


def test_latents_are_selected_in_the_absorbed_form():
    torch.manual_seed(3)
    sizes = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 16, "v_head_dim": 8}
    layer = MultiHeadLatentAttention(
        32, 4, **sizes, rope=Rotary(16), mask=Causal(), form="auto"
    ).eval()
    x = _x()
    few, every = _cache(12), _cache(500)
    got, want = _run(layer, x, few), _run(layer, x, every)
    assert few.selected.shape == (2, 1, 12)
    assert (got - want).abs().max() < 0.1
    layer.form = "expanded"
    with pytest.raises(ValueError, match="reads keys as they are stored"):
        _run(layer, x, _cache(12))
    rebuilt = LatentKVAttention(
        32, 4, num_kv_heads=2, head_dim=16, kv_lora_rank=16, rope=Rotary(16), mask=Causal()
    ).eval()
    with pytest.raises(ValueError, match="reads keys as they are stored"):
        _run(rebuilt, x, _cache(6))


def test_memory_is_that_of_the_pages_and_the_bounds():
    layer, x = _layer(), _x()
    cache, plain = _cache(4), PagedCache(PagePool(200, page_size=SIZE))
    _run(layer, x, cache)
    _run(layer, x, plain)
    whole = x.shape[1] // SIZE
    assert cache.bounds_nbytes == 2 * 2 * GROUPS * whole * WIDTH * 2  # bfloat16
    assert cache.nbytes == plain.nbytes + cache.bounds_nbytes


def test_nothing_is_lost():
    """Truncated, forked or reordered, the next steps are those of a cache that never was."""
    layer, x = _layer(), _x()
    cache, fresh = _cache(5), _cache(5)
    _run(layer, x, cache)
    cache.truncate(LENGTH - 30)
    _run(layer, x[:, : LENGTH - 30], fresh, first=LENGTH - 30)
    other = cache.fork()
    other.reorder(torch.tensor([1, 0, 1]))
    more = x[:, LENGTH - 30 : LENGTH]
    got, want = (_run(layer, more, each, first=1) for each in (cache, fresh))
    assert (got - want).abs().max() < 1e-6
    turned = _run(layer, more[[1, 0, 1]], other, first=1)
    assert (turned - want[[1, 0, 1]]).abs().max() < 1e-5


def test_a_failed_step_is_undone():
    layer, x = _layer(), _x()
    cache = _cache(5)
    _run(layer, x[:, :LENGTH], cache, first=LENGTH)
    twin, proj = cache.fork(), layer.o_proj
    layer.o_proj = torch.nn.Linear(3, 3)
    with pytest.raises(RuntimeError):
        _run(layer, x[:, LENGTH : LENGTH + 1], cache, first=1)
    layer.o_proj = proj
    assert cache.length == LENGTH
    rest = x[:, LENGTH:]
    got, want = (_run(layer, rest, each, first=1) for each in (cache, twin))
    assert (got - want).abs().max() < 1e-6


@pytest.mark.parametrize("format", ["plain", "K8V4"])
def test_a_file_is_that_of_the_pages(format, tmp_path):
    layer, x = _layer(), _x()
    cache, again = _cache(5, format), _cache(5, format)
    _run(layer, x[:, :LENGTH], cache, first=LENGTH)
    save_all([cache], tmp_path / "cache", weights="these")
    load_all([again], tmp_path / "cache", weights="these")
    for mine, its in zip(again._bounds, cache._bounds, strict=True):  # of codes, those of the codes
        assert (mine - its).abs().max() < (0.05 if format == "K8V4" else 1e-9)
    if format == "plain":
        got, want = (_run(layer, x[:, LENGTH:], each, first=1) for each in (again, cache))
        assert (got - want).abs().max() < 1e-6


def test_refusals():
    pool = PagePool(20, page_size=SIZE)
    with pytest.raises(TypeError, match="cache is a PagedCache"):
        SelectingCache(pool)
    with pytest.raises(ValueError, match="without a window"):
        SelectingCache(PagedCache(pool, window=5))
    with pytest.raises(ValueError, match="at least 4"):
        SelectingCache(PagedCache(pool), pages=3)
    with pytest.raises(ValueError, match="share in"):
        SelectingCache(PagedCache(pool), pages=0.0)
    cache = _cache(4)
    _run(_layer(), _x(), cache)
    with pytest.raises(ValueError, match="rows of one length"):
        cache.truncate(torch.tensor([3, 4]))
    assert not cache.can_truncate(torch.tensor([3, 4]))
