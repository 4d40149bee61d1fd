"""Copies of attentions that take rotary tables or positions beside x: all are right."""

import torch
from torch import nn


class RotaryEmbedding(nn.Module):
    """As in transformers: cosines and sines [B, L, D] of positions, in halves."""

    def __init__(self, config):
        super().__init__()
        self.head_dim = config.hidden_size // config.num_attention_heads
        steps = torch.arange(0, self.head_dim, 2).float() / self.head_dim
        self.register_buffer("inv_freq", config.rope_theta**-steps, persistent=False)

    def forward(self, x, position_ids):
        angles = position_ids[..., None].float() * self.inv_freq
        angles = torch.cat([angles, angles], -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def rotate_half(x):
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def attend(q, k, v, mask, scale):
    scores = q @ k.mT * scale
    if mask is not None:
        scores = scores + mask
    return scores.softmax(-1) @ v


class Projected(nn.Module):
    def __init__(self, hidden_size, heads, key_heads):
        super().__init__()
        self.head_dim = hidden_size // heads
        self.groups = heads // key_heads
        self.q_proj = nn.Linear(hidden_size, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, key_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, key_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, hidden_size, bias=False)

    def heads(self, x):
        return [
            p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        ]

    def joined(self, q, k, v, mask=None):
        k, v = (y.repeat_interleave(self.groups, 1) for y in (k, v))
        out = attend(q, k, v, mask, self.head_dim**-0.5)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class CopiedAttention(Projected):
    """The commonest copy: `position_embeddings` [B, L, D], an additive mask, a cache object."""

    def __init__(self, config, layer_idx):
        super().__init__(config.hidden_size, config.num_attention_heads, config.num_key_value_heads)
        self.config, self.layer_idx = config, layer_idx

    def forward(self, hidden_states, position_embeddings, attention_mask, past_key_values=None):
        q, k, v = self.heads(hidden_states)
        cos, sin = (table.unsqueeze(1) for table in position_embeddings)
        q, k = (y * cos + rotate_half(y) * sin for y in (q, k))
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        return self.joined(q, k, v, attention_mask), None


class Unrotated(CopiedAttention):
    """It takes the tables and forgets them."""

    def forward(self, hidden_states, position_embeddings, attention_mask):
        return self.joined(*self.heads(hidden_states), attention_mask)


class Tables(Projected):
    """`cos` and `sin` [L, D / 2], neighbouring channels are rotated together."""

    def __init__(self, dim, n_heads):
        super().__init__(dim, n_heads, n_heads)

    def forward(self, x, cos, sin, mask=None):
        q, k, v = self.heads(x)
        q, k = (self.rotated(y, cos, sin) for y in (q, k))
        return self.joined(q, k, v, mask)

    def rotated(self, y, cos, sin):
        a, b = y[..., 0::2], y[..., 1::2]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


class Complex(Projected):
    """As in Llama's own code: complex numbers [L, D / 2], a cache in the layer."""

    def __init__(self, args):
        super().__init__(args.dim, args.n_heads, args.n_kv_heads)
        shape = (args.max_batch_size, args.n_kv_heads, args.max_seq_len, self.head_dim)
        self.cache_k, self.cache_v = torch.zeros(shape), torch.zeros(shape)

    def forward(self, x, start_pos: int, freqs_cis, mask):
        q, k, v = self.heads(x)
        q, k = (self.rotated(y, freqs_cis) for y in (q, k))
        if not torch.is_grad_enabled():
            end = start_pos + x.shape[1]
            self.cache_k, self.cache_v = self.cache_k.to(k), self.cache_v.to(k)
            self.cache_k[: len(x), :, start_pos:end] = k
            self.cache_v[: len(x), :, start_pos:end] = v
            k, v = self.cache_k[: len(x), :, :end], self.cache_v[: len(x), :, :end]
        return self.joined(q, k, v, mask)

    def rotated(self, y, freqs_cis):
        pairs = torch.view_as_complex(y.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * freqs_cis).flatten(-2).type_as(y)


class Optional(Projected):
    """The argument has a default, and nothing works without it."""

    def __init__(self, dim, n_heads):
        super().__init__(dim, n_heads, n_heads)

    def forward(self, x, rope=None):
        cos, sin = rope
        q, k, v = self.heads(x)
        q, k = (y * cos + rotate_half(y) * sin for y in (q, k))
        return self.joined(q, k, v)


class Positions(Projected):
    """It computes its own angles from `position_ids` [B, L]."""

    def __init__(self, dim, n_heads):
        super().__init__(dim, n_heads, n_heads)

    def forward(self, x, position_ids, attention_mask=None):
        steps = torch.arange(0, self.head_dim, 2).float() / self.head_dim
        angles = (position_ids[..., None].float() * 10_000.0**-steps).repeat(1, 1, 2)
        cos, sin = angles.cos()[:, None].to(x.dtype), angles.sin()[:, None].to(x.dtype)
        q, k, v = self.heads(x)
        q, k = (y * cos + rotate_half(y) * sin for y in (q, k))
        return self.joined(q, k, v, attention_mask)
