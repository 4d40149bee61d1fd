"""GQA written as MLA by hand, exactly: every head's keys side by side are one rotary key."""

import torch
from torch import nn

from regard import Attention, Causal, MultiHeadLatentAttention, Rotary
from regard.rope.scaling import Frequencies, plain_frequencies


def joined(layer: Attention) -> MultiHeadLatentAttention:
    """The rotary key is all key heads, the latent is all value heads; a query is zero where its
    head does not look. Cached is what GQA caches."""
    groups, dim, heads = layer.num_kv_heads, layer.head_dim, layer.num_heads
    width, size = groups * dim, heads // groups
    rope = layer.rope
    scaling = rope.scaling or Frequencies(plain_frequencies(dim, rope.theta).tolist())
    frequencies = scaling.frequencies(dim, rope.theta).tolist() * groups
    biased = {name for name in ("q_proj", "o_proj") if layer.get_submodule(name).bias is not None}
    biased |= {"kv_a_proj_with_mqa"} if layer.k_proj.bias is not None else set()
    made = MultiHeadLatentAttention(
        layer.hidden_size,
        heads,
        kv_lora_rank=width,
        qk_nope_head_dim=0,
        qk_rope_head_dim=width,
        v_head_dim=dim,
        bias=biased,
        latent_norm=False,
        rope=Rotary(width, scaling=Frequencies(frequencies)),
        mask=layer.mask,
        scale=layer.scale,
    )
    order = torch.arange(width).view(groups, 2, dim // 2).transpose(0, 1).flatten()
    with torch.no_grad():
        for name in ("weight", "bias"):
            q, k, v, o = (
                getattr(getattr(layer, f"{each}_proj"), name) for each in ("q", "k", "v", "o")
            )
            if q is not None:
                spread = q.new_zeros(heads, groups, dim, *q.shape[1:])
                for head, rows in enumerate(q.unflatten(0, (heads, dim))):
                    spread[head, head // size] = rows
                spread = spread.flatten(1, 2)[:, order].flatten(0, 1)
                getattr(made.q_proj, name).copy_(spread)
            if k is not None:
                getattr(made.kv_a_proj_with_mqa, name).copy_(torch.cat([v, k[order]]))
            if o is not None:
                getattr(made.o_proj, name).copy_(o)
        eye = torch.eye(width).view(groups, dim, width).repeat_interleave(size, dim=0)
        made.kv_b_proj.weight.copy_(eye.flatten(0, 1))
    return made.to(layer.q_proj.weight.dtype)


def random_mla(model: nn.Module, *, pairing: str = "halves", seed: int = 0, **options):
    """Latent layers of one outline for every layer of a model, and of no relation to its own."""
    torch.manual_seed(seed)
    config = model.config
    rope = Rotary(6, pairing=pairing, scaling=Frequencies((1.0, 0.3, 0.3)))
    layers = [
        MultiHeadLatentAttention(
            config.hidden_size,
            config.num_attention_heads,
            kv_lora_rank=10,
            qk_nope_head_dim=4,
            qk_rope_head_dim=6,
            v_head_dim=8,
            bias={"kv_a_proj_with_mqa", "o_proj"},
            latent_norm=False,
            rope=rope,
            mask=Causal(),
            scale=0.5,
            **options,
        )
        for _ in range(config.num_hidden_layers)
    ]
    with torch.no_grad():
        for layer in layers:
            for parameter in layer.parameters():
                parameter.normal_(std=0.5 if parameter.dim() > 1 else 0.2)
    return [layer.eval() for layer in layers]
