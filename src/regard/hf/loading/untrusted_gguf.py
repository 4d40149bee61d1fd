"""Checks of a GGUF before it is read: every count and length, against the file's size.

Layout: magic, version, number of tensors, number of keys; the keys with their values; the tensors'
names, dimensions, types and offsets; then, aligned, the data.
"""

import math
import mmap
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from regard.hf.loading.untrusted import LAYERS, MEBIBYTE, check_number, refused
from regard.hf.loading.untrusted_weights import Contents

MAGIC = b"GGUF"
VERSIONS = (2, 3)
BOOL, STRING, ARRAY = 7, 8, 9
FORMATS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIifBQqd", strict=True))  # of `struct`
ENTRIES = 1 << 16  # tensors at most, and keys; the largest models have 2,000 and 60
ITEMS = 1 << 21  # in all arrays together; the largest vocabularies have 1.3 million
NAME = 1 << 10  # bytes of a name
TEXT = 16 * MEBIBYTE  # bytes of any other string
DIMENSIONS = 4
BLOCK = re.compile(r"\bblk\.(\d+)\.")


Tensors = Mapping[str, tuple[tuple[int, ...], int, int]]  # dimensions, type, offset, by name


@dataclass(frozen=True)
class GGUF:
    """The values of a GGUF's keys, and what its tensors hold."""

    values: Mapping[str, Any]
    contents: Contents


@dataclass(frozen=True)
class Header:
    """The header of a GGUF: its keys and values, and the descriptions of its tensors.

    Args:
        values: by key. An array of numbers, one for each layer at most, is a list; of any other
            array the length is in a tuple of one.
        tensors: dimensions, type and offset of each, by name.
        size: bytes of the header.
    """

    values: Mapping[str, Any]
    tensors: Tensors
    size: int


class _Cursor:
    """Reads forward through `data`, and never past its end."""

    def __init__(self, data: mmap.mmap, file: Path) -> None:
        self.data, self.file = data, file
        self.at = 0
        self.items = 0

    def skip(self, size: int, what: str) -> int:
        """Advance by `size` bytes; returns the offset of the first."""
        start, left = self.at, len(self.data) - self.at
        if size > left:
            raise refused(self.file, f"{what} must end within the {left} bytes left", size)
        self.at += size
        return start

    def number(self, format: str, what: str) -> Any:
        size = struct.calcsize(f"<{format}")
        return struct.unpack_from(f"<{format}", self.data, self.skip(size, what))[0]

    def skip_strings(self, count: int, key: str) -> None:
        """Advance by so many strings, each after its length: a million in a third of a second."""
        read, at, end = struct.Struct("<Q").unpack_from, self.at, len(self.data)
        for _ in range(count):
            self.at = at
            if end - at < 8:
                self.number("Q", f"a length in {key!r}")  # raises
            (size,) = read(self.data, at)
            if size > end - at - 8:
                self.at = at + 8
                self.skip(size, f"an item of {key!r}")  # raises
            at += 8 + size
        self.at = at

    def text(self, limit: int, what: str) -> str:
        length = self.number("Q", f"the length of {what}")
        if length > limit:
            raise refused(self.file, f"{what} may have {limit} bytes", length)
        start = self.skip(length, what)
        try:
            return self.data[start : self.at].decode("utf-8")
        except UnicodeDecodeError as error:
            raise refused(self.file, f"{what} must be UTF-8", str(error)) from error


def check_gguf(file: Path) -> GGUF:
    """Check every number of a GGUF's header; return its values and the contents of its tensors.

    Raises:
        CheckpointError: if the header breaks a rule of the format, or a limit of this module.
    """
    header = read_header(file)
    alignment = header.values.get("general.alignment", 32)
    begin = math.ceil(header.size / alignment) * alignment
    left = file.stat().st_size - begin
    return GGUF(header.values, _check_tensors(header.tensors, alignment, left, file))


def read_header(file: Path) -> Header:
    """The header of a GGUF, every number of which is checked; where tensors lie is not.

    Raises:
        CheckpointError: if it breaks a rule of the format, or a limit of this module.
    """
    if not file.is_file():  # reading a pipe would never end
        raise refused(file, "it must be a file", "something else")
    if file.stat().st_size < 24:
        raise refused(file, "a GGUF file has at least 24 bytes", file.stat().st_size)
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(data, file)
        tensors, keys = _counts(cursor)
        values = _read_values(cursor, keys)
        _check_values(values, file)
        entries = _read_tensors(cursor, tensors)
        _check_blocks(values, entries, file)
        return Header(values, entries, cursor.at)


def _counts(cursor: _Cursor) -> tuple[int, int]:
    """The number of tensors, and of keys."""
    magic = cursor.data[cursor.skip(4, "the magic") : cursor.at]
    if magic != MAGIC:
        out = "give a folder with config.json and *.safetensors, or a .gguf file"
        raise refused(cursor.file, f"a GGUF file begins with {MAGIC!r}", magic, out)
    version = cursor.number("I", "the version")
    if version not in VERSIONS:
        out = "convert it anew; big-endian files are not read"
        raise refused(cursor.file, f"its version must be one of {VERSIONS}", version, out)
    tensors, keys = cursor.number("Q", "a count"), cursor.number("Q", "a count")
    for what, count in (("tensors", tensors), ("keys", keys)):
        if not 1 <= count <= ENTRIES:
            raise refused(cursor.file, f"it must have 1 to {ENTRIES} {what}", count)
    return tensors, keys


