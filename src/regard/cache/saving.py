"""The content of files of caches: what a cache stores, and whether a file fits a cache.

A file has the version of this format, the fingerprint of the weights that made the keys and values,
and for each cache its kind, its arguments and the lengths of its rows. All of it is compared before
a tensor is read: a cache of other weights has the right shapes and gives wrong results.
"""

import json
import reprlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from regard.cache.files import (
    DTYPES,
    Stacked,
    TensorFile,
    file_error,
    is_naturals,
    is_shape,
    parse_json,
    write_tensors,
)
from regard.cache.streams import Lengths, lengths_of

FORMAT = "regard.cache"  # of a file of caches, in its metadata
VERSION = "1"  # of the format, in its metadata; changes when older versions cannot read a file
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}


class Record(NamedTuple):
    """The content of a cache in a file: values for JSON, and streams `[B, G, tokens, W]`."""

    state: dict[str, Any]  # lengths, first slot, ...
    streams: Sequence[Any]  # tensors, or a Stacked that is to be written


def weights_text(weights: str | nn.Module) -> str:
    """The fingerprint of a module, or a text that names its weights and no others."""
    if isinstance(weights, nn.Module):
        from regard.cache.paging.contexts import fingerprint

        return fingerprint(weights)
    if not isinstance(weights, str):
        raise TypeError(
            f"weights is the model, or a text that names its weights, got {type(weights).__name__}"
        )
    if not weights.strip():
        raise ValueError(f"weights names the weights of a model, got {weights!r}; give the model")
    return weights


def _origin(weights: str | nn.Module) -> dict[str, str]:
    """The metadata of a file that `_check_origin` compares, and the version of regard."""
    library: str = sys.modules["regard"].__version__  # importing it here would be a circle
    about = {"format": FORMAT, "version": VERSION, "regard": library}
    return about | {"weights": weights_text(weights)}


def _check_origin(file: TensorFile, weights: str | nn.Module) -> None:
    """Raise a ValueError unless a file is of this format and version, and of these weights."""
    library = reprlib.repr(file.metadata.get("regard"))
    ways_out = {
        "format": "give a file that save() wrote",
        "version": f"it was written by regard {library}, use that",
        "weights": "keys and values of other weights give wrong results: load those of this model",
    }
    expected = _origin(weights)
    for name, out in ways_out.items():
        came = file.metadata.get(name)
        if came != expected[name]:
            rule = f"it has the {name} {reprlib.repr(expected[name])}"
            raise file_error(file.path, rule, came, out)


def lengths_state(lengths: Lengths) -> dict[str, Any]:
    """The lengths of rows, for JSON."""
    rows = lengths.rows
    return {"length": lengths.longest, "rows": None if rows is None else rows.tolist()}


def lengths_from(state: dict[str, Any]) -> Lengths:
    """The lengths of rows, from JSON of `lengths_state`. Raises a ValueError if it has none."""
    length, rows = cast(int, state.get("length")), state.get("rows")
    if not is_naturals([length]) or not (rows is None or is_naturals(rows)):
        raise ValueError(f"length and rows are whole numbers, got {length!r:.50}, {rows!r:.200}")
    if rows is None:
        return Lengths(length, length)
    lengths = lengths_of(torch.tensor(rows, dtype=torch.int64, device="cpu"))
    if lengths.longest != length:
        raise ValueError(f"rows have a length each, the longest of {length}, got {rows!r:.200}")
    return lengths


def outline_text(shape: Sequence[int], dtype: torch.dtype) -> dict[str, Any]:
    """A shape and a dtype, for JSON."""
    return {"shape": list(shape), "dtype": str(dtype).removeprefix("torch.")}


def outlines_text(streams: Sequence[Tensor | Stacked]) -> list[dict[str, Any]]:
    """The shapes and dtypes of streams, for JSON; tokens are not counted."""
    return [outline_text((*x.shape[:2], 0, *x.shape[3:]), x.dtype) for x in streams]


