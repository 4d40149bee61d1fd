"""The attentions that curves are drawn of, and the tables of values that their page is given."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from regard.plan.cost import Cost, Workload, cache_bytes, cost_of
from regard.plan.devices import Device, roofline_seconds
from regard.plan.planning import largest
from regard.plan.shapes import LayerShape, Storage

Chosen = Mapping[str, int | str]  # the value of every slider, by its name


@dataclass(frozen=True)
class Line:
    """An attention of a model, drawn as one line.

    Args:
        name: as readers know it.
        layers: each different layer, and how many are alike.
        storages: of the cache, that a slider chooses among.
        dtype: of weights, hidden states and plain caches.
        tp: ranks of tensor parallelism.
        cp: ranks of context parallelism.

    Examples:
        >>> from regard.plan.shapes import STORAGES, LayerShape
        >>> from regard.see.pages.lines import line_of
        >>> gqa = LayerShape(
        ...     hidden_size=64, num_heads=8, num_kv_heads=2, head_dim=8, v_head_dim=8)
        >>> line = line_of("GQA-2", [gqa, gqa], [STORAGES["plain"]], dtype="bfloat16")
        >>> line.cache_bytes({"context": 1000, "batch": 1}) == 2 * 1000 * 2 * (8 + 8) * 2
        True
    """

    name: str
    layers: tuple[tuple[LayerShape, int], ...]
    storages: tuple[Storage, ...]
    dtype: str
    tp: int = 1
    cp: int = 1

    def cache_bytes(self, chosen: Chosen) -> int:
        """Bytes of the cache of all layers."""
        return sum(each.cache_bytes for each in self._costs(self._storage(chosen), chosen))

    def seconds(self, device: Device, chosen: Chosen) -> float:
        """The least time of a decode step on a device: the sum of every layer's roofline."""
        return sum(
            roofline_seconds(each.visible_decode_flops, each.decode_bytes, device, self.dtype)[0]
            for each in self._costs(self._storage(chosen), chosen)
        )

    def largest_context(self, memory: int, chosen: Chosen) -> int | None:
        """The most tokens whose cache fits the memory; None if every number does."""
        return self._largest(self._storage(chosen), memory // int(chosen["batch"]))

    def tables(self, contexts: Sequence[int], memories: Iterable[int]) -> dict[str, Any]:
        """For each storage, the tables of values from which the page computes every figure of one
        row exactly.

        `cache_bytes` by context; `parts`, of layers that are alike, with the FLOPs and the bytes of
        a decode step that grow with the batch, by context, and those that do not; `largest`, the
        most tokens by the memory of a row.

        Args:
            contexts: of sliders and tables.
            memories: of one row, in bytes.
        """
        return {each.name: self._table(each, contexts, memories) for each in self.storages}

    def _table(
        self, storage: Storage, contexts: Sequence[int], memories: Iterable[int]
    ) -> dict[str, Any]:
        one, two = ([self._at(storage, n, rows) for n in contexts] for rows in (1, 2))
        parts = []
        for at in range(len(self.layers)):
            moved = [b[at].decode_bytes - a[at].decode_bytes for a, b in zip(one, two, strict=True)]
            fixed = one[0][at].decode_bytes - moved[0]
            flops = [costs[at].visible_decode_flops for costs in one]
            parts.append({"flops": flops, "moved": moved, "fixed": fixed})
        return {
            "cache_bytes": [sum(each.cache_bytes for each in costs) for costs in one],
            "parts": parts,
            "largest": {memory: self._largest(storage, memory) for memory in memories},
        }

    def _largest(self, storage: Storage, memory: int) -> int | None:
        """The most tokens of one row; bytes of rows add up."""

        def taken(tokens: int) -> int:
            work = Workload(context=tokens, dtype=self.dtype, tp=self.tp, cp=self.cp)
            return sum(cache_bytes(layer, storage, work) * n for layer, n in self.layers)

        return largest(taken, memory)

    def _storage(self, chosen: Chosen) -> Storage:
        """The chosen storage; if the line does not have it, its first one."""
        return next((s for s in self.storages if s.name == chosen.get("storage")), self.storages[0])

    def _costs(self, storage: Storage, chosen: Chosen) -> list[Cost]:
        return self._at(storage, int(chosen["context"]), int(chosen["batch"]))

    def _at(self, storage: Storage, context: int, batch: int) -> list[Cost]:
        """The costs of layers that are alike, together."""
        call: Any = {"context": context, "batch": batch, "dtype": self.dtype}
        return [
            cost_of(layer, storage, **call, tp=self.tp, cp=self.cp) * count
            for layer, count in self.layers
        ]


def line_of(
    name: str,
    layers: Iterable[LayerShape],
    storages: Sequence[Storage],
    *,
    dtype: str,
    tp: int = 1,
    cp: int = 1,
) -> Line:
    """The line of a model's layers, those that are alike together.

    Args:
        name: of the line.
        layers: in any order.
        storages: that the slider of bits chooses among.
        dtype: of weights, hidden states and plain caches.
        tp: ranks of tensor parallelism.
        cp: ranks of context parallelism.
    """
    counts = tuple(Counter(layers).items())
    return Line(name, counts, tuple(storages), dtype, tp, cp)


@dataclass(frozen=True)
class Slider:
    """A range input over values that need not be evenly spaced.

    Args:
        name: of what it chooses.
        label: above it.
        values: in order.
        start: the value at first; one of them.
        texts: what is shown for each value.
    """

    name: str
    label: str
    values: tuple[int | str, ...]
    start: int | str
    texts: tuple[str, ...]
