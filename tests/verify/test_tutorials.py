"""Code as tutorials write it: each gets a useful report, and never a traceback of ours."""

from pathlib import Path

import pytest
import torch

import subjects
from regard.verify import SubjectError, check, understand


def example(report, name):
    return next(each.example for each in report.outcomes if each.law == name)


def test_a_scale_by_the_width_is_called_that():
    report = check(subjects.Tutorial, quick=True)
    assert set(report.failed) == {"scale_closed_form", "oracle_forward", "oracle_gradient"}
    assert "root of the whole width 32" in example(report, "scale_closed_form").cause
    assert "root of the width, 1/sqrt(32)" in example(report, "oracle_forward").cause


def test_a_mask_that_is_1_where_hidden_is_found_out():
    report = check(subjects.Tutorial, quick=True)
    assert "true or 1 is hidden" in report.inferred["mask"]
    assert report.inferred["a query that sees nothing"] == "reads the mean of all values"
    declared = check(
        subjects.Tutorial, {"polarity": "keep", "mask": "mask"}, only=["mask_polarity"]
    )
    assert declared.failed == ["mask_polarity"]
    assert "the wrong way round" in example(declared, "mask_polarity").cause


def test_three_inputs_and_weights_beside_the_output():
    report = check(subjects.ThreeInputs, quick=True)
    assert report.failed == []
    assert "true or 1 may look" in report.inferred["mask"]
    assert len(report.having("passed")) > 25


def test_a_missing_super_is_called_for_it_and_said():
    report = check(subjects.NoSuper, quick=True)
    assert not report.problem
    assert any("does not call super().__init__()" in note for note in report.notes)
    assert any("right as one head alone" in note for note in report.notes)
    assert report.failed == []


def test_a_configuration_is_guessed():
    report = check(subjects.CausalSelfAttention, quick=True)
    assert report.failed == []
    assert report.inferred["sees"] == "the past and its own key"
    assert report.inferred["fused projection"] == "blocked"
    assert len(report.having("passed")) > 18


def test_a_past_inside_is_found():
    report = check(subjects.WithCache, quick=True)
    assert report.failed == []
    assert report.inferred["cache"] == "inside, internal"
    assert {"chunked_prefill", "decode_equals_full"} <= {e.law for e in report.having("passed")}


def test_heads_inside_an_added_mask_and_heads_side_by_side():
    report = check(subjects.blhd, quick=True)
    assert report.inferred["layout"] == "BLHD, gives BLE"
    assert "added to the scores" in report.inferred["mask"]
    assert set(report.failed) == {"fully_masked_forward", "fully_masked_backward"}


def test_one_head_of_a_lecture():
    report = check(subjects.Head, quick=True)
    assert report.failed == []
    assert report.inferred["heads"] == "1 query heads on 1, 8 channels each"
    assert len(report.having("passed")) > 18


def test_heads_are_counted_where_nothing_says_how_many():
    report = check(subjects.Uncounted, quick=True)
    assert report.inferred["number of heads"].startswith("4:")
    assert report.failed == []


def test_the_annotated_transformer():
    function = check(subjects.annotated, quick=True)
    assert function.failed == []
    assert "dropout_stats" in {each.law for each in function.having("passed")}
    module = check(subjects.MultiHeadedAttention, quick=True)
    assert module.failed == []
    assert "BLS" in module.inferred["mask"]
    assert {"dropout_stats", "oracle_forward"} <= {e.law for e in module.having("passed")}


def test_what_reads_another_sequence_only():
    report = check(subjects.CrossOnly, quick=True)
    assert report.failed == []
    assert "cross_attention" in {each.law for each in report.having("passed")}


def test_a_factory_is_called():
    assert check(subjects.build, quick=True).failed == check(subjects.Tutorial, quick=True).failed


@pytest.mark.parametrize(
    ("subject", "said"),
    [
        (subjects.Unguessable, "nothing says what 'flux_capacity' of Unguessable should be"),
        (subjects.nonsense, "it gave back a str, and no tensor in it"),
        (subjects.nothing, "it gave back None"),
        (subjects.wrong_shape, "it gave back shape"),
        (subjects.leaves, "it ended the program with exit code 3"),
        (subjects.recursive, "RecursionError"),
        (subjects.NOT_CALLABLE, "a int, which cannot be called"),
    ],
)
def test_what_cannot_be_judged_is_a_sentence(subject, said):
    report = check(subject, quick=True)
    assert said in report.problem
    assert report.exit_code == 2
    assert not report


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere.py:attention", "there is no file nowhere.py"),
        (f"{Path(subjects.__file__)}:missing", "has no 'missing'; it has"),
        ("no.such.module", "ModuleNotFoundError"),
        ("nothing", "names nothing"),
    ],
)
def test_what_cannot_be_found_is_a_sentence(name, said):
    with pytest.raises(SubjectError, match=said):
        understand(name)


def test_conventions_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match="no convention is called 'polarty'"):
        check(subjects.right, {"polarty": "keep"})
    with pytest.raises(ValueError, match="polarity is one of keep, drop, additive"):
        check(subjects.right, {"polarity": "keeping"})
    with pytest.raises(ValueError, match="give the object itself"):
        check("some.py:thing", {"options": {"mask": torch.ones(2)}})
    with pytest.raises(ValueError, match="no law is called 'oracle'"):
        check(subjects.right, only=["oracle"])


def test_the_world_is_as_it_was():
    dtype, grad = torch.get_default_dtype(), torch.is_grad_enabled()
    threads = torch.get_num_threads()
    state = torch.get_rng_state()
    report = check(subjects.changes_the_world, quick=True)
    assert not report.problem
    assert (torch.get_default_dtype(), torch.is_grad_enabled()) == (dtype, grad)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def test_the_same_seed_is_the_same_report():
    def told(seed):
        report = check(subjects.Tutorial, quick=True, seed=seed)
        return [(each.law, each.status, each.example) for each in report.outcomes]

    assert told(0) == told(0)
    assert told(0) != told(1)
    assert [each[:2] for each in told(0)] == [each[:2] for each in told(1)]
