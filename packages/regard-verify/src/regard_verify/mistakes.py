"""Attention with one common mistake each: what it returns, and the mistake in words.

The report names a mistake where it gives the values that the subject returned. Where heads cannot
be found by what they change, a mistake that gives the module's own values shows how it is laid out.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from regard_verify.oracle import key_heads, rotated, softmax


class Heads(NamedTuple):
    """Queries [B, H, L, D], keys and values [B, H, S, D] in float64, and what is visible.

    `many` neighbouring heads have the same keys and values.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    keep: Tensor  # [#B, #H, L, S]
    scale: float
    many: int = 1

    def scores(self) -> Tensor:
        """[B, H, L, S]."""
        return torch.einsum("bhid,bhjd->bhij", self.q, self.k) * self.scale

    def weights(self) -> Tensor:
        """The right weights [B, H, L, S]."""
        return softmax(self.scores(), self.keep)

    def out(self) -> Tensor:
        """The right output [B, H, L, D]."""
        return self.weights() @ self.v


def heads_of(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor, scale: float, *, tiled: bool = False
) -> Heads:
    """Heads in float64, with a key head for each query head."""
    order = key_heads(q.shape[1], k.shape[1], tiled)
    full = keep.expand(1, 1, q.shape[2], k.shape[2]) if keep.ndim == 2 else keep
    many = 1 if tiled else q.shape[1] // k.shape[1]
    return Heads(q.double(), k.double()[:, order], v.double()[:, order], full, scale, many)


def turned(heads: Heads, pairing: str, theta: float = 10_000.0) -> Heads:
    """Heads after rotation by positions, the last of which are those of the queries."""
    first = max(heads.k.shape[2] - heads.q.shape[2], 0)
    return heads._replace(
        q=_turned(heads.q, pairing, theta, first), k=_turned(heads.k, pairing, theta)
    )


def _turned(x: Tensor, pairing: str, theta: float, first: int = 0) -> Tensor:
    return rotated(x, first + torch.arange(x.shape[2]), pairing, theta).double()


def mistakes(
    plain: Heads, pairing: str = "none", theta: float = 10_000.0
) -> Iterator[tuple[str, Tensor]]:
    """Each mistake, and the output [B, H, L, D] that it gives for these heads before rotation."""
    square = plain.q.shape == plain.k.shape == plain.v.shape
    right = turned(plain, pairing, theta)
    if square:
        for sentence, mixed in BEFORE.items():
            yield sentence, turned(mixed(plain), pairing, theta).out()
        yield VIEWED_BACK, _merged(turned(BEFORE[VIEWED](plain), pairing, theta).out())
    for sentence, mistaken in AFTER.items():
        if square or sentence != KEYS_AS_VALUES:
            yield sentence, mistaken(right)
    if pairing == "none":
        return
    q, k, v = plain.q, plain.k, plain.v
    first = max(k.shape[2] - q.shape[2], 0)
    even = v.shape[-1] % 2 == 0  # values of an odd number of channels cannot be rotated
    values = _turned(v, pairing, theta) if even else v
    given = (
        (right.q, right.k, values),
        (right.q, k, values),
        (right.q, k, v),
        (q, right.k, v),
        (_turned(q, pairing, theta, first + 1), right.k, v),
        (_turned(right.q, pairing, theta, first), _turned(right.k, pairing, theta), v),
    )
    for sentence, (queries, keys, used) in zip(ROTATIONS, given, strict=True):
        if even or "values" not in sentence:
            yield sentence, plain._replace(q=queries, k=keys, v=used).out()


ROTATIONS = (
    "the values are rotated too",
    "the queries and the values are rotated, and the keys are not",
    "the queries are rotated, and the keys are not",
    "the keys are rotated, and the queries are not",
    "the queries are rotated by one position too many",
    "queries and keys are rotated twice",
)


def _over(dim: int, heads: Heads) -> Tensor:
    """The output of a softmax over another axis of the scores."""
    scores = heads.scores().transpose(dim, -1)
    keep = heads.keep.expand_as(heads.scores()).transpose(dim, -1)
    return softmax(scores, keep).transpose(dim, -1) @ heads.v


def _viewed(x: Tensor, many: int = 1) -> Tensor:
    """[B, H, L, D], as if [B, L, G * D] had been viewed as [B, G, L, D]."""
    x = x[:, ::many]
    batch, heads, length, dim = x.shape
    return x.transpose(1, 2).reshape(batch, heads, length, dim).repeat_interleave(many, 1)


def _merged(x: Tensor) -> Tensor:
    """[B, H, L, D], as if it had been viewed as [B, L, H * D] and split again by heads."""
    batch, heads, length, dim = x.shape
    return x.reshape(batch, length, heads, dim).transpose(1, 2)


