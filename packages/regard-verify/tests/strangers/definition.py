"""What a drawn attention must give, from its weights and its drawing, in float64 with numpy.

It shares nothing with the text that is written: rotation is a product of complex numbers, heads are
taken one by one, and weights are cut by counting channels.
"""

from typing import Any

import numpy as np

from strangers.calls import GROUPS, HEADS, NOPE, OWN, ROPE, VALUE, WIDTH, Case
from strangers.draw import Drawing


class Weights:
    """The weights of a module, as numpy arrays."""

    def __init__(self, attention: Any) -> None:
        self.of = {n: v.double().numpy() for n, v in attention.state_dict().items()}

    def linear(self, name: str, x: np.ndarray, *, transposed: bool = False) -> np.ndarray:
        name = name if f"{name}.weight" in self.of else f"{name}.0"  # of a Sequential
        if transposed:
            return x @ self.of[f"{name}.weight"] + self.of[f"{name}.bias"]
        return x @ self.of[f"{name}.weight"].T + self.of.get(f"{name}.bias", 0.0)

    def norm(self, kind: str, name: str, x: np.ndarray) -> np.ndarray:
        if kind == "LayerNorm":
            x = x - x.mean(-1, keepdims=True)
            x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
            return x * self.of[f"{name}.weight"] + self.of[f"{name}.bias"]
        mean = (x.astype(np.float32) ** 2).mean(-1, keepdims=True)
        return x / np.sqrt(mean.astype(np.float64) + 1e-6) * self.of[f"{name}.weight"]


def rotated(x: np.ndarray, pairing: str) -> np.ndarray:
    """x [..., L, D] times exp(i position frequency)."""
    length, width = x.shape[-2:]
    angles = np.arange(length)[:, None] * 10000.0 ** (-np.arange(0, width, 2) / width)
    half = width // 2
    first, last = (
        (x[..., :half], x[..., half:]) if pairing != "pairs" else (x[..., ::2], x[..., 1::2])
    )
    turned = (first + 1j * last) * np.exp(1j * angles)
    if pairing != "pairs":
        return np.concatenate([turned.real, turned.imag], -1)
    return np.stack([turned.real, turned.imag], -1).reshape(x.shape)


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """Head by head: q [B, H, L, D], k and v [B, G, S, D], visible [B, L, S]."""
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    for b, h in np.ndindex(q.shape[:2]):
        g = h * k.shape[1] // q.shape[1]
        scores = q[b, h] @ k[b, g].T / q.shape[-1] ** 0.5
        powers = np.where(visible[b], np.exp(scores - scores.max()), 0.0)
        out[b, h] = powers / powers.sum(-1, keepdims=True) @ v[b, g]
    return out


def expected(drawing: Drawing, attention: Any, case: Case) -> np.ndarray:
    """The output [B, L, E] of a module, or [B, H, L, D] of a function."""
    arrays = {id(each): each.numpy() for each in case.inputs}
    q, k, v = (arrays[id(each)] for each in case.inputs)
    visible = case.visible().numpy()
    if drawing.family in ("function", "kernel"):
        return attend(q, k, v, visible)
    weights = Weights(attention)
    if drawing.family == "latent":
        return _latent(drawing, weights, q, visible)
    if drawing.family == "list":
        return _list(drawing, weights, q, visible)
    out = _layer(drawing, weights, q, k, v, visible)
    if drawing.zeroed and case.mask is not None:
        out = np.where(case.mask.numpy()[:, 0, :, None], out, 0.0)
    return out


def _layer(
    d: Drawing, weights: Weights, x: np.ndarray, k: np.ndarray, v: np.ndarray, visible: np.ndarray
) -> np.ndarray:
    first = x
    if d.norm == "pre":
        alone = k is x
        x = weights.norm(d.norm_class, d.norm_name, x)
        if alone:
            k = v = x
    queries, keys, values = _projected(d, weights, x, k, v)
    if d.qk_norm:
        queries = weights.norm(d.norm_class, "q_norm", queries)
        keys = weights.norm(d.norm_class, "k_norm", keys)
    if d.rope != "none":
        pairing = "pairs" if d.rope == "complex" else d.rope
        queries, keys = rotated(queries, pairing), rotated(keys, pairing)
    out = attend(queries, keys, values, visible)
    out = out.transpose(0, 2, 1, 3).reshape(*x.shape[:2], -1)
    if d.gate:
        out = out / (1 + np.exp(-weights.linear("gate", x)))
    if d.output:
        out = weights.linear(d.out_name, out)
    if d.residual:
        out = first + out
    return weights.norm(d.norm_class, d.norm_name, out) if d.norm == "post" else out


def _sizes(d: Drawing) -> tuple[int, int, int]:
    """Query heads, key heads, and their width."""
    heads = 1 if d.kind == "single" else HEADS
    groups = {"GQA": GROUPS, "MQA": 1}.get(d.kind, heads)
    return heads, groups, OWN if d.own_width else WIDTH // heads


