"""Few queries packed by key head: pieces of a long key head are merged."""

import os
import subprocess
import sys

import pytest
import torch

from cases import draw_case
from contract import compare
from covering import few
from regard import attend, attend_partial, prepare
from regard.ops.backends import grouped


def test_grouped_has_no_gradient_in_half_precision():
    q = torch.randn(1, 2, 1, 4, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(ValueError, match="no gradient in half precision"):
        attend(q, q, q, backend="grouped")


@pytest.mark.parametrize("keys", [1023, 1024, 1025, 2049])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("joined", [True, False])
def test_one_key_head_is_split_and_merged(keys, dtype, joined):
    """Long enough for pieces, with and without a remainder, against the definition."""
    torch.manual_seed(keys)
    q = torch.randn(1, 6, 1, 24).to(dtype)
    kv = torch.randn(1, 1, keys, 24).to(dtype)
    v = kv[..., :16] if joined else torch.randn(1, 1, keys, 24).to(dtype)
    made = prepare(q, kv, v, backend="grouped")
    from regard import Part

    streams = (kv,) if joined else (kv, v)
    with torch.no_grad():
        got = made.run(q, (Part(0, keys, streams),))
        halves = made.run(
            q,
            tuple(
                Part(a, b, tuple(s[:, :, a:b] for s in streams)) for a, b in ((0, 700), (700, keys))
            ),
        )
    want = attend(q.double(), kv.double(), v.double(), scale=24**-0.5, backend="eager")
    unit = torch.finfo(dtype).eps / 2
    largest = (q.double().abs() @ kv.double().abs().mT).max() * 24**-0.5
    half = dtype.itemsize < 4
    bound = (1.5 if half else 2 * (1 + largest)) * unit * v.double().abs().max()
    assert (got.double() - want).abs().max() <= bound
    assert (halves.double() - want).abs().max() <= bound


@pytest.mark.parametrize(("heads", "split"), [(32, True), (33, False)])
def test_many_rows_are_not_split_since_their_blocks_go_to_several_cores(heads, split, monkeypatch):
    """`_pieces` would pack and read what is split again for each block of rows."""
    ran, pieces = [], grouped._pieces

    def recorded(*given):
        ran.append(given)
        return pieces(*given)

    monkeypatch.setattr(grouped, "_pieces", recorded)
    q, k = torch.randn(1, heads, 1, 24), torch.randn(1, 1, 1030, 24)
    with torch.no_grad():
        got = attend(q, k, k, backend="grouped")
    assert bool(ran) is split
    assert (got - attend(q, k, k, backend="eager")).abs().max() < 1e-5


NARROWED = """
import torch
from regard import attend
q, k = torch.randn(1, 8, 40, 96).bfloat16(), torch.randn(1, 2, 300, 96).bfloat16()
found, wanted = (attend(q, k, k, backend=each) for each in ("grouped", "eager"))
assert (found - wanted).abs().max() <= 2 * 2**-8 * k.abs().max()
"""


@pytest.mark.parametrize("capability", few(["avx2", "default"], 2))
def test_bfloat16_runs_where_torchs_kernel_raises(capability):
    """torch 2.13 on processors with AMX, where the environment narrows their vectors."""
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
    done = subprocess.run(
        [sys.executable, "-c", NARROWED], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_half_precision_with_sums_in_float32(dtype, seed, monkeypatch):
    """As on NVIDIA's GPUs, where `torch.bmm` returns float32; here it is given float32."""
    real = torch.bmm

    def bmm(a, b, out_dtype=None):
        if out_dtype is None:
            return real(a, b)
        assert a.dtype == b.dtype == dtype
        return real(a.to(out_dtype), b.to(out_dtype))

    monkeypatch.setattr(torch, "bmm", bmm)
    monkeypatch.setattr(grouped, "_multiplies_half", lambda x: x.dtype.itemsize < 4)
    monkeypatch.setattr(grouped, "_fused", lambda call: False)
    case = draw_case(seed + 900, dtype)
    if grouped.objection(prepare(case.q, case.k, case.v, **case.given).call) is not None:
        pytest.skip("it objects")
    out = attend(case.q, case.k, case.v, **case.given, backend="grouped")
    compare(out, case, what="grouped in half precision")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_partial_results_are_not_rounded_to_half_precision(dtype):
    """They are merged, and the result is rounded: to round twice exceeds the contract."""
    torch.manual_seed(0)
    q, k = torch.randn(1, 4, 3, 8).to(dtype), torch.randn(1, 2, 30, 8).to(dtype)
    exact = attend(q.double(), k.double(), k.double(), backend="eager")
    out, _ = attend_partial(q, k, k, backend="grouped")
    assert (out - exact).abs().max() < 1e-5
