"""Rotary layouts: pairs to halves and back, exactly, and which of them weights were trained for.

Rotation turns channels two by two. Hugging Face pairs channel `i` with `i + dim / 2` ("halves"),
Meta and DeepSeek `2i` with `2i + 1` ("pairs"); llama.cpp stores pairs. Weights in one layout run
in the other write fluent rubbish, and nothing raises. The rows of queries and keys are all that
differs: permuted alike, their products do not change.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Shaped
from torch import Tensor, nn

from regard.convert.linear import linear_of, numbers_of
from regard.convert.sharing import shared_copy
from regard.layers.attention import Attention
from regard.layers.latent import LatentKVAttention, MultiHeadLatentAttention
from regard.rope import Pairing, Rotary

Rows = Shaped[Tensor, "R *I"]
Rotating = Attention | MultiHeadLatentAttention | LatentKVAttention


def pairs_to_halves(
    rows: Rows, num_heads: int, *, rotary_dim: int | None = None, start: int = 0
) -> Rows:
    """The rows of `q_proj` or `k_proj`, or their biases, from the layout "pairs" to "halves".

    Args:
        rows: `[num_heads * head_dim, ...]`. A norm over one head is `num_heads=1`.
        num_heads: query heads for `q_proj`, key heads for `k_proj`.
        rotary_dim: how many channels of a head turn; all of them if None.
        start: the first of them. MLA's come last in a head.

    Raises:
        ValueError: if the heads do not divide the rows, or the channels are not in a head.

    >>> pairs_to_halves(torch.tensor([0, 1, 2, 3, 10, 11, 12, 13]), 2)
    tensor([ 0,  2,  1,  3, 10, 12, 11, 13])
    """
    return _reordered(rows, num_heads, rotary_dim, start, _evens_first)


def halves_to_pairs(
    rows: Rows, num_heads: int, *, rotary_dim: int | None = None, start: int = 0
) -> Rows:
    """The inverse of `pairs_to_halves`, with the same arguments.

    >>> halves_to_pairs(torch.tensor([0, 2, 1, 3, 9]), 1, rotary_dim=4)
    tensor([0, 1, 2, 3, 9])
    """
    return _reordered(rows, num_heads, rotary_dim, start, lambda n: _evens_first(n).argsort())


def _evens_first(width: int) -> Tensor:
    return torch.arange(width).unflatten(0, (-1, 2)).mT.flatten()


def _reordered(
    rows: Tensor, num_heads: int, dim: int | None, start: int, order: Callable[[int], Tensor]
) -> Tensor:
    if num_heads < 1 or rows.shape[0] % num_heads:
        raise ValueError(f"{rows.shape[0]} rows are not {num_heads} heads of one size")
    head_dim = rows.shape[0] // num_heads
    dim = head_dim - start if dim is None else dim
    if dim < 0 or dim % 2 or start < 0 or start + dim > head_dim:
        raise ValueError(
            f"{dim} channels from {start} on cannot turn two by two in heads of {head_dim}; "
            "rotary_dim is even, and start + rotary_dim at most the size of a head"
        )
    places = torch.arange(head_dim)
    places[start : start + dim] = start + order(dim)
    heads = rows.unflatten(0, (num_heads, head_dim))
    return heads[:, places.to(rows.device)].flatten(0, 1)


def with_pairing(layer: Rotating, pairing: Pairing) -> Rotating:
    """The same attention with its rotary channels laid out the other way: equal outputs.

    Queries', keys' and their norms' rows are permuted copies; the rest is shared. A layer of that
    pairing is returned as it is. What a cache holds is laid out the same way, so caches do not
    move between the two.

    Raises:
        ValueError: if the layer has no `Rotary`, or projections or norms that are not plain.

    >>> from regard import Attention
    >>> layer, x = Attention(16, 2, rope=Rotary(8, pairing="pairs")), torch.randn(1, 5, 16)
    >>> other = with_pairing(layer, "halves")
    >>> other.rope, torch.allclose(other(x), layer(x), atol=1e-6)
    (Rotary(8), True)
    """
    rope = layer.rope
    if not isinstance(rope, Rotary):
        raise ValueError(f"rope={rope} turns nothing, so there is no layout to change")
    if rope.pairing == pairing:
        return layer
    move = pairs_to_halves if pairing == "halves" else halves_to_pairs
    moved = {name: _moved(layer, name, each) for name, each in _moves(layer, move).items()}
    made = shared_copy(layer, rope=replace(rope, pairing=pairing))
    for name, child in moved.items():
        setattr(made, name, child)
    return made


Move = Callable[[Tensor], Tensor]


def _moves(layer: Rotating, move: Callable[..., Tensor]) -> dict[str, Move]:
    """What is to be done to the rows of each child that makes rotating channels, or norms them."""
    turning = partial(move, rotary_dim=layer.rope.dim)
    if isinstance(layer, MultiHeadLatentAttention):  # where a head's, or the latent's, end
        queries = "q_proj" if layer.q_lora_rank is None else "q_b_proj"
        return {
            queries: partial(turning, num_heads=layer.num_heads, start=layer.qk_nope_head_dim),
            "kv_a_proj_with_mqa": partial(turning, num_heads=1, start=layer.kv_lora_rank),
        }
    q = partial(turning, num_heads=layer.num_heads)
    k = partial(turning, num_heads=layer.num_kv_heads)
    if isinstance(layer, LatentKVAttention):
        width = layer.num_kv_heads * layer.head_dim
        return {
            "q_proj": q,
            "kv_b_proj": lambda rows: torch.cat([k(rows[:width]), rows[width:]]),  # then values
        }
    if layer.q_norm is None:
        return {"q_proj": q, "k_proj": k}
    one = partial(turning, num_heads=1)
    norms = {"q_norm": q, "k_norm": k} if layer.norm_width else {"q_norm": one, "k_norm": one}
    return {"q_proj": q, "k_proj": k, **norms}


def _moved(layer: nn.Module, name: str, move: Move) -> nn.Module:
    if not name.endswith("norm"):
        weight, bias = numbers_of(layer, name)
        return linear_of(move(weight), None if bias is None else move(bias))
    norm = layer.get_submodule(name)
    if type(norm) is not nn.RMSNorm:
        raise ValueError(
            f"{name} is a {type(norm).__name__}, which may tell channels apart in ways of its own; "
            "an nn.RMSNorm can be laid out anew"
        )
    made = nn.RMSNorm(norm.normalized_shape, eps=norm.eps, device="meta")
    made.weight = nn.Parameter(move(norm.weight.detach()))
    return made
