"""Attention and the layers as the papers write them, in plain torch: callers are compared with it.

It shares nothing with the library but the names of parameters. In float64 it is what is right, with
every derivative that autograd has; in another dtype its error is what a plain implementation has.
`test_definition` holds it against the loops of `oracle`.
"""

import torch
from torch import Tensor

Leaves = dict[str, Tensor]


def attention(q: Tensor, k: Tensor, v: Tensor, *, keep: Tensor, **options: object) -> Tensor:
    """q `[B, H, L, D]`, k `[B, G, S, D]`, v `[B, G, S, Dv]`; a fully masked row is zero.

    `options` are those of `weights`.
    """
    v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    return weights(q, k, keep=keep, **options) @ v


def weights(
    q: Tensor, k: Tensor, *, keep: Tensor, sinks: Tensor | None = None, **options: object
) -> Tensor:
    """The softmax over visible keys and the sink, `[B, H, L, S]`; `options` of `masked_scores`."""
    scores = masked_scores(q, k, keep=keep, **options)
    seen = keep.any(-1, keepdim=True)
    if sinks is None:
        return scores.softmax(-1) * seen
    sink = sinks[None, :, None, None].expand(*scores.shape[:3], 1)
    return torch.cat([scores, sink], -1).softmax(-1)[..., :-1] * seen


