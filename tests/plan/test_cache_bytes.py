"""Bytes of caches: figures of papers, arithmetic by hand, and the caches themselves."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from costs import REAL as real_cost
from measured_layers import cache_of, layer_of
from regard import KVCache, SlidingCache
from regard.hf.generating.caches import KINDS, NAMES
from regard.plan.cache_bytes import coded_keys, coded_tokens, pages
from regard.plan.shapes import STORAGES, LayerShape, Storage, Workload, storages_of

PLAIN, INT8, INT4, *FORMATS = STORAGES.values()
GQA = LayerShape(hidden_size=64, num_heads=8, num_kv_heads=2, head_dim=8, v_head_dim=8)
MLA = replace(GQA, num_kv_heads=8, kv_lora_rank=12, qk_rope_head_dim=4)
LATENT_KV = replace(GQA, kv_lora_rank=12, keys_by_position=True)
WIDE = LayerShape(
    hidden_size=5120, num_heads=128, num_kv_heads=128, head_dim=128, v_head_dim=128
)  # of the comparisons in arXiv:2405.04434


@pytest.fixture
def cost():
    """The module: tests/plan/test_wrong_formulas.py gives the same tests a wrong one."""
    return real_cost


def needed(cost, layer, storage=PLAIN, **call):
    return cost.cache_bytes(layer, storage, cost.Workload(**{"context": 1, **call}))


def allocated(cost, layer, storage=PLAIN, **call):
    return cost.allocated_bytes(layer, storage, cost.Workload(**{"context": 1, **call}))


def test_bytes_of_a_token_in_papers(cost):
    mla = replace(WIDE, head_dim=192, kv_lora_rank=512, qk_rope_head_dim=64)
    for layer, nbytes in (
        (WIDE, 65536),
        (replace(WIDE, num_kv_heads=8), 4096),
        (replace(WIDE, num_kv_heads=1), 512),
        (mla, 1152),
    ):
        assert needed(cost, layer, dtype="bfloat16") == nbytes


def test_deepseek_v2_saves_93_percent(cost):
    """arXiv:2405.04434: 93.3 % less than DeepSeek 67B, with 6 bits an element (section 3.2.3).

    DeepSeek 67B has 95 layers of 8 key heads of 128 (arXiv:2401.02954), V2 has 60 layers.
    """
    six_bits = Storage("six bits", 6, 6)
    mla = replace(WIDE, head_dim=192, kv_lora_rank=512, qk_rope_head_dim=64)
    before = 95 * needed(cost, replace(WIDE, num_kv_heads=8), dtype="bfloat16")
    after = 60 * needed(cost, mla, six_bits, dtype="bfloat16")
    plain = 60 * needed(cost, mla, dtype="bfloat16")
    assert (before, plain, after) == (389_120, 69_120, 25_920)
    assert round(100 * (1 - after / before), 1) == 93.3
    assert round(100 * (1 - plain / before), 1) == 82.2  # by the latent alone


def test_gemma_3_has_five_windows_for_each_full_layer(cost):
    """arXiv:2503.19786: windows of 1024; the 27B model has 62 layers of 16 key heads of 128."""
    full = LayerShape(hidden_size=5376, num_heads=32, num_kv_heads=16, head_dim=128, v_head_dim=128)
    layers = [full if index % 6 == 5 else replace(full, window=1024) for index in range(62)]
    call = {"context": 131072, "dtype": "bfloat16"}
    found = sum(needed(cost, layer, **call) for layer in layers)
    token = 2 * 16 * 128 * 2  # bytes: keys and values
    assert found == token * (10 * 131072 + 52 * 1024)
    assert round(62 * needed(cost, full, **call) / found, 2) == 5.96


def test_scales_and_zeros_are_stored_with_codes(cost):
    wide = replace(GQA, head_dim=96, v_head_dim=33)
    assert needed(cost, wide, INT8) == 2 * (96 + 2 * 2 * 2 + 33 + 2 * 2 * 1)
    assert needed(cost, wide, INT4) == 2 * (48 + 2 * 2 * 3 + 17 + 2 * 2 * 2)
    assert needed(cost, MLA, INT8) == 16 + 2 * 2
    assert needed(cost, LATENT_KV, INT4) == 6 + 2 * 2 + 4


def test_codes_are_those_of_the_cache(cost):
    layers = (replace(GQA, head_dim=w, v_head_dim=w) for w in (1, 31, 32, 33, 64, 65, 130))
    for layer in layers:
        for storage in (INT8, INT4, *FORMATS):
            cache, k = cache_of(layer, storage), torch.zeros(3, 2, 5, layer.head_dim)
            cache.update(k, k)
            assert needed(cost, layer, storage, context=5, batch=3) == cache.nbytes


def test_values_have_a_width_of_their_own(cost):
    layer = replace(GQA, head_dim=24, v_head_dim=16)
    assert needed(cost, layer, context=3) == 3 * 2 * (24 + 16) * 4
    cache = KVCache()
    cache.update(torch.zeros(1, 2, 3, 24), torch.zeros(1, 2, 3, 16))
    assert cache.nbytes == needed(cost, layer, context=3)


def test_rows_of_the_batch_have_their_own_tokens(cost):
    for layer in (GQA, MLA, LATENT_KV, replace(GQA, state_elements=5)):
        for storage in STORAGES.values():
            one = needed(cost, layer, storage, context=9)
            assert needed(cost, layer, storage, context=9, batch=7) == 7 * one


def test_a_window_holds_its_size(cost):
    layer = replace(GQA, window=6)
    tokens = [needed(cost, layer, context=n) // (2 * 2 * 8 * 4) for n in (0, 1, 5, 6, 7, 100)]
    assert tokens == [0, 1, 5, 6, 6, 6]
    assert needed(cost, layer, context=100, cp=3) == needed(cost, layer, context=6)


def test_a_chunk_holds_its_size(cost):
    layer = replace(GQA, chunk=6)
    tokens = [needed(cost, layer, context=n) // (2 * 2 * 8 * 4) for n in (1, 5, 6, 7, 100)]
    assert tokens == [1, 5, 6, 6, 6]


def test_shared_keys_are_cached_once(cost):
    shared = replace(GQA, keys_of=3)
    assert needed(cost, shared, context=9) == allocated(cost, shared, context=9) == 0


def test_a_state_does_not_grow(cost):
    layer = replace(GQA, state_elements=1000)
    for storage in STORAGES.values():
        for context in (0, 5000):
            call = {"context": context, "batch": 2, "dtype": "bfloat16"}
            assert needed(cost, layer, storage, **call) == 2 * 1000 * 2
            assert allocated(cost, layer, storage, **call) == 2 * 1000 * 2
    with pytest.raises(ValueError, match="stores a state and no tokens"):
        cost.token_bytes(layer, PLAIN, cost.Workload(context=1))


def test_ranks_share_heads_rounded_up(cost):
    heads = replace(GQA, num_heads=12, num_kv_heads=6)
    found = [needed(cost, heads, tp=tp) // (2 * 8 * 4) for tp in (1, 2, 4, 6, 12)]
    assert found == [6, 3, 2, 1, 1]


def test_a_latent_is_on_every_rank(cost):
    for layer in (MLA, LATENT_KV):
        assert needed(cost, layer, context=9, tp=4) == needed(cost, layer, context=9)


def test_ranks_share_tokens_rounded_up(cost):
    for layer in (GQA, MLA, LATENT_KV):
        assert needed(cost, layer, context=10, cp=4) == needed(cost, layer, context=3)
        assert allocated(cost, layer, context=1030, cp=4) == allocated(cost, layer, context=258)


def test_positions_are_cached_beside_a_latent(cost):
    assert needed(cost, LATENT_KV, context=5, dtype="bfloat16") == 5 * (12 * 2 + 4)


def grown(cache, context, *widths):
    """The bytes that a cache allocates for two rows, one prefill and one token."""
    with torch.device("meta"):
        for tokens in (context, 1):
            cache.update(*(torch.zeros(2, 2, tokens, width) for width in widths))
    return cache.allocated_bytes


def test_buffers_double(cost):
    for context in (0, 1, 127, 129, 254, 255, 256, 257, 300, 511, 512, 513, 5000):
        found = allocated(cost, GQA, context=context, batch=2)
        assert found == grown(KVCache(), context, 8, 8)


def test_buffers_of_a_window_have_a_quarter_more(cost):
    for window in (*range(1, 12), 100, 205, 206, 1023):
        for context in (1, 127, 129, 255, 256, 300, 512, window, 2 * window + 1):
            layer = replace(GQA, window=window)
            found = allocated(cost, layer, context=context, batch=2)
            assert found == grown(SlidingCache(window), context, 8, 8)


def test_codes_of_a_window_are_dropped_as_its_numbers_are(cost):
    for window in (5, 100, 700):
        layer = replace(GQA, window=window)
        for name in ("int8", "int4", "K8V8", "K8V4", "K6V4", "K4V4"):
            kind, options = NAMES[name]
            cache = KINDS[kind](**options)(window)
            found = allocated(cost, layer, STORAGES[name], context=300, batch=2)
            assert found == grown(cache, 300, 8, 8)
            assert cache.nbytes == needed(cost, layer, STORAGES[name], context=301, batch=2)


@pytest.mark.parametrize(
    "storage",
    [Storage("keys alone", 8, None, 32), Storage("k3", 3, 3, 32), Storage("odd", 8, 8, 7)],
    ids=lambda each: each.name,
)
def test_a_storage_that_no_cache_has_is_refused(storage, cost):
    assert needed(cost, GQA, storage) > 0
    with pytest.raises(ValueError, match="choose from STORAGES"):
        allocated(cost, GQA, storage)


@pytest.mark.parametrize("layer", [GQA, MLA, LATENT_KV], ids=["GQA", "MLA", "LatentKV"])
def test_the_layers_cache_what_the_formulas_say(layer, cost):
    """The streams of the layers themselves; tests/plan/test_cost.py has 500 shapes of them."""
    for storage in STORAGES.values():
        cache = cache_of(layer, storage)
        with torch.device("meta"), torch.no_grad():
            layer_of(layer)(torch.zeros(2, 9, 64), cache=cache)
        assert needed(cost, layer, storage, context=9, batch=2) == cache.nbytes


@pytest.mark.parametrize("storage", storages_of(page_size=4), ids=lambda each: each.name)
def test_bytes_in_pages_are_those_of_the_cache(storage, cost):
    """A row's first page and its open one are plain; the last token may seal a page."""
    for layer in (GQA, replace(GQA, head_dim=65, v_head_dim=24)):
        for context in (1, 3, 4, 5, 7, 8, 9, 11, 12, 15, 16, 21):
            cache, call = cache_of(layer, storage), {"context": context, "batch": 2}
            widths = (layer.head_dim, layer.v_head_dim)
            cache.update(*(torch.zeros(2, 2, context, width) for width in widths))
            assert needed(cost, layer, storage, **call) == cache.nbytes, context
            cache.update(*(torch.zeros(2, 2, 1, width) for width in widths))
            assert allocated(cost, layer, storage, **call) == cache.allocated_bytes, context


