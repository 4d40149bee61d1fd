"""How a family's module projects queries, keys and values, before rotation, by its own children."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from jaxtyping import Float
from torch import Tensor

from regard.heads import split_heads

Heads = Float[Tensor, "B H L D"]


class Projection(NamedTuple):
    """From hidden states to heads.

    `queries` and `memory` are `both` in two steps, for modules with cross-attention; None for
    others. `children` names the child that projects queries, keys or values, where each has one.
    """

    both: Callable[[Any, Tensor], tuple[Tensor, Tensor, Tensor]]
    queries: Callable[[Any, Tensor], Tensor] | None = None
    memory: Callable[[Any, Tensor], tuple[Tensor, Tensor]] | None = None
    children: "Separate | None" = None


@dataclass(frozen=True)
class Separate:
    """Three children, one each for queries, keys and values."""

    q: str = "q_proj"  # the child that projects queries; `k` and `v` likewise
    k: str = "k_proj"
    v: str = "v_proj"
    head_dim: str = "head_dim"  # the module's attribute that holds the size of a head
    # whether `q_norm` and `k_norm` norm each head or the whole width; None without them
    norm: Literal["head", "width"] | None = None
    # the attribute of the config whose value, unless None, bounds all three
    clip: str | None = None

    def queries(self, module: Any, x: Tensor) -> Tensor:
        return self._split(module, getattr(module, self.q)(x), "q_norm")

    def memory(self, module: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        keys = self._split(module, getattr(module, self.k)(x), "k_norm")
        return keys, self._split(module, getattr(module, self.v)(x), None)

    def both(self, module: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return (self.queries(module, x), *self.memory(module, x))

    def of_products(self, module: Any, wide: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values from what their children have computed."""
        q, k, v = map(partial(self._split, module), wide, ("q_norm", "k_norm", None))
        return q, k, v

    def _split(self, module: Any, wide: Tensor, norm: str | None) -> Tensor:
        if norm is not None and self.norm == "width":
            wide = getattr(module, norm)(wide)
        bound = None if self.clip is None else getattr(module.config, self.clip)
        if bound is not None:
            wide = wide.clamp(-bound, bound)
        heads = split_heads(wide, getattr(module, self.head_dim))
        return getattr(module, norm)(heads) if norm is not None and self.norm == "head" else heads


def separate(**names: Any) -> Projection:
    """A projection by three children; the arguments are those of `Separate`."""
    made = Separate(**names)
    return Projection(made.both, made.queries, made.memory, made)


def with_normed_values() -> Projection:
    """Three children, and norms of all three; one that is missing: values are the keys before their
    norm and rotation (Gemma 3n and 4)."""

    def memory(module: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        keys = _split(module, module.k_proj(x))
        own = module._modules.get("v_proj")
        values = keys if own is None else _split(module, own(x))
        return module.k_norm(keys), module.v_norm(values)

    queries = Separate(norm="head").queries
    return Projection(lambda module, x: (queries(module, x), *memory(module, x)), queries, memory)


def blocks(fused: str) -> Projection:
    """One child: all queries, then all keys, then all values (Phi-3)."""

    def both(module: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        keys = module.num_key_value_heads * module.head_dim
        wide = getattr(module, fused)(x)
        q, k, v = wide.split([wide.shape[-1] - 2 * keys, keys, keys], dim=-1)
        return _split(module, q), _split(module, k), _split(module, v)

    return Projection(both)


def _split(module: Any, x: Tensor) -> Tensor:
    return split_heads(x, module.head_dim)


def gpt2() -> Projection:
    """`c_attn` holds queries, keys and values; across sequences, `q_attn` holds the queries."""

    def both(module: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = module.c_attn(x).chunk(3, -1)
        return _split(module, q), _split(module, k), _split(module, v)

    def queries(module: Any, x: Tensor) -> Tensor:
        return _split(module, module.q_attn(x))

    def memory(module: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        k, v = module.c_attn(x).chunk(2, -1)
        return _split(module, k), _split(module, v)

    return Projection(both, queries, memory)


def by_head(fused: str, head_dim: str) -> Projection:
    """One child: a query, a key and a value for the first head, then for the next (GPT-NeoX)."""

    def both(module: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        three = split_heads(getattr(module, fused)(x), 3 * getattr(module, head_dim))
        q, k, v = three.chunk(3, dim=-1)
        return q, k, v

    return Projection(both)


def by_group(fused: str) -> Projection:
    """One child: the queries of a group, then its key and its value (Falcon: one group is MQA, as
    many as there are heads is MHA)."""

    def both(module: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        group = module.num_heads // module.num_kv_heads
        wide = getattr(module, fused)(x).unflatten(-1, (-1, group + 2, module.head_dim))
        q, k, v = wide.split([group, 1, 1], dim=-2)
        q, k, v = (each.flatten(2, 3).transpose(1, 2) for each in (q, k, v))
        return q, k, v

    return Projection(both)
