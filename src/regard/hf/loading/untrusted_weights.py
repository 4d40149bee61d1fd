"""Checks of safetensors before they are read: the index, the headers, and their sums."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from regard.hf.loading.untrusted import INDEX, JSON_LIMIT, WEIGHTS, read_json, refused

PATHS = {*"/\\:\0"}  # characters of a path
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


def check_weights(folder: Path, weights: str = WEIGHTS, index: str = INDEX) -> Contents:
    """Check the headers of the weights in `folder`, and return their contents.

    Raises:
        FileNotFoundError: if a file of weights is missing.
        CheckpointError: if a file breaks a rule of its format, or a limit of this module.
    """
    if any(folder.glob("shard-?????-model-*.safetensors")):
        out = "save the model with save_pretrained"
        raise refused(folder, "weights of a distributed run are not read", "shard-*", out)
    if (folder / weights).is_file():
        return check_safetensors(folder / weights)
    if (folder / index).exists():
        return check_index(folder / index)
    pickles = sorted(file.name for file in folder.glob("*.bin"))
    why = f"it has {', '.join(pickles)}, and pickles can run code" if pickles else "it has none"
    raise FileNotFoundError(f"{folder} needs weights in {weights} or {index}: {why}")


def check_index(file: Path) -> Contents:
    """The contents of all shards; each must be beside the index and hold its tensors."""
    places = read_json(file).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise refused(file, "'weight_map' must be an object that is not empty", places)
    shards: dict[str, Contents] = {}
    for tensor, name in places.items():
        # a file name, and not a path on any system
        if not isinstance(name, str) or not name.endswith(".safetensors") or set(name) & PATHS:
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


def check_safetensors(file: Path) -> Contents:
    """The contents of a safetensors file: its header is small, and one that safetensors reads.

    Raises:
        FileNotFoundError: if there is no such file.
        CheckpointError: if the header is too large, or breaks a rule of the format.
    """
    from safetensors import SafetensorError, safe_open

    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist; get the whole checkpoint")
    with file.open("rb") as stream:
        prefix = stream.read(8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > JSON_LIMIT:
        raise refused(file, f"it must begin with a header of up to {JSON_LIMIT} bytes", prefix)
    try:
        with safe_open(file, framework="pt") as reader:
            tensors = {name: reader.get_slice(name) for name in reader.keys()}  # noqa: SIM118
            outlines = [(each.get_dtype(), each.get_shape()) for each in tensors.values()]
    except (SafetensorError, OSError) as error:
        raise refused(file, "safetensors must be able to read it", str(error)) from error
    dtypes: Counter[str] = Counter()
    for dtype, shape in outlines:
        dtypes[dtype] += math.prod(shape)
    nbytes = file.stat().st_size - 8 - length  # which the tensors fill
    return Contents(frozenset(tensors), dtypes.total(), nbytes, dtypes)
