"""Caches as strangers write them, and layers that take them: all are right."""

import torch
import torch.nn.functional as F
from torch import nn


class Memory:
    """As transformers' Cache, under another name."""

    def __init__(self):
        self.layers = {}

    def update(self, key_states, value_states, layer_idx, cache_kwargs=None):
        if layer_idx in self.layers:
            k, v = self.layers[layer_idx]
            key_states = torch.cat([k, key_states], -2)
            value_states = torch.cat([v, value_states], -2)
        else:
            key_states, value_states = key_states.clone(), value_states.clone()
        self.layers[layer_idx] = (key_states, value_states)
        return key_states, value_states

    def get_seq_length(self, layer_idx=0):
        return self.layers[layer_idx][0].shape[-2] if layer_idx in self.layers else 0

    def crop(self, max_length):
        self._change(lambda x: x[..., :max_length, :])

    def reorder_cache(self, beam_idx):
        self._change(lambda x: x.index_select(0, beam_idx))

    def _change(self, change):
        self.layers = {at: tuple(change(x) for x in pair) for at, pair in self.layers.items()}


class Cropped(Memory):
    """It keeps one token too many."""

    def crop(self, max_length):
        super().crop(max_length + 1)


class Places:
    """All places are allocated at once; `append` returns them all, with a count of those in use."""

    def __init__(self, max_batch, n_kv_heads, max_len, head_dim):
        self.shape, self.k, self.v, self.used = (max_len, head_dim), None, None, 0

    def append(self, new_k, new_v, start_pos: int):
        if self.k is None:
            shape = (*new_k.shape[:2], *(self.shape[0], new_k.shape[3]))
            self.k, self.v = new_k.new_zeros(shape), new_v.new_zeros(shape)
        end = start_pos + new_k.shape[2]
        if end > self.k.shape[2] or new_k.shape[:2] != self.k.shape[:2]:
            raise ValueError("no place")
        self.k[:, :, start_pos:end], self.v[:, :, start_pos:end] = new_k, new_v
        self.used = end
        return self.k, self.v

    def __len__(self):
        return self.used


class ByPositions(nn.Module):
    """Buffers of fixed places, written at given positions, without a count."""

    def __init__(self, max_batch_size, max_seq_length, n_heads, head_dim):
        super().__init__()
        shape = (max_batch_size, n_heads, max_seq_length, head_dim)
        self.register_buffer("k_cache", torch.zeros(shape))
        self.register_buffer("v_cache", torch.zeros(shape))

    def update(self, input_pos, k_val, v_val):
        k, v = self.k_cache.clone(), self.v_cache.clone()
        k[: len(k_val), :, input_pos] = k_val
        v[: len(v_val), :, input_pos] = v_val
        self.k_cache, self.v_cache = k, v
        return k[: len(k_val)], v[: len(v_val)]


