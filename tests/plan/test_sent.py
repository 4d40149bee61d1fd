"""Bytes that ranks send, by hand from the sizes of layers; tokens against tables of all queries."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch.distributed.tensor import DTensor

from covering import covering
from measured_layers import layer_of
from ranks import on_ranks
from regard import KVCache
from regard.distributed import (
    ShardedCache,
    Shards,
    context_parallel,
    counted,
    tensor_parallel,
)
from regard.distributed.ranks import sum_bytes
from regard.plan.cache_bytes import cache_bytes
from regard.plan.sent import (
    AGREED,
    Sent,
    counted_ranks,
    decode_sent,
    is_balanced,
    moved_tokens,
    prefill_sent,
    sent_of,
    sum_sent,
    training_sent,
)
from regard.plan.shapes import STORAGES, LayerShape, Workload
from regard.plan.weights import parameters
from session import LONG

GQA = LayerShape(hidden_size=24, num_heads=6, num_kv_heads=2, head_dim=5, v_head_dim=3)
MLA = replace(GQA, num_kv_heads=6, kv_lora_rank=7, qk_rope_head_dim=2)
LATENT_KV = replace(GQA, kv_lora_rank=7, keys_by_position=True)
ITEMSIZES = {"bfloat16": 2, "float32": 4, "float64": 8}
STREAMS = {  # numbers of a token that others attend to, and other bytes of it
    GQA: (2 * (5 + 3), 0),
    MLA: (7 + 2, 0),
    LATENT_KV: (7, 4),
}


def count(sent, layer, *layout, **call):
    """Bytes of the last rank."""
    work = Workload(**{"context": 24, **call})
    return sent(layer, work, *layout, *([work.cp - 1] if layout else []))


def test_sums_are_those_of_ranks():
    for elements in (1, 2, 7, 24, 1000):
        for tp in (1, 2, 3, 4, 7):
            for dtype, itemsize in (("bfloat16", 4), ("float32", 4), ("float64", 8)):
                found = sum_sent(elements, tp, ITEMSIZES[dtype])
                assert found == sum_bytes(elements * itemsize, tp)


@pytest.mark.parametrize("layer", STREAMS, ids=["GQA", "MLA", "LatentKV"])
@pytest.mark.parametrize("dtype", ITEMSIZES)
def test_tokens_by_hand(layer, dtype):
    numbers, others = STREAMS[layer]
    single = max(4, ITEMSIZES[dtype])
    for layout in (True, False):
        call = {"dtype": dtype, "cp": 3, "batch": 2}
        sent, received = moved_tokens(layer, layout, 24, 3, 2)
        streams = 2 * (numbers * ITEMSIZES[dtype] + others)
        agreed = 2 * AGREED
        assert count(prefill_sent, layer, layout, **call) == sent * streams + agreed
        back = received * 2 * numbers * single + agreed
        assert count(training_sent, layer, layout, **call) == 2 * sent * streams + back


def test_heads_by_hand():
    for dtype in ITEMSIZES:
        single = max(4, ITEMSIZES[dtype])
        outputs = sum_bytes(2 * 24 * 24 * single, 3)  # rows x tokens x channels
        call = {"dtype": dtype, "tp": 3, "batch": 2}
        assert count(prefill_sent, GQA, True, **call) == outputs
        assert count(training_sent, GQA, True, **call) == 2 * outputs
        assert count(decode_sent, GQA, **call) == sum_bytes(2 * 24 * single, 3)


def test_both_by_hand():
    """Half of the tokens, of half of the heads: a key head of the two, and 3 query heads."""
    call = {"tp": 2, "cp": 2}
    sums = sum_bytes(12 * 24 * 4, 2)
    assert count(prefill_sent, GQA, True, **call) == sums + 12 * (5 + 3) * 4 + AGREED
    assert count(decode_sent, GQA, **call) == sum_bytes(24 * 4, 2) + 3 * (3 + 1) * 4


def test_partial_outputs_by_hand():
    for layer, width in ((GQA, 3), (MLA, 7), (LATENT_KV, 3)):
        for dtype in ITEMSIZES:
            single = max(4, ITEMSIZES[dtype])
            found = count(decode_sent, layer, dtype=dtype, cp=3, batch=2)
            assert found == 2 * (3 - 1) * 6 * (width + 1) * single


def test_one_rank_sends_nothing():
    for layer in (*STREAMS, replace(GQA, window=5), replace(GQA, causal=False)):
        assert sent_of([layer], context=24) == Sent()


def test_linear_attention_has_no_plan():
    linear = replace(GQA, state_elements=5)
    assert sent_of([linear], context=24, cp=2) == Sent(rank=0)
    for formula in (prefill_sent, training_sent):
        with pytest.raises(ValueError, match="do not follow from its sizes"):
            count(formula, linear, True)


def test_layers_of_a_model_add_up():
    windowed = replace(GQA, window=4)
    one = sent_of([GQA], context=96, cp=4, dtype="bfloat16")
    both = sent_of([GQA, windowed, GQA], context=96, cp=4, dtype="bfloat16")
    assert one.rank == both.rank == 3
    of_window = count(prefill_sent, windowed, True, context=96, cp=4, dtype="bfloat16")
    assert both.prefill == 2 * one.prefill + of_window
    assert both.decode == 3 * one.decode


def test_windows_alone_are_contiguous_and_the_first_rank_sends():
    found = sent_of([replace(GQA, window=4)], context=96, cp=4)
    assert found == replace(found, rank=0, prefill=3 * 2 * (5 + 3) * 4 + 3 * AGREED)


def test_steps_wait_for_one_another():
    found = sent_of([GQA], context=96, tp=3, cp=4)
    assert found.prefill_steps == 2 * (3 - 1) + (4 - 1) + 1
    assert found.decode_steps == 2 * (3 - 1) + 1
    assert sent_of([GQA], context=96).training_steps == 0


# What layers send, counted on ranks and by the plans themselves

LAYERS = (
    GQA_RUN := replace(GQA, head_dim=4, v_head_dim=4),
    replace(GQA_RUN, window=5),
    replace(GQA_RUN, qk_norm="head"),
    replace(GQA_RUN, qk_norm="width"),
    replace(MLA, head_dim=6, v_head_dim=4),
    replace(MLA, head_dim=6, v_head_dim=4, q_lora_rank=5),
    replace(LATENT_KV, head_dim=4, v_head_dim=4),
)
CASES = list(product(LAYERS, ("float32", "bfloat16")))
TOKENS, PAGE = 25, 4


def _runs(mesh, plan):
    """Of each layer: bytes sent by a forward and a backward pass and by a decoded token, bytes of
    the cache, and parameters here."""
    return [_run(mesh, plan, shape, getattr(torch, dtype)) for shape, dtype in CASES]


def _run(mesh, plan, shape, dtype):
    torch.manual_seed(0)
    layer, x = layer_of(shape, "absorbed").to(dtype), torch.randn(2, TOKENS, 24).to(dtype)
    if plan == "tokens":
        own, cache = context_parallel(layer, mesh).shard(x), ShardedCache(mesh, page_size=PAGE)
    else:
        layer, own, cache = tensor_parallel(layer, mesh), x, KVCache()
    with counted() as forward:
        out = layer(own.requires_grad_())
    with counted() as backward:
        out.sum().backward()
    with torch.no_grad():
        layer(own, cache=cache)
        with counted() as step:
            layer(x[:, :1].detach(), cache=cache)
    return {
        "prefill": forward.bytes,
        "training": forward.bytes + backward.bytes,
        "decode": step.bytes,
        "cache": cache.nbytes,
        "parameters": sum(_here(each).numel() for each in layer.parameters()),
    }


def _here(parameter):
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


@pytest.mark.parametrize(
    ("plan", "ranks"), covering(["tokens", "heads"], [2, 3, 4] if LONG else [2, 3], together=1)
)
def test_the_formulas_count_what_layers_send_and_hold(plan, ranks):
    share = {"cp": ranks} if plan == "tokens" else {"tp": ranks}
    for rank, counts in enumerate(on_ranks(ranks, _runs, plan)):
        for (shape, dtype), real in zip(CASES, counts, strict=True):
            call = {"context": TOKENS, "batch": 2, "dtype": dtype, **share}
            work, sharer = Workload(**call), rank if plan == "tokens" else 0
            layout = is_balanced([shape])
            found = {
                "prefill": prefill_sent(shape, work, layout, sharer),
                "training": training_sent(shape, work, layout, sharer),
                "decode": decode_sent(shape, work),
                "parameters": parameters(shape, work),
            }
            for name, value in found.items():
                assert value == real[name], (name, shape, dtype, rank)
            check_cache(shape, plan, work, real["cache"])


def check_cache(shape, plan, work, nbytes):
    """Bytes after one more token; a window's cache of all tokens has them all. Of pages the fullest
    rank may have one more than its share."""
    whole = replace(shape, window=None)
    held = cache_bytes(whole, STORAGES["plain"], replace(work, context=TOKENS + 1))
    if plan == "heads":
        assert nbytes == held
    else:
        one = held // -(-(TOKENS + 1) // work.cp)
        assert abs(nbytes - held) <= PAGE * one


# Tokens

FULL = LayerShape(hidden_size=8, num_heads=2, num_kv_heads=1, head_dim=4, v_head_dim=4)
EVERY = replace(FULL, causal=False)
LENGTHS = (8, 9, 12, 13, 16, 17, 24, 29, 31)
WINDOWS = (1, 2, 3, 4, 6, 7, 9, 13, 20, 40)


def needed(length, ranks, layout, visible):
    """Tokens by sender and receiver: those that some query of the receiver may attend to."""
    shards = Shards(length, ranks, layout)
    slots = [shards.positions(rank).tolist() for rank in range(ranks)]
    return [
        [
            0 if sender is receiver else sum(any(visible(q, k) for q in receiver) for k in sender)
            for receiver in slots
        ]
        for sender in slots
    ]


def sent_and_received(table):
    return [sum(row) for row in table], [sum(column) for column in zip(*table, strict=True)]


def by_formula(layer, layout, length, ranks):
    both = [moved_tokens(layer, layout == "zigzag", length, ranks, rank) for rank in range(ranks)]
    return [list(each) for each in zip(*both, strict=True)]


def cases(layout):
    pieces = 2 if layout == "zigzag" else 1
    return [(n, ranks) for n in LENGTHS for ranks in (1, 2, 3, 4) if n >= pieces * ranks]


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_tokens_are_those_that_some_query_may_attend_to(layout):
    for length, ranks in cases(layout):
        table = needed(length, ranks, layout, lambda q, k: k <= q)
        assert by_formula(FULL, layout, length, ranks) == [*sent_and_received(table)]
        table = needed(length, ranks, layout, lambda q, k: True)
        assert by_formula(EVERY, layout, length, ranks) == [*sent_and_received(table)]
        for window in WINDOWS:
            table = needed(length, ranks, layout, lambda q, k, w=window: q - w < k <= q)
            found = by_formula(replace(FULL, window=window), layout, length, ranks)
            assert found == [*sent_and_received(table)], (length, ranks, window)


def test_chunks_send_no_more_than_windows_of_their_size():
    for length, ranks in cases("contiguous"):
        for chunk in WINDOWS:
            table = needed(
                length, ranks, "contiguous", lambda q, k, c=chunk: k <= q and q // c == k // c
            )
            most, _ = by_formula(replace(FULL, chunk=chunk), "contiguous", length, ranks)
            exact, _ = sent_and_received(table)
            assert all(a <= b for a, b in zip(exact, most, strict=True))
    both = replace(FULL, chunk=4, window=9)
    assert by_formula(both, "contiguous", 24, 3) == by_formula(
        replace(FULL, window=4), "contiguous", 24, 3
    )


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_one_of_the_counted_ranks_sends_most(layout):
    for length, ranks in ((64, 4), (480, 5), (990, 9)):
        for window in (None, 2, 9, 50, 70, 200, 600):
            found, _ = by_formula(replace(FULL, window=window), layout, length, ranks)
            most = max(found[rank] for rank in counted_ranks(ranks))
            assert max(found) <= most + ranks, (length, ranks, window)


def test_pieces_are_balanced_where_a_layer_needs_it():
    windowed, chunked = replace(FULL, window=3), replace(FULL, chunk=3)
    assert not is_balanced([windowed, chunked, EVERY])
    assert is_balanced([windowed, FULL])


def test_windows_on_both_sides_are_refused():
    for layer in (replace(EVERY, window=3), replace(EVERY, chunk=3)):
        with pytest.raises(ValueError, match="known of causal layers only"):
            moved_tokens(layer, False, 96, 4, 0)