@pytest.mark.parametrize("storage", storages_of(page_size=32), ids=lambda each: each.name)
def test_bytes_of_pages_whose_tokens_share_scales(storage, cost):
    for layer in (GQA, replace(GQA, head_dim=65, v_head_dim=24)):
        widths = (layer.head_dim, layer.v_head_dim)
        for context in (31, 63, 64, 100):
            cache, call = cache_of(layer, storage), {"context": context, "batch": 2}
            cache.update(*(torch.zeros(2, 2, context, width) for width in widths))
            assert needed(cost, layer, storage, **call) == cache.nbytes, context
            cache.update(*(torch.zeros(2, 2, 1, width) for width in widths))
            assert allocated(cost, layer, storage, **call) == cache.allocated_bytes, context


@pytest.mark.parametrize("storage", storages_of(page_size=4), ids=lambda each: each.name)
def test_pages_before_a_window_are_released(storage, cost):
    for window in (1, 3, 4, 5, 9, 30):
        layer = replace(GQA, window=window)
        for context in (1, 4, 8, 9, 13, 16, 23):
            cache = cache_of(layer, storage)
            for tokens in (context, 1):
                cache.update(*2 * [torch.zeros(3, 2, tokens, 8)])
            found = allocated(cost, layer, storage, context=context, batch=3)
            assert found == cache.allocated_bytes, (window, context)


