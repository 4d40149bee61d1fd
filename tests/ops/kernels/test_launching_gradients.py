"""The gradients of a prefill against those of attention in float64, within the numeric contract."""

import pytest
import torch

pytest.importorskip("numba")

from regard.ops.kernels.launching_gradients import prefill_gradients
from regard.ops.kernels.launching_prefill import prefill
from regard.ops.kernels.vectors import machine_lanes

pytestmark = pytest.mark.skipif(machine_lanes() < 8, reason="no AVX2")
WIDTHS = (48, 80)  # both end in half a block
SIZES = [  # batch, heads, key heads, queries, keys
    (2, 4, 2, 1, 1), (2, 6, 2, 33, 31), (2, 3, 1, 70, 300), (2, 2, 2, 200, 129), (1, 8, 1, 64, 257),
]  # fmt: skip


def drawn(size, layout="plain"):
    b, h, g, queries, keys = size
    shapes = (h, queries, 48), (g, keys, 48), (g, keys, 80), (h, queries, 80)
    return [tensor(b, *shape, layout=layout) for shape in shapes]


def tensor(*shape, layout):
    if layout == "heads last":
        return tensor(*(shape[i] for i in (0, 2, 1, 3)), layout="plain").transpose(1, 2)
    if layout == "in a buffer":
        return torch.randn(shape[0], shape[1], shape[2] + 3, shape[3] + 5)[:, :, 2:-1, 1:-4]
    return torch.randn(shape)


def intervals(batch, queries, keys):
    """For each of the rows intervals of any kind, also empty ones."""
    edges = torch.randint(0, keys + 1, (2, batch, queries)).int()
    return edges[0], torch.where(torch.rand(batch, queries) < 0.2, edges[0], edges[1])


def of_kernel(q, k, v, slope, limits, scale):
    options = {"scale": scale, "starts": limits[0], "stops": limits[1]}
    out, lse = prefill(q, k, v, wide=True, **options)
    return prefill_gradients(slope, q, k, v, lse, (out * slope).sum(-1), **options)


def of_definition(q, k, v, slope, limits, scale, dtype):
    inputs = [x.to(dtype).requires_grad_() for x in (q, k, v)]
    group, keys = q.shape[1] // k.shape[1], torch.arange(k.shape[2])
    of_heads = [inputs[0], *(x.repeat_interleave(group, 1) for x in inputs[1:])]
    keep = (keys >= limits[0][..., None]) & (keys < limits[1][..., None])
    scores = scale * of_heads[0] @ of_heads[1].mT
    weights = scores.masked_fill(~keep[:, None], -1e9).softmax(-1) * keep[:, None]
    return torch.autograd.grad(weights @ of_heads[2], inputs, slope.to(dtype))


def check(given, limits, scale=0.15):
    """At most 5 times the error of the plain implementation in the same dtype.

    A slope of scores is a difference of sums over products of `slope` and `v`, which may be 0.
    """
    found, (q, k, v, slope) = of_kernel(*given, limits, scale), (x.abs() for x in given)
    sums = slope.amax((0, 1, 2)) @ v.amax((0, 1, 2))
    least = torch.finfo(torch.float32).eps * scale * sums * max(q.max(), k.max())
    plain, exact = (of_definition(*given, limits, scale, x) for x in (torch.float32, torch.float64))
    for one, other, truth in zip(found, plain, exact, strict=True):
        assert one.shape == truth.shape
        assert (one - truth).abs().max() <= 5 * (other - truth).abs().max() + least
    return found


@pytest.mark.parametrize("layout", ["plain", "heads last", "in a buffer"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_they_are_those_of_attention(size, layout):
    given = drawn(size, layout)
    batch, _, _, queries, keys = size
    stops = torch.arange(keys - queries + 1, keys + 1).clamp(min=0).int()[None]
    check(given, (torch.zeros_like(stops), stops))
    check(given, intervals(batch, queries, keys))
    limits = intervals(batch, queries, keys)
    of_q = check(given, limits, scale=2.0)[0]
    assert of_q[(limits[0] >= limits[1])[:, None].expand(of_q.shape[:3])].eq(0).all()


def test_threads_change_no_bit():
    given = drawn((2, 4, 2, 300, 300))
    limits = intervals(2, 300, 300)
    torch.set_num_threads(1)
    wanted = of_kernel(*given, limits, 0.2)
    torch.set_num_threads(2)
    for one, other in zip(of_kernel(*given, limits, 0.2), wanted, strict=True):
        assert one.equal(other)
