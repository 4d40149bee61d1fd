"""Gradients of blocks through torch's kernel: those of the definition, however the call is made."""

import subprocess
import sys
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from blocks import MASKS, tensors
from regard import NOTHING, Causal, Padding, SlidingWindow, attend
from regard.versions import ChangedInPlace

WINDOW = Causal() & SlidingWindow(6)


def gradients(inputs, backend, mask=WINDOW, slope=None):
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = attend(*inputs, mask=mask, backend=backend)
    slope = torch.ones_like(out) if slope is None else slope
    return [out, *torch.autograd.grad(out, inputs, slope)]


@pytest.mark.parametrize("mask", [name for name in MASKS if MASKS[name] is not NOTHING])
@pytest.mark.parametrize("v_dim", [3, 5])
def test_gradients_are_those_of_the_definition(blocks, mask, v_dim):
    """For inputs and gradients of any strides."""
    q, k, v = tensors(v_dim=v_dim)
    q, k = q.mT.contiguous().mT, k.transpose(1, 2).contiguous().transpose(1, 2)
    slope = torch.randn(2, 4, v_dim, 23, dtype=torch.float64).mT
    got, want = (gradients((q, k, v), name, MASKS[mask], slope) for name in ("blocked", "eager"))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_shared_keys_are_added_in_float32(blocks, dtype):
    """At most 3 times the error of the plain implementation in the same dtype."""
    inputs = [x.to(dtype) for x in tensors(heads=2, kv_heads=1, dim=8, v_dim=8)]
    want = gradients([x.double() for x in inputs], "eager")
    got, plain = gradients(inputs, "blocked"), gradients(inputs, "eager")
    for one, other, exact in zip(got, plain, want, strict=True):
        least = torch.finfo(dtype).eps * exact.abs().max()
        assert (one - exact).abs().max() <= 3 * (other - exact).abs().max() + least


def test_hidden_scores_may_overflow(blocks):
    """A key too large for its product with queries from which it is hidden."""
    q, k, v = (x.float() for x in tensors())
    usual = gradients((q, k, v), "eager")[1]
    q[:, :, [0, 14]], k[:, :, 15] = 1e30, 1e30
    out, of_q = gradients((q, k, v), "blocked")[:2]
    assert out[:, :, :15].isfinite().all()
    torch.testing.assert_close(of_q[:, :, 1:14], usual[:, :, 1:14])


def test_keys_must_not_be_written_before_the_backward_pass():
    q, k, v = (x.requires_grad_() for x in tensors())
    k = k * 1
    out = attend(q, k, v, mask=WINDOW, backend="blocked")
    k += 1
    with pytest.raises(ChangedInPlace, match="written in place between"):
        out.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("precision", ["strict", "fast"])
def test_a_checkpoint_computes_the_blocks_again(reentrant, precision):
    inputs = [x.bfloat16() for x in tensors()]
    run = partial(attend, mask=WINDOW, backend="blocked", precision=precision)
    found = []
    for each in (run, partial(checkpoint, run, use_reentrant=reentrant)):
        leaves = [x.clone().requires_grad_() for x in inputs]
        each(*leaves).sum().backward()
        found.append([leaf.grad for leaf in leaves])
    for one, other in zip(*found, strict=True):
        assert one.equal(other)


def test_a_second_derivative_is_refused():
    q, k, v = (x.requires_grad_() for x in tensors())
    out = attend(q, k, v, mask=WINDOW, backend="blocked")
    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(ValueError, match="no second derivative"):
        grad.sum().backward()


def test_rows_of_a_batch_have_gradients_of_their_own(blocks):
    q, k, v = tensors()
    k[1, :, 8:] = torch.nan
    v[1, :, 8:] = torch.nan
    found = gradients((q, k, v), "blocked", Causal() & Padding.from_lengths([23, 8]))
    assert all(x.isfinite().all() for x in found)
    assert (found[2][1, :, 8:] == 0).all()


def test_the_first_call_imports_no_compiler():
    program = """
import sys, torch
from regard import Causal, SlidingWindow, attend
q = torch.randn(1, 2, 600, 8, requires_grad=True)
attend(q, q, q, mask=Causal() & SlidingWindow(9), backend="blocked").sum().backward()
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
