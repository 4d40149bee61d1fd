"""Layers in numpy, one head and one query at a time. They share no code with the library.

Weights come from a layer's state dict; everything else, shapes, norms, rotation, softmax, is here.
All is float64: agreement is to the rounding of a few hundred products.
"""

import cmath
import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
from torch import nn

Sees = Callable[[int, int, int, int], bool]  # (row of the batch, head, query, key) -> may look


def array(x: torch.Tensor) -> np.ndarray:
    return x.detach().double().numpy().copy()


def weights_of(layer: nn.Module) -> dict[str, np.ndarray]:
    return {name: array(value) for name, value in layer.state_dict().items()}


def linear(w: dict, name: str, x: np.ndarray) -> np.ndarray:
    """x W^T, and the bias if there is one; `x` itself where there is no such projection."""
    if f"{name}.weight" not in w:
        return x
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)


def heads(x: np.ndarray, size: int) -> np.ndarray:
    """[B, L, H*D] to [B, H, L, D], slice by slice."""
    return np.stack([x[..., i : i + size] for i in range(0, x.shape[-1], size)], axis=1)


def side_by_side(x: np.ndarray) -> np.ndarray:
    """[B, H, L, D] to [B, L, H*D]."""
    return np.concatenate([x[:, h] for h in range(x.shape[1])], axis=-1)


def rms(x: np.ndarray, weight: np.ndarray, eps: float = 1e-6) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def normed(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """RMS over a head, or over all of them at once where the weight is as wide as they are."""
    size = x.shape[-1]
    if len(weight) == size:
        return rms(x, weight, eps)
    return heads(rms(side_by_side(x), weight, eps), size)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def frequencies(dim: int, theta: float) -> list[float]:
    return [theta ** (-2 * i / dim) for i in range(dim // 2)]


def rotate(x: np.ndarray, turns: list[float], pairs: bool = False, grow: float = 1.0, first=0):
    """Each pair of channels as a complex number, rotated by its slot times its frequency."""
    out = x.copy()
    half = len(turns)
    for slot in range(x.shape[2]):
        for i, frequency in enumerate(turns):
            a, b = (2 * i, 2 * i + 1) if pairs else (i, i + half)
            spin = grow * cmath.exp(1j * (first + slot) * frequency)
            z = (x[:, :, slot, a] + 1j * x[:, :, slot, b]) * spin
            out[:, :, slot, a], out[:, :, slot, b] = z.real, z.imag
    return out


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    sees: Sees = lambda b, h, i, j: True,
    *,
    scale: float | None = None,
    bias: np.ndarray | None = None,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Outputs [B, H, L, Dv] and weights [B, H, L, S]; key heads are shared by neighbours."""
    batch, num_heads, queries, size = q.shape
    group = num_heads // k.shape[1]
    out = np.zeros((batch, num_heads, queries, v.shape[-1]))
    weights = np.zeros((batch, num_heads, queries, k.shape[2]))
    for b, h, i in np.ndindex(batch, num_heads, queries):
        shares = {}
        for j in range(k.shape[2]):
            if not sees(b, h, i, j):
                continue
            score = float(q[b, h, i] @ k[b, h // group, j]) * (scale or 1 / math.sqrt(size))
            if softcap is not None:
                score = softcap * math.tanh(score / softcap)
            if bias is not None:
                score += bias[b, h, i, j]
            shares[j] = math.exp(score)
        total = sum(shares.values()) + (0.0 if sinks is None else math.exp(sinks[h]))
        for j, share in shares.items():
            weights[b, h, i, j] = share / total
            out[b, h, i] += share / total * v[b, h // group, j]
    return out, weights


def causal(b: int, h: int, i: int, j: int) -> bool:
    return j <= i


def window(size: int) -> Sees:
    return lambda b, h, i, j: i - size < j <= i


def padded(valid: torch.Tensor, also: Sees = lambda b, h, i, j: True) -> Sees:
    real = valid.tolist()
    return lambda b, h, i, j: bool(real[b][j]) and also(b, h, i, j)


def latent_attention(
    w: dict,
    x: np.ndarray,
    sizes: dict,
    turns: list[float],
    *,
    scale: float,
    norm: bool = True,
    grow: float = 1.0,
) -> np.ndarray:
    """DeepSeek's equations: every head's keys and values rebuilt, the rotary key repeated."""
    rank, nope, turned = (
        sizes[n] for n in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
    )
    q = linear(w, "q_proj", x)
    if "q_a_proj.weight" in w:
        low = linear(w, "q_a_proj", x)
        q = linear(w, "q_b_proj", rms(low, w["q_a_layernorm.weight"]) if norm else low)
    q = heads(q, nope + turned)
    down = linear(w, "kv_a_proj_with_mqa", x)
    latent, k_rope = down[..., :rank], down[:, None, :, rank:]
    if norm:
        latent = rms(latent, w["kv_a_layernorm.weight"])
    both = heads(linear(w, "kv_b_proj", latent), nope + sizes["v_head_dim"])
    q_rope = rotate(q[..., nope:], turns, pairs=True, grow=grow)
    k_rope = rotate(k_rope, turns, pairs=True, grow=grow).repeat(q.shape[1], axis=1)
    out, _ = attention(
        np.concatenate([q[..., :nope], q_rope], -1),
        np.concatenate([both[..., :nope], k_rope], -1),
        both[..., nope:],
        causal,
        scale=scale,
    )
    return linear(w, "o_proj", side_by_side(out))


def same(ours: torch.Tensor, judged: np.ndarray) -> None:
    """Equal to float64 rounding."""
    assert ours.dtype == torch.float64
    assert tuple(ours.shape) == judged.shape
    ours = array(ours)
    assert np.abs(ours - judged).max() <= 1e-12 * (1 + np.abs(judged).max())


def differs(one: torch.Tensor, other: np.ndarray) -> None:
    """The outputs differ: the option under test has an effect."""
    assert np.abs(array(one) - other).max() > 1e-3


def ready(layer: nn.Module) -> nn.Module:
    """In float64 and eval mode, all parameters drawn: no zero or one hides a missing one."""
    for name, parameter in layer.named_parameters():
        nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.4)
    return layer.double().eval()


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def judge(layer, x, sees=causal, context=None, turn=lambda x: x, eps=1e-6, **options):
    """A layer of plain heads: its output and its weights."""
    w, size = weights_of(layer), layer.head_dim
    x = array(x)
    source = x if context is None else array(context)
    q, k, v = (
        heads(linear(w, f"{name}_proj", given), size)
        for name, given in (("q", x), ("k", source), ("v", source))
    )
    if "q_norm.weight" in w:
        q, k = (normed(t, w[f"{name}_norm.weight"], eps) for name, t in (("q", q), ("k", k)))
    out, weights = attention(turn(q), turn(k), v, sees, sinks=w.get("sinks"), **options)
    if "gate_proj.weight" in w:
        gate = sigmoid(linear(w, "gate_proj", x))
        out = out * heads(gate, gate.shape[-1] // layer.num_heads)
    return linear(w, "o_proj", side_by_side(out)), weights


@torch.no_grad()
def decode(layer, x, cache, sizes=(3, 1, 1, 2), **options):
    edges = np.cumsum([0, *sizes])
    pieces = [layer(x[:, a:b], cache=cache, **options) for a, b in pairwise(edges)]
    assert cache.length == x.shape[1]
    return torch.cat(pieces, dim=1)
