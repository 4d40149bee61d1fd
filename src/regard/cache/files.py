"""Files of tensors in the safetensors format: written piece by piece, and whole or not at all.

The package safetensors reads and checks the header. The bytes are read here, a piece at a time:
the package maps the file, and the process ends where the file shrinks, or it reads a whole tensor
for each slice. (https://github.com/huggingface/safetensors)
"""

import ctypes
import json
import math
import os
import reprlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.whole_file import private_file

HEADER_LIMIT = 16 << 20  # bytes: enough for 100,000 tensors
COMMAS = 1 << 20  # in JSON: each can make an object of fifty times its own bytes
ELEMENTS = 1 << 48  # of a tensor, an axis of none counted as 1: more than any memory has
DIMENSIONS = 8  # of a tensor at most
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Entry(NamedTuple):
    """A tensor of a file, by its header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # byte of the file


class Stacked(NamedTuple):
    """Tensors of one shape that a file holds as one, along a new first axis; at least one."""

    pieces: Sequence[Tensor]

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the tensor in the file."""
        return (len(self.pieces), *self.pieces[0].shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensor in the file."""
        return self.pieces[0].dtype


def file_error(path: Path, rule: str, came: object, out: str = "save it again") -> ValueError:
    """The error for a file: the rule, the value that breaks it, and the way out."""
    return ValueError(f"{path}: {rule}, got {reprlib.repr(came)}; {out}")


def write_tensors(
    path: str | Path, metadata: Mapping[str, str], tensors: Mapping[str, Tensor | Stacked]
) -> None:
    """Write tensors to a file, which appears under its name when it is complete.

    Memory is needed for one piece of a tensor at a time: safetensors' own writer takes all of them
    contiguous and on the CPU. A file of that name is replaced; only its owner can read the new one.

    Raises:
        OSError: if the disk is full or read-only; a file of that name is as before.
        ValueError: if a tensor has a dtype that the format lacks, the header is too large, or there
            is a folder, a pipe or a device of that name.
    """
    path = Path(path)
    _check_regular(path)  # a device or a pipe would be replaced by the file
    header = _header(metadata, tensors)
    with private_file(path) as file:
        file.write(header)
        for tensor in tensors.values():
            for piece in _pieces(tensor):
                file.write(memory_of(piece.cpu()))


@contextmanager
def open_tensors(path: str | Path) -> Iterator["TensorFile"]:
    """A file of tensors, whose header has been compared with its size before memory is taken.

    Raises:
        ImportError: if safetensors is not installed.
        OSError: if the file cannot be opened.
        ValueError: if it breaks a rule of the format or a limit of this module.
    """
    path = Path(path)
    _check_regular(path)  # reading a pipe would never end
    with path.open("rb") as file:
        yield TensorFile(path, file, *_read_header(file, path))


class TensorFile(NamedTuple):
    """An open file of tensors. Reading raises a ValueError if it has become shorter since."""

    path: Path
    file: BufferedReader
    metadata: dict[str, str]
    entries: dict[str, Entry]

    def read(self, name: str) -> Tensor:
        """The tensor of that name, in the memory of the CPU."""
        entry = self.entries[name]
        return self._read(name, entry.shape, entry.start)

    def pieces(self, name: str) -> Iterator[Tensor]:
        """The tensor of that name, one after another along its first axis."""
        dtype, (count, *shape), start = self.entries[name]
        nbytes = math.prod(shape) * dtype.itemsize
        for index in range(count):
            yield self._read(name, tuple(shape), start + nbytes * index)

    def _read(self, name: str, shape: tuple[int, ...], start: int) -> Tensor:
        with torch.inference_mode(False):
            tensor = torch.empty(shape, dtype=self.entries[name].dtype, device="cpu")
        self.file.seek(start)
        count = self.file.readinto(memory_of(tensor))
        if count != tensor.nbytes:
            raise file_error(self.path, f"{name!r} has {tensor.nbytes} bytes", count)
        return tensor


def _check_regular(path: Path) -> None:
    if path.exists() and not path.is_file():
        came = "a folder" if path.is_dir() else "something else"
        raise file_error(path, "it is a file", came, "give the path of a file")


def _header(metadata: Mapping[str, str], tensors: Mapping[str, Tensor | Stacked]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    start = 0
    for name, tensor in tensors.items():
        dtype, shape = tensor.dtype, list(tensor.shape)
        if dtype not in NAMES:
            raise ValueError(
                f"tensors of {', '.join(NAMES.values())} can be saved, got {dtype}; convert it"
            )
        stop = start + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data is aligned
    if len(text) > HEADER_LIMIT or text.count(b",") > COMMAS:
        raise ValueError(
            f"the header of a file has up to {HEADER_LIMIT} bytes, got {len(text)}; save fewer "
            "caches in one file"
        )
    return len(text).to_bytes(8, "little") + text


def _pieces(x: Tensor | Stacked) -> Iterator[Tensor]:
    """A tensor in contiguous pieces, in the order of its elements."""
    if isinstance(x, Tensor) and (x.is_contiguous() or x.dim() == 1):
        yield x.detach().contiguous()
    else:
        for piece in x.pieces if isinstance(x, Stacked) else x:
            yield from _pieces(piece)


def memory_of(x: Tensor) -> Any:
    """The bytes of a contiguous tensor, as a buffer that is read from or written to."""
    if sys.byteorder != "little":
        raise OSError("files of tensors are little-endian, this machine is not; use another one")
    if not x.nbytes:
        return bytearray()
    buffer: Any = (ctypes.c_char * x.nbytes).from_address(x.data_ptr())
    buffer.owner = x  # alive as long as the buffer
    return buffer


def _read_header(file: BufferedReader, path: Path) -> tuple[dict[str, str], dict[str, Entry]]:
    """The texts and the tensors of a header that safetensors has found to be right."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError(
            "safetensors reads the files of caches: python -m pip install 'regard[hf]'"
        ) from error
    first = file.read(8)
    length = int.from_bytes(first, "little")
    if len(first) < 8 or length > HEADER_LIMIT:
        raise file_error(path, f"it begins with a header of up to {HEADER_LIMIT} bytes", first)
    try:
        with safe_open(path, framework="pt") as reader:
            metadata = reader.metadata() or {}
            outlines = [(name, reader.get_slice(name)) for name in reader.offset_keys()]
            headers = [(name, each.get_dtype(), each.get_shape()) for name, each in outlines]
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: safetensors cannot read it: {error}; save it again") from error
    if not os.path.samestat(os.fstat(file.fileno()), path.stat()):
        raise file_error(path, "it stays while it is read", "another file", "load it again")
    entries, start = {}, 8 + length
    for name, dtype, shape in headers:
        if dtype not in DTYPES or not is_shape(shape):
            rule = f"{name!r} has at most {DIMENSIONS} sizes, and is one of {', '.join(DTYPES)}"
            raise file_error(path, rule, (dtype, shape))
        entries[name] = Entry(DTYPES[dtype], tuple(shape), start)
        start += math.prod(shape) * DTYPES[dtype].itemsize
    return metadata, entries


def parse_json(text: str, path: Path) -> Any:
    """The value of a file's JSON of a bounded size. Raises a ValueError if it is none."""
    if text.count(",") > COMMAS:
        raise file_error(path, f"its JSON has up to {COMMAS} commas", text.count(","))
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise file_error(path, "it holds valid JSON", str(error)) from error


def is_naturals(values: Any) -> bool:
    """Whether it is a list of whole numbers from 0 on; True and False are none."""
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value <= ELEMENTS for value in values
    )


def is_shape(values: Any) -> bool:
    """Whether it is a list of the sizes of a tensor that a machine could have."""
    if not is_naturals(values) or len(values) > DIMENSIONS:
        return False
    return math.prod(max(1, size) for size in values) <= ELEMENTS
