"""FLOPs against arithmetic and torch's counter; visible pairs against dense masks."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from measured_layers import layer_of
from regard import EVERYTHING, Causal, KVCache, SlidingWindow, Span, Where
from regard.plan import cost as real_cost
from regard.plan.formula import number
from regard.plan.shapes import STORAGES, LayerShape

MHA = LayerShape(hidden_size=20, num_heads=3, num_kv_heads=3, head_dim=4, v_head_dim=4)
MLA = replace(MHA, v_head_dim=5, kv_lora_rank=7, qk_rope_head_dim=2)


@pytest.fixture
def cost():
    """The module: tests/plan/test_wrong_formulas.py gives the same tests a wrong one."""
    return real_cost


def evaluated(cost, formula, layer, **call):
    return formula.evaluate(**cost.sizes(layer, STORAGES["plain"], **call))


def test_a_multiply_add_is_two_operations(cost):
    """The whole prefill by hand: four projections of 20 x 12, scores and weighted sums."""
    found = evaluated(cost, cost.prefill_flops(MHA), MHA, context=9, batch=2)
    assert found == 2 * 2 * 9 * 4 * 20 * 12 + 2 * 2 * 3 * 9 * 9 * (4 + 4)


def counted(layer, *lengths):
    """What torch's counter says of the last of these calls with one cache."""
    cache = KVCache()
    with torch.device("meta"), torch.no_grad():
        for tokens in lengths:
            with FlopCounterMode(display=False) as counter:
                layer(torch.zeros(2, tokens, 20), cache=cache)
    return counter.get_total_flops()


@pytest.mark.parametrize("form", ["expanded", "absorbed"])
@pytest.mark.parametrize("q_lora_rank", [None, 6])
def test_mla_in_both_forms(form, q_lora_rank, cost):
    shape = replace(MLA, q_lora_rank=q_lora_rank)
    with torch.device("meta"):
        layer = layer_of(shape, form)
    prefill, decode = cost.prefill_flops(shape, form), cost.decode_flops(shape, form)
    assert evaluated(cost, prefill, shape, context=9, batch=2) == counted(layer, 9)
    assert evaluated(cost, decode, shape, context=9, batch=2) == counted(layer, 9, 1)


def test_the_forms_differ_as_their_authors_say(cost):
    """DeepSeek-V2's sizes: a step is far less work absorbed, a prefill less work expanded."""
    shape = LayerShape(
        hidden_size=5120,
        num_heads=128,
        num_kv_heads=128,
        head_dim=192,
        v_head_dim=128,
        kv_lora_rank=512,
        q_lora_rank=1536,
        qk_rope_head_dim=64,
    )

    def flops(kind, form):
        return evaluated(cost, kind(shape, form), shape, context=4096)

    assert flops(cost.decode_flops, "expanded") > 50 * flops(cost.decode_flops, "absorbed")
    assert flops(cost.prefill_flops, "absorbed") > 2 * flops(cost.prefill_flops, "expanded")


@pytest.mark.usefixtures("unchecked")
def test_another_form_is_refused(cost):
    with pytest.raises(ValueError, match="form is 'expanded' or 'absorbed', got 'auto'"):
        cost.prefill_flops(MLA, "auto")


def test_a_gate_is_a_projection(cost):
    gated = replace(MHA, gate="channel")
    found = [evaluated(cost, cost.decode_flops(each), each, context=1) for each in (MHA, gated)]
    assert found[1] - found[0] == 2 * 20 * 12


