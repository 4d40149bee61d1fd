"""The prefill kernel against attention in float64, within the numeric contract."""

import threading

import pytest
import torch

pytest.importorskip("numba")

from kernel_checks import run_python
from regard.ops.kernels import launching_prefill
from regard.ops.kernels.launching_prefill import prefill, products
from regard.ops.kernels.vectors import machine_lanes

HALF, FULL = torch.bfloat16, torch.float32
HALVES = {None: [], "avx512": [(HALF, False)], "amx": [(HALF, False), (HALF, True)]}[products()]
EITHER = HALVES + [(FULL, False)] * (machine_lanes() >= 8)  # a dtype, and whether AMX is used
WIDTHS = (48, 80)  # both end in half a block


def random(*shape, dtype=HALF, layout="plain"):
    if layout == "heads last":
        return random(*(shape[i] for i in (0, 2, 1, 3)), dtype=dtype).transpose(1, 2)
    if layout == "in a buffer":
        return random(shape[0], shape[1], shape[2] + 3, shape[3] + 5, dtype=dtype)[:, :, 2:-1, 1:-4]
    return torch.randn(shape).to(dtype)


def judge(q, k, v, scale, starts, stops, sinks=None):
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double()
    scores = scale * q @ k.mT
    keys = torch.arange(k.shape[2])
    keep = (keys >= starts[..., None]) & (keys < stops[..., None])
    scores = scores.masked_fill(~keep[:, None], -torch.inf)
    sums = scores.logsumexp(-1)
    total = sums if sinks is None else torch.logaddexp(sums, sinks.double()[:, None])
    weights = (scores - total[..., None]).exp().nan_to_num(0.0)
    return weights @ v.repeat_interleave(group, 1), sums


def causal(queries, keys):
    stops = torch.arange(keys - queries + 1, keys + 1).clamp(min=0)
    return torch.zeros(1, queries).int(), stops.int()[None]


def drawn(queries, keys):
    """For each of two rows intervals of any kind, also empty ones."""
    edges = torch.randint(0, keys + 1, (2, 2, queries)).int()
    return edges[0], torch.where(torch.rand(2, queries) < 0.2, edges[0], edges[1])


def check(q, k, v, limits, scale=None, **given):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, lse = prefill(q, k, v, scale=scale, starts=limits[0], stops=limits[1], **given)
    wanted, sums = judge(q, k, v, scale, *limits, sinks=given.get("sinks"))
    unit = torch.finfo(q.dtype).eps / 2
    sizes = scale * q.abs() @ k.abs().repeat_interleave(q.shape[1] // k.shape[1], 1).mT
    most = 1.5 if q.dtype is HALF else k.shape[2] ** 0.5 + 2 * float(sizes.max())  # roundings
    assert (out.double() - wanted).abs().max() <= most * unit * v.abs().max()
    if given.get("wide"):
        visible = sums > -torch.inf
        assert lse[~visible].eq(-torch.inf).all()
        atol = 2.0**-9 if q.dtype is HALF else most * unit
        torch.testing.assert_close(lse[visible].double(), sums[visible], rtol=0, atol=atol)
    return out


SIZES = [  # batch, heads, key heads, queries, keys
    (2, 4, 2, 1, 1), (2, 6, 2, 33, 31), (2, 3, 1, 70, 300), (2, 2, 2, 200, 129), (2, 8, 1, 64, 257),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "amx"), EITHER)
