"""Unscaled frequencies, and the checks and code of the scalings' arguments."""

import math
from dataclasses import dataclass

import pytest
import torch

from regard.rope.frequencies import paste, plain_frequencies, require_finite, require_positive


@pytest.mark.parametrize(("dim", "theta"), [(2, 10_000.0), (8, 500_000.0), (6, 2)])
def test_frequencies_fall_geometrically_from_one(dim, theta):
    found = plain_frequencies(dim, theta)
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx([theta ** (-2 * i / dim) for i in range(dim // 2)])


@dataclass
class Scaling:
    factor: float
    low: float = 1.0
    high: float = 4.0


def test_the_code_of_a_scaling_leaves_out_what_is_implied():
    assert paste(Scaling(2.0)) == "Scaling(2.0)"
    assert paste(Scaling(2.0, high=8.0)) == "Scaling(2.0, high=8.0)"
    assert paste(Scaling(2.0, 3.0), always=2) == "Scaling(2.0, 3.0)"
    assert paste(Scaling(2.0, high=9.0), high=9.0) == "Scaling(2.0)"
    assert paste(Scaling(2.0), high=9.0) == "Scaling(2.0, high=4.0)"


@pytest.mark.parametrize("value", [0, -1.0, math.inf, math.nan])
def test_what_is_not_positive_is_refused(value):
    with pytest.raises(ValueError, match=r"Yarn: factor must be finite and greater than 0, got"):
        require_positive("Yarn", factor=value)
    require_positive("Yarn", factor=None, other=1e-9)


@pytest.mark.parametrize("value", [True, "2", None, 1j])
def test_what_is_no_number_is_refused(value):
    with pytest.raises(TypeError, match="NTK: factor must be a number, got"):
        require_finite("NTK", factor=value)


def test_what_is_not_finite_is_refused():
    require_finite("NTK", factor=-1.0, other=0)
    with pytest.raises(ValueError, match="NTK: factor must be finite, got nan"):
        require_finite("NTK", factor=math.nan)
