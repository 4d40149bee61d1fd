"""Few rows times a weight: the sums of float64, rounded; a row has the same bits in any company."""

import pytest
import torch

pytest.importorskip("numba")

from regard.matrices import MOST_ROWS
from regard.ops.kernels.chaining import Gate, Matrix, Norm, Product, linear, prepare
from regard.ops.kernels.row_products import SILU

SIZES = [(5, 16), (7, 48), (1, 32), (131, 24), (50, 8), (67, 576)]  # outputs, width
DTYPES = [torch.float32, torch.bfloat16]


def expected(x, weight, bias):
    """The products in float64, an output at a time."""
    rows = [[(a * b).sum() for b in weight.double()] for a in x.double()]
    out = torch.stack([torch.stack(row) for row in rows])
    return out if bias is None else out + bias.double()


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "width"), SIZES)
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8])
def test_products_are_those_of_float64_rounded(rows, outputs, width, dtype, biased, lanes):
    x, weight = torch.randn(rows, width).to(dtype), torch.randn(outputs, width).to(dtype)
    bias = torch.randn(outputs).to(dtype) if biased else None
    wanted = expected(x, weight, bias)
    out = linear(x, weight, bias)
    assert out.dtype is dtype
    terms = x.double().abs() @ weight.double().abs().T + 1  # a sum's error is a share of its terms
    error = (out.double() - wanted).abs()
    rounded = wanted.abs() * torch.finfo(dtype).eps / 2
    assert (error <= rounded + terms * width * torch.finfo(torch.float32).eps).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_has_the_same_bits_in_any_company_and_on_any_threads(dtype, threads):
    x, weight = torch.randn(MOST_ROWS, 576).to(dtype), torch.randn(301, 576).to(dtype)
    alone = torch.cat([linear(row[None], weight) for row in x])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows in range(1, MOST_ROWS + 1):
            assert linear(x[:rows], weight).equal(alone[:rows])
    finally:
        torch.set_num_threads(before)


def test_axes_before_the_rows_are_kept():
    x, weight = torch.randn(2, 1, 3, 16), torch.randn(5, 16)
    out = linear(x, weight)
    assert out.shape == (2, 1, 3, 5)
    assert out.flatten(0, 2).equal(linear(x.flatten(0, 2), weight))


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_and_nans_are_those_of_the_sums(dtype):
    x, weight = torch.ones(3, 16, dtype=dtype), torch.ones(2, 16, dtype=dtype)
    x[0, 3], x[1, 5] = float("inf"), float("nan")
    out = linear(x, weight)
    assert out[0].isposinf().all()
    assert out[1].isnan().all()
    assert out[2].eq(16).all()


X, WEIGHT, BIAS = torch.randn(2, 16), torch.randn(5, 16), torch.randn(5)
REFUSED = {
    "more rows": (torch.randn(MOST_ROWS + 1, 16), WEIGHT),
    "no rows": (torch.randn(0, 16), WEIGHT),
    "no outputs": (X, torch.randn(0, 16)),
    "a width that is not an even number of vectors": (torch.randn(2, 12), torch.randn(5, 12)),
    "another width": (torch.randn(2, 32), WEIGHT),
    "another dtype": (X.bfloat16(), WEIGHT),
    "a dtype that it does not have": (X.double(), WEIGHT.double()),
    "rows with strides": (torch.randn(16, 2).T, WEIGHT),
    "a weight with strides": (X, torch.randn(16, 5).T),
    "a shorter bias": (X, WEIGHT, torch.randn(4)),
    "a bias of another dtype": (X, WEIGHT, BIAS.double()),
    "a lazy minus sign": (torch.randn(2, 16, dtype=torch.complex64).conj().imag, WEIGHT),
    "a sparse weight": (X, WEIGHT.to_sparse()),
    "a weight without memory": (X, WEIGHT.to("meta")),
}


@pytest.mark.parametrize("given", REFUSED.values(), ids=REFUSED)
def test_a_call_that_the_kernel_cannot_read_is_left_to_others(given):
    assert linear(*given) is None


def test_a_parameter_that_is_written_in_place_counts_and_a_moved_one_ends_the_chain():
    x, norm = torch.randn(2, 48), Norm(torch.ones(48), 0.0)
    matrix = Matrix(torch.randn(80, 48), torch.randn(80))
    chain = prepare(1, 1, Product(1, matrix, 2, norm=norm))
    (before,) = chain.run(x)
    matrix.weight.mul_(2)
    matrix.bias.mul_(2)
    torch.testing.assert_close(chain.run(x)[0], 2 * before)
    for changed in (matrix.weight, matrix.bias, norm.weight):
        place = changed.data
        changed.data = changed.data.clone()
        assert chain.run(x) is None
        changed.data = place
        assert chain.run(x) is not None
    square = Matrix(torch.randn(48, 48))
    chain = prepare(1, 1, Product(1, square, 2))
    square.weight.data = square.weight.data.T  # the same memory, in another order
    assert chain.run(torch.randn(1, 48)) is None


def test_chains_of_tensors_that_the_kernel_cannot_read_are_not_prepared_or_run():
    x, y, wide = torch.randn(2, 48), torch.randn(2, 80), Matrix(torch.randn(80, 48))
    chain = prepare(2, 1, Product(1, wide, 3, added=2))
    for rows in ((x, y[:1]), (x, y.T.contiguous().T), (x.double(), y), (x[:, :16], y),
                 (x[:0], y[:0]), (x.repeat(5, 1), y.repeat(5, 1))):  # fmt: skip
        assert chain.run(*rows) is None
    other = Matrix(torch.randn(80, 64))
    assert prepare(1, 1, Product(1, wide, 2, gate=Gate(other, SILU))) is None
    assert prepare(1, 1, Product(1, wide, 2, norm=Norm(torch.ones(47), 1e-5))) is None
    assert prepare(1, 1, Product(1, wide, 2, norm=Norm(torch.ones(48).double(), 1e-5))) is None
    assert prepare(1, 1, Product(1, Matrix(torch.randn(5, 12)), 2)) is None
    assert prepare(1, 1, Product(1, wide, 2, added=1)) is None
    assert prepare(1, 1, Product(1, Matrix(wide.weight.half()), 2)) is None
