"""Layers of joint latents in one call, against float64; `test_model_stepping.py` has others."""

import pytest
import torch
from torch.nn import functional

pytest.importorskip("numba")

from regard.ops.kernels.chaining import Gate, Matrix, Norm, Product, prepare
from regard.ops.kernels.latent_stepping import LatentPlan
from regard.ops.kernels.layer_steps import LatentsStep
from regard.ops.kernels.model_stepping import LayerStep, prepare_model
from regard.ops.kernels.row_products import SILU
from regard.ops.kernels.tiles import Latents

WIDTH, HEADS, KV_HEADS, HEAD, GATED, ROOM, EPS, SCALE = 64, 4, 2, 16, 96, 40, 1e-5, 0.2


class Layer:
    """The parameters of a decoder layer, and the latents and positions of its cache."""

    def __init__(self, dtype, batch, rank, rotated):
        def new(*shape, std=0.1, mean=0.0):
            return (torch.randn(shape) * std + mean).to(dtype)

        self.rank, self.rotated = rank, rotated
        self.first, self.second = (new(WIDTH, mean=1.0) for _ in range(2))
        self.q, self.a = new(HEADS * HEAD, WIDTH), new(rank, WIDTH)
        self.b = new(2, KV_HEADS, HEAD, rank)  # of keys and of values
        self.out, self.down = new(WIDTH, HEADS * HEAD), new(WIDTH, GATED)
        self.gate, self.up = new(GATED, WIDTH), new(GATED, WIDTH)
        self.latents = new(batch, 1, ROOM, rank, std=1.0)
        self.positions = torch.arange(ROOM, dtype=torch.int32).expand(batch, 1, ROOM)[..., None]
        self.positions = self.positions.contiguous()

    def angles(self, positions):
        at = positions[..., None] * torch.logspace(0, -1, self.rotated // 2)
        return torch.cat([at, at], -1)

    def step(self, batch):
        first, second = Norm(self.first, EPS), Norm(self.second, EPS)
        before = prepare(
            1, 2, *(Product(1, Matrix(x), i, norm=first) for i, x in enumerate((self.q, self.a), 2))
        )
        after = prepare(
            1, 1, Product(3, Matrix(self.out), 4, added=1),
            Product(4, Matrix(self.up), 5, norm=second, gate=Gate(Matrix(self.gate), SILU),
                    waits=True),
            Product(5, Matrix(self.down), 2, added=4, waits=True),
        )  # fmt: skip
        sizes = HEADS, KV_HEADS, HEAD, self.rank, self.rotated
        plan = LatentPlan.of(self.q.dtype, batch, *sizes)
        angles = self.angles(torch.arange(64.0)) if self.rotated else torch.empty(1, 0)
        sine = angles.sin()
        sine[:, : self.rotated // 2] *= -1
        keys = Latents(self.b[0], self.positions, angles.cos(), sine)
        attention = LatentsStep(plan, self.latents, keys, self.b.view(-1, self.rank), SCALE)
        return LayerStep(before, after, attention)

    def plain(self, x, position, length):
        """In the dtype of x: new hidden states `[B, E]` and latents `[B, R]`."""
        rows, dtype = normed(x, self.first), x.dtype
        q, latent = rows @ self.q.to(dtype).T, rows @ self.a.to(dtype).T
        latents = torch.cat([self.latents[:, 0, :length].to(dtype), latent[:, None]], 1)
        keys, values = torch.einsum("bsr,kgdr->kbgsd", latents, self.b.to(dtype))
        at = torch.arange(length + 1.0)
        at[-1] = position
        keys = turned(keys, self.angles(at).to(dtype), self.rotated)
        q = turned(q.unflatten(-1, (HEADS, HEAD)), self.angles(at[-1:]).to(dtype), self.rotated)
        scores = SCALE * torch.einsum("bgmd,bgsd->bgms", q.unflatten(1, (KV_HEADS, -1)), keys)
        heads = torch.einsum("bgms,bgsd->bgmd", scores.softmax(-1), values).flatten(1)
        x = x + heads @ self.out.to(dtype).T
        rows = normed(x, self.second)
        gated = functional.silu(rows @ self.gate.to(dtype).T) * (rows @ self.up.to(dtype).T)
        return x + gated @ self.down.to(dtype).T, latent


def normed(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight.to(x.dtype)


def turned(x, angles, rotated):
    """Rotate pairs half the rotated channels apart."""
    part, rest = x[..., :rotated], x[..., rotated:]
    a, b = part.chunk(2, -1)
    return torch.cat([part * angles.cos() + torch.cat([-b, a], -1) * angles.sin(), rest], -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rank", "rotated"), [(32, 16), (27, 16), (48, 8), (32, 0)])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_step_is_the_decoder_in_float64(dtype, rank, rotated, batch):
    layers = [Layer(dtype, batch, rank, rotated) for _ in range(3)]
    last, x = Norm(torch.linspace(0.5, 1.5, WIDTH).to(dtype), EPS), torch.randn(batch, 1, WIDTH)
    kernels = prepare_model([each.step(batch) for each in layers], last, ROOM)
    x = x.to(dtype)
    for length, position in ((17, 17), (18, 30)):
        found = {}
        for kind in (torch.float64, dtype):
            states, latents = x[:, 0].to(kind), []
            for layer in layers:
                if length == 18:  # the second token is after the first one's
                    layer.positions[:, 0, 17] = 17
                states, latent = layer.plain(states, position, length)
                latents.append(latent)
            found[kind] = [normed(states, last.weight), *latents]
        out = kernels.run(x, position, length)
        written = [layer.latents[:, 0, length] for layer in layers]
        for mine, plain, exact in zip(
            [out[:, 0], *written], found[dtype], found[torch.float64], strict=True
        ):
            error, theirs = ((each.double() - exact).square().mean() for each in (mine, plain))
            assert error.sqrt() <= 2 * theirs.sqrt()
        assert all((layer.positions[:, 0, length] == position).all() for layer in layers)


def test_a_position_beyond_the_tables_is_refused():
    layer = Layer(torch.float32, 1, 32, 16)
    last = Norm(torch.ones(WIDTH), EPS)
    kernels, x = prepare_model([layer.step(1)], last, ROOM), torch.randn(1, 1, WIDTH)
    before = layer.latents.clone()
    assert kernels.run(x, 64, 8) is None
    assert kernels.run(x, -1, 8) is None
    assert layer.latents.equal(before)
    assert kernels.run(x, 63, 8) is not None
    unrotated = prepare_model([Layer(torch.float32, 1, 32, 0).step(1)], last, ROOM)
    assert unrotated.run(x, 1 << 31, 8) is None
    assert unrotated.run(x, (1 << 31) - 1, 8) is not None
    layer.positions = layer.positions.long()
    assert prepare_model([layer.step(1)], last, ROOM) is None
