"""FLOPs against arithmetic and torch's counter; visible pairs against dense masks."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from costs import REAL as real_cost
from measured_layers import layer_of
from regard import EVERYTHING, Causal, KVCache, SlidingWindow, Span, Where
from regard.plan.shapes import LayerShape

MHA = LayerShape(hidden_size=20, num_heads=3, num_kv_heads=3, head_dim=4, v_head_dim=4)
MLA = replace(MHA, v_head_dim=5, kv_lora_rank=7, qk_rope_head_dim=2)


@pytest.fixture
def cost():
    """The module: tests/plan/test_wrong_formulas.py gives the same tests a wrong one."""
    return real_cost


def count(cost, flops, layer, *form, **call):
    return flops(layer, cost.Workload(**call), *form)


def test_a_multiply_add_is_two_operations(cost):
    """The whole prefill by hand: four projections of 20 x 12, scores and weighted sums."""
    found = count(cost, cost.prefill_flops, MHA, context=9, batch=2)
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
    call = {"context": 9, "batch": 2}
    assert count(cost, cost.prefill_flops, shape, form, **call) == counted(layer, 9)
    assert count(cost, cost.decode_flops, shape, form, **call) == counted(layer, 9, 1)


def test_values_of_a_joint_latent_are_absorbed_and_its_keys_are_not(cost):
    """A step after 8 tokens by hand: projections, keys of all 9 tokens, scores, sums of latents,
    and the values' weights applied to the sums; with a bias no weights are absorbed."""
    shape = replace(MHA, num_heads=6, kv_lora_rank=7, keys_by_position=True, bias=("q_proj",))
    call = {"context": 8, "batch": 2}
    projections = 20 * 24 + 20 * 7 + 24 * 20
    absorbed = 7 * 9 * 3 * 4 + 6 * 9 * (4 + 7) + 7 * 6 * 4
    rebuilt = 7 * 9 * 3 * (4 + 4) + 6 * 9 * (4 + 4)
    found = count(cost, cost.decode_flops, shape, **call)
    assert found == 2 * 2 * (projections + absorbed)
    biased = replace(shape, bias=("q_proj", "kv_b_proj"))
    for each, form in ((shape, "expanded"), (biased, "absorbed")):
        found = count(cost, cost.decode_flops, each, form, **call)
        assert found == 2 * 2 * (projections + rebuilt)


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
        return count(cost, kind, shape, form, context=4096)

    assert flops(cost.decode_flops, "expanded") > 50 * flops(cost.decode_flops, "absorbed")
    assert flops(cost.prefill_flops, "absorbed") > 2 * flops(cost.prefill_flops, "expanded")


@pytest.mark.usefixtures("unchecked")
def test_another_form_is_refused(cost):
    with pytest.raises(ValueError, match="form is 'expanded' or 'absorbed', got 'auto'"):
        count(cost, cost.prefill_flops, MLA, "auto", context=9)


def test_a_gate_is_a_projection(cost):
    gated = replace(MHA, gate="channel")
    found = [count(cost, cost.decode_flops, each, context=1) for each in (MHA, gated)]
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
            assert cost.visible_pairs(layer, length) == cells.sum()
            before = count(cost, cost.visible_keys, layer, context=length - 1)
            if layer.causal:
                assert before == cells[-1].sum()


def test_hidden_pairs_save_scores_alone(cost):
    for layer in MASKED:
        call = {"context": 9, "batch": 2}
        all_pairs = count(cost, cost.prefill_flops, layer, **call)
        visible = count(cost, cost.visible_prefill_flops, layer, **call)
        hidden = 9 * 9 - int(dense(layer, 9).sum())
        assert all_pairs - visible == 2 * 2 * 3 * hidden * (4 + 4)


def test_a_step_reads_its_window_or_chunk(cost):
    def steps(kind, layer):
        return [count(cost, kind, layer, context=n) for n in (1, 2, 3, 4, 5)]

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
        cost.visible_pairs(replace(MHA, window=3, chunk=4), 9)
    with pytest.raises(ValueError, match="causal layers only"):
        cost.visible_pairs(replace(MHA, window=3, causal=False), 9)


def test_ranks_share_heads_and_tokens(cost):
    heads = replace(MHA, num_heads=12, num_kv_heads=4)
    a_rank = replace(heads, num_heads=3, num_kv_heads=1)
    for kind in (cost.prefill_flops, cost.decode_flops, cost.visible_prefill_flops):
        whole = count(cost, kind, heads, context=10, tp=4)
        assert whole == count(cost, kind, a_rank, context=10)
    a_share = count(cost, cost.prefill_flops, heads, context=10, cp=4)
    assert a_share == 2 * 3 * (20 * 48 + 2 * 20 * 16 + 48 * 20) + 2 * 12 * 3 * 10 * (4 + 4)
    step = count(cost, cost.decode_flops, heads, context=10, cp=4)
    assert step == 2 * (20 * 48 + 2 * 20 * 16 + 48 * 20) + 2 * 12 * 3 * (4 + 4)


def test_shared_keys_are_read_and_not_projected(cost):
    shared = replace(MHA, keys_of=0)
    found = [count(cost, cost.decode_flops, each, context=9) for each in (MHA, shared)]
    assert found[0] - found[1] == 2 * 2 * 20 * 12


def test_attention_alone_has_no_projections(cost):
    for shape, form, widths in ((MLA, "expanded", 4 + 5), (MLA, "absorbed", 7 + 2 + 7)):
        found = cost.attention_flops(shape, cost.Workload(context=0, batch=3), 10, form)
        assert found == 2 * 3 * 3 * 10 * widths


def test_linear_attention_is_refused(cost):
    with pytest.raises(ValueError, match="do not follow from its sizes"):
        count(cost, cost.decode_flops, replace(MHA, state_elements=5), context=9)