def _cut(flat: np.ndarray, order: tuple[str, ...], sizes: dict[str, int]) -> np.ndarray:
    """Channels [B, L, C] cut in an order of axes, as [qkv, B, heads, L, dim]."""
    whole = flat.reshape(*flat.shape[:2], *(sizes[each] for each in order))
    where = {each: 2 + at for at, each in enumerate(order)}
    return whole.transpose(where["qkv"], 0, where["heads"], 1, where["dim"])


def _projected(
    d: Drawing, weights: Weights, x: np.ndarray, k: np.ndarray, v: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    heads, groups, width = _sizes(d)
    order = d.order if d.projections == "three" else ("qkv", "heads", "dim")

    def one(flat: np.ndarray, heads: int) -> np.ndarray:
        return _cut(flat, order, {"qkv": 1, "heads": heads, "dim": width})[0]

    if d.projections == "fused by group":
        flat = weights.linear(d.fused, x)
        flat = flat.reshape(*flat.shape[:2], groups, heads // groups + 2, width)
        flat = flat.transpose(0, 2, 3, 1, 4)
        queries = flat[:, :, :-2].reshape(len(x), heads, -1, width)
        return queries, flat[:, :, -2], flat[:, :, -1]
    if d.projections == "fused":
        flat = weights.linear(d.fused, x, transposed=d.conv)
        if groups == heads:
            return tuple(_cut(flat, d.order, {"qkv": 3, "heads": heads, "dim": width}))
        ends = np.cumsum([heads * width, groups * width])
        parts = np.split(flat, ends, axis=-1)
        return tuple(one(p, n) for p, n in zip(parts, (heads, groups, groups), strict=True))
    if d.projections == "matrices":
        flats = [each @ _matrix(weights, n) for n, each in zip(d.three, (x, k, v), strict=True)]
        return tuple(one(p, n) for p, n in zip(flats, (heads, groups, groups), strict=True))
    if d.projections == "pair":
        both = weights.linear(d.pair[1], k)
        keys, values = _cut(both, d.order, {"qkv": 2, "heads": groups, "dim": width})
        return one(weights.linear(d.pair[0], x), heads), keys, values
    if d.projections == "low-rank":
        down, norm, up = d.low_rank
        queries = weights.norm(d.norm_class, norm, weights.linear(down, x))
        queries = weights.linear(up, queries)
    else:
        queries = weights.linear(d.three[0], x)
    keys, values = weights.linear(d.three[1], k), weights.linear(d.three[2], v)
    return one(queries, heads), one(keys, groups), one(values, groups)


def _matrix(weights: Weights, name: str) -> np.ndarray:
    found = weights.of[name]
    return found.reshape(found.shape[0], -1)


def _list(d: Drawing, weights: Weights, x: np.ndarray, visible: np.ndarray) -> np.ndarray:
    names = [n.rpartition(".")[0] for n in weights.of if n.endswith(f".{d.three[0]}.weight")]
    outs = []
    for home in (name.removesuffix(f".{d.three[0]}") for name in names):
        q, k, v = (weights.linear(f"{home}.{name}", x)[:, None] for name in d.three)
        outs += [attend(q, k, v, visible)[:, 0]]
    assert len(outs) == HEADS
    out = np.concatenate(outs, -1)
    return weights.linear(d.out_name, out) if d.output else out


def _latent(d: Drawing, weights: Weights, x: np.ndarray, visible: np.ndarray) -> np.ndarray:
    rope = ROPE if d.rope != "none" else 0
    value = weights.of[f"{d.out_name}.weight"].shape[1] // HEADS
    assert value in (VALUE, NOPE)
    down, norm, up = d.low_rank
    if d.query_rank:
        q = weights.linear(up, weights.norm("RMSNorm", norm, weights.linear(down, x)))
    else:
        q = weights.linear(d.three[0], x)
    q = q.reshape(*x.shape[:2], HEADS, NOPE + rope).transpose(0, 2, 1, 3)
    wide = weights.linear("kv_down", x)
    latent = weights.norm("RMSNorm", "kv_norm", wide[..., : wide.shape[-1] - rope])
    kv = weights.linear("kv_up", latent).reshape(*x.shape[:2], HEADS, NOPE + value)
    kv = kv.transpose(0, 2, 1, 3)
    k, v = kv[..., :NOPE], kv[..., NOPE:]
    if rope:
        shared = rotated(wide[..., -rope:], d.rope)[:, None].repeat(HEADS, 1)
        k = np.concatenate([k, shared], -1)
        q = np.concatenate([q[..., :NOPE], rotated(q[..., NOPE:], d.rope)], -1)
    out = attend(q, k, v, visible).transpose(0, 2, 1, 3).reshape(*x.shape[:2], -1)
    return weights.linear(d.out_name, out)
