"""GQA is MHA with shared keys: spelled out, every query head gets a copy of its own."""

import torch
from torch import Tensor, nn

from regard.attention import Attention
from regard.convert.linear import linear_of, numbers_of

WRITTEN_OUT = ("k_proj", "v_proj")


def spell_out(layer: Attention) -> Attention:
    """The same attention as MHA, exactly: the key and value rows of a group, once for each head.

    All but `k_proj` and `v_proj` is shared with `layer`, not copied; MHA is returned as it is. The
    cache becomes `num_heads / num_kv_heads` times as large: that is what grouping saves.

    Raises:
        ValueError: if keys are normed over their whole width, where copies would change the norm.

    >>> import torch
    >>> from regard import Causal, GroupedQueryAttention
    >>> gqa = GroupedQueryAttention(16, 4, 2, mask=Causal())
    >>> mha, x = spell_out(gqa), torch.randn(1, 5, 16)
    >>> mha.kind, torch.allclose(mha(x), gqa(x), atol=1e-6)
    ('MHA', True)
    """
    if layer.kind == "MHA":
        return layer
    if layer.norm_width:
        raise ValueError(
            'qk_norm="width" norms all key heads at once, and copies would count again; '
            'layers with qk_norm="head", or none, can be spelled out'
        )
    with torch.device("meta"):  # all of it is replaced
        mha = Attention(**{**layer._given, "num_kv_heads": None})
    for name, child in layer.named_children():
        if name not in WRITTEN_OUT:
            setattr(mha, name, child)
    for name in WRITTEN_OUT:
        setattr(mha, name, _copied(layer, name))
    mha.sinks = layer.sinks
    return mha.train(layer.training)


def _copied(layer: Attention, name: str) -> nn.Linear:
    weight, bias = numbers_of(layer, name)
    return linear_of(
        _each_head_again(weight, layer), bias if bias is None else _each_head_again(bias, layer)
    )


def _each_head_again(rows: Tensor, layer: Attention) -> Tensor:
    """`[G*D, ..]` rows, each head's repeated for every query head that reads it: `[H*D, ..]`."""
    heads = rows.unflatten(0, (layer.num_kv_heads, layer.head_dim))
    return heads.repeat_interleave(layer.num_heads // layer.num_kv_heads, dim=0).flatten(0, 1)
