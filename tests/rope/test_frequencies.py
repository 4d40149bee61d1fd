"""Frequencies without scaling, and checks of numeric arguments."""

import math

import pytest
import torch

from regard.rope.frequencies import given, plain_frequencies, require_finite, require_positive


@pytest.mark.parametrize(("dim", "theta"), [(2, 10_000.0), (8, 500_000.0), (6, 2)])
def test_frequencies_are_powers_of_theta(dim, theta):
    found = plain_frequencies(dim, theta)
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx([theta ** (-2 * i / dim) for i in range(dim // 2)])


@pytest.mark.parametrize("value", [0, -1.0, math.inf, math.nan])
def test_numbers_that_are_not_positive_are_refused(value):
    with pytest.raises(ValueError, match=r"Yarn: factor must be finite and greater than 0, got"):
        require_positive("Yarn", factor=value)
    require_positive("Yarn", other=1e-9, **given(factor=None, scale=2.0))


@pytest.mark.parametrize("value", [True, "2", None, 1j])
def test_other_types_are_refused(value):
    with pytest.raises(TypeError, match="NTK: factor must be a number, got"):
        require_finite("NTK", factor=value)


def test_numbers_that_are_not_finite_are_refused():
    require_finite("NTK", factor=-1.0, other=0)
    with pytest.raises(ValueError, match="NTK: factor must be finite, got nan"):
        require_finite("NTK", factor=math.nan)
