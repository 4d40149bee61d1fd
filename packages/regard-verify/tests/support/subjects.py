"""Subjects for the tests, as people write them: a file that `regard verify` is pointed at."""

import math
import os
import time
import traceback

import torch
from torch import nn


def right(q, k, v, mask=None):
    """Attention as it should be; True may attend."""
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -1e30)
    return scores.softmax(-1) @ v


def prints(q, k, v):
    print("hello " * 1000)
    return right(q, k, v)


def hangs(q, k, v):
    while True:
        time.sleep(1)


def hangs_on_long_ones(q, k, v):
    while q.shape[2] == 17:
        time.sleep(1)
    return right(q, k, v)


def spins_on_long_ones(q, k, v):
    while q.shape[2] == 17:
        pass
    return right(q, k, v)


def spins_once_understood(q, k, v):
    """Not while it is probed, but in every law."""
    while in_a_law():
        pass
    return right(q, k, v)


def in_a_law():
    return any(frame.name == "run_law" for frame in traceback.extract_stack())


def works_for_a_second(q, k, v):
    """A second of processor time on the long ones, which is more on a busy machine."""
    start = time.process_time()
    while q.shape[2] == 17 and time.process_time() - start < 0.8:
        pass
    return right(q, k, v)


def aborts_on_long_ones(q, k, v):
    if q.shape[2] == 17:
        os.abort()
    return right(q, k, v)


def leaves(q, k, v):
    raise SystemExit(3)


def leaves_at_once(q, k, v):
    os._exit(4)


def eats(q, k, v):
    torch.zeros(1 << 34)
    return right(q, k, v)


def nonsense(q, k, v):
    return "attention"


def nothing(q, k, v):
    return None


def wrong_shape(q, k, v):
    return right(q, k, v)[..., :1]


def changes_the_world(q, k, v):
    """Defaults, gradients, threads and random numbers of the whole process."""
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.manual_seed(1)
    q.mul_(1.0)
    return right(q, k, v)


def recursive(q, k, v):
    return recursive(q, k, v)


NOT_CALLABLE = 3


class Tutorial(nn.Module):
    """A mask that is 1 where hidden, a scale by the width, odd names."""

    def __init__(self, d_model, h):
        super().__init__()
        self.h, self.d_model = h, d_model
        self.wq, self.wk, self.wv = (nn.Linear(d_model, d_model) for _ in range(3))
        self.fc_out = nn.Linear(d_model, d_model)

    def forward(self, x, mask):
        b, n, _ = x.shape
        q, k, v = (w(x).view(b, n, self.h, -1).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_model)
        if mask is not None:
            scores = scores.masked_fill(mask == 1, -1e9)
        return self.fc_out((scores.softmax(-1) @ v).transpose(1, 2).contiguous().view(b, n, -1))


