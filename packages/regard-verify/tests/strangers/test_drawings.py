"""What is drawn is what it says: right attentions are right, and faults change what they do."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from covering import few
from session import LONG
from strangers.calls import build, call, cases, load
from strangers.changing import changes, faults_of
from strangers.definition import expected
from strangers.draw import (
    CLASSES,
    FUSED,
    HEADS,
    KV,
    KV_HEADS,
    LOW_RANK,
    ORDERS,
    OUT,
    THREE,
    WIDTH,
    draw,
)
from strangers.faults import FAULTS
from strangers.write import write

SEEDS = range(3 if LONG else 1)
MANY = 500 if LONG else 120
DRAWN = [draw(0, index) for index in range(600)]


def difference(drawing, source):
    """The largest error relative to the definition, over all calls."""
    torch.manual_seed(drawing.index)
    attention = build(drawing, load(source))
    if isinstance(attention, nn.Module):
        attention.double().eval()
    errors = []
    for case in cases(drawing):
        with torch.no_grad():
            out, _ = call(drawing, attention, case)
        errors.append(np.abs(out.numpy() - expected(drawing, attention, case)).max())
    return max(errors)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("start", range(0, MANY, 20))
def test_right_ones_are_the_definition(seed, start):
    """cos and sin, and the sum of an RMS norm, are in float32; with freqs_cis all of q and k."""
    for index in range(start, start + 20):
        drawing = draw(seed, index)
        source = write(drawing)
        single = drawing.rope == "complex" or drawing.table.startswith("complex")
        most = 1e-5 if single else 1e-6
        assert difference(drawing, source) < most, f"{drawing}\n{source.text}"


@pytest.mark.parametrize("fault", ["scale_missing", "keys_as_values", "scores_rolled"])
def test_the_definition_notices_a_fault(fault):
    offering = [each for each in DRAWN if fault in write(each).offered][:20]
    assert len(offering) == 20
    for drawing in offering:
        assert difference(drawing, write(drawing, fault)) > 1e-4


def test_drawings_repeat_and_differ():
    assert [draw(0, index) for index in range(50)] == DRAWN[:50]
    texts = {write(each).text for each in DRAWN}
    assert len(texts) > 0.99 * len(DRAWN)
    assert {write(draw(1, index)).text for index in range(50)}.isdisjoint(texts)


AXES = {
    "family": {"layer", "cross", "qkv", "list", "latent", "function", "kernel"},
    "projections": {
        "three", "fused", "fused by group", "pair", "low-rank", "matrices", "latent",
    },
    "order": set(ORDERS),
    "cut": {"chunk", "view", "rearrange", "unbind", "chunk of heads"},
    "kind": {"MHA", "GQA", "MQA", "single"},
    "norm": {"none", "pre", "post"},
    "norm_class": {"LayerNorm", "RMSNorm"},
    "mask": {"none", "zeros hide", "ones hide", "keep", "hide", "additive"},
    "mask_shape": {"LS", "BLS", "B1LS", "BS"},
    "second": {"none", "keep", "hide"},
    "causal": {"never", "buffer", "built", "option", "argument", "blocks"},
    "table": {"none", "buffer", "attribute", "complex buffer", "complex attribute"},
    "config": {"plain", "dict", "dataclass", "namespace"},
    "core": {"softmax", "sdpa", "einsum", "tokens first", "flat", "grouped"},
    "rope": {"none", "halves", "pairs", "given", "complex"},
    "cache": {"none", "tuple", "object"},
    "returns": {"tensor", "weights", "optional", "asked"},
    "layout": {"BHLD", "BLHD", "BLD"},
    "width_name": set(WIDTH),
    "heads_name": set(HEADS),
    "kv_name": set(KV_HEADS),
    "three": set(THREE),
    "fused": set(FUSED),
    "pair": set(KV),
    "low_rank": set(LOW_RANK),
    "out_name": set(OUT),
    "class_name": {
        *CLASSES, "MultiHeadLatentAttention", "MLA", "LatentAttention", "MultiHead",
        "MultiHeadAttentionWrapper",
    },
}  # fmt: skip


@pytest.mark.parametrize("axis", AXES)
def test_every_choice_is_drawn(axis):
    assert {getattr(each, axis) for each in DRAWN} == AXES[axis]


def test_every_flag_is_drawn():
    flags = [each.name for each in dataclasses.fields(DRAWN[0]) if each.type is bool]
    assert len(flags) >= 8
    for flag in flags:
        assert {getattr(each, flag) for each in DRAWN} == {False, True}, flag


def test_the_faults_are_those_of_the_table():
    assert len(FAULTS) >= 20
    assert {fault for each in DRAWN for fault in write(each).offered} == FAULTS.keys()
    for name, each in FAULTS.items():
        assert each.laws or each.text, name


@pytest.mark.parametrize("fault", few(FAULTS, 4))
def test_a_fault_is_one_edit_that_changes_what_is_done(fault):
    offering = [each for each in DRAWN if fault in write(each).offered][: 10 if LONG else 2]
    assert offering
    same = [drawing for drawing in offering if not changes(drawing, fault)]
    # where norms bound the scores, say, exp does not overflow: `faults_of` leaves these out
    assert len(same) <= len(offering) // 5, write(same[0], fault).text
    for drawing in offering:
        right, wrong = (write(drawing, name).text.splitlines() for name in ("", fault))
        assert right != wrong
        shared = sum(line in right for line in wrong)
        assert len(wrong) - shared <= 4, "the texts differ in more than one place"


def test_a_fault_that_changes_nothing_is_not_put_in(monkeypatch):
    drawing = next(each for each in DRAWN if each.causal == "built" and each.core == "softmax")
    assert "causal_future" in faults_of(drawing)
    monkeypatch.setattr("strangers.changing.cases", lambda drawing: [])
    monkeypatch.setattr("strangers.changing.large", lambda drawing: [])
    assert faults_of(drawing) in ([], ["super_missing"])


def test_laws_of_faults_exist():
    from regard_verify import LAWS

    known = set(LAWS)
    for name, each in FAULTS.items():
        assert each.laws <= known, (name, each.laws - known)
