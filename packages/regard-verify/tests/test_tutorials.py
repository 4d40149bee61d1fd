"""Code as in tutorials: each gets a useful report, and never a traceback of this suite."""

import pytest
import torch
from torch import nn

import subjects
from regard_verify import check


def example(report, name):
    return next(each.example for each in report.outcomes if each.law == name)


def test_a_scale_by_the_width_is_named():
    report = check(subjects.Tutorial, quick=True)
    assert set(report.failed) == {"scale_closed_form", "oracle_forward", "oracle_gradient"}
    assert "root of the whole width 32" in example(report, "scale_closed_form").cause
    assert "root of the whole width 32" in example(report, "oracle_forward").cause


def test_a_mask_that_is_1_where_hidden_is_found_out():
    report = check(subjects.Tutorial, quick=True)
    assert "true or 1 is hidden" in report.inferred["mask"]
    assert report.inferred["a fully masked query"] == "gives the mean of all values"
    declared = check(
        subjects.Tutorial, {"polarity": "keep", "mask": "mask"}, only=["mask_polarity"]
    )
    assert declared.failed == ["mask_polarity"]
    assert "the wrong way round" in example(declared, "mask_polarity").cause


def test_three_inputs_and_weights_in_the_output():
    report = check(subjects.ThreeInputs, quick=True)
    assert report.failed == []
    assert "true or 1 may attend" in report.inferred["mask"]
    assert len(report.having("passed")) > 18


def test_a_missing_super_is_a_broken_law_and_all_others_are_checked():
    report = check(subjects.NoSuper, quick=True)
    assert not report.problem
    assert report.failed == ["super_init", "named_heads"]  # it computes one head of its n_heads
    assert report.exit_code == 1
    assert report.causes[0].line.endswith("def __init__(self, d_model, n_heads):")
    assert len(report.having("passed")) > 15


def test_a_module_whose_shapes_do_not_fit_is_broken():
    assert "declare width=" in check(subjects.Clumsy, quick=True).problem
    for subject in (subjects.Clumsy, f"{subjects.__file__}:Clumsy"):
        report = check(subject, {"width": 32}, quick=True)
        assert report.exit_code == 1
        assert report.failed == ["runs"]
        assert "RuntimeError" in report.causes[0].example.cause
        assert report.causes[0].line.endswith(": scores = q @ k")


class ShapeError(RuntimeError):
    """As einops raises."""


class OfFrames(nn.Module):
    """It takes x [B, T, L, E], with an axis of frames."""

    def __init__(self, dim):
        super().__init__()
        self.to_qkv, self.to_out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        if x.ndim != 4:
            raise ShapeError("expected 4 dims, received 3")
        return self.to_out(subjects.right(*self.to_qkv(x).chunk(3, -1)))


def test_a_module_of_other_axes_is_not_understood_and_not_broken():
    report = check(OfFrames, quick=True)
    assert report.exit_code == 2
    assert "expected 4 dims" in report.problem and "name a function" in report.problem


def test_a_function_that_never_ends_its_recursion_is_broken():
    report = check(subjects.recursive)
    assert report.failed == ["runs"]
    assert "RecursionError" in report.causes[0].example.cause


class OfOneLength(nn.Module):
    """A window of 7 x 7 tokens: no other number of tokens is documented."""

    def __init__(self, dim=32, window=7):
        super().__init__()
        self.window, self.qkv = window, nn.Linear(dim, 3 * dim)
        self.table = nn.Parameter(torch.zeros(window * window, window * window))

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q @ k.mT * q.shape[-1] ** -0.5 + self.table).softmax(-1) @ v


class OfImages(nn.Module):
    """Its input is no sequence."""

    def __init__(self, dim=32):
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)

    def forward(self, x):
        q, k, v = self.qkv(x).flatten(1, 2).chunk(3, -1)
        return torch.bmm((q @ k.mT).softmax(-1), v).unflatten(1, x.shape[1:3])


@pytest.mark.parametrize("subject", [OfOneLength, OfImages])
def test_a_module_that_is_not_understood_is_not_broken(subject):
    report = check(subject, quick=True)
    assert report.failed == []


