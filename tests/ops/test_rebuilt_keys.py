"""Keys that are computed from latents when they are read: by any backend, and by the kernel."""

import pytest
import torch

from covering import covering
from regard import NO_ROPE, Causal, Part, Rotary, Span, prepare
from regard.cache.parts import Stream, streams_of
from regard.layers.latent_kv import tables_of
from regard.masks import Padding
from regard.ops.backends import fused
from regard.ops.rebuilt_keys import RebuiltKeys
from regard.rope import NTK

BATCH, HEADS, TOKENS, RANK, WIDTH = 2, 3, 70, 24, 16


def keys_of(rope=None, dtype=torch.float32, positions=None) -> RebuiltKeys:
    chance = torch.Generator().manual_seed(1)
    latents = torch.randn(BATCH, 1, TOKENS, RANK, generator=chance).to(dtype)
    weights = torch.randn(HEADS * WIDTH, RANK, generator=chance).to(dtype)
    rope = Rotary(WIDTH) if rope is None else rope
    if positions is None:
        positions = torch.arange(TOKENS, dtype=torch.int32) + torch.tensor([[3], [8]]).int()
    positions = positions[:, None, :, None].expand(BATCH, 1, TOKENS, 1)
    return RebuiltKeys(latents, positions, weights, HEADS, rope, tables_of(rope, positions))


def test_it_is_a_stream_of_the_keys():
    keys = keys_of()
    tensor = keys.to_tensor()
    assert isinstance(keys, Stream)
    assert keys.outline.shape == tensor.shape == (BATCH, HEADS, TOKENS, WIDTH)
    assert keys.outline.dtype == tensor.dtype
    product = (keys.latents[:, 0] @ keys.weights.mT).view(BATCH, TOKENS, HEADS, WIDTH)
    turned = Rotary(WIDTH).rotate(product.transpose(1, 2), keys.positions[:, 0, :, 0])
    torch.testing.assert_close(tensor, turned)
    assert torch.equal(keys.narrow(5, 9).to_tensor(), tensor[:, :, 5:14])
    assert torch.equal(keys.rows(1, 1).to_tensor(), tensor[1:])
    assert list(keys.cuts(5)) == [(0, TOKENS)]
    assert not keys.is_shared
    alone = keys.rows(0, 1)
    assert alone._replace(latents=alone.latents.expand(2, -1, -1, -1)).is_shared


@torch.no_grad()
@pytest.mark.parametrize(
    ("rope", "dtype"),
    covering(
        [Rotary(WIDTH), NO_ROPE, Rotary(WIDTH, pairing="pairs")],
        [torch.float32, torch.bfloat16],
        together=1,
    ),
    ids=repr,
)
@pytest.mark.parametrize("backend", ["fused", "eager", "sdpa"])
def test_every_backend_reads_them(backend, rope, dtype):
    """The judge reads keys in float64: exact ones for the kernel, which rounds none; for the other
    backends the tensor of keys, rounded to the dtype."""
    if backend == "fused":
        pytest.importorskip("numba")
    keys = keys_of(rope, dtype)
    q, v = torch.randn(BATCH, 6, 2, WIDTH, dtype=dtype), keys.latents.expand(-1, HEADS, -1, -1)
    own = run(backend, q, keys, v)
    exact = keys._replace(latents=keys.latents.double(), weights=keys.weights.double())
    k = exact.to_tensor() if backend == "fused" and readable(keys) else keys.to_tensor()
    wanted = run("eager", q.double(), k.double(), v.double())
    bound = (1e-6 if dtype is torch.float32 else 1.5 * 2**-8) * v.abs().max().item()
    torch.testing.assert_close(own.double(), wanted, rtol=0, atol=bound)


def run(backend, q, k, v) -> torch.Tensor:
    shape = k.outline if isinstance(k, RebuiltKeys) else k
    span = Span(TOKENS - 2, TOKENS, 0, TOKENS)
    call = prepare(q, shape, v, mask=Causal(), span=span, backend=backend)
    return call.run(q, (Part(0, TOKENS, streams_of((k, v))),))


@torch.no_grad()
def test_the_kernel_reads_positions_of_any_integers():
    """transformers' caches have no positions: they are then counted, in int64."""
    pytest.importorskip("numba")
    keys, q = keys_of(), torch.randn(BATCH, 6, 1, WIDTH)
    v, span = keys.latents.expand(-1, HEADS, -1, -1), Span(TOKENS - 1, TOKENS, 0, TOKENS)
    call = prepare(q, keys.outline, v, span=span, backend="fused")
    wide = keys._replace(positions=keys.positions.long())
    one, other = (call.run(q, (Part(0, TOKENS, streams_of((each, v))),)) for each in (keys, wide))
    assert torch.equal(one, other)


def readable(keys, v=None) -> bool:
    values = keys.latents.expand(-1, HEADS, -1, -1) if v is None else v
    return fused.reads_latents((keys, values))


def test_the_kernel_reads_those_whose_rotation_it_knows():
    assert readable(keys_of())
    assert readable(keys_of(NO_ROPE))
    assert not readable(keys_of(Rotary(WIDTH, pairing="pairs")))
    assert not readable(keys_of(Rotary(12)))  # half of the rotated channels is no vector
    assert not readable(keys_of(Rotary(WIDTH, scaling=NTK(2.0, original_max_position=8))))
    negative = torch.arange(TOKENS, dtype=torch.int32)[None] - 9
    assert not readable(keys_of(positions=negative))
    assert not readable(keys_of()._replace(latents=keys_of().latents.requires_grad_()))


@torch.no_grad()
def test_hidden_latents_that_are_not_finite_have_no_effect():
    pytest.importorskip("numba")
    keys = keys_of()
    latents = keys.latents.clone()
    latents[0, :, :4] = torch.nan
    hidden = torch.ones(BATCH, TOKENS, dtype=torch.bool)
    hidden[0, :4] = False
    q, span = torch.randn(BATCH, 6, 1, WIDTH), Span(TOKENS - 1, TOKENS, 0, TOKENS)

    def run(stored):
        v = stored.latents.expand(-1, HEADS, -1, -1)
        call = prepare(q, keys.outline, v, mask=Padding(hidden), span=span, backend="fused")
        return call.run(q, (Part(0, TOKENS, streams_of((stored, v))),))

    own = run(keys._replace(latents=latents))
    assert own.isfinite().all()
    torch.testing.assert_close(own, run(keys))
