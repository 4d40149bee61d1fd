"""Layers that compute with the heads of one rank: each rank drops other weights."""

import pytest
import torch
import torch.distributed as dist

from ranks import on_ranks
from regard.distributed import tensor_parallel
from regard.distributed.ranks import sum_bytes
from split_layers import LAYERS, attention, drawn, inputs, latent, options_of
from tensor_bytes import Bytes, bytes_sent


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


# ---- bytes ----


NAMES = ["mha", "gqa width", "mqa many", "relative", "mla queries", "latent kv"]


def _reduced(mesh, names):
    """Bytes of the tensors that torch is asked to add up, by an independent count."""
    found = []
    for name in names:
        layer = tensor_parallel(drawn(LAYERS[name][0], torch.float32), mesh)
        x, seen = inputs().float().requires_grad_(), []
        with pytest.MonkeyPatch.context() as patch:
            plain = dist.all_reduce

            def all_reduce(tensor, *args, group=None, _plain=plain, _seen=seen, **options):
                _seen.append(sum_bytes(tensor.nbytes, dist.get_world_size(group)))
                return _plain(tensor, *args, group=group, **options)

            patch.setattr(dist, "all_reduce", all_reduce)
            out = layer(x, **options_of(name))
            forward = sum(seen)
            out.sum().backward()
        found.append((forward, sum(seen) - forward))
    return found


@pytest.mark.parametrize("number", [2, 4])
def test_the_count_is_what_torch_adds_up(number):
    for results in on_ranks(number, _reduced, NAMES):
        for name, found in zip(NAMES, results, strict=True):
            layer = LAYERS[name][0]()
            planned = bytes_sent(layer, ranks=number, batch=2, length=5)
            assert found == planned, name
            assert planned.forward > 0


def test_counts_by_hand():
    two = sum_bytes(4, 2)  # of one number
    plain = bytes_sent(attention(4, 2)(), ranks=2, batch=3, length=5)
    assert plain == Bytes(3 * 5 * 24 * two, 3 * 5 * 24 * two)
    gated = bytes_sent(attention(4, 2, gate="head")(), ranks=2, batch=3, length=5)
    assert gated.backward == 2 * plain.backward
    normed = bytes_sent(attention(4, 2, qk_norm="head")(), ranks=2, batch=3, length=5)
    assert normed == (plain.forward, plain.backward + 8 * two)
    assert bytes_sent(latent(4)(), ranks=2, batch=1, length=1).backward == (10 + 24) * two
    doubled = bytes_sent(attention(4, 2)(), ranks=2, batch=3, length=5, dtype=torch.float64)
    assert doubled.forward == 2 * plain.forward
    half = bytes_sent(attention(4, 2)(), ranks=2, batch=3, length=5, dtype=torch.bfloat16)
    assert half == plain
