"""Scalings against those of transformers, and properties of all scalings."""

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard.rope import Rotary
from regard.rope.scaling import (
    NTK,
    Frequencies,
    LinearScaling,
    Llama3,
    LongRope,
    Scaling,
    Yarn,
    plain_frequencies,
)

DIM = 16
SHORT = [1.0 + i / 10 for i in range(8)]
LONG = [1.0 + i * i for i in range(8)]
CONTEXT = 2048  # transformers' max_position_embeddings

VALUES = (
    LinearScaling(2),
    NTK(4.0),
    NTK(4.0, 64),
    Yarn(40, original_max_position=4096),
    Yarn(40, original_max_position=4096, mscale=1.0, mscale_all_dim=0.707),
    Yarn(4, original_max_position=64, attention_factor=1.5, truncate=False, beta_fast=16),
    Llama3(8),
    Llama3(32, low_freq_factor=2, original_max_position=512),
    LongRope(SHORT, LONG, original_max_position=64, factor=4),
    LongRope(tuple(SHORT), LONG, original_max_position=64, factor=4, attention_factor=1.25),
    Frequencies((1.0, 1.0, 0.5, 0.25, 0, -0.5, 1e-3, 3)),
)


def theirs(kind, theta, length=None, context=CONTEXT, **parameters):
    """transformers' frequencies and attention factor."""
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=4 * DIM,
        num_attention_heads=4,
        max_position_embeddings=context,
        rope_parameters={"rope_type": kind, "rope_theta": theta, **parameters},
    )
    return utils.ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)


