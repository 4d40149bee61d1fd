"""All layers of a decoder in one call: against float64, in any number of threads."""

import pytest
import torch
from torch.nn import functional

pytest.importorskip("numba")

from regard.ops.kernels.chaining import Gate, Matrix, Norm, Product, prepare
from regard.ops.kernels.layer_steps import HeadsStep
from regard.ops.kernels.model_stepping import LayerStep, prepare_model
from regard.ops.kernels.row_products import SILU
from regard.ops.kernels.stepping import Plan

WIDTH, HEADS, KV_HEADS, HEAD, GATED, ROOM, EPS, SCALE = 64, 4, 2, 16, 96, 40, 1e-5, 0.2


class Layer:
    """The parameters of a decoder layer of Llama's form, and the buffers of its cache."""

    def __init__(self, dtype, batch, *, normed=False, biased=False):
        def new(*shape, std=0.1, mean=0.0):
            return (torch.randn(shape) * std + mean).to(dtype)

        self.first, self.second = (new(WIDTH, mean=1.0) for _ in range(2))
        outs = HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD
        self.into = [Matrix(new(n, WIDTH), new(n) if biased else None) for n in outs]
        self.out = Matrix(new(WIDTH, HEADS * HEAD))
        self.gate, self.up = Matrix(new(GATED, WIDTH)), Matrix(new(GATED, WIDTH))
        self.down = Matrix(new(WIDTH, GATED))
        self.norms = tuple(new(HEAD, mean=1.0) for _ in range(2)) if normed else ()
        self.keys, self.values = (new(batch, KV_HEADS, ROOM, HEAD, std=1.0) for _ in range(2))

    def step(self, batch, *, rotates=True, masked=False):
        first, second = (Norm(each, EPS) for each in (self.first, self.second))
        before = prepare(1, 3, *(Product(1, x, i, norm=first) for i, x in enumerate(self.into, 2)))
        after = prepare(
            1, 1, Product(3, self.out, 4, added=1),
            Product(4, self.up, 5, norm=second, gate=Gate(self.gate, SILU), waits=True),
            Product(5, self.down, 2, added=4, waits=True),
        )  # fmt: skip
        plan = Plan.of(self.keys.dtype, batch, HEADS, KV_HEADS, HEAD, HEAD, biased=masked)
        norms = tuple(Norm(each, EPS) for each in self.norms)
        heads = HeadsStep(plan, (self.keys, self.values), SCALE, rotates, norms)
        return LayerStep(before, after, heads)

    def plain(self, x, angles, length, bias=None):
        """In the dtype of x: new hidden states `[B, E]`, with the keys and values of the token."""
        keys, values = (each[:, :, :length].to(x.dtype) for each in (self.keys, self.values))
        q, k, v = (linear(normed(x, self.first), each) for each in self.into)
        q, k, v = (each.unflatten(-1, (-1, HEAD)) for each in (q, k, v))
        if self.norms:
            q, k = (normed(each, weight) for each, weight in zip((q, k), self.norms, strict=True))
        if angles is not None:
            q, k = (turned(each, *angles) for each in (q, k))
        keys, values = (
            torch.cat([old, new[:, :, None]], 2) for old, new in ((keys, k), (values, v))
        )
        scores = SCALE * torch.einsum("bgmd,bgsd->bgms", q.unflatten(1, (KV_HEADS, -1)), keys)
        weights = torch.softmax(scores if bias is None else scores + bias.to(x.dtype), -1)
        heads = torch.einsum("bgms,bgsd->bgmd", weights, values).flatten(1)
        x = x + linear(heads, self.out)
        rows = normed(x, self.second)
        gated = functional.silu(linear(rows, self.gate)) * linear(rows, self.up)
        return x + linear(gated, self.down), k, v


def last_norm(dtype):
    return Norm(torch.linspace(0.5, 1.5, WIDTH).to(dtype), EPS)


