"""`hadamard`: orthonormal, its own inverse, and the same under every caller."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from regard.cache.rotation import blocks_of, hadamard


def entry(row, column, width):
    """Sylvester's matrix by the parity of the common binary digits."""
    return (-1) ** (row & column).bit_count() * width**-0.5


@pytest.mark.parametrize("blocks", [(), (1,), (2,), (8,), (4, 2), (4, 1), (16, 8)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_each_block_is_multiplied_by_sylvesters_matrix(blocks, dtype):
    x = torch.randn(2, 3, sum(blocks) + 3).to(dtype)
    matrix, start = torch.eye(x.shape[-1], dtype=torch.float64), 0
    for block in blocks:
        for row in range(block):
            for column in range(block):
                matrix[start + row, start + column] = entry(row, column, block)
        start += block
    wanted = x.double() @ matrix
    found = hadamard(x, blocks)
    unit = torch.finfo(dtype).eps / 2
    size = x.double().abs() @ matrix.abs()
    assert found.dtype == dtype
    assert ((found.double() - wanted).abs() <= (unit + 8 * 2.0**-53) * 8 * size).all()
    if dtype in (torch.bfloat16, torch.float16):  # rounded once
        assert ((found.double() - wanted).abs() <= 1.01 * unit * wanted.abs() + 1e-6).all()


@pytest.mark.parametrize("width", [1, 7, 64, 96, 100, 128])
def test_it_is_its_own_inverse_and_preserves_products(width):
    q, k, blocks = torch.randn(5, width).double(), torch.randn(4, width).double(), blocks_of(width)
    rotated = hadamard(q, blocks)
    torch.testing.assert_close(hadamard(rotated, blocks), q)
    torch.testing.assert_close(rotated @ hadamard(k, blocks).mT, q @ k.mT)


def test_blocks_are_powers_of_two_that_add_up_to_the_width():
    for width in range(300):
        blocks = blocks_of(width)
        assert sum(blocks) == width - width % 2
        assert all(block.bit_count() == 1 for block in blocks)
        assert list(blocks) == sorted(set(blocks), reverse=True)


def test_under_any_caller():
    x = torch.randn(2, 5, 12)
    wanted = hadamard(x, (8, 4))
    with torch.autocast("cpu", torch.bfloat16):
        assert hadamard(x, (8, 4)).equal(wanted)
    with torch.inference_mode():
        assert hadamard(x, (8, 2)).equal(hadamard(x, (8, 2)))
    with torch.device("meta"):
        assert hadamard(x, (8, 4)).equal(wanted)
        assert hadamard(torch.empty(2, 8), (8,)).shape == (2, 8)
    torch.set_default_dtype(torch.float64)
    try:
        assert hadamard(x, (8, 4)).equal(wanted)
    finally:
        torch.set_default_dtype(torch.float32)
    with FakeTensorMode() as mode:
        assert hadamard(mode.from_tensor(x), (4,)).shape == x.shape
    assert hadamard(x, (4,)).isfinite().all()
    assert torch.func.vmap(lambda y: hadamard(y, (8, 4)))(x).allclose(wanted)


@pytest.mark.usefixtures("unchecked")
def test_compiled():
    x = torch.randn(2, 5, 12)
    found = torch.compile(hadamard, backend="eager", fullgraph=True)(x, (8, 4))
    assert found.equal(hadamard(x, (8, 4)))


def test_gradients_flow():
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda y: hadamard(y, (4, 2)), x)


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (2, 0)])
def test_without_elements(shape):
    assert hadamard(torch.zeros(shape), blocks_of(shape[-1])).shape == shape


@pytest.mark.parametrize("blocks", [(3,), (8, 4), (0,), (-2,)])
def test_other_blocks_are_refused(blocks):
    with pytest.raises(ValueError, match="powers of two that add up to at most the 10 channels"):
        hadamard(torch.zeros(2, 10), blocks)
