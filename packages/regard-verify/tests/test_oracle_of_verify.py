"""The reference of this suite gives what that of the library's tests gives."""

import math

import pytest
import torch

import oracle
import plain
from regard_verify.oracle import attention, bound, pattern, rotated


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("options", [{}, {"scale": 0.3}, {"softcap": 2.0}, {"sinks": True}])
def test_it_is_the_definition(groups, options):
    q = torch.randn(2, 4, 3, 5, dtype=torch.float64)
    k, v = (torch.randn(2, groups, 6, d, dtype=torch.float64) for d in (5, 2))
    keep = torch.rand(2, 4, 3, 6) < 0.6
    keep[0, 0, 1] = False
    if options.get("sinks"):
        options = {"sinks": torch.randn(4, dtype=torch.float64)}
    ours = attention(q, k, v, keep=keep, **options)
    table = keep.tolist()
    lists = {n: x.tolist() if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    theirs = oracle.attention(
        q.tolist(), k.tolist(), v.tolist(), visible=lambda b, h, i, j: table[b][h][i][j], **lists
    )
    torch.testing.assert_close(ours.out, torch.tensor(theirs.out, dtype=torch.float64))
    torch.testing.assert_close(ours.weights, torch.tensor(theirs.weights, dtype=torch.float64))
    assert math.isclose(ours.largest, theirs.largest, rel_tol=1e-12)


@pytest.mark.parametrize("pairing", ["halves", "pairs"])
def test_rotation_is_the_definition(pairing):
    x = torch.randn(1, 2, 5, 6, dtype=torch.float64)
    frequencies = plain.frequencies(6, 10_000.0)
    expected = plain.rotate(x.numpy(), frequencies, pairs=pairing == "pairs", first=3)
    got = rotated(x, torch.arange(3, 8), pairing)
    torch.testing.assert_close(got, torch.from_numpy(expected))


def test_patterns():
    assert pattern(2, 4, causal=True).int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    corner = pattern(2, 4, causal=True, alignment="top-left")
    assert corner.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0]]
    assert pattern(3, 3, causal=True, window=2).int().tolist() == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]


def test_gradients_of_fully_masked_rows_are_zero():
    q, k, v = (torch.randn(1, 1, 2, 3, dtype=torch.float64, requires_grad=True) for _ in "qkv")
    keep = torch.tensor([[[[True, False], [False, False]]]])
    attention(q, k, v, keep=keep).out.sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))
    assert q.grad[0, 0, 1].eq(0).all()


def test_the_bound_grows_with_scores_and_values():
    q, k, v = torch.randn(3, 1, 1, 4, 4).unbind()
    small = bound(attention(q, k, v), v, torch.float32)
    assert bound(attention(10 * q, k, v), v, torch.float32) > small
    assert bound(attention(q, k, v), 3 * v, torch.float32) == pytest.approx(3 * small)
    assert bound(attention(q, k, v), v, torch.bfloat16) == pytest.approx(2**16 * small)