def linear(x, matrix):
    weight, bias = matrix
    return functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def normed(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight.to(x.dtype)


def turned(x, cos, sin):
    """Rotate pairs half a head apart."""
    a, b = x.chunk(2, -1)
    return x * cos.to(x.dtype) + torch.cat([-b, a], -1) * sin.to(x.dtype)


def assert_as_near(found, plain, exact):
    """The numeric contract: at most twice the error of plain operators of the same dtype."""
    error, theirs = ((x.double() - exact).square().mean().sqrt() for x in (found, plain))
    assert error <= 2 * theirs


def angles_at(batch):
    each = torch.randn(batch, 1, HEAD // 2).repeat(1, 1, 2)
    return each.cos(), each.sin()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"normed": True}, {"biased": True}])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_step_is_the_decoder_in_float64(dtype, options, batch):
    layers, length = [Layer(dtype, batch, **options) for _ in range(3)], 17
    steps = [each.step(batch, rotates=i != 1) for i, each in enumerate(layers)]
    x, angles = torch.randn(batch, 1, WIDTH).to(dtype), angles_at(batch)
    kernels = prepare_model(steps, last_norm(dtype), ROOM)
    for at in (length, length + 1):  # the second after the token that the first has appended
        made = {}
        for kind in (torch.float64, dtype):
            states, made[kind] = x[:, 0].to(kind), []
            for i, layer in enumerate(layers):
                states, *new = layer.plain(states, None if i == 1 else angles, at)
                made[kind] += new
            made[kind].insert(0, normed(states, last_norm(dtype).weight))
        out = kernels.run(x, angles, at)
        assert out.dtype is dtype
        assert out.shape == x.shape
        written = [each[:, :, at] for layer in layers for each in (layer.keys, layer.values)]
        assert_as_near(out[:, 0], made[dtype][0], made[torch.float64][0])
        assert_as_near(*map(torch.cat, (written, made[dtype][1:], made[torch.float64][1:])))


def test_keys_are_hidden_from_rows_of_the_batch():
    layer, x, angles = Layer(torch.float32, 2), torch.randn(2, 1, WIDTH), angles_at(2)
    bias = torch.zeros(2, 18)
    bias[0, :5] = bias[1, 11] = -torch.inf
    exact, plain = (
        normed(
            layer.plain(x[:, 0].to(kind), angles, 17, bias[:, None, None])[0],
            last_norm(torch.float32).weight,
        )
        for kind in (torch.float64, torch.float32)
    )
    kernels = prepare_model([layer.step(2, masked=True)], last_norm(torch.float32), ROOM)
    assert_as_near(kernels.run(x, angles, 17, bias)[:, 0], plain, exact)
    assert kernels.run(x, angles, 18, bias) is None  # of one key less


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_number_of_threads_computes_the_same_bits(dtype, threads):
    """Some of seven threads on fewer processors come late to a kernel."""
    torch.set_num_threads(threads)
    layers = [Layer(dtype, 1) for _ in range(20)]
    kernels = prepare_model([each.step(1) for each in layers], last_norm(dtype), ROOM)
    x, angles = torch.randn(1, 1, WIDTH).to(dtype), angles_at(1)
    wanted = kernels.run(x, angles, 8)
    for _ in range(60):
        assert kernels.run(x, angles, 8).equal(wanted)


def test_what_the_kernels_do_not_read_is_refused():
    layers = [Layer(torch.float32, 2) for _ in range(2)]
    steps = [each.step(2) for each in layers]
    x, angles = torch.randn(2, 1, WIDTH), angles_at(2)
    kernels = prepare_model(steps, last_norm(torch.float32), 20)
    before = [each.keys.clone() for each in layers]
    assert kernels.run(x, angles, 20) is None  # no room
    assert kernels.run(x[:1], angles, 8) is None
    assert kernels.run(x.bfloat16(), angles, 8) is None
    assert kernels.run(torch.randn(2, WIDTH, 2).mT[:, :1], angles, 8) is None  # not contiguous
    assert kernels.run(x, tuple(each.double() for each in angles), 8) is None
    assert kernels.run(x, None, 8) is not None
    layers[1].down.weight.set_(layers[1].down.weight.clone())
    assert kernels.run(x, angles, 8) is None
    layers[0].keys[:, :, 8] = before[0][:, :, 8]
    assert layers[0].keys.equal(before[0])
    assert (
        prepare_model(steps, last_norm(torch.float32), 20).run(x, angles, 8) is None
    )  # chains of the weight before
    assert (
        prepare_model([steps[0], Layer(torch.bfloat16, 2).step(2)], last_norm(torch.float32), 20)
        is None
    )
    assert prepare_model(steps, last_norm(torch.float32), ROOM + 1) is None


def test_a_step_that_runs_in_another_thread_is_refused():
    layer = Layer(torch.float32, 1)
    kernels, x, angles = (
        prepare_model([layer.step(1)], last_norm(torch.float32), ROOM),
        torch.randn(1, 1, WIDTH),
        angles_at(1),
    )
    with kernels._lock:
        assert kernels.run(x, angles, 8) is None
    assert kernels.run(x, angles, 8) is not None