def outlines_from(value: Any, streams: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Tensors of no tokens, on the device of `streams`, from JSON of `outlines_text`.

    Raises:
        ValueError: if it is of another form, or a shape of more elements than memory could have.
    """
    if not isinstance(value, list) or not all(_is_outline(each) for each in value):
        raise ValueError(f"outlines have a shape [B, G, 0, W] and a dtype, got {value!r:.200}")
    device = streams[0].device if streams else torch.device("cpu")
    return tuple(torch.empty(x["shape"], dtype=_DTYPES[x["dtype"]], device=device) for x in value)


def _is_outline(value: Any) -> bool:
    if not isinstance(value, dict) or str(value.get("dtype")) not in _DTYPES:
        return False
    shape: Any = value.get("shape")
    return is_shape(shape) and len(shape) == 4 and shape[2] == 0


def pieces_from(value: Any, like: Sequence[Tensor]) -> tuple[int, ...] | None:
    """The widths of the pieces of one joined stream, from the JSON of a file.

    Raises:
        ValueError: if they are not the width of the stream `like` together.
    """
    if value is None:
        return None
    width = like[0].shape[-1] if like else 0
    if not is_naturals(value) or 0 in value or (len(like) == 1 and sum(value) != width):
        raise ValueError(f"pieces are {width} channels wide together, got {value!r:.200}")
    return tuple(value)


def write_entries(
    path: str | Path, own: Sequence[tuple[str, Any, Record]], weights: str | nn.Module
) -> None:
    """Write the kinds, arguments and records of caches to a file. Raises as `write_tensors`."""
    entries, streams = [], dict[str, Any]()
    for layer, (kind, arguments, (state, given)) in enumerate(own):
        outlines = [outline_text(each.shape, each.dtype) for each in given]
        entry = {"kind": kind, "arguments": arguments, "state": state, "streams": outlines}
        entries.append(entry)
        streams |= {_stream_name(layer, index): each for index, each in enumerate(given)}
    write_tensors(path, _origin(weights) | {"caches": json.dumps(entries)}, streams)


def read_entries(
    file: TensorFile, own: Sequence[tuple[str, Any]], weights: str | nn.Module
) -> list[dict[str, Any]]:
    """The entry of each cache in a file, with the names of its streams. Raises a ValueError unless
    it is of these weights, and of the kinds and arguments of the caches to fill, `own`."""
    _check_origin(file, weights)
    entries = parse_json(file.metadata.get("caches", ""), file.path)
    if not isinstance(entries, list) or len(entries) != len(own):
        came = len(entries) if isinstance(entries, list) else entries
        out = "load it into as many as were saved"
        raise file_error(file.path, f"it has {len(own)} caches, one for each layer", came, out)
    outlines: dict[str, dict[str, Any]] = {}
    for layer, (entry, call) in enumerate(zip(entries, own, strict=True)):
        if not isinstance(entry, dict) or set(entry) != {"kind", "arguments", "state", "streams"}:
            raise file_error(file.path, "a cache has kind, arguments, state and streams", entry)
        if (entry["kind"], entry["arguments"]) != call:
            came = _call_text(entry["kind"], entry["arguments"])
            rule = f"layer {layer} is {_call_text(*call)}"
            raise ValueError(f"{file.path}: {rule}, got {came:.200}; load it into that")
        if not isinstance(entry["state"], dict) or not isinstance(entry["streams"], list):
            raise file_error(file.path, "state is an object and streams are a list", entry)
        named = {_stream_name(layer, index): each for index, each in enumerate(entry["streams"])}
        outlines, entry["streams"] = outlines | named, [*named]
    tensors = {name: outline_text(x.shape, x.dtype) for name, x in file.entries.items()}
    if tensors != outlines:
        raise file_error(file.path, f"its tensors are {reprlib.repr(outlines)}", tensors)
    return entries


def _call_text(kind: Any, arguments: Any) -> str:
    pairs = arguments.items() if isinstance(arguments, dict) else [("?", arguments)]
    return f"{kind}({', '.join(f'{name}={value!r}' for name, value in pairs)})"


def _stream_name(layer: int, index: int) -> str:
    return f"layers.{layer}.streams.{index}"
