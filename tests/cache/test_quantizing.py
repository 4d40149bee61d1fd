"""Few tokens are quantised by one compiled loop, to the codes that torch's operators give."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from regard import QuantizedCache
from regard.cache import quantizing
from regard.cache.codes import dequantize, quantize
from regard.cache.quantizing import quantized
from regard.cache.rotation import hadamard

pytest.importorskip("numba")
WIDTHS = (1, 2, 5, 16, 31, 32, 33, 48, 64, 70, 130)


@pytest.fixture
def compiled_only(monkeypatch):
    """torch's operators are not used."""
    monkeypatch.setattr(quantizing, "quantize", None)


def numbers(width, dtype, scale=1.0):
    x = scale * torch.randn(2, 3, 4, width, dtype=torch.float64)
    x[0, 0] = x[0, 0, :, :1]  # a group of equal numbers has a scale of 0
    return x.to(dtype)


@pytest.mark.parametrize("bits", [8, 6, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("group", [2, 6, 32, 64])
@pytest.mark.usefixtures("compiled_only")
def test_the_codes_of_torchs_operators(bits, dtype, group):
    for width in WIDTHS:
        for scale in (1.0, 1e-30, 1e30, 0.0):
            x = numbers(width, dtype, min(scale, 1e3) if dtype is torch.float16 else scale)
            for found, wanted in zip(quantized(x, bits, group), quantize(x, bits, group),
                                     strict=True):  # fmt: skip
                assert found.dtype == wanted.dtype
                assert found.equal(wanted), (width, scale)


@pytest.mark.parametrize("rotation", [(64,), (32, 16), (4,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.usefixtures("compiled_only")
def test_the_codes_of_rotated_numbers(dtype, rotation):
    x = numbers(70, dtype)
    wanted = quantize(hadamard(x.float(), rotation), 6, 32)
    for found, each in zip(quantized(x, 6, 32, rotation), wanted, strict=True):
        assert found.equal(each)


@pytest.mark.parametrize("bits", [8, 6, 4])
@pytest.mark.usefixtures("compiled_only")
def test_the_error_is_at_most_half_a_step(bits):
    x = numbers(70, torch.float32)
    codes, scales = quantized(x, bits, 32)
    found = dequantize(codes, scales, bits, 32, 70)
    for first in (0, 32, 64):
        group = x[..., first : first + 32].double()
        step = (group.amax(-1) - group.amin(-1)) / (2**bits - 1)
        gap = (found[..., first : first + 32].double() - group).abs().amax(-1)
        most = group.abs().amax(-1)
        # scale and zero are rounded to 8 binary digits: a zero that is lower by so much of itself
        # makes the range that much wider
        assert (gap <= 0.5 * step * (1 + 2**-7) + most * 2**-7 / (2**bits - 1) + 1e-6).all()


@pytest.mark.usefixtures("compiled_only")
@pytest.mark.parametrize("make", [
    lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    lambda x: x[..., ::2],
    lambda x: x.flip(0)[:1].expand(5, -1, -1, -1),
    lambda x: x.clone().requires_grad_(),
    lambda x: torch.complex(x, x).conj().imag,
])  # fmt: skip
def test_any_strides_and_parameters(make):
    x = make(numbers(24, torch.float32))
    for found, wanted in zip(quantized(x, 8, 8), quantize(x, 8, 8), strict=True):
        assert found.equal(wanted)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_not_finite_afterwards(bad):
    x = numbers(16, torch.float32)
    x[1, 2, 3, 5] = bad
    codes, scales = quantized(x, 8, 8)
    found = dequantize(codes, scales, 8, 8, 16)
    assert not found[1, 2, 3, :8].isfinite().any()
    assert found[1, 2, 3, 8:].isfinite().all()
    assert found[:1].isfinite().all()


def test_torchs_operators_where_it_cannot_be_compiled(monkeypatch):
    used = []
    monkeypatch.setattr(quantizing, "quantize", lambda *a: used.append(a) or quantize(*a))
    many = torch.zeros(1, 1, 2, quantizing.MOST)
    quantized(many, 8, 8)
    assert len(used) == 1
    few = torch.zeros(1, 1, 2, 8)
    with FakeTensorMode() as mode:
        quantized(mode.from_tensor(few), 8, 8)
    assert len(used) == 2
    monkeypatch.setattr(quantizing, "has_numba", lambda: False)
    quantized(many[..., :8], 8, 8)
    assert len(used) == 3


@pytest.mark.parametrize(
    "given", [{"bits": 8}, {"bits": 4}, {"format": "K6V4"}, {"format": "K8V6"}]
)
def test_a_cache_is_the_same_by_steps_and_at_once(given, monkeypatch):
    x = torch.randn(1, 2, 9, 48)
    one, other = QuantizedCache(**given), QuantizedCache(**given)
    monkeypatch.setattr(quantizing, "has_numba", lambda: False)
    (whole,) = one.update(x, 2 * x)
    monkeypatch.undo()
    for piece in x.split(1, 2):
        (parts,) = other.update(piece, 2 * piece)
    for a, b in zip(whole.streams, parts.streams, strict=True):
        assert a.equal(b)


def test_another_default_device_and_dtype():
    x = torch.randn(1, 2, 1, 32)
    wanted = quantized(x, 8, 32)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            found = quantized(x, 8, 32)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(a.equal(b) for a, b in zip(found, wanted, strict=True))