def _rolled(heads: Heads, by: int) -> Tensor:
    return heads.weights().roll(by, 1) @ heads.v


def _queries_rolled(heads: Heads, by: int) -> Tensor:
    return heads._replace(q=heads.q.roll(by, 1)).out()


def _without(heads: Heads, key: int) -> Tensor:
    keep = heads.keep.expand_as(heads.scores()).clone()
    keep[..., key] = False
    return heads._replace(keep=keep).out()


def halves_averaged(heads: Heads) -> Tensor:
    """The mean of attention to the first half of the keys and to the second."""
    first = torch.arange(heads.k.shape[2]) < heads.k.shape[2] // 2
    one, other = (heads._replace(keep=heads.keep & mine).out() for mine in (first, ~first))
    return (one + other) / 2


KEYS_AS_VALUES = "the rotated keys are used as values"  # which needs both of one shape
LOW = -1e30  # a score that a mask sets, as code does that knows no infinity
VIEWED = "the heads are split by a view without a transposition"
VIEWED_BACK = "the heads are split and merged by a view without a transposition"
_VIEWS = {  # the parts that are split by a view
    VIEWED: "qkv",
    "the queries are split by a view without a transposition": "q",
    "the keys are split by a view without a transposition": "k",
    "the values are split by a view without a transposition": "v",
}
_ROLES = {  # the parts that serve as queries, keys and values
    "the keys are used as values": "qkk",
    "the values are used as keys": "qvv",
    "the queries are used as keys": "qqv",
    "the keys are used as queries": "kkv",
    "queries and keys change places": "kqv",
}


def _split(heads: Heads, parts: str) -> Heads:
    """Heads of which these parts are split by a view."""
    q = _viewed(heads.q) if "q" in parts else heads.q
    k = _viewed(heads.k, heads.many) if "k" in parts else heads.k
    v = _viewed(heads.v, heads.many) if "v" in parts else heads.v
    return heads._replace(q=q, k=k, v=v)


def _served(heads: Heads, roles: str) -> Heads:
    """Heads with these parts as queries, keys and values."""
    q, k, v = (getattr(heads, each) for each in roles)
    return heads._replace(q=q, k=k, v=v)


BEFORE: dict[str, Callable[[Heads], Heads]] = {
    **{sentence: partial(_split, parts=parts) for sentence, parts in _VIEWS.items()},
    **{sentence: partial(_served, roles=roles) for sentence, roles in _ROLES.items()},
    "the queries, already scaled, are used as keys": lambda heads: heads._replace(
        k=heads.q, scale=heads.scale**2
    ),
}
AFTER: dict[str, Callable[[Heads], Tensor]] = {
    "the softmax runs over the queries": partial(_over, 2),
    "the softmax runs over the heads": partial(_over, 1),
    "the softmax runs over the heads, hidden keys among them": lambda heads: (
        heads.scores().masked_fill(~heads.keep, LOW).softmax(1) @ heads.v
    ),
    "there is no softmax: the scores are the weights": lambda heads: (
        torch.where(heads.keep, heads.scores(), 0.0) @ heads.v
    ),
    "the weights are divided by their sums over the queries": lambda heads: (
        heads.weights() / heads.weights().sum(-2, keepdim=True).clamp(min=1e-30) @ heads.v
    ),
    "the mask is applied after the softmax, so that weights no longer sum to 1": lambda heads: (
        heads._replace(keep=torch.ones_like(heads.keep)).weights() * heads.keep @ heads.v
    ),
    KEYS_AS_VALUES: lambda heads: heads._replace(v=heads.k).out(),
    "the key heads are in the reverse order": lambda x: x._replace(k=x.k.flip(1)).out(),
    "the value heads are in the reverse order": lambda x: x._replace(v=x.v.flip(1)).out(),
    "the weights of a head are applied to the values of the next head": partial(_rolled, by=1),
    "the weights of a head are applied to the values of the head before": partial(_rolled, by=-1),
    "the queries of a head meet the keys of the next head": partial(_queries_rolled, by=1),
    "the queries of a head meet the keys of the head before": partial(_queries_rolled, by=-1),
    "the heads are merged without transposing them back": lambda heads: _merged(heads.out()),
    "the last key is left out": partial(_without, key=-1),
    "the first key is left out": partial(_without, key=0),
    "the last key is lost after the softmax": lambda x: x.weights()[..., :-1] @ x.v[..., :-1, :],
    "the output is divided by the number of keys": lambda heads: heads.out() / heads.k.shape[2],
}
AVERAGED = "the parts of two ranks are averaged, and not merged by their sums of exponentials"
SENTENCES = (AVERAGED, *BEFORE, VIEWED_BACK, *AFTER, *ROTATIONS)
