"""A step in compiled code: its output, and the tensors that are refused."""

import pytest
import torch

pytest.importorskip("numba")

from regard.ops.kernels.stepping import Buffers, step


def reference(q, keys, values, scale):
    """Attention in float64, one head at a time."""
    out = torch.empty(*q.shape[:3], values.shape[-1], dtype=torch.float64)
    group = q.shape[1] // keys.shape[1]
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            k, v = keys[b, h // group].double(), values[b, h // group].double()
            weights = torch.softmax(scale * (k @ q[b, h, 0].double()), dim=0)
            out[b, h, 0] = weights @ v
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "value_width"), [(8, 8), (8, 24), (64, 32), (12, 4), (80, 16)])
@pytest.mark.parametrize("held", [0, 1, 30, 700])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_step_is_attention_over_what_is_held(dtype, width, value_width, held, threads):
    torch.set_num_threads(threads)
    q, k = torch.randn(2, 6, 1, width).to(dtype), torch.randn(2, 3, 1, width).to(dtype)
    v = torch.randn(2, 3, 1, value_width).to(dtype)
    keys = torch.randn(2, 3, 701, width).to(dtype)
    values = torch.randn(2, 3, 701, value_width).to(dtype)
    out = step(q, k, v, Buffers.of(keys, values), held, scale=0.3)
    keys, values = keys[:, :, : held + 1], values[:, :, : held + 1]
    assert keys[:, :, -1:].equal(k)
    assert values[:, :, -1:].equal(v)
    expected = reference(q, keys, values, 0.3)
    unit = torch.finfo(dtype).eps / 2
    largest = 0.3 * (q.double().abs().sum(-1).amax() * keys.double().abs().amax())
    bound = 1.5 * unit if dtype is torch.bfloat16 else 2 * unit * (1 + largest)
    assert (out.double() - expected).abs().amax() <= bound * values.abs().amax()
    assert out.dtype is dtype


def test_buffers_may_be_views():
    whole = torch.randn(2, 2, 3, 2, 9, 16)
    keys, values = whole[0, :, 1], whole[1, :, 1]
    q, k, v = (torch.randn(2, count, 1, 16) for count in (2, 2, 2))
    before = whole.clone()
    step(q, k, v, Buffers.of(keys, values), 4, scale=1.0)
    before[0, :, 1, :, 4:5], before[1, :, 1, :, 4:5] = k, v
    assert whole.equal(before)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("q", torch.zeros(1, 2, 1, 16).double()),
        ("v", torch.zeros(1, 1, 1, 24)),
        ("k", torch.zeros(1, 1, 1, 16, device="meta")),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(name, wrong):
    given = {
        "q": torch.ones(1, 2, 1, 16),
        "k": torch.ones(1, 1, 1, 16),
        "v": torch.ones(1, 1, 1, 16),
    }
    keys, values = torch.zeros(2, 1, 1, 4, 16).unbind()
    with pytest.raises(AssertionError, match=f"kernel: {name}"):
        step(**given | {name: wrong}, buffers=Buffers.of(keys, values), length=1, scale=1.0)
    assert not keys.any()
    assert not values.any()
