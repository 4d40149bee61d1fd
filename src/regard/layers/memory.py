"""Another sequence's keys and values, projected once, and the layer that they belong to."""

from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Memory:
    """Another sequence's keys and values, projected once and read at every step: cross-attention.

    Made by `layer.remember(context)`, for that layer.

    Attributes:
        k: keys, `[B, num_kv_heads, S, head_dim]`.
        v: values, of the same shape.

    Examples:
        >>> import torch
        >>> from regard import Attention
        >>> layer, encoded = Attention(8, 2), torch.randn(1, 6, 8)
        >>> memory = layer.remember(encoded)
        >>> memory.k.shape
        torch.Size([1, 2, 6, 4])
        >>> x = torch.randn(1, 1, 8)
        >>> torch.equal(layer(x, context=memory), layer(x, context=encoded))
        True
    """

    k: Float[Tensor, "B G S D"]
    v: Float[Tensor, "B G S D"]
    _layer: "ref[nn.Module] | None" = field(default=None, init=False, repr=False)  # made it

    def reorder(self, rows: Int[Tensor, " N"]) -> "Memory":
        """The memory of these batch rows, `[N]` integers: for beams, selection and repetition."""
        return Memory(self.k[rows], self.v[rows])._of(self._layer)

    def _of(self, layer: "ref[nn.Module] | None") -> "Memory":
        if layer is not None:
            object.__setattr__(self, "_layer", layer)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Memory, (self.k, self.v)  # copies and unpickled ones belong to no layer


Context = Tensor | Memory | None  # another sequence, `[B, S, C]`, or its memory


def recorded_for(layer: nn.Module, memory: Memory) -> Memory:
    """Record that the memory belongs to `layer`."""
    return memory._of(None if torch.compiler.is_compiling() else ref(layer))


def check_own(layer: nn.Module, memory: Memory, want: tuple[int, int]) -> None:
    """Refuse a memory of another layer, or of other numbers of key heads and of channels."""
    got = memory.k.shape[1], memory.k.shape[3]
    if want != got:
        raise ValueError(
            f"context was remembered by a layer of (num_kv_heads, head_dim) = {got}, this one has "
            f"{want}; call remember() on this layer"
        )
    if torch.compiler.is_compiling() or memory._layer is None:
        return
    if memory._layer() not in (layer, None):
        raise ValueError(
            "context was remembered by another layer of the same sizes; call remember() on this "
            "layer, or, where both have the same weights, give Memory(memory.k, memory.v)"
        )