@pytest.mark.parametrize("layout", ["plain", "heads last", "in a buffer"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_it_is_attention(size, layout, dtype, amx):
    b, h, g, queries, keys = size
    q = random(b, h, queries, WIDTHS[0], dtype=dtype, layout=layout)
    k, v = (random(b, g, keys, width, dtype=dtype, layout=layout) for width in WIDTHS)
    check(q, k, v, causal(queries, keys), amx=amx)
    check(q, k, v, drawn(queries, keys), amx=amx)
    check(q, k, v, drawn(queries, keys), scale=3.0, amx=amx)
    check(q, k, v, drawn(queries, keys), amx=amx, sinks=torch.randn(h) * 4)
    out = check(q, k, v, (limits := drawn(queries, keys)), amx=amx, wide=True)
    hidden = (limits[0] >= limits[1])[:, None].expand(b, h, queries)
    assert out[hidden].eq(0).all()


@pytest.mark.parametrize(("dtype", "amx"), EITHER)
def test_scores_that_rise_from_key_to_key(dtype, amx):
    """Each block of keys rescales the sums of those before it."""
    shapes = (1, 2, 64, 48), (1, 1, 1000, 48), (1, 1, 1000, 80)
    q, k, v = (random(*shape, dtype=dtype) for shape in shapes)
    q[..., 0], k[..., 0] = 8, torch.linspace(-40, 40, 1000)
    check(q, k, v, causal(64, 1000), scale=0.25, amx=amx)
    k[..., 0] = k[..., 0].flip(-1)
    check(q, k, v, causal(64, 1000), scale=0.25, amx=amx)


@pytest.mark.parametrize(("dtype", "amx"), EITHER)
def test_the_contract_where_rounded_weights_cost_most(dtype, amx):
    """Values of both signs, and few weights of every size."""
    for keys in (2, 3, 5):
        q, k = random(1, 1, 512, 48, dtype=dtype) * 2, random(1, 1, keys, 48, dtype=dtype)
        v = torch.randn(1, 1, keys, 80).sign().to(dtype)
        limits = torch.zeros(1, 512).int(), torch.full((1, 512), keys).int()
        check(q, k, v, limits, amx=amx)


@pytest.mark.parametrize(("dtype", "amx"), EITHER)
def test_a_result_depends_on_no_hidden_key(dtype, amx):
    """Not even on whether it raises the maximum of another query."""
    q, k, v = (random(1, 1, 64, width, dtype=dtype) for width in (48, 48, 80))
    starts, stops = causal(64, 64)
    before = prefill(q, k, v, scale=1.0, starts=starts, stops=stops, amx=amx)[0]
    k[:, :, 20:], v[:, :, 20:] = 30 * k[:, :, 20:], 1e30
    after = prefill(q, k, v, scale=1.0, starts=starts, stops=stops, amx=amx)[0]
    assert after[:, :, :20].equal(before[:, :, :20])


@pytest.mark.parametrize(("dtype", "amx"), EITHER)
def test_threads_and_memory_change_no_bit(dtype, amx, monkeypatch):
    shapes = (2, 4, 300, 48), (2, 2, 300, 48), (2, 2, 300, 80)
    q, k, v = (random(*shape, dtype=dtype) for shape in shapes)
    starts, stops = causal(300, 300)
    options = {"scale": 0.2, "starts": starts, "stops": stops, "amx": amx}
    torch.set_num_threads(1)
    wanted = prefill(q, k, v, **options)[0]
    torch.set_num_threads(2)
    assert prefill(q, k, v, **options)[0].equal(wanted)
    monkeypatch.setattr(launching_prefill, "PACKED_BYTES", 1)  # one key head at a time
    assert prefill(q, k, v, **options)[0].equal(wanted)
    found = [None] * 3
    work = [lambda i=i: found.__setitem__(i, prefill(q, k, v, **options)[0]) for i in range(3)]
    threads = [threading.Thread(target=each) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(each.equal(wanted) for each in found)


@pytest.mark.skipif(products() is None, reason="no instructions for bfloat16")
def test_torchs_own_products_still_work_on_the_same_threads():
    """torch's kernels configure AMX tiles too; those of one must not change the other's."""
    a = random(256, 256)
    wanted = a @ a
    q, k, v = random(1, 2, 64, 48), random(1, 2, 64, 48), random(1, 2, 64, 80)
    for _ in range(3):
        check(q, k, v, causal(64, 64))
        assert (a @ a).equal(wanted)


def test_a_processor_without_bfloat16_instructions():
    """It has those for float32."""
    code = """
import torch
from regard import attend, explain, prepare, Causal
q = torch.randn(1, 2, 64, 64).bfloat16()
try:
    attend(q, q, q, mask=Causal(), backend="tiled")
except ValueError as error:
    assert "needs a processor with bfloat16 instructions" in str(error), error
else:
    raise AssertionError
assert prepare(q, q, q).name != "tiled"
q = q.float()
one, other = (attend(q, q, q, mask=Causal(), backend=name) for name in ("tiled", "eager"))
assert (one - other).abs().max() < 1e-5
"""
    run_python(code, NUMBA_CPU_NAME="haswell", NUMBA_CPU_FEATURES="+avx2,+fma")