def masked_scores(
    q: Tensor,
    k: Tensor,
    *,
    keep: Tensor,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Scores of all pairs, -inf for masked ones; a fully masked row keeps its scores, finite."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    return scores.masked_fill(~keep & keep.any(-1, keepdim=True), -torch.inf)


def attention_in_halves(q: Tensor, k: Tensor, v: Tensor, *, keep: Tensor) -> Tensor:
    """The same as `attention` but for rounding: attention over each half of the keys, and the mean
    of both outputs, weighted by the sums of exponentials."""
    v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    halves = [k.shape[2] // 2, k.shape[2] - k.shape[2] // 2]
    keep = keep.expand(*q.shape[:3], k.shape[2])
    outs, sums = [], []
    for keys, values, kept in zip(
        k.split(halves, 2), v.split(halves, 2), keep.split(halves, -1), strict=True
    ):
        scores = masked_scores(q, keys, keep=kept)
        outs.append(scores.softmax(-1) @ values)
        sums.append(scores.logsumexp(-1).masked_fill(~kept.any(-1), -torch.inf))
    sums = torch.stack(sums)
    nothing = (sums == -torch.inf).all(0)
    shares = sums.masked_fill(nothing, 0.0).softmax(0).masked_fill(nothing, 0.0)
    return (torch.stack(outs) * shares.unsqueeze(-1)).sum(0)


def largest_score(
    q: Tensor, k: Tensor, *, keep: Tensor, scale: float | None = None, bias: Tensor | None = None
) -> float:
    """S of the numeric contract: the largest visible sum of |scale * q_i * k_i|, plus |bias|."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    sums = q.abs() @ k.abs().mT * abs(q.shape[-1] ** -0.5 if scale is None else scale)
    sums = sums if bias is None else sums + bias.abs()
    return torch.where(keep, sums, 0.0).max().item()


def alibi(slopes: Tensor, positions: Tensor, keys: int) -> Tensor:
    """`-slope * distance`, `[1, H, L, S]`."""
    distances = (positions[:, None] - torch.arange(keys)).abs()
    return -slopes[None, :, None, None] * distances.to(slopes.dtype)


def relative(weight: Tensor, positions: Tensor, keys: int) -> Tensor:
    """T5's buckets, one direction and each near distance its own: `[1, H, L, S]`.

    `weight` is `[buckets, H]`; the calls keep distances below half of the buckets, where a bucket
    is the distance itself.
    """
    distances = (positions[:, None] - torch.arange(keys)).clamp(min=0)
    assert int(distances.max()) < len(weight) // 2
    return weight[distances].permute(2, 0, 1)[None]


def linear(w: Leaves, name: str, x: Tensor) -> Tensor:
    """x W^T, and the bias if there is one; `x` itself where there is no such projection."""
    if f"{name}.weight" not in w:
        return x
    out = x @ w[f"{name}.weight"].mT
    return out + w[f"{name}.bias"] if f"{name}.bias" in w else out


def heads(x: Tensor, size: int) -> Tensor:
    """`[B, L, H * D]` to `[B, H, L, D]`."""
    return x.unflatten(-1, (-1, size)).transpose(1, 2)


def side_by_side(x: Tensor) -> Tensor:
    """`[B, H, L, D]` to `[B, L, H * D]`."""
    return x.transpose(1, 2).flatten(2)


def rms(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, size: int, *, pairs: bool = False, theta: float = 10_000.0) -> Tensor:
    """The first `size` channels of every head, in pairs, by position times frequency."""
    if not size:
        return x
    frequencies = theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angles = torch.arange(x.shape[2], dtype=torch.float64)[:, None] * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    turned, rest = x[..., :size], x[..., size:]
    a, b = (turned[..., ::2], turned[..., 1::2]) if pairs else turned.chunk(2, -1)
    both = a * cos - b * sin, b * cos + a * sin
    joined = torch.stack(both, -1).flatten(-2) if pairs else torch.cat(both, -1)
    return torch.cat([joined, rest], -1)


def layer(
    w: Leaves,
    x: Tensor,
    context: Tensor | None = None,
    *,
    head_dim: int,
    rope: int = 0,
    only_weights: bool = False,
    **options: object,
) -> Tensor:
    """SelfAttention, MHA, MQA, GQA and cross-attention; `rope` is how many channels rotate."""
    source = x if context is None else context
    q, k, v = (
        heads(linear(w, name, given), head_dim)
        for name, given in (("q_proj", x), ("k_proj", source), ("v_proj", source))
    )
    if "q_norm.weight" in w:
        q, k = rms(q, w["q_norm.weight"]), rms(k, w["k_norm.weight"])
    q, k = rotate(q, rope), rotate(k, rope)
    options["sinks"] = w.get("sinks")
    if only_weights:
        return weights(q, k, **options)
    out = attention(q, k, v, **options)
    if "gate_proj.weight" in w:
        gate = torch.sigmoid(linear(w, "gate_proj", x))
        out = out * heads(gate, gate.shape[-1] // q.shape[1])
    return linear(w, "o_proj", side_by_side(out))


def latent_layer(
    w: Leaves, x: Tensor, *, rank: int, nope: int, rope: int, v_dim: int, **options: object
) -> Tensor:
    """DeepSeek's equations: every head's keys and values rebuilt, the rotary key repeated."""
    q = linear(w, "q_proj", x)
    if "q_a_proj.weight" in w:
        low = rms(linear(w, "q_a_proj", x), w["q_a_layernorm.weight"])
        q = linear(w, "q_b_proj", low)
    q = heads(q, nope + rope)
    down = linear(w, "kv_a_proj_with_mqa", x)
    latent, k_rope = rms(down[..., :rank], w["kv_a_layernorm.weight"]), down[:, None, :, rank:]
    both = heads(linear(w, "kv_b_proj", latent), nope + v_dim)
    q = torch.cat([q[..., :nope], rotate(q[..., nope:], rope, pairs=True)], -1)
    k_rope = rotate(k_rope, rope, pairs=True).expand(-1, q.shape[1], -1, -1)
    k = torch.cat([both[..., :nope], k_rope], -1)
    return linear(w, "o_proj", side_by_side(attention(q, k, both[..., nope:], **options)))


def latent_kv_layer(
    w: Leaves, x: Tensor, *, head_dim: int, kv_heads: int, rope: int, **options: object
) -> Tensor:
    """GQA whose keys and values are rebuilt from one joint latent, and then rotated."""
    q = rotate(heads(linear(w, "q_proj", x), head_dim), rope)
    both = heads(linear(w, "kv_b_proj", linear(w, "kv_a_proj", x)), head_dim)
    k, v = rotate(both[:, :kv_heads], rope), both[:, kv_heads:]
    return linear(w, "o_proj", side_by_side(attention(q, k, v, **options)))