def test_a_configuration_is_guessed():
    report = check(subjects.CausalSelfAttention, quick=True)
    assert report.failed == []
    assert report.inferred["attends to"] == "earlier keys and its own"
    assert report.inferred["heads"] == "4 query heads, 4 key heads, 8 channels each"
    assert "oracle_forward" in {each.law for each in report.having("passed")}
    assert len(report.having("passed")) > 12


def test_a_cache_in_the_layer_is_found():
    report = check(subjects.WithCache, quick=True)
    assert report.failed == []
    assert report.inferred["cache"] == "in the layer, internal"
    assert {"chunked_prefill", "decode_equals_full"} <= {e.law for e in report.having("passed")}


def test_heads_before_channels_an_additive_mask_and_merged_heads():
    report = check(subjects.blhd, quick=True)
    assert report.inferred["layout"] == "BLHD, returns BLE"
    assert "added to the scores" in report.inferred["mask"]
    assert set(report.failed) == {"fully_masked_forward", "fully_masked_backward"}


def test_one_head_of_a_lecture():
    report = check(subjects.Head, quick=True)
    assert report.failed == []
    assert report.inferred["heads"] == "1 query heads, 1 key heads, 8 channels each"
    assert len(report.having("passed")) > 12


def test_heads_are_counted_where_their_number_is_unknown():
    report = check(subjects.Uncounted, quick=True)
    assert report.inferred["heads"] == "4 query heads, 4 key heads, 8 channels each"
    assert report.failed == []


def test_the_annotated_transformer():
    function = check(subjects.annotated, quick=True)
    assert function.failed == []
    module = check(subjects.MultiHeadedAttention, quick=True)
    assert module.failed == []
    assert "BLS" in module.inferred["mask"]
    assert {"dropout_stats", "oracle_forward"} <= {e.law for e in module.having("passed")}


def test_cross_attention_alone():
    report = check(subjects.CrossOnly, quick=True)
    assert report.failed == []
    assert "cross_attention" in {each.law for each in report.having("passed")}


def test_a_factory_is_called():
    assert check(subjects.build, quick=True).failed == check(subjects.Tutorial, quick=True).failed


@pytest.mark.parametrize(
    ("subject", "problem"),
    [
        (subjects.Unguessable, "the value of 'flux_capacity' of Unguessable cannot be guessed"),
        (subjects.nonsense, "it returned a str, and no tensor in it"),
        (subjects.nothing, "it returned None"),
        (subjects.wrong_shape, "it returned shape"),
        (subjects.leaves, "it ended the program with exit code 3"),
        (subjects.NOT_CALLABLE, "of type int, which cannot be called"),
    ],
)
def test_a_subject_that_cannot_be_checked_gets_a_sentence(subject, problem):
    report = check(subject, quick=True)
    assert problem in report.problem
    assert report.exit_code == 2
    assert not report


def test_global_settings_are_restored():
    dtype, grad = torch.get_default_dtype(), torch.is_grad_enabled()
    threads = torch.get_num_threads()
    state = torch.get_rng_state()
    report = check(subjects.changes_the_world, quick=True)
    assert not report.problem
    assert (torch.get_default_dtype(), torch.is_grad_enabled()) == (dtype, grad)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def test_the_same_seed_is_the_same_report():
    def outcomes(seed):
        report = check(subjects.Tutorial, quick=True, seed=seed)
        return [(each.law, each.status, each.example) for each in report.outcomes]

    first, again, other = outcomes(0), outcomes(0), outcomes(1)
    assert first == again
    assert first != other
    assert [each[:2] for each in first] == [each[:2] for each in other]


@pytest.mark.parametrize("setting", ["float64 default", "bfloat16 default", "autocast", "weights"])
def test_settings_of_the_caller_change_no_verdict(setting):
    made = subjects.Tutorial(32, 4)
    default = torch.get_default_dtype()
    try:
        if "default" in setting:
            torch.set_default_dtype(getattr(torch, setting.split()[0]))
        with torch.autocast("cpu", torch.bfloat16, enabled=setting == "autocast"):
            given = made.double() if setting == "weights" else subjects.Tutorial
            report = check(given, quick=True)
        dtype = torch.get_default_dtype()
    finally:
        torch.set_default_dtype(default)
    assert [each.law for each in report.causes] == ["scale_closed_form"]
    assert not report.unjudged
    assert ("copy of it in float32" in str(report.notes)) == (setting == "weights")
    assert dtype == (getattr(torch, setting.split()[0]) if "default" in setting else default)
