"""The definition as a backend: it takes every call, and other backends are compared with it."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from regard import Alibi, Causal, Padding, Span, attend, prepare
from regard.ops.backends import eager

OPTIONS = [
    {},
    {"softcap": 2.0},
    {"sinks": torch.zeros(2)},
    {"score_bias": Alibi.for_heads(2)},
    {"dropout": 0.5},
    {"mask": Causal() & Padding(torch.tensor([[True, False, True]]))},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_it_objects_to_nothing(options, dtype):
    q = torch.randn(1, 2, 3, 4).to(dtype)
    prepared = prepare(q, q, q, backend="eager", **options)
    assert eager.objection(prepared.call) is None
    out = attend(q, q, q, backend="eager", **options)
    assert out.shape == q.shape and out.dtype == dtype and out.isfinite().all()


def test_hidden_keys_may_hold_anything():
    q, k = torch.randn(1, 1, 2, 4), torch.randn(1, 1, 3, 4)
    bad = k.clone()
    bad[:, :, 2] = torch.nan
    mask = Padding(torch.tensor([[True, True, False]]))
    good = attend(q, k[:, :, :2], k[:, :, :2], backend="eager")
    torch.testing.assert_close(attend(q, bad, bad, mask=mask, backend="eager"), good)


def test_more_cells_take_longer_by_its_estimate():
    def estimate(queries, keys):
        q, k = torch.empty(1, 8, queries, 64), torch.empty(1, 8, keys, 64)
        span = Span(keys - queries, keys, 0, keys)
        return eager.estimate(prepare(q, k, k, span=span, backend="eager").call)

    assert 0 < estimate(1, 64) < estimate(64, 64) < estimate(64, 4096) < estimate(4096, 4096)


def test_dropout_drops_and_scales():
    q, v = torch.zeros(1, 1, 1, 4), torch.ones(1, 1, 1000, 1)
    k, span = torch.zeros(1, 1, 1000, 4), Span(999, 1000, 0, 1000)
    outs = {attend(q, k, v, span=span, dropout=0.5, backend="eager").item() for _ in range(5)}
    assert len(outs) > 1
    assert all(out == pytest.approx(1.0, abs=0.2) for out in outs)


class Copied(TorchDispatchMode):
    """The most elements that a copying operator returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.clone.default, torch.ops.aten.copy_.default):
            self.elements = max(self.elements, out.numel())
        return out


def test_keys_are_not_copied_for_each_head_that_shares_them():
    q, k = torch.randn(2, 8, 3, 16), torch.randn(2, 1, 50, 16)
    with torch.no_grad(), Copied() as copied:
        attend(q, k, k, backend="eager")
    assert copied.elements < k.numel()
