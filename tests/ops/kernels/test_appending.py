"""Rotating and appending in compiled code gives the bits of the operators."""

import pytest
import torch

pytest.importorskip("numba")

from regard import Rotary
from regard.ops.kernels.stepping import Plan

WIDTHS = [(16, 16), (40, 24), (40, 40), (16, 4)]  # of a head, and of its rotated channels


def heads(batch, count, width, dtype):
    """As a projection gives them: a view with the heads' axis before that of the tokens."""
    return torch.randn(batch, 1, count * width).to(dtype).unflatten(-1, (-1, width)).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pairing", ["halves", "pairs"])
@pytest.mark.parametrize(("width", "rotated"), WIDTHS)
@pytest.mark.parametrize("positions", [[7], [3, 7, 11]])
def test_keys_and_values_are_those_of_rotary(dtype, pairing, width, rotated, positions):
    rope = Rotary(rotated, pairing=pairing)
    q, k, v = (heads(3, count, width, dtype) for count in (4, 2, 2))
    keys, values = torch.randn(2, 3, 2, 9, width).to(dtype).unbind()
    at = torch.tensor(positions)[:, None] if len(positions) > 1 else torch.tensor(positions)
    _, rotated_keys = rope(q, k, at)
    expected_keys, expected_values = keys.clone(), values.clone()
    expected_keys[:, :, 5], expected_values[:, :, 5] = rotated_keys[:, :, 0], v[:, :, 0]

    cos, sin = (torch.stack(each) for each in zip(*map(rope.row, positions), strict=True))
    if len(positions) == 1:
        cos, sin = cos[0], sin[0]
    else:
        cos, sin = cos[:, None], sin[:, None]
    plan = Plan.of(dtype, 3, 4, 2, width, width)
    plan.run(q, k, v, keys, values, 5, angles=(cos, sin), neighbours=pairing == "pairs",
         scale=1.0)  # fmt: skip
    if torch.backends.cpu.get_cpu_capability() != "DEFAULT":  # there torch rounds both products
        assert keys.equal(expected_keys)
    ulp = torch.finfo(dtype).eps * keys.abs().amax()
    assert (keys - expected_keys).abs().amax() <= ulp
    assert values.equal(expected_values)


def test_infinities_and_nans_stay_what_they_are():
    q = k = torch.zeros(1, 1, 1, 16, dtype=torch.bfloat16)
    v = torch.tensor([float("inf"), float("-inf"), float("nan"), 3e38, 1, 2, 3, 4]).repeat(2)
    v = v.bfloat16().view(1, 1, 1, 16)
    k = v.clone()
    keys, values = torch.zeros(2, 1, 1, 2, 16, dtype=torch.bfloat16).unbind()
    plan = Plan.of(torch.bfloat16, 1, 1, 1, 16, 16)
    plan.run(q, k, v, keys, values, 0, scale=1.0)
    for held in (keys, values):
        assert held[0, 0, 0].isnan().tolist() == v.isnan().flatten().tolist()
        assert held[0, 0, 0].nan_to_num(0).equal(v.flatten().nan_to_num(0))
    rope = Rotary(16)
    plan.run(q, k, v, keys, values, 1, angles=rope.row(1), scale=1.0)
    _, expected = rope(q, k, torch.tensor([1]))
    assert keys[0, 0, 1].isnan().equal(expected.isnan().flatten())
    assert keys[0, 0, 1].nan_to_num(0).equal(expected.flatten().nan_to_num(0))


def test_bfloat16_is_rounded_to_even():
    """1 + 2**-7 + 2**-8 lies between two bfloat16, the upper of which is even; 1 + 2**-8, lower."""
    ones = torch.ones(1, 1, 1, 16, dtype=torch.bfloat16)
    keys, values = torch.zeros(2, 1, 1, 1, 16, dtype=torch.bfloat16).unbind()
    cos = torch.tensor([1 + 2**-7 + 2**-8, 1 + 2**-8]).repeat(8)
    plan, angles = Plan.of(torch.bfloat16, 1, 1, 1, 16, 16), (cos, torch.zeros(16))
    plan.run(ones, ones, ones, keys, values, 0, angles=angles, scale=1.0)
    assert keys.flatten().equal(torch.tensor([1 + 2**-6, 1.0]).repeat(8).bfloat16())


@pytest.mark.parametrize("rows", [1, 3])
def test_unsigned_sines_are_those_of_transformers(rows):
    """`x * cos + rotate_half(x) * sin`, where the two halves of the angles may differ."""
    q, k = torch.randn(3, 2, 1, 16), torch.randn(3, 1, 1, 16)
    angles = torch.randn(rows, 1, 8)
    cos, sin = angles.cos(), angles.sin()
    keys, values = torch.zeros(2, 3, 1, 2, 16).unbind()
    plan = Plan.of(torch.float32, 3, 2, 1, 16, 16)
    plan.run(q, k, k, keys, values, 0, angles=(cos, sin), signed=False, scale=1.0)
    halves = k[..., :8], torch.cat([-k[..., 4:8], k[..., :4]], -1)
    expected = halves[0] * cos[:, None] + halves[1] * sin[:, None]
    assert torch.allclose(keys[:, :, :1, :8], expected, atol=1e-6)
    assert keys[:, :, :1, 8:].equal(k[..., 8:])
