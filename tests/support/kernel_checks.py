"""The decoding kernel against attention in float64 and its specification, and fresh processes."""

import os
import platform
import subprocess
import sys

import numpy as np
import torch
from numba.core.registry import cpu_target

from regard.cache.codes import QuantizedStream, quantize
from regard.ops.kernels.launching import decode
from regard.ops.kernels.specification import Specification
from regard.ops.kernels.tiles import BFLOAT16, FLOAT32, Format, tile_for
from regard.ops.kernels.vectors import machine_lanes, memory_streams

UNIT = torch.finfo(torch.float32).eps / 2


def judge(q, k, v, scale, bias=None):
    """Attention in float64, and what float32 may be wrong by."""
    q, k, v = q.double(), k.double(), v.double()
    scores = scale * q @ k.mT + (0 if bias is None else bias.double())
    sizes = (scale * q.abs() @ k.abs().mT).amax().item()
    weights = scores.softmax(-1).nan_to_num(0.0)
    return weights @ v, scores.logsumexp(-1), 2 * UNIT * v.abs().max().item() * (1 + sizes)


def quantized(x, bits=8, group=64):
    """A stream of codes."""
    return QuantizedStream(*quantize(x, bits, group), bits, group, x.shape[-1], x.dtype)


def of_stream(x):
    """The values of keys or values, and how they are stored."""
    if isinstance(x, QuantizedStream):
        return x._replace(dtype=torch.float32).to_tensor(), Format(x.bits, x.group)
    return x, BFLOAT16 if x.dtype is torch.bfloat16 else FLOAT32


def gathered(x, pages):
    """The tokens of each sequence, `[B, G, S, W]`."""
    if pages is None:
        return x
    slots = torch.arange(pages.skipped, pages.skipped + pages.keys)
    at = pages.table[:, slots // pages.size] * pages.size + slots % pages.size
    return x[0][:, at].transpose(0, 1)


def check(q, k, v, bias=None, joined=False, lanes=None, pages=None):
    """Against float64, of the values that codes stand for, multiplied in float32 (test_integers.py
    has products of integers); joined, v gives the width alone."""
    scale = q.shape[-1] ** -0.5
    (keys, _), (values, _) = of_stream(k), of_stream(v)
    values = keys[..., : values.shape[-1]] if joined else values
    given = {"width": values.shape[-1]} if joined else {"v": v}
    given |= {"lanes": lanes, "pages": pages, "integers": False}
    out, lse = decode(q, k, scale=scale, bias=bias, **given)
    keys, values = gathered(keys, pages), gathered(values, pages)
    wanted, sums, bound = judge(q, keys, values, scale, bias)
    assert (out.double() - wanted).abs().max() <= bound
    visible = sums > -torch.inf
    assert lse[~visible].eq(-torch.inf).all()
    assert out[~visible].eq(0).all()
    torch.testing.assert_close(lse[visible].double(), sums[visible], rtol=0, atol=2e-5)


def check_specification(q, k, v, bias=None, joined=False, lanes=None, pages=None):
    """The kernel and its specification: the same bits, but for what NumPy cannot express."""
    lanes, half = lanes or machine_lanes(), q.dtype is torch.bfloat16
    (keys, k_form), (values, v_form) = of_stream(k), of_stream(v)
    dv = values.shape[-1]
    given = {"width": dv} if joined else {"v": v}
    given |= {"lanes": lanes, "pages": pages, "integers": False}
    out, lse = decode(q, k, scale=0.17, bias=bias, **given)
    b, g, m, d = q.shape
    size, count = (0, keys.shape[2]) if pages is None else (pages.size, pages.keys)
    biased, streams = bias is not None, memory_streams()
    tile = tile_for(m, d, dv, half, joined, biased, lanes, k_form, v_form, size, streams=streams)
    twin = Specification(tile, has_fma())
    added = None if bias is None else bias.expand(b, g, m, count).numpy()
    k_array, v_array = array_of(twin, k), array_of(twin, v)
    v_array = k_array[..., :dv] if joined else v_array
    given = q.float().numpy(), k_array, v_array, added, 0.17
    wanted, sums = twin.decode(*given, torch.get_num_threads(), pages)
    largest = np.nanmax(np.abs(v_array))  # pages that the table does not name may hold anything
    assert (out.numpy() == wanted).mean() > 0.99
    np.testing.assert_allclose(out, wanted, rtol=0, atol=8 * UNIT * largest)
    np.testing.assert_allclose(lse, sums, rtol=4 * UNIT, atol=4 * UNIT)


def array_of(twin, x):
    """Keys or values in float32, as the specification dequantises them."""
    if isinstance(x, torch.Tensor):
        return x.float().numpy()
    scales = x.scales.float().numpy()
    return twin.dequantized(x.codes.numpy(), scales, Format(x.bits, x.group), x.width)


def has_fma():
    """Whether the processor that numba compiles for adds a product with one rounding."""
    features = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
    return "+fma" in features or platform.machine() in ("aarch64", "arm64")


def as_bfloat16(x):
    """The bits of the nearest bfloat16 values."""
    return torch.from_numpy(x).bfloat16().view(torch.int16).numpy()


def widened(x):
    """The float32 values of the bits of bfloat16."""
    return torch.from_numpy(x).view(torch.bfloat16).float().numpy()


def run_python(code, **environment):
    """Run code in a fresh process that finds the library and `tests/support`."""
    paths = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "PYTHONPATH": paths, **environment}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