def dense(layer, length):
    mask = Causal() if layer.causal else EVERYTHING
    if layer.window is not None:
        mask = mask & SlidingWindow(layer.window)
    if layer.chunk is not None:
        mask = mask & Where(lambda b, h, q, k: q // layer.chunk == k // layer.chunk)
    return mask.dense(Span(0, length, 0, length)).expand(length, length)


MASKED = [
    MHA,
    replace(MHA, causal=False),
    *(replace(MHA, window=size) for size in (1, 3, 50)),
    *(replace(MHA, chunk=size) for size in (1, 3, 8, 50)),
]


def test_visible_pairs_are_those_of_dense_masks(cost):
    for layer in MASKED:
        for length in (1, 2, 3, 8, 9, 24):
            cells = dense(layer, length)
            pairs = evaluated(cost, cost.visible_pairs(layer), layer, context=length)
            assert pairs == cells.sum()
            before = evaluated(cost, cost.visible_keys(layer), layer, context=length - 1)
            if layer.causal:
                assert before == cells[-1].sum()


def test_hidden_pairs_save_scores_alone(cost):
    for layer in MASKED:
        call = {"context": 9, "batch": 2}
        all_pairs = evaluated(cost, cost.prefill_flops(layer), layer, **call)
        visible = evaluated(cost, cost.visible_prefill_flops(layer), layer, **call)
        hidden = 9 * 9 - int(dense(layer, 9).sum())
        assert all_pairs - visible == 2 * 2 * 3 * hidden * (4 + 4)


def test_a_step_reads_its_window_or_chunk(cost):
    def steps(kind, layer):
        return [evaluated(cost, kind(layer), layer, context=n) for n in (1, 2, 3, 4, 5)]

    projections = 2 * 4 * 20 * 12

    def of(keys):
        return [projections + 2 * 3 * n * (4 + 4) for n in keys]

    window, chunk = replace(MHA, window=3), replace(MHA, chunk=3)
    assert steps(cost.decode_flops, window) == of([2, 3, 3, 3, 3])
    assert steps(cost.visible_decode_flops, window) == of([2, 3, 3, 3, 3])
    assert steps(cost.decode_flops, chunk) == of([2, 3, 4, 5, 6])  # KVCache drops nothing
    assert steps(cost.visible_decode_flops, chunk) == of([2, 3, 1, 2, 3])


def test_masks_of_unknown_pairs_are_refused(cost):
    with pytest.raises(ValueError, match="not of both"):
        cost.visible_pairs(replace(MHA, window=3, chunk=4))
    with pytest.raises(ValueError, match="causal layers only"):
        cost.visible_pairs(replace(MHA, window=3, causal=False))


def test_ranks_share_heads_and_tokens(cost):
    heads = replace(MHA, num_heads=12, num_kv_heads=4)
    a_rank = replace(heads, num_heads=3, num_kv_heads=1)
    for kind in (cost.prefill_flops, cost.decode_flops, cost.visible_prefill_flops):
        whole = evaluated(cost, kind(heads), heads, context=10, tp=4)
        assert whole == evaluated(cost, kind(a_rank), a_rank, context=10)
    a_share = evaluated(cost, cost.prefill_flops(heads), heads, context=10, cp=4)
    assert a_share == 2 * 3 * (20 * 48 + 2 * 20 * 16 + 48 * 20) + 2 * 12 * 3 * 10 * (4 + 4)
    step = evaluated(cost, cost.decode_flops(heads), heads, context=10, cp=4)
    assert step == 2 * (20 * 48 + 2 * 20 * 16 + 48 * 20) + 2 * 12 * 3 * (4 + 4)


def test_shared_keys_are_read_and_not_projected(cost):
    shared = replace(MHA, keys_of=0)
    found = [evaluated(cost, cost.decode_flops(each), each, context=9) for each in (MHA, shared)]
    assert found[0] - found[1] == 2 * 2 * 20 * 12


def test_attention_alone_has_no_projections(cost):
    for shape, form, widths in ((MLA, "expanded", 4 + 5), (MLA, "absorbed", 7 + 2 + 7)):
        formula = cost.attention_flops(shape, number(10), form)
        assert evaluated(cost, formula, shape, context=0, batch=3) == 2 * 3 * 3 * 10 * widths


def test_linear_attention_is_refused(cost):
    with pytest.raises(ValueError, match="do not follow from its sizes"):
        cost.decode_flops(replace(MHA, state_elements=5))
