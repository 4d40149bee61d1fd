"""Checks of safetensors before they are read: the index, the headers, and their sums."""

import math
import reprlib
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regard.hf.loading.untrusted import (
    INDEX,
    INTEGER,
    JSON_LIMIT,
    WEIGHTS,
    parse_json,
    read_json,
    refused,
)

DIMENSIONS = 16  # of a tensor at most
BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8}
BITS |= {"F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
BITS |= {"I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32}
BITS |= {"I64": 64, "U64": 64, "F64": 64, "C64": 64}
FLOATS = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint by its headers; `dtypes` counts the elements of each."""

    names: frozenset[str]
    elements: int
    nbytes: int
    dtypes: Mapping[str, int] = field(default_factory=dict)

    @property
    def dtype(self) -> str:
        """The dtype of most elements, if a cache may have it; else float32."""
        most = max(self.dtypes, key=lambda name: self.dtypes[name], default="")
        return FLOATS.get(most, "float32")


def check_weights(folder: Path) -> Contents:
    """Check the headers of the weights in `folder`, and return their contents.

    Raises:
        FileNotFoundError: if a file of weights is missing.
        CheckpointError: if a file breaks a rule of its format, or a limit of this module.
    """
    if any(folder.glob("shard-?????-model-*.safetensors")):
        out = "save the model with save_pretrained"
        raise refused(folder, "weights of a distributed run are not read", "shard-*", out)
    if (folder / WEIGHTS).is_file():
        return check_safetensors(folder / WEIGHTS)
    return check_index(folder / INDEX)


def check_index(file: Path) -> Contents:
    """The contents of all shards; each must be beside the index and hold its tensors."""
    places = read_json(file).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise refused(file, "'weight_map' must be an object that is not empty", places)
    shards: dict[str, Contents] = {}
    for tensor, name in places.items():
        if not isinstance(name, str) or not _plain(name):
            rule = "a shard must be the name of a *.safetensors file beside the index"
            raise refused(file, rule, name)
        if name not in shards:
            shards[name] = check_safetensors(file.parent / name)
        if tensor not in shards[name].names:
            raise refused(file, f"{name} must hold what the index says", tensor)
    names = frozenset().union(*(shard.names for shard in shards.values()))
    elements = sum(shard.elements for shard in shards.values())
    nbytes = sum(shard.nbytes for shard in shards.values())
    dtypes = sum((Counter(shard.dtypes) for shard in shards.values()), Counter())
    return Contents(names, elements, nbytes, dtypes)


def _plain(name: str) -> bool:
    """Whether this is a file name, and not a path on any system."""
    return name.endswith(".safetensors") and not set(name) & set("/\\:\0")


def check_safetensors(file: Path) -> Contents:
    """The contents of a safetensors file, read from its header alone.

    Raises:
        FileNotFoundError: if there is no such file.
        CheckpointError: if the header breaks a rule of the format.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist; get the whole checkpoint")
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        if len(prefix) < 8:
            raise refused(file, "a safetensors file has at least 8 bytes", size)
        (length,) = struct.unpack("<Q", prefix)
        if length > min(size - 8, JSON_LIMIT):
            rule = f"its header may have {min(size - 8, JSON_LIMIT)} bytes"
            raise refused(file, rule, length)
        header = parse_json(stream.read(length), file)
    _check_metadata(header.pop("__metadata__", {}), file)
    spans = sorted(_check_tensor(name, entry, file) for name, entry in header.items())
    end = 0
    for start, stop, name, _ in spans:
        if start != end:
            raise refused(file, f"{name!r} must begin at byte {end}, where the last ended", start)
        end = stop
    if end != size - 8 - length:
        raise refused(file, f"its tensors must fill {size - 8 - length} bytes", end)
    dtypes: Counter[str] = Counter()
    for _, _, name, elements in spans:
        dtypes[header[name]["dtype"]] += elements
    return Contents(frozenset(header), dtypes.total(), end, dtypes)


def _check_metadata(metadata: Any, file: Path) -> None:
    texts = isinstance(metadata, dict) and all(isinstance(text, str) for text in metadata.values())
    if not texts:
        raise refused(file, "'__metadata__' must be an object of strings", metadata)


def _check_tensor(name: str, entry: Any, file: Path) -> tuple[int, int, str, int]:
    """The first and last byte of a tensor, its name, and its number of elements."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise refused(file, f"{name!r} must have dtype, shape and data_offsets", entry)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise refused(file, f"the dtype of {name!r} must be one of {', '.join(BITS)}", dtype)
    if not _naturals(shape) or len(shape) > DIMENSIONS:
        raise refused(file, f"the shape of {name!r} must be a list of sizes up to 2**40", shape)
    if not _naturals(offsets) or len(offsets) != 2:
        raise refused(file, f"the data_offsets of {name!r} must be two numbers", offsets)
    start, stop = offsets
    elements = math.prod(shape)
    bits = elements * BITS[dtype]
    if (stop - start) * 8 != bits:
        rule = f"{name!r} of {dtype} and shape {reprlib.repr(shape)} must span "
        raise refused(file, f"{rule}{-(-bits // 8)} bytes", stop - start)
    return start, stop, name, elements


def _naturals(values: Any) -> bool:
    # `type`, because a bool is an int
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value <= INTEGER for value in values
    )
