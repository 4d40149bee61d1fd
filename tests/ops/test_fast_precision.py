"""Attention with precision="fast": products in bfloat16, within the bound that it states."""

import pytest
import torch

from blocks import BLOCKS, MASKS, WINDOW, tensors
from cases import bound
from covering import covering
from regard import (
    NOTHING,
    Causal,
    attend,
    explain,
    prepare,
)
from regard.ops.backends import blocked


@pytest.mark.parametrize(
    ("blocks", "mask", "scale"), covering(BLOCKS, MASKS, [0.3, 3.0]), indirect=["blocks"]
)
def test_fast_products_keep_the_bound_that_was_asked_for(blocks, mask, scale):
    if MASKS[mask] is NOTHING:
        pytest.skip("no key is in sight: blocked objects")
    q, k, v = tensors(dtype=torch.bfloat16)
    for feature in ({}, {"softcap": 5.0}, {"sinks": torch.zeros(4)}):
        given = {"mask": MASKS[mask], "scale": scale, **feature}
        got = attend(q, k, v, **given, precision="fast", backend="blocked")
        given |= {"sinks": given["sinks"].double()} if "sinks" in given else {}
        want = attend(q.double(), k.double(), v.double(), **given, backend="eager")
        largest = scale * (q.double().abs() @ k.double().abs().repeat_interleave(2, 1).mT).max()
        allowed = bound(torch.float32, v.abs().max().item(), largest.item())
        allowed *= torch.finfo(torch.bfloat16).eps / torch.finfo(torch.float32).eps
        assert (got.double() - want).abs().max() <= allowed


def gradients(run, inputs, dtype):
    """Gradients of a fixed weighted sum of the output, in float64."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
    out = run(*leaves)
    slopes = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    return [x.double() for x in torch.autograd.grad(out, leaves, slopes)]


def plain(q, k, v):
    """Attention under the window as the papers write it, in the dtype of the inputs."""
    keep = torch.ones(q.shape[2], q.shape[2]).tril().triu(-5).bool()
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~keep, -torch.inf)
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("dim", [3, 16])
def test_fast_gradients_are_at_most_three_times_as_wrong_as_plain_ones(blocks, dim):
    torch.manual_seed(3)
    inputs = [x.to(torch.bfloat16) for x in tensors(dim=dim, v_dim=dim)]
    exact = gradients(plain, inputs, torch.float64)
    others = gradients(plain, inputs, torch.bfloat16)
    options = {"mask": WINDOW, "precision": "fast", "backend": "blocked"}
    found = gradients(lambda *leaves: attend(*leaves, **options), inputs, torch.bfloat16)
    for got, other, want in zip(found, others, exact, strict=True):
        assert (got - want).abs().max() <= 3 * (other - want).abs().max()


@pytest.mark.parametrize("mask", [name for name in MASKS if name != "nothing"])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_fast_gradients_err_no_more_than_plain_ones(blocks, mask, heads):
    """Not more than three times those of attention written down in bfloat16."""
    if blocked.BLOCK == 1:
        pytest.skip("sums over as many blocks as queries are rounded as often")
    torch.manual_seed(4)
    q, k, v = tensors(dtype=torch.bfloat16)
    inputs = q, k[:, :1].expand(-1, heads, -1, -1), v[:, :1].expand(-1, heads, -1, -1)
    cotangent = torch.randn(q.shape[:3] + v.shape[-1:]).bfloat16()

    def gradients(of, dtype):
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        return torch.autograd.grad(of(*leaves), leaves, cotangent.to(dtype))

    def fast(q, k, v):
        return attend(q, k, v, mask=MASKS[mask], precision="fast", backend="blocked")

    def exact(q, k, v):
        return attend(q, k, v, mask=MASKS[mask], backend="eager")

    def plain(q, k, v):
        k, v = (x.repeat_interleave(4 // heads, 1) for x in (k, v))
        at = torch.meshgrid(*map(torch.arange, (2, 4, 23, 23)), indexing="ij")
        keep = MASKS[mask](*at)
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~keep, -torch.inf)
        return scores.softmax(-1).nan_to_num() @ v

    wants = gradients(exact, torch.float64)
    for got, near, want in zip(
        gradients(fast, torch.bfloat16), gradients(plain, torch.bfloat16), wants, strict=True
    ):
        allowed = 3 * (near.double() - want).abs().max() + 1e-6
        assert (got.double() - want).abs().max() <= allowed


def test_the_larger_error_of_fast_is_explained():
    options = {"mask": Causal(), "precision": "fast", "backend": "blocked"}
    made = call(dtype=torch.bfloat16, **options)
    assert "scores and weights are kept in bfloat16" in explain(made)
    assert "bfloat16:" not in explain(call(mask=Causal(), dtype=torch.bfloat16))


def call(length=8192, heads=8, kv_heads=8, dim=64, dtype=torch.float32, grad=False, **options):
    q = torch.empty(1, heads, length, dim, dtype=dtype, requires_grad=grad)
    k = torch.empty(1, kv_heads, length, dim, dtype=dtype)
    return prepare(q, k, k, **options)


def test_a_second_derivative_is_refused():
    """Also where the gradient of the output is a constant."""
    q, k, v = (x.bfloat16().requires_grad_() for x in tensors())
    out = attend(q, k, v, mask=WINDOW, precision="fast", backend="blocked")
    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(ValueError, match="no second derivative"):
        grad.sum().backward()
