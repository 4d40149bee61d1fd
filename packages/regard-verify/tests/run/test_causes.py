"""One fault, one cause: the other laws that it breaks follow from it."""

import statistics
from dataclasses import replace

import pytest
import torch

import subjects
from mutants import defects, functions, layers
from regard_verify import LAWS, check
from regard_verify.blame import WORDS
from regard_verify.law import Counterexample
from regard_verify.report.report import outcome
from regard_verify.run.causes import EXPLAINS, settled

SOME = [
    *functions.MUTANTS,
    *layers.MUTANTS,
    *defects.MUTANTS,
]


def broken(law, shape="", cause="", expected=None, actual=None):
    return outcome(
        LAWS[law], "failed", example=Counterexample(shape, "", "", "", cause, expected, actual)
    )


def causes(*outcomes):
    return [each.law for each in settled(outcomes) if each.status == "failed"]


def test_the_table_names_laws():
    assert {*EXPLAINS, *WORDS} <= set(LAWS)
    assert {law for laws in EXPLAINS.values() for law in laws} <= set(LAWS)


def test_what_follows_names_its_cause_and_the_cause_comes_first():
    found = settled([broken("oracle_forward"), outcome(LAWS["convexity"], "passed"),
                     broken("scale_closed_form"), broken("documents_apart")])  # fmt: skip
    assert [(each.law, each.status, each.because) for each in found] == [
        ("scale_closed_form", "failed", ""),
        ("documents_apart", "failed", ""),
        ("oracle_forward", "follows", "scale_closed_form"),
        ("convexity", "passed", ""),
    ]


def test_what_is_alone_is_a_cause_of_its_own():
    for law in LAWS.values():
        if not law.advised:
            assert causes(broken(law.name)) == [law.name]


def test_a_mask_explains_values_only_under_a_mask():
    right = [[True, False, True, True]] * 4
    ignored = broken("mask_polarity", "key 1 hidden", "", right, [[True] * 4] * 4)
    assert causes(ignored, broken("oracle_forward", "B=1, a mask")) == ["mask_polarity"]
    both = causes(ignored, broken("oracle_forward", "B=1"))
    assert both == ["mask_polarity", "oracle_forward"]


def test_where_no_form_of_a_mask_works_what_is_wrong_without_one_is_the_cause():
    formless = broken("mask_polarity", "B=1 L=4 S=4")
    assert causes(formless, broken("convexity", "B=1 H=1")) == ["convexity"]
    assert causes(formless, broken("fully_masked_forward", "B=1")) == ["mask_polarity"]


def test_where_a_mask_hides_its_key_another_rule_is_at_fault():
    keep = torch.ones(4, 4, dtype=torch.bool)
    keep[:, 1] = False
    right, alone = keep.tril().tolist(), keep.tolist()  # key 1 is hidden in both
    wrong = broken("mask_polarity", "key 1 hidden", "", right, alone)
    assert causes(wrong, broken("causality_exact")) == ["causality_exact"]
    off = broken("mask_and_causal", "", "A mask switches the causal rule off", right, alone)
    assert causes(wrong, off) == ["mask_and_causal"]
    everything = [[True] * 4] * 4
    ignored = broken("mask_polarity", "key 1 hidden", "", right, everything)
    both = broken("mask_and_causal", "", "", right, everything)
    assert causes(ignored, both, broken("causality_exact")) == ["mask_polarity"]


def test_shared_heads_explain_values_and_not_the_other_way_round():
    tiled = broken("gqa_order", cause="key heads are tiled")
    assert causes(broken("head_permutation"), tiled, broken("oracle_forward")) == ["gqa_order"]
    other = broken("gqa_order", cause="in another way")
    assert causes(broken("head_permutation"), other) == ["head_permutation"]


def test_two_calls_that_differ_end_the_questions():
    def drops(q, k, v):
        weights = torch.nn.functional.dropout((q @ k.mT * q.shape[-1] ** -0.5).softmax(-1), 0.5)
        return weights @ v

    report = check(drops, {"layout": "BHLD"}, quick=True)
    assert report.failed == ["eval_determinism"]
    asked = [each for each in report.outcomes if each.status != "not applicable"]
    assert len(asked) == 1
    assert {each.reason for each in report.having("not applicable")} == {
        "not asked: two calls of it differ"
    }


def test_advice_keeps_its_status_and_names_its_cause():
    advice = replace(broken("mask_dtype"), status="advice")
    found = settled([advice, broken("every_mask_argument")])
    assert [(each.status, each.because) for each in found] == [
        ("failed", ""),
        ("advice", "every_mask_argument"),
    ]


@pytest.mark.long
def test_most_mutants_have_one_cause_and_it_is_the_one_that_names_the_fault():
    counts, right = [], 0
    asked = [mutant for mutant in SOME if not mutant.slow]
    for mutant in asked:
        found = check(mutant.make(), mutant.like, quick=True)
        names = [each.law for each in found.causes] or found.advice
        counts.append(len(names))
        right += bool(names) and names[0] in mutant.kills
    assert statistics.median(counts) == 1
    assert statistics.mean(counts) < 1.1
    assert right >= 0.9 * len(asked)


@pytest.mark.parametrize("subject", [subjects.right, subjects.ThreeInputs])
def test_a_right_subject_has_no_cause(subject):
    assert check(subject, quick=True).causes == []
