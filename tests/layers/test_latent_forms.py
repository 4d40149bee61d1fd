"""The two ways to read cached latents compute the same."""

import pytest
import torch

from layers import (
    assert_same,
    inputs,
    latent,
    scattered,
)
from regard import KVCache, Span, matrices
from regard.layers import latent_forms


@pytest.mark.parametrize("options", [{}, {"q_lora_rank": None}, {"latent_norm": False}])
def test_absorbed_is_expanded(options):
    """Forward and gradients, at positions past zero, with norms that do something."""
    layers = {}
    for form in ("expanded", "absorbed"):
        torch.manual_seed(1)
        layers[form] = scattered(latent(form=form, **options)).double()
    layers["absorbed"].load_state_dict(layers["expanded"].state_dict())
    found = {}
    for form, layer in layers.items():
        past, x = inputs(2, 5), inputs(2, 4, seed=1).requires_grad_()
        cache = KVCache()
        layer(past, cache=cache)
        out = layer(x, cache=cache)
        (out * torch.arange(out.numel()).view(out.shape)).sum().backward()
        gradients = {name: p.grad for name, p in layer.named_parameters()}
        assert all(grad is not None for grad in gradients.values())
        found[form] = {"out": out.detach(), "x": x.grad, **gradients}
    for name, value in found["expanded"].items():
        assert_same(found["absorbed"][name], value)


def test_the_two_forms_are_two():
    """The law above would hold of a switch that does nothing."""
    x = inputs(2, 11)
    saw = {form: latent(form=form).double().explain(x) for form in ("expanded", "absorbed")}
    assert saw["expanded"] != saw["absorbed"]


@pytest.mark.parametrize("products", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 3])
def test_absorbed_in_half_precision(products, dtype, tokens, monkeypatch):
    """On a processor with or without products in that dtype: as in float64, to eight independent
    roundings of half an eps, from the input to the output."""
    monkeypatch.setattr(matrices, "_BFLOAT16", products)
    layer = scattered(latent(form="absorbed")).to(dtype)
    wide = latent(form="absorbed").double()
    wide.load_state_dict(layer.state_dict())
    past, x = inputs(2, 5).to(dtype), inputs(2, tokens, seed=1).to(dtype)
    found = []
    for each in (layer, wide):
        cache = KVCache()
        like = each.o_proj.weight.dtype
        each(past.to(like), cache=cache)
        found.append(each(x.to(like), cache=cache))
    error = (found[0].double() - found[1]).norm() / found[1].norm()
    assert found[0].dtype == dtype and error < 8**0.5 / 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_products_are_summed_in_float32_where_there_are_none(dtype, monkeypatch):
    """The rounded sum is exact to half an ulp; and which dtypes have products is told apart."""
    monkeypatch.setattr(matrices, "_BFLOAT16", False)
    a, b = torch.randn(3, 4, 65).to(dtype), torch.randn(3, 65, 5).to(dtype)
    assert matrices.has_products(a) == (dtype == torch.float32)
    wanted = a.double() @ b.double()
    error = (matrices.multiply(a, b).double() - wanted).abs()
    assert (error <= wanted.abs() * torch.finfo(dtype).eps / 2 + 1e-4).all()


def test_without_products_keys_are_rebuilt_for_fewer_queries(monkeypatch):
    """Rebuilding takes several times as long there, absorbing as long as in float32."""
    layer, chosen = latent().bfloat16(), {}
    for products in (True, False):
        monkeypatch.setattr(matrices, "_BFLOAT16", products)
        chosen[products] = [
            latent_forms.choose_form(layer, Span(keys - n, keys, 0, keys)).name
            for keys in (4, 40, 400)
            for n in (1, 3)
        ]
    absorbed = {products: names.count("absorbed") for products, names in chosen.items()}
    assert absorbed[False] > absorbed[True]
