"""Fused projections of queries, keys and values: splitting them into three, and fusing three.

A fused weight holds the same rows as three separate ones, with the heads in another order. So a
layout is an order of heads and a parameter name; splitting is a permutation, fusing its inverse.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Shaped
from torch import Tensor

SEPARATE = ("q_proj", "k_proj", "v_proj")


def in_blocks(num_heads: int, num_kv_heads: int) -> list[int]:
    """The order of heads in a fused weight: all queries, then all keys, then all values."""
    return list(range(num_heads + 2 * num_kv_heads))


def by_group(num_heads: int, num_kv_heads: int) -> list[int]:
    """The queries of a group, then its key and its value, then the next group. With as many groups
    as heads, that is a query, a key and a value for each head; with one group, three blocks.

    Examples:
        >>> by_group(4, 2)
        [0, 1, 4, 6, 2, 3, 5, 7]
    """
    size = num_heads // num_kv_heads
    queries = (range(g * size, (g + 1) * size) for g in range(num_kv_heads))
    return [
        head
        for g, group in enumerate(queries)
        for head in (*group, num_heads + g, num_heads + num_kv_heads + g)
    ]


@dataclass(frozen=True)
class Layout:
    """The layout in which one class of modules stores its fused projection.

    Args:
        weight: name of the weight in a state dict.
        bias: name of the bias.
        order: the order of the heads, given `num_heads` and `num_kv_heads`. Query heads are
            numbered first, then key heads, then value heads.
        transposed: whether the weight is `[in, out]`, as in GPT-2's Conv1D.

    Examples:
        >>> import torch
        >>> from regard.convert import Layout, split_state
        >>> mine = Layout("c_attn.weight", "c_attn.bias")
        >>> state = split_state({"c_attn.weight": torch.zeros(12, 4)}, mine, num_heads=2)
        >>> sorted(state)
        ['k_proj.weight', 'q_proj.weight', 'v_proj.weight']
    """

    weight: str
    bias: str
    order: Callable[[int, int], list[int]] = in_blocks
    transposed: bool = False


LAYOUTS = {  # by name of the module's class
    "Phi3Attention": Layout("qkv_proj.weight", "qkv_proj.bias"),
    "GPT2Attention": Layout("c_attn.weight", "c_attn.bias", transposed=True),
    "GPTNeoXAttention": Layout("query_key_value.weight", "query_key_value.bias", by_group),
    "FalconAttention": Layout("query_key_value.weight", "query_key_value.bias", by_group),
    "MultiheadAttention": Layout("in_proj_weight", "in_proj_bias"),  # torch.nn's
}


def split_fused(
    fused: Shaped[Tensor, "R *I"],
    layout: Layout,
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of queries, keys and values in a fused weight or bias.

    Args:
        fused: a weight as the layout stores it, or a bias.
        layout: one of `LAYOUTS`, or a user-defined one.
        num_heads: query heads.
        num_kv_heads: key and value heads; `num_heads` if None.

    Returns:
        Queries, keys and values; weights are `[out, in]`.

    Raises:
        ValueError: if the heads do not divide the rows, or each other.

    Examples:
        >>> import torch
        >>> from regard.convert import LAYOUTS, split_fused
        >>> rows = torch.tensor([10, 11, 20, 30, 12, 13, 21, 31])  # two groups
        >>> split_fused(rows, LAYOUTS["FalconAttention"], num_heads=4, num_kv_heads=2)
        (tensor([10, 11, 12, 13]), tensor([20, 21]), tensor([30, 31]))
    """
    groups = _groups(num_heads, num_kv_heads)
    rows = fused.mT if layout.transposed and fused.dim() == 2 else fused
    count = num_heads + 2 * groups
    if rows.shape[0] % count:
        raise ValueError(
            f"{rows.shape[0]} rows are not of {num_heads} query heads and {groups} each of keys "
            f"and values: {count} heads of one size; give the model's num_heads and num_kv_heads"
        )
    places = torch.tensor(layout.order(num_heads, groups)).argsort()
    heads = rows.unflatten(0, (count, -1))[places.to(rows.device)]
    q, k, v = (part.flatten(0, 1) for part in heads.split([num_heads, groups, groups]))
    return q, k, v


