"""What curves are drawn from: attentions as sums of formulas, with sizes that sliders replace."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from regard.plan import cost
from regard.plan.devices import Device, roofline_seconds
from regard.plan.formula import Formula, Number
from regard.plan.planning import largest
from regard.plan.shapes import LayerShape, Storage

COSTS = ("cache_bytes", "visible_decode_flops", "decode_bytes")  # of `plan.cost`, in curves
ALWAYS = {"context": "context", "batch": "batch"}  # sizes that a slider replaces in every layer

Chosen = Mapping[str, int | str]  # the value of every slider, by its name


@dataclass(frozen=True)
class Stored:
    """The costs of a layer with one way of storing its cache.

    Args:
        formulas: of `COSTS`; of linear attention the cache alone.
        sizes: a number for every name in them.
    """

    formulas: Mapping[str, Formula]
    sizes: Mapping[str, Number]


@dataclass(frozen=True)
class Part:
    """Layers that are alike.

    Args:
        count: how many.
        stored: their costs, by the name of the storage.
        follows: names of sizes, each with the slider that replaces it.
    """

    count: int
    stored: Mapping[str, Stored]
    follows: Mapping[str, str]

    def value(self, name: str, chosen: Chosen) -> int:
        """One of `COSTS` for all these layers, exactly."""
        stored = self._stored(chosen)
        if name not in stored.formulas:
            return 0
        replaced = {each: int(chosen[slider]) for each, slider in self.follows.items()}
        return self.count * int(stored.formulas[name].evaluate(**{**stored.sizes, **replaced}))

    def _stored(self, chosen: Chosen) -> Stored:
        """With the chosen storage; if there is none, with the first."""
        return self.stored.get(str(chosen.get("storage")), next(iter(self.stored.values())))


@dataclass(frozen=True)
class Line:
    """An attention of a model, drawn as one line.

    Args:
        name: as readers know it; `{rank}` stands for the value of the slider `rank`.
        parts: its layers.

    Examples:
        >>> from regard.plan.shapes import STORAGES, LayerShape
        >>> from regard.see.pages.lines import line_of
        >>> gqa = LayerShape(
        ...     hidden_size=64, num_heads=8, num_kv_heads=2, head_dim=8, v_head_dim=8)
        >>> line = line_of("GQA-{key_heads}", [gqa, gqa], [STORAGES["plain"]], dtype="bfloat16",
        ...     follows={"num_kv_heads": "key_heads"})
        >>> chosen = {"context": 1000, "batch": 1, "key_heads": 4}
        >>> line.named(chosen), line.total("cache_bytes", chosen) == 2 * 1000 * 4 * (8 + 8) * 2
        ('GQA-4', True)
    """

    name: str
    parts: tuple[Part, ...]

    def named(self, chosen: Chosen) -> str:
        """The name with the values of sliders in it."""
        name = self.name
        for slider, value in chosen.items():
            name = name.replace(f"{{{slider}}}", str(value))
        return name

    def total(self, name: str, chosen: Chosen) -> int:
        """One of `COSTS` for all layers, exactly."""
        return sum(part.value(name, chosen) for part in self.parts)

    def seconds(self, device: Device, dtype: str, chosen: Chosen) -> float:
        """The least time of a decode step on a device: the sum of every layer's roofline."""
        return sum(
            roofline_seconds(
                part.value("visible_decode_flops", chosen),
                part.value("decode_bytes", chosen),
                device,
                dtype,
            )[0]
            for part in self.parts
        )

    def largest_context(self, memory: int, chosen: Chosen) -> int | None:
        """The most tokens whose cache fits the memory; None if every number does."""

        def taken(context: int) -> int:
            return self.total("cache_bytes", {**chosen, "context": context})

        return largest(taken, memory)


def line_of(
    name: str,
    layers: Iterable[LayerShape],
    storages: Sequence[Storage],
    *,
    dtype: str,
    tp: int = 1,
    cp: int = 1,
    follows: Mapping[str, str] | None = None,
) -> Line:
    """The line of a model's layers, those that are alike together.

    Args:
        name: see `Line`.
        layers: in any order.
        storages: that the slider of bits chooses among.
        dtype: of weights, hidden states and plain caches.
        tp: ranks of tensor parallelism.
        cp: ranks of context parallelism.
        follows: names of sizes of `LayerShape`, each with the slider that replaces it.

    Raises:
        ValueError: if a layer's costs are not known.
    """
    counts: dict[LayerShape, int] = {}
    for layer in layers:
        counts[layer] = counts.get(layer, 0) + 1
    parts = []
    for layer, count in counts.items():
        stored = {}
        for storage in storages:
            sizes = cost.sizes(layer, storage, context=1, dtype=dtype, tp=tp, cp=cp)
            known = cost.formulas(layer, storage)
            stored[storage.name] = Stored(
                {each: known[each] for each in COSTS if each in known}, sizes
            )
        replaced = ALWAYS if layer.state_elements else {**ALWAYS, **(follows or {})}
        parts.append(Part(count, stored, replaced))
    return Line(name, tuple(parts))


@dataclass(frozen=True)
class Slider:
    """A range input over values that need not be evenly spaced.

    Args:
        name: of what it chooses.
        label: above it.
        values: in order.
        start: the value at first; one of them.
        texts: what is shown for each value.
        divides: the slider whose value must be a multiple of this one's; `""` for any.
    """

    name: str
    label: str
    values: tuple[int | str, ...]
    start: int | str
    texts: tuple[str, ...]
    divides: str = ""

    def fitting(self, chosen: Chosen) -> list[int | str]:
        """The values that can be chosen beside those of the other sliders."""
        if not self.divides:
            return list(self.values)
        whole = int(chosen[self.divides])
        return [each for each in self.values if whole % int(each) == 0]