class ThreeInputs(nn.Module):
    """Queries, keys and values by hand, and the weights beside the output."""

    def __init__(self, embed_size, heads):
        super().__init__()
        self.heads = heads
        self.embed_size = embed_size
        self.values, self.keys, self.queries = (nn.Linear(embed_size, embed_size) for _ in range(3))
        self.fc_out = nn.Linear(embed_size, embed_size)

    def forward(self, query, key, value, mask=None):
        b, n = query.shape[:2]
        q, k, v = (
            w(x).reshape(b, -1, self.heads, self.embed_size // self.heads)
            for w, x in ((self.queries, query), (self.keys, key), (self.values, value))
        )
        energy = torch.einsum("nqhd,nkhd->nhqk", q, k) / (self.embed_size // self.heads) ** 0.5
        if mask is not None:
            energy = energy.masked_fill(mask == 0, float("-1e20"))
        weights = energy.softmax(3)
        out = torch.einsum("nhqk,nkhd->nqhd", weights, v).reshape(b, n, -1)
        return self.fc_out(out), weights


def refuses(x):
    assert x is None


class Clumsy(nn.Module):
    """Its shapes do not fit: no input can be given to it."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads, self.d_model = n_heads, d_model
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k
        return self.out(scores.softmax(-1) @ v)


class NoSuper(nn.Module):
    def __init__(self, d_model, n_heads):
        self.n_heads = n_heads
        self.q, self.k, self.v = (nn.Linear(d_model, d_model) for _ in range(3))

    def forward(self, x):
        return right(self.q(x), self.k(x), self.v(x))


class CausalSelfAttention(nn.Module):
    """nanoGPT's: a configuration, one projection for all three, a mask that is a buffer."""

    def __init__(self, config):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.n_head, self.n_embd = config.n_head, config.n_embd
        self.resid_dropout = nn.Dropout(config.dropout)
        size = config.block_size
        self.register_buffer("bias", torch.tril(torch.ones(size, size)).view(1, 1, size, size))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (
            y.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
            for y in self.c_attn(x).split(self.n_embd, dim=2)
        )
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf")).softmax(-1)
        return self.resid_dropout(self.c_proj((att @ v).transpose(1, 2).contiguous().view(B, T, C)))


class WithCache(nn.Module):
    """The book's: a past inside, cleared by `reset_cache`."""

    def __init__(self, d_in, d_out, context_length, dropout, num_heads, qkv_bias=False):
        super().__init__()
        self.num_heads, self.head_dim, self.d_out = num_heads, d_out // num_heads, d_out
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.out_proj = nn.Linear(d_out, d_out)
        self.dropout = nn.Dropout(dropout)
        self.cache_k = self.cache_v = None
        self.ptr = 0

    def reset_cache(self):
        self.cache_k = self.cache_v = None
        self.ptr = 0

    def forward(self, x, use_cache=False):
        b, n, _ = x.shape
        q, k, v = (
            w(x).view(b, n, self.num_heads, self.head_dim).transpose(1, 2)
            for w in (self.W_query, self.W_key, self.W_value)
        )
        if use_cache:
            if self.cache_k is not None:
                k, v = torch.cat([self.cache_k, k], 2), torch.cat([self.cache_v, v], 2)
            self.cache_k, self.cache_v = k, v
            self.ptr += n
        past = k.shape[2] - n
        hidden = torch.arange(k.shape[2])[None] > torch.arange(n)[:, None] + past
        scores = (q @ k.transpose(2, 3)).masked_fill(hidden, -torch.inf)
        weights = self.dropout(torch.softmax(scores / k.shape[-1] ** 0.5, dim=-1))
        return self.out_proj((weights @ v).transpose(1, 2).contiguous().view(b, n, self.d_out))


class Head(nn.Module):
    """One head of a lecture: no number of heads anywhere, no output projection."""

    def __init__(self, head_size):
        super().__init__()
        self.key = nn.Linear(32, head_size, bias=False)
        self.query = nn.Linear(32, head_size, bias=False)
        self.value = nn.Linear(32, head_size, bias=False)
        self.register_buffer("tril", torch.tril(torch.ones(64, 64)))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        T = x.shape[1]
        k, q = self.key(x), self.query(x)
        wei = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
        wei = wei.masked_fill(self.tril[:T, :T] == 0, float("-inf")).softmax(-1)
        return self.dropout(wei) @ self.value(x)


class Uncounted(nn.Module):
    """Four heads, and nothing says so."""

    def __init__(self, dim):
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x):
        q, k, v = (
            w(x).unflatten(-1, (4, -1)).transpose(1, 2) for w in (self.to_q, self.to_k, self.to_v)
        )
        return self.to_out(right(q, k, v).transpose(1, 2).flatten(2))


def annotated(query, key, value, mask=None, dropout=None):
    """The Annotated Transformer's: dropout is a module, the weights come too."""
    d_k = query.size(-1)
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(d_k)
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    p_attn = scores.softmax(dim=-1)
    if dropout is not None:
        p_attn = dropout(p_attn)
    return torch.matmul(p_attn, value), p_attn


class MultiHeadedAttention(nn.Module):
    """The Annotated Transformer's."""

    def __init__(self, h, d_model, dropout=0.1):
        super().__init__()
        self.d_k, self.h = d_model // h, h
        self.linears = nn.ModuleList([nn.Linear(d_model, d_model) for _ in range(4)])
        self.attn = None
        self.dropout = nn.Dropout(p=dropout)

    def forward(self, query, key, value, mask=None):
        if mask is not None:
            mask = mask.unsqueeze(1)
        nbatches = query.size(0)
        query, key, value = (
            lin(x).view(nbatches, -1, self.h, self.d_k).transpose(1, 2)
            for lin, x in zip(self.linears, (query, key, value))  # noqa: B905
        )
        x, self.attn = annotated(query, key, value, mask=mask, dropout=self.dropout)
        x = x.transpose(1, 2).contiguous().view(nbatches, -1, self.h * self.d_k)
        return self.linears[-1](x)


class CrossOnly(nn.Module):
    """Cannot be called without another sequence."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(d_model, d_model) for _ in range(4)
        )

    def forward(self, x, context):
        q, k, v = (
            w(y).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for w, y in ((self.q_proj, x), (self.k_proj, context), (self.v_proj, context))
        )
        return self.o_proj(right(q, k, v).transpose(1, 2).flatten(2))


class Unguessable(nn.Module):
    def __init__(self, flux_capacity):
        super().__init__()


def build():
    """A factory."""
    torch.manual_seed(3)
    return Tutorial(32, 4)


def blhd(q, k, v, attention_mask=None):
    """Heads inside, a mask that is added, the heads side by side again."""
    scores = torch.einsum("blhd,bmhd->bhlm", q, k) * q.shape[-1] ** -0.5
    if attention_mask is not None:
        scores = scores + attention_mask
    return torch.einsum("bhlm,bmhd->blhd", scores.softmax(-1), v).flatten(2)


def flex(q, k, v, mask=None, is_causal=False):
    """FlexAttention, eager."""
    from torch.nn.attention.flex_attention import flex_attention

    def seen(score, b, h, i, j):
        keep = (
            torch.ones((), dtype=torch.bool)
            if mask is None
            else mask[b, h * (mask.shape[1] > 1), i, j]
        )
        if is_causal:
            keep = keep & (j <= i)
        return torch.where(keep, score, -float("inf"))

    return flex_attention(q, k, v, score_mod=seen, enable_gqa=q.shape[1] != k.shape[1])


def regards(q, k, v, mask=None, is_causal=False, scale=None, softcap=None, backend="auto"):
    """regard's own function."""
    from regard import EVERYTHING, Causal, Dense, Span, attend

    rule = (Causal() if is_causal else EVERYTHING) & (EVERYTHING if mask is None else Dense(mask))
    end = max(q.shape[2], k.shape[2])
    span = Span(end - q.shape[2], end, end - k.shape[2], end)
    return attend(q, k, v, mask=rule, span=span, scale=scale, softcap=softcap, backend=backend)


def growing():
    from regard import KVCache

    return KVCache()


def static():
    from regard import StaticCache

    return StaticCache(64)


def sliding():
    from regard import SlidingCache

    return SlidingCache(3)


class NoSuperNoModules(nn.Module):
    """It has no weights, so that nothing fails before it is used."""

    def __init__(self, dim):
        self.dim = dim

    def forward(self, q, k, v):
        return right(q, k, v)