def _read_values(cursor: _Cursor, count: int) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.text(NAME, "a key")
        if key in values or key.startswith("GGUF."):  # readers store the counts under that prefix
            raise refused(cursor.file, "a key may come once, and not begin with 'GGUF.'", key)
        values[key] = _read_value(cursor, key)
    return values


def _read_value(cursor: _Cursor, key: str) -> Any:
    """The value of `key`, as `Header` describes it."""
    kind = cursor.number("I", f"the type of {key!r}")
    if kind == STRING:
        return cursor.text(TEXT, f"the value of {key!r}")
    if kind == ARRAY:
        return _read_array(cursor, key)
    if kind not in FORMATS:
        raise refused(cursor.file, f"the type of {key!r} must be 0 to 12", kind)
    if key == "general.alignment" and FORMATS[kind] != "I":
        raise refused(cursor.file, f"the type of {key!r} must be 4", kind)
    value = cursor.number(FORMATS[kind], f"the value of {key!r}")
    return bool(value) if kind == BOOL else value


def _read_array(cursor: _Cursor, key: str) -> list[Any] | tuple[int]:
    """The numbers of the array of `key`, or its length. Arrays of arrays are refused: no model has
    them."""
    kind, length = cursor.number("I", f"the type of {key!r}"), cursor.number("Q", "a length")
    if kind not in FORMATS and kind != STRING:
        rule = f"the items of {key!r} must be strings or numbers"
        raise refused(cursor.file, rule, f"type {kind}")
    cursor.items += length
    if cursor.items > ITEMS:
        raise refused(cursor.file, f"its arrays may have {ITEMS} items", cursor.items)
    if kind == STRING:
        cursor.skip_strings(length, key)
    else:
        size = struct.calcsize(f"<{FORMATS[kind]}")
        start = cursor.skip(length * size, f"the items of {key!r}")
        if length <= LAYERS:
            found = struct.unpack_from(f"<{length}{FORMATS[kind]}", cursor.data, start)
            return [bool(each) for each in found] if kind == BOOL else list(found)
    return (int(length),)


def _check_values(values: Mapping[str, Any], file: Path) -> None:
    """The architecture is a word, the alignment a power of two, every number a model could have."""
    architecture = values.get("general.architecture")
    word = isinstance(architecture, str) and architecture.replace("-", "_").isidentifier()
    if not word:
        raise refused(file, "'general.architecture' must be a word", architecture)
    alignment = values.get("general.alignment", 32)
    if not 1 <= alignment <= MEBIBYTE or alignment & (alignment - 1):
        raise refused(file, "'general.alignment' must be a power of two up to 2**20", alignment)
    for key, value in values.items():
        if isinstance(value, int | float):
            check_number(key, value, file)


def _read_tensors(cursor: _Cursor, count: int) -> dict[str, tuple[tuple[int, ...], int, int]]:
    """The dimensions, the type and the offset of every tensor."""
    tensors: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(count):
        name = cursor.text(NAME, "a tensor's name")
        if name in tensors:
            raise refused(cursor.file, "a tensor's name may come once", name)
        ndim = cursor.number("I", f"the number of dimensions of {name!r}")
        if ndim > DIMENSIONS:
            raise refused(cursor.file, f"{name!r} may have {DIMENSIONS} dimensions", ndim)
        dims = tuple(cursor.number("Q", f"a dimension of {name!r}") for _ in range(ndim))
        kind = cursor.number("I", f"the type of {name!r}")
        tensors[name] = dims, kind, cursor.number("Q", f"the offset of {name!r}")
    return tensors


def _check_blocks(values: Mapping[str, Any], names: Iterable[str], file: Path) -> None:
    """Raise unless the count of blocks fits: readers would build blocks without weights."""
    key = f"{values['general.architecture']}.block_count"
    blocks = {number for name in names for number in BLOCK.findall(name)}
    count = values.get(key)
    if not isinstance(count, int) or not 1 <= count <= len(blocks):
        raise refused(file, f"{key!r} must be 1 to {len(blocks)}, its blocks of tensors", count)


def _check_tensors(tensors: Tensors, alignment: int, size: int, file: Path) -> Contents:
    """The contents of the tensors in `size` bytes; raises if they overlap or lie outside."""
    spans, elements = [], 0
    for name, (dims, kind, offset) in tensors.items():
        nbytes = _nbytes(name, dims, kind, file)
        if offset % alignment or offset + nbytes > size:
            rule = f"{name!r} of {nbytes} bytes must begin at a multiple of {alignment} and end by "
            raise refused(file, f"{rule}{size}", offset)
        spans.append((offset, offset + nbytes, name))
        elements += math.prod(dims)
    end = 0
    for start, stop, name in sorted(spans):
        if start < end:
            raise refused(file, f"{name!r} must begin at byte {end} or later", start)
        end = stop
    return Contents(frozenset(tensors), elements, sum(stop - start for start, stop, _ in spans))


def _nbytes(name: str, dims: tuple[int, ...], kind: int, file: Path) -> int:
    """The bytes of a tensor, whose rows are whole blocks of its type."""
    if kind not in _types():
        known = ", ".join(str(known) for known in _types())
        raise refused(file, f"the type of {name!r} must be one of {known}", kind)
    block, nbytes = _types()[kind]
    if any(not 1 <= dim < 1 << 40 for dim in dims) or (dims[0] if dims else 1) % block:
        rule = f"{name!r} must have sizes of 1 to 2**40, the first a multiple of {block}"
        raise refused(file, rule, dims)
    return math.prod(dims) // block * nbytes


@cache
def _types() -> dict[int, tuple[int, int]]:
    """For every type of tensor, the elements in a block and the bytes it takes."""
    from gguf import GGML_QUANT_SIZES

    return {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}
