"""Modules whose parameters are split: what each computes with its share."""

import pytest
import torch
from torch import nn

from ranks import on_ranks
from regard.distributed import tensor_parallel
from regard.matrices import matrix_objection, matrix_of, product_objection
from split_layers import attention, drawn, latent


def _share(mesh):
    rank, one = mesh.get_local_rank(), drawn(attention(4, 2, bias=True, qk_norm="width"))
    layer = tensor_parallel(drawn(attention(4, 2, bias=True, qk_norm="width")), mesh)
    x = torch.randn(2, 3, 24, dtype=torch.float64)
    q = one.q_proj(x)
    torch.testing.assert_close(layer.q_proj(x), q[..., 8 * rank : 8 * rank + 8])
    normed = one.q_norm(q)[..., 8 * rank : 8 * rank + 8]
    torch.testing.assert_close(layer.q_norm(layer.q_proj(x)), normed)
    heads = torch.randn(2, 3, 16, dtype=torch.float64)
    own = heads[..., 8 * rank : 8 * rank + 8]
    torch.testing.assert_close(layer.o_proj(own), one.o_proj(heads))
    assert torch.equal(matrix_of(layer.q_proj), one.q_proj.weight[8 * rank : 8 * rank + 8])
    assert matrix_of(one.q_proj) is one.q_proj.weight
    assert isinstance(layer.q_proj, nn.Linear)
    assert matrix_objection(layer.q_proj) == "multiplies by a share of its weight"
    assert product_objection(layer.q_proj) is None
    assert "not a plain" in product_objection(layer.o_proj)
    layer.q_proj.register_forward_hook(lambda *a: None)
    assert product_objection(layer.q_proj) == "has forward hooks"


def test_each_module_computes_its_share():
    on_ranks(2, _share)


def _autocast(mesh):
    one = drawn(attention(4, 2, bias=True, qk_norm="width"), torch.float32)
    layer = tensor_parallel(drawn(attention(4, 2, bias=True, qk_norm="width"), torch.float32), mesh)
    x = torch.randn(2, 3, 24, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        mine, its = layer(x), one(x)
    mine.float().sum().backward()
    assert mine.dtype is its.dtype is torch.bfloat16
    assert torch.isfinite(x.grad).all()
    return mine, its, one(x)


def test_autocast():
    """The error is at most twice that of one device under autocast."""
    for mine, its, exact in on_ranks(2, _autocast):
        unit = torch.finfo(torch.bfloat16).eps / 2 * exact.abs().max()
        assert (mine - exact).abs().max() <= 2 * max((its - exact).abs().max(), unit)


def _forms(mesh):
    found = []
    for form in ("expanded", "absorbed"):
        layer = tensor_parallel(drawn(latent(3, form=form)), mesh)
        x = torch.randn(1, 3, 24, dtype=torch.float64)
        found.append((layer(x).detach(), layer.explain(x).split(":")[0], repr(layer)))
        with pytest.raises(RuntimeError, match="not initialised again"):
            layer.kv_b_proj.reset_parameters()
    return found


def test_both_forms_of_latent_attention_read_this_ranks_rows():
    one = latent(3, form="expanded")()
    for expanded, absorbed in on_ranks(2, _forms):
        torch.testing.assert_close(expanded[0], absorbed[0])
        assert (expanded[1], absorbed[1]) == ("form     expanded", "form     absorbed")
        assert expanded[2] == repr(one)
