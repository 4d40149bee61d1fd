"""GQA is MHA with shared keys: spelled out, every query head gets a copy of its own."""

import torch
from torch import Tensor

from regard.convert.linear import linear_of, numbers_of
from regard.layers.attention import Attention

WRITTEN_OUT = ("k_proj", "v_proj")


def spell_out(layer: Attention, num_kv_heads: int | None = None) -> Attention:
    """The same attention with more key heads, exactly: rows of a group, once for each new head.

    All but `k_proj` and `v_proj` is shared with `layer`, not copied; a layer that has so many heads
    is returned as it is. The cache grows by as much: that is what grouping saves.

    Args:
        layer: GQA or MQA.
        num_kv_heads: a multiple of the layer's own that divides its query heads; MHA if None.

    Raises:
        ValueError: if the heads do not divide, or keys are normed over their whole width, where
            copies would change the norm.

    >>> import torch
    >>> from regard import Causal, GroupedQueryAttention
    >>> gqa = GroupedQueryAttention(16, 4, 2, mask=Causal())
    >>> mha, x = spell_out(gqa), torch.randn(1, 5, 16)
    >>> mha.kind, torch.allclose(mha(x), gqa(x), atol=1e-6)
    ('MHA', True)
    """
    wanted = layer.num_heads if num_kv_heads is None else num_kv_heads
    if wanted < 1 or wanted % layer.num_kv_heads or layer.num_heads % wanted:
        raise ValueError(
            f"num_kv_heads={wanted} must be a multiple of the layer's {layer.num_kv_heads} that "
            f"divides its {layer.num_heads} query heads"
        )
    if wanted == layer.num_kv_heads:
        return layer
    refuse_norm_of_width(layer)
    sizes = {"num_heads": layer.num_heads, "num_kv_heads": wanted}
    with torch.device("meta"):  # all of it is replaced
        mha = Attention(**{**layer.arguments, **sizes})
    for name, child in layer.named_children():
        if name not in WRITTEN_OUT:
            setattr(mha, name, child)
    copies = wanted // layer.num_kv_heads
    for name in WRITTEN_OUT:
        weight, bias = numbers_of(layer, name)
        again = None if bias is None else _each_head_again(bias, layer, copies)
        setattr(mha, name, linear_of(_each_head_again(weight, layer, copies), again))
    mha.sinks = layer.sinks
    return mha.train(layer.training)


def refuse_norm_of_width(layer: Attention) -> None:
    """Raise a ValueError if keys are normed over all heads at once: more heads, or fewer, would
    have another norm."""
    if layer.norm_width:
        raise ValueError(
            'qk_norm="width" norms all key heads at once, and more or fewer of them would have '
            "another norm; a joint latent keeps it: to='mla' with a budget, or to='mla:RANK'"
        )


def _each_head_again(rows: Tensor, layer: Attention, copies: int) -> Tensor:
    """`[G*D, ..]` rows, each head's repeated: `[G*copies*D, ..]`."""
    heads = rows.unflatten(0, (layer.num_kv_heads, layer.head_dim))
    return heads.repeat_interleave(copies, dim=0).flatten(0, 1)
