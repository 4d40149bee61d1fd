"""Checks of a folder before transformers reads it: links, JSON files, numbers, headers of weights.

Every limit is far above what published models need, and low enough that refusing a file takes
little time and memory, whatever it contains.
"""

import json
import math
import reprlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MEBIBYTE = 1 << 20
JSON_LIMIT = 16 * MEBIBYTE  # enough for an index of 150,000 tensors or a header of 100,000
TOKENIZER_LIMIT = 256 * MEBIBYTE  # the largest vocabularies take 40 MiB
COMMAS = 1 << 20  # in a JSON file: each makes an object, of fifty times its two bytes
TOKENIZER_COMMAS = 1 << 24
DEPTH = 64  # levels of nested JSON
LAYERS = 10_000  # the largest number of layers
COUNT = 1 << 20  # of labels, heads, experts: configurations make lists of that length
INTEGER = 1 << 40  # the largest of all other integers

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
TOKENIZER_JSON = ("tokenizer.json", "vocab.json", "added_tokens.json", "tekken.json")
OTHER_JSON = (
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.json",
)
WEIGHTY = (".safetensors", ".gguf")
READ = (*WEIGHTY, ".json", ".model", ".txt", ".jinja", ".tiktoken")
SIZES = ("size", "dim", "layer", "head", "expert", "length", "position", "depth", "num", "rank")
REFUSED = {
    "transformers_weights": f"weights are read from {WEIGHTS} or {INDEX}; remove the entry",
    "fusion_config": "a checkpoint may not exchange modules; remove the entry",
}
KERNELS = ("attn_implementation", "experts_implementation")
RULE = 400  # characters of a rule in an error: it may quote a key, of any length
SHORT = reprlib.Repr()
SHORT.maxstring = 200


class CheckpointError(ValueError):
    """The error for a damaged or hostile checkpoint, or one of another format than its name says.

    Examples:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from regard.hf import CheckpointError, load
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "config.json").write_text("{not JSON")
        ...     _ = Path(folder, "model.safetensors").write_text("")
        ...     try:
        ...         load(folder)
        ...     except CheckpointError as error:
        ...         print(str(error).partition(": ")[2].partition(",")[0])
        it must hold valid JSON
    """


def refused(
    file: Path, rule: str, came: object, out: str = "get the file from a source you trust"
) -> CheckpointError:
    """The error for `file`: the rule, the value that breaks it, and what to do."""
    return CheckpointError(f"{file}: {rule[:RULE]}, got {SHORT.repr(came)}; {out}")


def check_files(folder: Path) -> None:
    """Raise a CheckpointError unless all that could be read in `folder` are files of bounded size.

    A link must stay inside the folder, or be one of a Hugging Face cache, which has the files in
    `blobs` and links to them from `snapshots/<revision>`.
    """
    home = folder.resolve()
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    for file in folder.iterdir():
        if not file.name.lower().endswith(READ) or file.is_dir():
            continue
        if file.is_symlink() and file.resolve().parent not in (home, blobs):
            out = "put the file itself into the folder"
            came = str(file.resolve())
            raise refused(file, "a link may not lead out of its folder", came, out)
        if not file.is_file():  # reading a pipe would never end
            raise refused(file, "it must be a file", "something else or a link to nothing")
        if file.suffix.lower() not in WEIGHTY and file.stat().st_size > TOKENIZER_LIMIT:
            raise refused(file, f"it may have {TOKENIZER_LIMIT} bytes", file.stat().st_size)


def check_json_files(folder: Path) -> None:
    """Raise a CheckpointError unless the JSON beside the configuration is of bounded size."""
    if (folder / "adapter_config.json").exists():  # it can name another model and pickles
        out = "merge it into its model and save that, or move it elsewhere"
        raise refused(folder, "an adapter is not read", "adapter_config.json", out)
    large = {"limit": TOKENIZER_LIMIT, "commas": TOKENIZER_COMMAS}
    for name in (*OTHER_JSON, *TOKENIZER_JSON):
        if (folder / name).exists():
            read_json(folder / name, **(large if name in TOKENIZER_JSON else {}))


def read_json(file: Path, *, limit: int = JSON_LIMIT, commas: int = COMMAS) -> dict[str, Any]:
    """The JSON object in `file`, of at most `limit` bytes. Raises a CheckpointError if it is
    larger, is not an object, or has a key twice."""
    if not file.is_file():
        raise refused(file, "it must be a file", "something else")
    if (size := file.stat().st_size) > limit:
        raise refused(file, f"it may have {limit} bytes", size)
    return parse_json(file.read_bytes(), file, commas=commas)


def parse_json(data: bytes, file: Path, *, commas: int = COMMAS) -> dict[str, Any]:
    """The JSON object in `data`, which was read from `file`; raises as `read_json`."""
    if data.count(b",") > commas:
        raise refused(file, f"its JSON may have {commas} commas", data.count(b","))
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise refused(file, "it must hold valid JSON", str(error)) from error
    if not isinstance(value, dict):
        raise refused(file, "its JSON must be an object", value)
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A dict without duplicate keys: parsers differ in which of two values they take."""
    value = dict(pairs)
    if len(value) != len(pairs):
        key, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {reprlib.repr(key)} comes twice")
    return value


def check_config(config: dict[str, Any], file: Path) -> None:
    """Raise a CheckpointError unless numbers are those of a model, and no entry names code."""
    for key, value, depth in _entries(config):
        if depth > DEPTH:
            raise refused(file, f"its JSON may be {DEPTH} levels deep", f"more under {key!r}")
        if key in REFUSED and value is not None:
            raise refused(file, f"{key!r} is not allowed", value, REFUSED[key])
        if key.endswith(KERNELS) and isinstance(value, str) and "/" in value:
            out = "remove the entry"
            raise refused(file, f"{key!r} may not name code from elsewhere", value, out)
        if isinstance(value, int | float):
            check_number(key, value, file)


def _entries(config: dict[str, Any]) -> Iterator[tuple[str, Any, int]]:
    """Every entry with its key and depth; the items of a list go by the list's key."""
    waiting: list[tuple[str, Any, int]] = [("", config, 0)]
    while waiting:
        key, value, depth = waiting.pop()
        yield key, value, depth
        if depth > DEPTH:
            continue
        if isinstance(value, dict):
            waiting += [(name, inner, depth + 1) for name, inner in value.items()]
        elif isinstance(value, list):
            waiting += [(key, inner, depth + 1) for inner in value]


def check_number(key: str, value: int | float, file: Path) -> None:
    """Raise a CheckpointError unless the entry `key` of a model could have this value."""
    key = key.lower()
    if isinstance(value, float):
        if not math.isfinite(value) and any(word in key for word in SIZES):
            raise refused(file, f"{key!r} must be finite", value)
        return
    limit = INTEGER
    if "layer" in key or "depth" in key or key.endswith("block_count"):
        limit = LAYERS
    elif "num_" in key or key.endswith("_count"):
        limit = COUNT
    if abs(value) > limit:
        raise refused(file, f"{key!r} may be at most {limit}", value)


# ---- safetensors: the index, the headers, and their sums ----

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
