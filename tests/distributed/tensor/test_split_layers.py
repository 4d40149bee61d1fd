"""Layers that compute with the heads of one rank: each rank drops other weights."""

import torch

from ranks import on_ranks
from regard.distributed import tensor_parallel
from split_layers import attention, drawn, inputs


def _dropped(mesh):
    """Twice the same call, the random number after it, and a call with the same heads on both."""
    layer = tensor_parallel(drawn(attention(4, 4, dropout=0.5)), mesh)
    torch.manual_seed(5)
    first, after = layer(inputs()).detach(), torch.rand(1)
    torch.manual_seed(5)
    again = layer(inputs()).detach()
    half = drawn(attention(2, 2))
    with torch.no_grad():
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            getattr(layer, name).weight.to_local().copy_(half.get_submodule(name).weight)
        torch.manual_seed(5)
        return first, again, after, layer(inputs())


def test_ranks_drop_other_weights():
    results, half = on_ranks(2, _dropped), drawn(attention(2, 2, dropout=0.5))
    for first, again, after, _ in results:
        assert torch.equal(first, again)
        assert torch.equal(first, results[0][0])
        assert torch.equal(after, results[0][2])
    torch.manual_seed(5)
    number, terms = int(torch.randint(1 << 62, ())), []
    for rank in (0, 1):
        torch.manual_seed(number + rank)
        terms.append(half(inputs()).detach())
    assert (terms[0] - terms[1]).abs().max() > 1e-3
    torch.testing.assert_close(results[0][3], terms[0] + terms[1])


def test_dropout_of_zero_is_the_layer_in_eval_mode():
    for trained, evaluated in on_ranks(2, _train_and_eval):
        assert torch.equal(trained, evaluated)


def _train_and_eval(mesh):
    layer = tensor_parallel(drawn(attention(6, 3)), mesh)
    return layer.train()(inputs()).detach(), layer.eval()(inputs()).detach()