class Attention(nn.Module):
    """Causal, with fewer key heads; `step` is how a cache is read and written."""

    def __init__(self, dim, n_heads, n_kv_heads):
        super().__init__()
        self.head_dim, self.n_heads, self.n_kv_heads = dim // n_heads, n_heads, n_kv_heads
        self.layer_idx = 0
        self.q_proj = nn.Linear(dim, n_heads * self.head_dim)
        self.k_proj = nn.Linear(dim, n_kv_heads * self.head_dim)
        self.v_proj = nn.Linear(dim, n_kv_heads * self.head_dim)
        self.o_proj = nn.Linear(n_heads * self.head_dim, dim)

    def attend(self, x, extend):
        q, k, v = (
            p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        k, v = extend(k, v)
        rows, columns = q.shape[2], k.shape[2]
        visible = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
        k, v = (y.repeat_interleave(self.n_heads // self.n_kv_heads, 1) for y in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class WithMemory(Attention):
    def forward(self, x, store: Memory | None = None):
        if store is None:
            return self.attend(x, lambda k, v: (k, v))
        return self.attend(x, lambda k, v: store.update(k, v, self.layer_idx))


class OneLayer:
    """Of one layer: its update is given no index."""

    def __init__(self):
        self.k = self.v = None

    def update(self, k, v):
        self.k = k if self.k is None else torch.cat([self.k, k], 2)
        self.v = v if self.v is None else torch.cat([self.v, v], 2)
        return self.k, self.v


class WithOneLayer(Attention):
    def forward(self, x, cache: OneLayer | None = None):
        if cache is None:
            return self.attend(x, lambda k, v: (k, v))
        return self.attend(x, cache.update)


class WithPast(Attention):
    """Earlier keys and values are passed as a list and returned."""

    def forward(self, x, layer_past=None, use_cache=False):
        held = []

        def extend(k, v):
            if layer_past is not None:
                k, v = torch.cat([layer_past[0], k], 2), torch.cat([layer_past[1], v], 2)
            held.extend([k, v])
            return k, v

        out = self.attend(x, extend)
        return (out, held) if use_cache else out


class WithDictionary(Attention):
    """A dictionary that is changed in place."""

    def forward(self, x, kv_cache=None):
        def extend(k, v):
            if kv_cache is not None:
                if "k" in kv_cache:
                    k, v = torch.cat([kv_cache["k"], k], 2), torch.cat([kv_cache["v"], v], 2)
                kv_cache["k"], kv_cache["v"] = k, v
            return k, v

        return self.attend(x, extend)


class WithStack(Attention):
    """Keys and values in one tensor [2, B, G, S, D], returned."""

    def forward(self, x, prev_kv=None):
        held = []

        def extend(k, v):
            both = torch.stack([k, v])
            held.append(both if prev_kv is None else torch.cat([prev_kv, both], 3))
            return held[0].unbind()

        return self.attend(x, extend), held[0]


class WithBuffers(Attention):
    """Places in the layer, written from `start_pos` on."""

    def __init__(self, dim, n_heads, n_kv_heads, max_batch, max_len):
        super().__init__(dim, n_heads, n_kv_heads)
        shape = (max_batch, n_kv_heads, max_len, self.head_dim)
        self.register_buffer("cache_k", torch.zeros(shape), persistent=False)
        self.register_buffer("cache_v", torch.zeros(shape), persistent=False)

    def forward(self, x, start_pos: int = 0, use_cache=False):
        def extend(k, v):
            if not use_cache:
                return k, v
            end = start_pos + k.shape[2]
            self.cache_k[: len(x), :, start_pos:end] = k.detach()
            self.cache_v[: len(x), :, start_pos:end] = v.detach()
            return self.cache_k[: len(x), :, :end], self.cache_v[: len(x), :, :end]

        return self.attend(x, extend)


class Unused(Attention):
    """It takes a cache and does not use it, as copies often do."""

    def forward(self, x, past_key_value=None, use_cache=False):
        return self.attend(x, lambda k, v: (k, v))


class OfUnknownKind(WithOneLayer):
    """Nothing says which class its cache has."""

    def forward(self, x, cache=None):
        return super().forward(x, cache)


class OffByOne(WithDictionary):
    """It loses the oldest token of its cache."""

    def forward(self, x, kv_cache=None):
        if kv_cache:
            kv_cache.update({name: held[:, :, 1:] for name, held in kv_cache.items()})
        return super().forward(x, kv_cache)


class WithAttributes(Attention):
    """Keys and values in the layer, without a method that forgets them."""

    def __init__(self, dim, n_heads, n_kv_heads):
        super().__init__(dim, n_heads, n_kv_heads)
        self.k_cache = self.v_cache = None

    def forward(self, x, use_cache=False):
        def extend(k, v):
            if not use_cache:
                return k, v
            if self.k_cache is not None:
                k, v = torch.cat([self.k_cache, k], 2), torch.cat([self.v_cache, v], 2)
            self.k_cache, self.v_cache = k.detach(), v.detach()
            return k, v

        return self.attend(x, extend)
