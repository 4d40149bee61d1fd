"""Chains of products with weights: norm, gated product, product, as float64 computes them."""

import pytest
import torch

pytest.importorskip("numba")

from regard.matrices import MOST_ROWS
from regard.ops.kernels import chaining
from regard.ops.kernels.chaining import Gate, Matrix, Norm, Product, prepare
from regard.ops.kernels.row_products import GELU, GELU_TANH, SILU
from regard.ops.kernels.threads import launch

DTYPES = [torch.float32, torch.bfloat16]


class Layer:
    """The parameters of the products after attention, and what they compute in float64."""

    def __init__(
        self, dtype, *, width=48, inner=80, heads=64, shift=0.0, activation=SILU, biased=True
    ):
        def random(*shape):
            return (torch.randn(*shape) / shape[-1] ** 0.5).to(dtype)

        self.out = Matrix(random(width, heads), random(width) if biased else None)
        self.gate = Gate(
            Matrix(random(inner, width), random(inner) if biased else None), activation
        )
        self.up = Matrix(random(inner, width), random(inner) if biased else None)
        self.down = Matrix(random(width, inner), random(width) if biased else None)
        self.norm = Norm(torch.randn(width).to(dtype), 1e-3, shift)
        self.heads, self.width, self.dtype = heads, width, dtype

    def rows(self, count):
        x, heads = torch.randn(count, self.width), torch.randn(count, self.heads)
        return heads.to(self.dtype), x.to(self.dtype)

    def prepared(self):
        return prepare(
            2,
            1,
            Product(1, self.out, 4, added=2),
            Product(4, self.up, 5, norm=self.norm, gate=self.gate, waits=True),
            Product(5, self.down, 3, added=4, waits=True),
        )

    def defined(self, heads, x):
        states = exact(self.out, heads.double()) + x.double()
        mean = states.pow(2).mean(-1, keepdim=True)
        normed = states / (mean + self.norm.eps).sqrt()
        normed = normed * (self.norm.weight.double() + self.norm.shift)
        gates = ACTIVATIONS[self.gate.activation](exact(self.gate.matrix, normed))
        return exact(self.down, gates * exact(self.up, normed)) + states


def exact(matrix, x):
    bias = 0 if matrix.bias is None else matrix.bias.double()
    return torch.einsum("oi,...i->...o", matrix.weight.double(), x) + bias


ACTIVATIONS = {
    SILU: lambda x: x / (1 + (-x).exp()),
    GELU: lambda x: x * torch.special.ndtr(x),
    GELU_TANH: lambda x: x / (1 + (-2 * (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)).exp()),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_a_chain_computes_what_float64_does(rows, dtype, lanes):
    layer = Layer(dtype)
    heads, x = layer.rows(rows)
    (out,) = layer.prepared().run(heads, x)
    assert out.dtype is dtype
    assert out.shape == x.shape
    wanted = layer.defined(heads, x)
    eps = torch.finfo(torch.float32).eps
    bound = wanted.abs() * torch.finfo(dtype).eps / 2 + 100 * eps * (1 + wanted.abs())
    assert ((out.double() - wanted).abs() <= bound).all()


@pytest.mark.parametrize(("activation", "shift", "biased"), [
    (SILU, 1.0, False), (GELU, 0.0, True), (GELU_TANH, 1.0, True)])  # fmt: skip
def test_activations_norms_and_biases(activation, shift, biased):
    layer = Layer(torch.float32, activation=activation, shift=shift, biased=biased)
    heads, x = layer.rows(2)
    (out,) = layer.prepared().run(heads, 30 * x)  # far beyond where an exponential is infinite
    torch.testing.assert_close(out.double(), layer.defined(heads, 30 * x), atol=1e-3, rtol=1e-5)


def test_three_products_of_normed_rows_have_their_own_outputs():
    layer = Layer(torch.float32)
    _, x = layer.rows(2)
    parts = layer.up, layer.gate.matrix, layer.up
    chain = prepare(
        1, 3, *(Product(1, each, i, norm=layer.norm) for i, each in enumerate(parts, 2))
    )
    mean = x.double().pow(2).mean(-1, keepdim=True) + layer.norm.eps
    normed = x.double() / mean.sqrt() * layer.norm.weight.double()
    for out, each in zip(chain.run(x), parts, strict=True):
        torch.testing.assert_close(out.double(), exact(each, normed), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_of_a_chain_has_the_same_bits_in_any_company_and_on_any_threads(threads):
    layer = Layer(torch.float32, width=576, inner=1040)
    chain, (heads, x) = layer.prepared(), layer.rows(MOST_ROWS)
    alone = torch.cat([chain.run(h[None], row[None])[0] for h, row in zip(heads, x, strict=True)])
    others = layer.rows(MOST_ROWS)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows in range(1, MOST_ROWS + 1):
            for _ in range(20):  # threads arrive in another order each time
                chain.run(*others)  # so that memory holds other results until they are computed
                assert chain.run(heads[:rows], x[:rows])[0].equal(alone[:rows])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [2, 5])
def test_the_threads_that_run_take_the_shares_of_those_that_do_not(threads, monkeypatch):
    layer = Layer(torch.float32, width=576, inner=1040)
    _, x = layer.rows(2)
    parts = layer.up, layer.gate.matrix  # none waits for another, so tasks left over are a failure
    chain = prepare(
        1, 2, *(Product(1, each, i, norm=layer.norm) for i, each in enumerate(parts, 2))
    )
    assert chain.tasks > threads
    wanted = chain.run(x)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(chaining, "launch", lambda address, data, _: launch(address, data, 1))
    for out, each in zip(chain.run(x), wanted, strict=True):
        assert out.equal(each)
