"""Keys and values that a layer of a model leaves for others: the parts that its cache returned."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from regard.cache import Part
from regard.hf.running.calls import one_part
from regard.ops.parts import concatenated

ARGUMENT = "shared_kv_states"  # the dictionary that a model passes to each of its layers


class SharedKeys(Sequence[Tensor]):
    """Keys and values as transformers passes them between layers, a pair of tensors.

    Indexing copies them out of pages or codes. Layers that regard runs read the parts.

    Attributes:
        parts: as the cache returned them, which may be pages or codes.
        attending: the cache, if it attends itself.
    """

    def __init__(self, parts: tuple[Part, ...], attending: Any) -> None:
        self.parts, self.attending = parts, attending

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return concatenated(self.parts).streams[index]


def leave(given: Mapping[str, Any], name: str, parts: tuple[Part, ...], attending: Any) -> None:
    """Leave the parts for later layers of the same call."""
    given[ARGUMENT][name] = SharedKeys(parts, attending)


def take(given: Mapping[str, Any], name: str) -> SharedKeys:
    """The parts that an earlier layer of the same call left.

    Tensors that the model moved to another device, or that its caller gave, are one part.
    """
    held = given[ARGUMENT][name]
    return held if isinstance(held, SharedKeys) else SharedKeys(one_part(*held), None)
