"""The two ways to read cached latents compute the same."""

import pytest
import torch

from layers import (
    assert_same,
    inputs,
    latent,
    scattered,
)
from regard import (
    KVCache,
)


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