def assert_same(ours, expected, theta, length=None):
    frequencies, attention_factor = expected
    length = None if length is None else torch.tensor(length)
    found = ours.frequencies(DIM, theta, length=length)
    assert found.dtype == torch.float64 and found.shape == (DIM // 2,)
    torch.testing.assert_close(found.float(), frequencies, rtol=3e-6, atol=0)
    assert ours.attention_factor == pytest.approx(attention_factor, rel=1e-12)


@pytest.mark.parametrize("theta", [100.0, 10_000.0, 500_000.0])
@pytest.mark.parametrize("factor", [1.0, 2.5, 8])
def test_linear_scaling_is_transformers_linear(theta, factor):
    assert_same(LinearScaling(factor), theirs("linear", theta, factor=float(factor)), theta)


@pytest.mark.parametrize("theta", [100.0, 10_000.0])
@pytest.mark.parametrize("length", [None, 1, CONTEXT, CONTEXT + 1, 3 * CONTEXT])
def test_dynamic_ntk_is_transformers_dynamic(theta, length):
    tensor = None if length is None else torch.tensor(length)
    expected = theirs("dynamic", theta, tensor, factor=2.5)
    assert_same(NTK(2.5, original_max_position=CONTEXT), expected, theta, length)


def test_static_ntk_is_a_larger_theta():
    raised = plain_frequencies(DIM, 10_000.0 * 4 ** (DIM / (DIM - 2)))
    torch.testing.assert_close(NTK(4).frequencies(DIM, 10_000.0), raised)
    assert NTK(4).frequencies(DIM, 10_000.0)[0] == 1.0
    slowest = plain_frequencies(DIM, 10_000.0)[-1] / 4
    torch.testing.assert_close(NTK(4).frequencies(DIM, 10_000.0)[-1], slowest)


@pytest.mark.parametrize("theta", [100.0, 10_000.0, 150_000.0])
@pytest.mark.parametrize("original", [64, 4096])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mscale": 1.0, "mscale_all_dim": 1.0},
        {"mscale": 0.707, "mscale_all_dim": 1.3},
        {"mscale": 1.0, "mscale_all_dim": 0},
        {"mscale_all_dim": 1.0},
        {"attention_factor": 0.8, "mscale": 0.5, "mscale_all_dim": 1.3},
        {"truncate": False},
        {"beta_fast": 8, "beta_slow": 2},
        {"beta_fast": 3, "beta_slow": 3, "truncate": False},
        {"beta_fast": 21.8356, "beta_slow": 21.8356, "truncate": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("factor", [1.0, 4.0, 40.0])
def test_yarn_is_transformers_yarn(theta, original, options, factor):
    expected = theirs(
        "yarn", theta, factor=factor, original_max_position_embeddings=original, **options
    )
    ours = Yarn(factor, original_max_position=original, **options)
    assert_same(ours, expected, theta)


@pytest.mark.parametrize("weight", [None, 0, 0.0, 0.5, 1, 1.0])
@pytest.mark.parametrize("factor", [1.0, 40])
def test_yarn_scales_the_softmax_as_deepseek_does(weight, factor):
    deepseek = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    parameters = {"rope_type": "yarn", "factor": factor, "mscale_all_dim": weight}
    expected = deepseek.yarn_apply_mscale(parameters, 0.125) / 0.125
    ours = Yarn(factor, original_max_position=4096, mscale_all_dim=weight)
    assert ours.softmax_factor == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("theta", [100.0, 10_000.0, 500_000.0])
@pytest.mark.parametrize(("low", "high"), [(1.0, 4.0), (2, 8), (0.5, 1.0)])
@pytest.mark.parametrize("original", [64, 8192])
def test_llama3_is_transformers_llama3(theta, low, high, original):
    options = {"low_freq_factor": low, "high_freq_factor": high}
    expected = theirs(
        "llama3", theta, factor=8.0, original_max_position_embeddings=original, **options
    )
    assert_same(Llama3(8.0, original_max_position=original, **options), expected, theta)


@pytest.mark.parametrize("length", [None, 1, 64, 65, 4096])
@pytest.mark.parametrize("options", [{}, {"attention_factor": 1.25}], ids=str)
@pytest.mark.parametrize("factor", [0.5, 1.0, 32.0])
def test_longrope_is_transformers_longrope(length, options, factor):
    expected = theirs(
        "longrope",
        10_000.0,
        length,
        factor=factor,
        short_factor=SHORT,
        long_factor=LONG,
        original_max_position_embeddings=64,
        **options,
    )
    ours = LongRope(SHORT, LONG, original_max_position=64, factor=factor, **options)
    assert_same(ours, expected, 10_000.0, length)


@given(
    factor=st.floats(1.0, 64.0),
    theta=st.floats(10.0, 1e6),
    original=st.integers(32, 10_000),
    pairs=st.integers(2, 64),
)
def test_a_scaling_divides_frequencies_by_at_most_its_factor(factor, theta, original, pairs):
    plain = plain_frequencies(2 * pairs, theta)
    for scaling in (
        LinearScaling(factor),
        NTK(factor),
        Yarn(factor, original_max_position=original),
        Llama3(factor, original_max_position=original),
    ):
        divided_by = plain / scaling.frequencies(2 * pairs, theta)
        assert (divided_by >= 1 - 1e-9).all() and (divided_by <= factor * (1 + 1e-9)).all()
        assert (divided_by.diff() >= -1e-9).all()  # lower frequencies by at least as much


def test_given_frequencies_are_returned():
    given = [1.0, 0.3, 0.3, 0.0, -0.01]
    scaling = Frequencies(given)
    expected = torch.tensor(given, dtype=torch.float64)
    assert scaling.frequencies(10, 10_000.0).equal(expected)
    assert scaling.frequencies(10, 7.0).equal(expected)
    positions = torch.tensor([0, 3])
    angles = Rotary(10, scaling=scaling).angles(positions, torch.float64)
    torch.testing.assert_close(angles, positions[:, None] * expected)


def test_given_frequencies_rotate_as_computed_ones_do():
    plain = plain_frequencies(DIM, 10_000.0).tolist()
    q, positions = torch.randn(1, 2, 5, DIM), torch.arange(5) * 100
    given = Rotary(DIM, theta=3.0, scaling=Frequencies(plain))
    assert given.rotate(q, positions).equal(Rotary(DIM).rotate(q, positions))


def test_plain_frequencies_are_powers_of_theta():
    expected = [500_000.0 ** (-2 * i / 64) for i in range(32)]
    torch.testing.assert_close(
        plain_frequencies(64, 500_000.0),
        torch.tensor(expected, dtype=torch.float64),
        rtol=1e-14,
        atol=0,
    )


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_scaling_can_be_compared_copied_pickled_and_rebuilt_from_its_repr(value):
    names = {c.__name__: c for c in (LinearScaling, NTK, Yarn, Llama3, LongRope, Frequencies)}
    for other in (
        eval(repr(value), names),
        copy.deepcopy(value),
        pickle.loads(pickle.dumps(value)),
    ):
        assert other == value and hash(other) == hash(value) and repr(other) == repr(value)
    assert isinstance(value, Scaling)
    with pytest.raises(AttributeError):
        value.factor = 3
    assert len({*VALUES}) == len(VALUES)


def test_repr_leaves_out_defaults():
    assert repr(NTK(2)) == "NTK(2)"
    assert repr(Yarn(4, original_max_position=64)) == "Yarn(4, original_max_position=64)"
    given = "Yarn(4, original_max_position=64, attention_factor=1.5)"
    assert repr(eval(given)) == given


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_frequencies_are_on_the_device_given(value):
    assert value.frequencies(DIM, 10_000.0, device="meta").is_meta
    length = torch.tensor(100)
    assert value.frequencies(DIM, 10_000.0, length=length).device.type == "cpu"
    changes = not torch.equal(
        value.frequencies(DIM, 10_000.0, length=length), value.frequencies(DIM, 10_000.0)
    )
    assert changes == value.uses_length


def yarn(**options):
    return Yarn(**({"factor": 4, "original_max_position": 64} | options))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: LinearScaling(0), ValueError, "factor must be finite and greater than 0, got 0"),
        (lambda: LinearScaling(-2.0), ValueError, "got -2.0"),
        (lambda: LinearScaling(math.inf), ValueError, "must be finite"),
        (lambda: LinearScaling(True), TypeError, "must be a number, got True|Actual value: True"),
        (lambda: NTK(math.nan), ValueError, "NTK: factor must be finite"),
        (lambda: NTK(2, original_max_position=0), ValueError, "original_max_position must be"),
        (lambda: NTK(2).frequencies(2, 10.0), ValueError, "dim >= 4 .*got dim=2"),
        (lambda: yarn(factor=-1), ValueError, "Yarn: factor must"),
        (lambda: yarn(original_max_position=-1), ValueError, "original_max_position must"),
        (lambda: yarn(beta_fast=1, beta_slow=32), ValueError, "beta_slow=32; swap"),
        (lambda: yarn(beta_slow=0), ValueError, "beta_slow must"),
        (lambda: yarn(mscale=-1.0), ValueError, "mscale must"),
        (lambda: yarn(attention_factor=0), ValueError, "attention_factor must"),
        (lambda: yarn().frequencies(8, 1.0), ValueError, "theta > 1 .*theta=1.0"),
        (lambda: Llama3(0), ValueError, "Llama3: factor must"),
        (lambda: Llama3(8, high_freq_factor=1), ValueError, "high_freq_factor=1 must be above"),
        (lambda: Llama3(8, low_freq_factor=0), ValueError, "low_freq_factor must"),
        (
            lambda: LongRope([1.0], [1.0, 2.0], original_max_position=64, factor=2),
            ValueError,
            "short_factor has 1 entries and long_factor 2",
        ),
        (
            lambda: LongRope([1.0], [0.0], original_max_position=64, factor=2),
            ValueError,
            r"long_factor\[0\] must",
        ),
        (
            lambda: LongRope([1.0], [1.0], original_max_position=1, factor=2),
            ValueError,
            "original_max_position must be above 1",
        ),
        (
            lambda: LongRope([1.0], [1.0], original_max_position=64, factor=0),
            ValueError,
            "LongRope: factor must",
        ),
        (lambda: Frequencies(()), ValueError, "at least one entry"),
        (lambda: Frequencies((1.0, math.inf)), ValueError, r"values\[1\] must be finite"),
        (lambda: Frequencies((1.0, True)), TypeError, r"values\[1\] must be a number|Actual value"),
        (
            lambda: Rotary(4, scaling=Frequencies((1.0,))),
            ValueError,
            "there are 1 values, but dim=4 has 2 pairs",
        ),
        (
            lambda: Rotary(4, scaling=LongRope([1], [1], original_max_position=64, factor=2)),
            ValueError,
            "1 entries, but dim=4 has 2 pairs",
        ),
    ],
)
def test_errors_say_why(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Yarn(4, original_max_position=None),
        lambda: Llama3(4, original_max_position=None),
        lambda: LongRope([1], [1], original_max_position=None, factor=2),
        lambda: LinearScaling(None),
        lambda: NTK(None),
        lambda: Rotary(8, theta=None),
        lambda: Rotary(None),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_a_number_that_may_not_be_left_out_is_asked_for(make):
    with pytest.raises(TypeError, match="must be a number, got None"):
        make()