def fuse(
    q: Shaped[Tensor, "Q *I"],
    k: Shaped[Tensor, "K *I"],
    v: Shaped[Tensor, "K *I"],
    layout: Layout,
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
) -> Tensor:
    """The inverse of `split_fused`; raises a ValueError unless the rows are heads of one size."""
    groups = _groups(num_heads, num_kv_heads)
    sizes = {q.shape[0] / num_heads, k.shape[0] / groups, v.shape[0] / groups}
    if len(sizes) > 1 or q.shape[0] % num_heads:
        raise ValueError(
            f"q, k and v have {q.shape[0]}, {k.shape[0]} and {v.shape[0]} rows, which are not "
            f"{num_heads}, {groups} and {groups} heads of one size; give the layer's own"
        )
    order = torch.tensor(layout.order(num_heads, groups), device=q.device)
    heads = torch.cat([q, k, v]).unflatten(0, (num_heads + 2 * groups, -1))
    rows = heads[order].flatten(0, 1)
    return rows.mT.contiguous() if layout.transposed and rows.dim() == 2 else rows


def split_state(
    state: Mapping[str, Tensor], layout: Layout, *, num_heads: int, num_kv_heads: int | None = None
) -> dict[str, Tensor]:
    """A state dict with every fused projection split into `q_proj`, `k_proj` and `v_proj`.

    Args:
        state: the state dict.
        layout: one of `LAYOUTS`, or a user-defined one.
        num_heads: query heads.
        num_kv_heads: key and value heads; `num_heads` if None.

    Raises:
        ValueError: if there is no fused projection of this layout, or the heads do not divide it.

    Examples:
        >>> import torch
        >>> from regard.convert import LAYOUTS, split_state
        >>> state = torch.nn.MultiheadAttention(6, 3).state_dict()
        >>> sorted(split_state(state, LAYOUTS["MultiheadAttention"], num_heads=3))[:4]
        ['k_proj.bias', 'k_proj.weight', 'out_proj.bias', 'out_proj.weight']
    """
    kinds = {layout.weight: "weight", layout.bias: "bias"}
    fused = re.compile(f"(.*[.]|)({'|'.join(map(re.escape, kinds))})")
    made: dict[str, Tensor] = {}
    for key, value in state.items():
        if found := fused.fullmatch(key):
            parts = split_fused(value, layout, num_heads=num_heads, num_kv_heads=num_kv_heads)
            names = (f"{found[1]}{name}.{kinds[found[2]]}" for name in SEPARATE)
            made.update(zip(names, parts, strict=True))
        else:
            made[key] = value
    if made.keys() == state.keys():
        raise ValueError(f"no parameter is named {layout.weight}; choose another layout")
    return made


def fuse_state(
    state: Mapping[str, Tensor], layout: Layout, *, num_heads: int, num_kv_heads: int | None = None
) -> dict[str, Tensor]:
    """The inverse of `split_state`. If only some of the three have a bias, the others get zeros.

    Args:
        state: the state dict.
        layout: one of `LAYOUTS`, or a user-defined one.
        num_heads: query heads.
        num_kv_heads: key and value heads; `num_heads` if None.

    Raises:
        ValueError: if there are no separate projections, or their rows are not heads of one size.

    Examples:
        >>> import torch
        >>> from regard.convert import LAYOUTS, fuse_state
        >>> state = {f"attn.{name}_proj.weight": torch.zeros(6, 6) for name in "qkv"}
        >>> fused = fuse_state(state, LAYOUTS["Phi3Attention"], num_heads=3)
        >>> {name: tuple(weight.shape) for name, weight in fused.items()}
        {'attn.qkv_proj.weight': (18, 6)}
    """

    def fused(parts: list[Tensor]) -> Tensor:
        q, k, v = parts
        return fuse(q, k, v, layout, num_heads=num_heads, num_kv_heads=num_kv_heads)

    separate = re.compile(rf"(.*[.]|)({'|'.join(SEPARATE)})[.](weight|bias)")
    made: dict[str, Tensor] = {}
    for key, value in state.items():
        found = separate.fullmatch(key)
        if found is None:
            made[key] = value
        elif found.groups()[1:] == (SEPARATE[0], "weight"):
            rows = [state[f"{found[1]}{each}.weight"] for each in SEPARATE]
            biases = [state.get(f"{found[1]}{each}.bias") for each in SEPARATE]
            made[found[1] + layout.weight] = fused(rows)
            if any(bias is not None for bias in biases):
                pairs = zip(rows, biases, strict=True)
                made[found[1] + layout.bias] = fused(
                    [w.new_zeros(w.shape[0]) if b is None else b for w, b in pairs]
                )
    if made.keys() == state.keys():
        raise ValueError(f"no parameter is named {', '.join(SEPARATE)}; there is nothing to fuse")
    return made


def _groups(num_heads: int, num_kv_heads: int | None) -> int:
    groups = num_heads if num_kv_heads is None else num_kv_heads
    if groups < 1 or num_heads % groups:
        raise ValueError(f"num_kv_heads={groups} does not divide num_heads={num_heads}")
    return groups