def test_bytes_of_a_window_in_pages_by_hand(cost):
    """Slots 8..17 of 18 in pages of 4: two of codes, and two tokens of the open page."""
    layer, storage = replace(GQA, window=10), storages_of(["K8V4"], page_size=4)[0]
    codes, plain = 2 * (8 + 4 + 4 + 4), 2 * (8 + 8) * 4
    assert needed(cost, layer, storage, context=18) == 8 * codes + 2 * plain
    first = replace(GQA, window=17)  # slots 1..17: three tokens of the first page
    assert needed(cost, first, storage, context=18) == 12 * codes + (3 + 2) * plain


@pytest.mark.parametrize("layer", [GQA, MLA, LATENT_KV], ids=["GQA", "MLA", "LatentKV"])
def test_the_layers_cache_what_the_formulas_say_in_pages(layer, cost):
    for storage in (*storages_of(page_size=4), *storages_of(["K6V4"], page_size=32)):
        cache, tokens = cache_of(layer, storage), 2 * storage.page_size + 1
        with torch.no_grad():
            layer_of(layer)(torch.zeros(2, tokens, 64), cache=cache)
        assert needed(cost, layer, storage, context=tokens, batch=2) == cache.nbytes


def test_blocks_are_those_that_the_needed_slots_touch(cost):
    """The most blocks that the slots in use have touched after each number of tokens."""
    token = needed(cost, GQA)
    for block in (1, 3, 4, 16):
        for window in (None, 1, 2, 5, 9, 16, 17):
            most = 0
            for tokens in range(1, 60):
                first = 0 if window is None else max(0, tokens - window)
                most = max(most, len({slot // block for slot in range(first, tokens)}))
                layer = replace(GQA, window=window)
                work = cost.Workload(context=tokens, batch=2)
                found = cost.block_bytes(layer, PLAIN, work, block)
                assert found == 2 * most * block * token, (block, window, tokens)
    work = cost.Workload(context=50)
    assert cost.block_bytes(replace(GQA, chunk=6), PLAIN, work, 4) == 8 * token
    with pytest.raises(ValueError, match="give block or page_size"):
        cost.block_bytes(GQA, replace(PLAIN, page_size=64), work, 4)


CONTEXTS = [*range(1, 15), 29, 64]


def coded_slots(tokens, size):
    """Slots of full pages after the first."""
    return [slot for slot in range(tokens) if 1 <= slot // size < tokens // size]


def test_tokens_in_codes_are_those_of_full_pages_after_the_first():
    faults = []
    for context, size in product(CONTEXTS, (1, 4, 5)):
        storage, work = replace(PLAIN, page_size=size), Workload(context=context)
        for few in (1, 3, context):
            slots = [s for s in coded_slots(context, size) if s >= context - few]
            tokens = coded_tokens(storage, work, min(few, context))
            if tokens != len(slots):
                faults.append((context, size, few, tokens, slots))
        if coded_keys(storage, work, context + 1) != len(coded_slots(context, size)):
            faults.append((context, size))
    assert faults == []


def test_pages_are_open_or_codes_and_those_before_a_window_are_released():
    size, faults = 4, []
    for context, window in product(CONTEXTS, (None, 1, 3, 9)):
        tokens = context + 1
        first = 0 if window is None else max(0, tokens + 1 - window)
        kept = [page for page in range(-(-tokens // size)) if (page + 1) * size > first]
        coded = [page for page in kept if 1 <= page < tokens // size]
        counts = pages(replace(GQA, window=window), size, Workload(context=context))
        if counts != (len(kept) - len(coded), len(coded)):
            faults.append((context, window, counts))
    assert faults == []
