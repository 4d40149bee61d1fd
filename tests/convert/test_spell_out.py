"""Spelled out as MHA, nothing changes but the size of the cache."""

import pytest
import torch

from layers import attention, everything_at_once
from regard import KVCache
from regard.convert import spell_out

VARIANTS = {
    "GQA": lambda: attention(4, num_kv_heads=2),
    "MQA with biases": lambda: attention(4, num_kv_heads=1, bias=True),
    "QK-norm, gate": lambda: attention(4, num_kv_heads=2, qk_norm="head", gate="head"),
    "everything at once": everything_at_once,
}


@pytest.mark.parametrize("name", VARIANTS)
def test_gqa_spelled_out_is_the_same_attention(name):
    layer = VARIANTS[name]().double().eval()
    mha = spell_out(layer)
    x = torch.randn(2, 7, layer.hidden_size, dtype=torch.float64)
    assert mha.kind == "MHA"
    torch.testing.assert_close(mha(x), layer(x), atol=1e-12, rtol=1e-12)
    caches = KVCache(), KVCache()
    chunks = [(mha(c, cache=caches[0]), layer(c, cache=caches[1])) for c in x.split(3, dim=1)]
    for ours, theirs in chunks:
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)
    assert caches[0].nbytes == caches[1].nbytes * layer.num_heads // layer.num_kv_heads


def test_all_but_keys_and_values_is_shared():
    layer = attention(4, num_kv_heads=2)
    mha = spell_out(layer)
    assert mha.q_proj is layer.q_proj
    assert mha.o_proj is layer.o_proj
    assert not any(parameter.is_meta for parameter in mha.parameters())


def test_mha_is_returned_as_it_is():
    layer = attention(4)
    assert spell_out(layer) is layer


def test_norms_over_the_whole_width_are_refused():
    with pytest.raises(ValueError, match='qk_norm="width" norms all key heads at once'):
        spell_out(attention(4, num_kv_heads=2, qk_norm="width"))


def test_adapters_are_refused():
    layer = attention(4, num_kv_heads=2)
    layer.k_proj = torch.nn.Sequential(layer.k_proj)
    with pytest.raises(ValueError, match="k_proj is a Sequential"):
        spell_out(layer)
