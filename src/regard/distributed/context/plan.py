"""The plan of context parallel: which ranks have which tokens, and what they send."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from regard.constants import accumulating_dtype
from regard.distributed.context.agreement import NBYTES, agree
from regard.distributed.context.needed import Bytes, bytes_sent, needs_of
from regard.distributed.context.sending import widths_of
from regard.distributed.context.summing import gathered
from regard.distributed.ranks import Ranks
from regard.distributed.shards import Layout, Shards
from regard.masks import EVERYTHING, Mask, Span

Exchange = Literal["ring", "gather"]
Plan = TypeVar("Plan", bound="ContextParallel")


@dataclass(frozen=True, eq=False)
class ContextParallel:
    """The plan that `context_parallel` returns: which ranks have which tokens.

    Attributes:
        ranks: the ranks that share the tokens.
        layout: `"zigzag"` or `"contiguous"`.
        exchange: `"ring"` or `"gather"`.
        layers: the attention layers of the model.

    Examples:
        >>> from regard.distributed import ContextParallel
        >>> [name for name in vars(ContextParallel) if name in ("shard", "gathered", "remove")]
        ['shard', 'gathered', 'remove']
    """

    ranks: Ranks
    layout: Layout
    exchange: Exchange
    layers: tuple[Any, ...]
    _undo: list[Callable[[], Any]] = field(default_factory=list, init=False, repr=False)

    def shards(self, length: int) -> Shards:
        """The tokens of each rank, for a sequence of this length."""
        return Shards(length, self.ranks.size, self.layout)

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's tokens of a whole sequence: of inputs, and of targets."""
        return self.shards(x.shape[dim]).take(x, self.ranks.rank, dim)

    def gathered(self, x: Tensor, dim: int = 1) -> Tensor:
        """The whole sequence, on every rank, of every rank's tokens; every rank calls this.

        Its gradient is the sum over the ranks, since each of them may use the whole.
        """
        return gathered(x, self.ranks, self.layout, dim)

    def bytes_sent(
        self,
        batch: int,
        length: int,
        *,
        mask: Mask = EVERYTHING,
        dtype: torch.dtype = torch.float32,
    ) -> Bytes:
        """The bytes that this rank sends in a forward and in a backward pass of all layers.

        Without the gathers of `attention_mask=`, `documents=` and `position_ids=` of a model.

        Args:
            batch: rows.
            length: tokens of the whole sequence.
            mask: that of the calls; each layer's own is added.
            dtype: of keys and values.
        """
        shards, rank = self.shards(length), self.ranks.rank
        forward, backward = self._agreements * (self.ranks.size - 1) * NBYTES, 0
        for layer in self.layers:
            pattern, (elements, others) = self._sends(layer)
            sent = bytes_sent(
                needs_of(pattern & mask, shards),
                rank,
                token_bytes=batch * (elements * dtype.itemsize + others),
                gradient_bytes=batch * elements * accumulating_dtype(dtype).itemsize,
                exchange=self.exchange,
            )
            forward, backward = forward + sent.forward, backward + sent.backward
        return Bytes(forward, backward)

    @property
    def _agreements(self) -> int:
        """The number of agreements of the ranks in a forward pass."""
        return len(self.layers)

    def _sends(self, layer: Any) -> tuple[Mask, tuple[int, int]]:
        """The mask of a layer, and the widths of its streams."""
        return layer.mask, widths_of(layer)

    def remove(self) -> None:
        """Let every layer be as on one device again."""
        while self._undo:
            self._undo.pop()()

    def __deepcopy__(self, memo: object) -> "ContextParallel":
        return self  # a copy of a layer has the same ranks: process groups are not copied

    def __repr__(self) -> str:
        return (
            f"ContextParallel({len(self.layers)} layers, rank {self.ranks.rank} of "
            f"{self.ranks.size}, layout={self.layout!r}, exchange={self.exchange!r})"
        )


def replace(plan: ContextParallel, module: nn.Module, name: str, value: Any) -> None:
    """Set an attribute of one module, until `plan.remove()`. Class, weights and hooks stay."""
    attributes = module.__dict__
    if name in attributes:
        undo = partial(attributes.__setitem__, name, attributes[name])
    else:
        undo = partial(attributes.pop, name, None)
    attributes[name] = value
    on_removal(plan, undo)


def on_removal(plan: ContextParallel, undo: Callable[[], Any]) -> None:
    """Call a function in `plan.remove()`, too."""
    plan._undo.append(undo)


def agree_on_plan(
    plan: Callable[..., Plan],
    mesh: DeviceMesh,
    exchange: Exchange,
    layout: Layout | Literal["auto"],
    find: Callable[[Ranks], list[tuple[Any, Mask]]],
) -> Plan:
    """The plan of the attention modules and masks that `find` returns; all ranks agree on it.
    Raises a TypeError or ValueError, on every rank, if `find` raises on one or the ranks differ."""
    ranks, refusal, found = Ranks(mesh), None, list[tuple[Any, Mask]]()
    try:
        if exchange not in get_args(Exchange):
            raise ValueError(f"exchange is 'ring' or 'gather', got {exchange!r}")
        if layout not in ("auto", *get_args(Layout)):
            raise ValueError(f"layout is 'auto', 'zigzag' or 'contiguous', got {layout!r}")
        found = find(ranks)
    except (TypeError, ValueError) as error:
        refusal = error
    kinds = (f"{getattr(each, 'kind', type(each).__name__)} {mask!r}" for each, mask in found)
    facts = {"layers": ", ".join(kinds), "exchange": str(exchange), "layout": str(layout)}
    agree(ranks, facts, refusal=refusal)
    chosen = choose_layout(mask for _, mask in found) if layout == "auto" else layout
    return plan(ranks, chosen, exchange, tuple(each for each, _ in found))


def choose_layout(masks: Iterable[Mask]) -> Layout:
    """Zig-zag where a causal layer sees back to the start: its last queries have the most work."""
    return "zigzag" if any(map(_sees_all_before, masks)) else "contiguous"


_FAR = 1 << 40  # a slot farther than any window: only unbounded masks show it slot 0


def _sees_all_before(mask: Mask) -> bool:
    """Whether a mask is causal and does not bound how far back a query sees."""
    low, high = mask.reach(Span(_FAR, _FAR + 1, 0, _FAR + 1))
    return high is not None and high <= _FAR and not low
