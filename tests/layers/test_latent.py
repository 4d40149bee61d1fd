"""Biases of multi-head latent attention, projection by projection."""

import pytest
import torch

from regard import NO_ROPE, Causal, KVCache, MultiHeadLatentAttention

SIZES = {"kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 3}
PLAIN = {"q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
LOW_RANK = (PLAIN - {"q_proj"}) | {"q_a_proj", "q_b_proj"}


def mla(bias, q_lora_rank=None):
    return MultiHeadLatentAttention(
        10, 2, **SIZES, q_lora_rank=q_lora_rank, bias=bias, rope=NO_ROPE, mask=Causal()
    )


def biased(layer):
    return {
        name for name, child in layer.named_children() if getattr(child, "bias", None) is not None
    }


@pytest.mark.parametrize(("rank", "there"), [(None, PLAIN), (5, LOW_RANK)])
def test_a_bias_is_where_it_is_named(rank, there):
    for name in there:
        assert biased(mla({name}, rank)) == {name}
    assert biased(mla(frozenset(there), rank)) == there
    assert biased(mla(True, rank)) == there & {"q_a_proj", "kv_a_proj_with_mqa", "o_proj"}
    assert biased(mla(False, rank)) == biased(mla(set(), rank)) == set()


@pytest.mark.parametrize("name", sorted(PLAIN | LOW_RANK))
def test_a_bias_is_added_to_what_its_projection_makes(name):
    rank = 5 if name in LOW_RANK - PLAIN else None
    layer, x = mla({name}, rank).double(), torch.randn(1, 4, 10, dtype=torch.float64)
    child = layer.get_submodule(name)
    wanted = layer(x)
    bias, child.bias = child.bias.detach(), None
    assert not torch.allclose(layer(x), wanted)
    handle = child.register_forward_hook(lambda module, given, out: out + bias)
    torch.testing.assert_close(layer(x), wanted)
    handle.remove()


def test_a_bias_on_the_rebuilt_keys_keeps_the_layer_expanded():
    layer, x = mla({"kv_b_proj"}).double(), torch.randn(1, 5, 10, dtype=torch.float64)
    cache = KVCache()
    pieces = [layer(piece, cache=cache) for piece in x.split(1, dim=1)]
    torch.testing.assert_close(torch.cat(pieces, 1), layer(x))
    assert "expanded" in layer.explain(x[:, :1])


def test_its_code_names_the_biases():
    layer = mla({"q_proj", "kv_a_proj_with_mqa"})
    assert "bias={'kv_a_proj_with_mqa', 'q_proj'}" in repr(layer)
    again = eval(repr(layer), {**vars(__import__("regard"))})
    assert biased(again) == {"q_proj", "kv_a_proj_with_mqa"}


@pytest.mark.parametrize(
    ("bias", "rank", "message"),
    [
        ({"q_a_proj"}, None, r"bias names \['q_a_proj'\]; with q_lora_rank=None choose from"),
        ({"q_proj", "k_proj"}, 5, r"bias names \['k_proj', 'q_proj'\]; with q_lora_rank=5"),
    ],
)
def test_a_bias_of_no_projection_is_refused(bias, rank, message):
    with pytest.raises(ValueError, match=message):
        mla(bias, rank)


class Doubled:
    """A projection whose `forward` was replaced on the instance, as accelerate's hooks do."""

    def __init__(self, module):
        self.before = module.forward

    def __call__(self, x):
        return 2 * self.before(x)


def test_a_replaced_forward_of_the_up_projection_is_called():
    layer, x = mla(False).double(), torch.randn(1, 5, 10, dtype=torch.float64)
    layer.kv_b_proj.forward = Doubled(layer.kv_b_proj)
    cache = KVCache()
    pieces = [layer(piece, cache=cache) for piece in x.split(1, dim=1)]
    torch.testing.assert_close(torch.cat(pieces, 1), layer(x))
    assert "kv_b_proj has a forward of its own" in layer.explain(x[:, :1])
    layer.form = "absorbed"
    with pytest.raises(ValueError, match=r"form='absorbed' reads kv_b_proj.weight, but kv_b_proj"):
        layer(x)


@pytest.mark.parametrize("name", ["kv_a_proj_with_mqa", "kv_b_proj"])
def test_accelerates_hooks_and_offloading_change_nothing(name):
    accelerate = pytest.importorskip("accelerate")
    layer, x = mla(False).double().eval(), torch.randn(1, 5, 10, dtype=torch.float64)
    with torch.no_grad():
        expected = layer(x)
        accelerate.cpu_offload(layer.get_submodule(name), "cpu")
        assert layer.get_parameter(f"{name}.weight").is_meta
        cache = KVCache()
        pieces = [layer(piece, cache=cache) for piece in x.split([3, 1, 1], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, 1), expected)
