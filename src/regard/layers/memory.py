"""Another sequence's keys and values, projected once, and the layer that they belong to."""

from dataclasses import dataclass
from weakref import WeakKeyDictionary, ref

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.cache.streams import check_rows


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

    def reorder(self, rows: Int[Tensor, " N"]) -> "Memory":
        """The memory of these batch rows, `[N]` integers: for beams, selection and repetition."""
        check_rows(rows, [self.k])
        chosen = Memory(self.k[rows], self.v[rows])
        if self in _LAYER_OF:
            _LAYER_OF[chosen] = _LAYER_OF[self]
        return chosen


Context = Tensor | Memory | None  # another sequence, `[B, S, C]`, or its memory
_LAYER_OF: WeakKeyDictionary[Memory, "ref[nn.Module]"] = WeakKeyDictionary()


def recorded_for(layer: nn.Module, memory: Memory) -> Memory:
    """Record that the memory belongs to `layer`."""
    if not torch.compiler.is_compiling():
        _LAYER_OF[memory] = ref(layer)
    return memory


def check_own(layer: nn.Module, memory: Memory, want: tuple[int, int]) -> None:
    """Refuse a memory of another layer, or of other numbers of key heads and of channels."""
    got = memory.k.shape[1], memory.k.shape[3]
    if want != got:
        raise ValueError(
            f"context was remembered by a layer of (num_kv_heads, head_dim) = {got}, this one has "
            f"{want}; call remember() on this layer"
        )
    if torch.compiler.is_compiling() or memory not in _LAYER_OF:
        return
    if _LAYER_OF[memory]() not in (layer, None):
        raise ValueError(
            "context was remembered by another layer of the same sizes; call remember() on this "
            "layer, or, where both have the same weights, give Memory(memory.k, memory.v)"
        )
