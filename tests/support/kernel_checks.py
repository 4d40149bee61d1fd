"""The decoding kernel against attention in float64, here and in a fresh process."""

import os
import subprocess
import sys

import torch

from regard.ops.kernels.launching import decode

UNIT = torch.finfo(torch.float32).eps / 2


def judge(q, k, v, scale, bias=None):
    """Attention in float64, and what float32 may be wrong by."""
    q, k, v = q.double(), k.double(), v.double()
    scores = scale * q @ k.mT + (0 if bias is None else bias.double())
    sizes = (scale * q.abs() @ k.abs().mT).amax().item()
    weights = scores.softmax(-1).nan_to_num(0.0)
    return weights @ v, scores.logsumexp(-1), 2 * UNIT * v.abs().max().item() * (1 + sizes)


def check(q, k, v, bias=None, joined=False, lanes=None):
    scale = q.shape[-1] ** -0.5
    given = {"width": v.shape[-1]} if joined else {"v": v}
    out, lse = decode(q, k, scale=scale, bias=bias, lanes=lanes, **given)
    wanted, sums, bound = judge(q, k, v, scale, bias)
    assert (out.double() - wanted).abs().max() <= bound
    seen = sums > -torch.inf
    assert lse[~seen].eq(-torch.inf).all()
    assert out[~seen].eq(0).all()
    torch.testing.assert_close(lse[seen].double(), sums[seen], rtol=0, atol=2e-5)


def run_python(code, **environment):
    """Run code in a fresh process that finds the library and `tests/support`."""
    paths = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "PYTHONPATH": paths, **environment}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
