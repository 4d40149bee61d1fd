"""A reader of GGUF files that are not trusted: gguf's own, with bounds and quick arrays.

transformers parses a file three times (tokenizer, configuration, weights) with gguf's own reader,
which makes two numpy arrays of every word: 85 s for 262,000 words and as many merges. It reads past
the end of a file without an error, for as long as a count of the header says.
"""

import math
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import RLock
from typing import Any

from regard.hf.loading.untrusted import MEBIBYTE, CheckpointError, Contents, check_number, refused

MAGIC = b"GGUF"
VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
FORMATS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))  # of `struct`
ENTRIES = 1 << 16  # tensors at most, and keys; the largest models have 2,000 and 60
ITEMS = 1 << 21  # in all arrays together; the largest vocabularies have 1.3 million
DIMENSIONS = 4
TEXT = 16 * MEBIBYTE  # bytes of a string that is not in an array
BLOCK = re.compile(r"\bblk\.(\d+)\.")
_LOCK = RLock()  # `gguf.GGUFReader` is replaced for all threads


@dataclass(frozen=True)
class GGUF:
    """The keys of a GGUF, and what its tensors hold."""

    keys: frozenset[str]
    contents: Contents


def check_gguf(file: Path) -> GGUF:
    """Check a GGUF's header; return its keys and the contents of its tensors.

    Raises:
        CheckpointError: if gguf cannot read the header, a count or a length in it is larger than
            the file or a limit of this module, tensors overlap, or a number is not one that a model
            could have.
    """
    if not file.is_file():  # reading a pipe would never end
        raise refused(file, "it must be a file", "something else")
    with file.open("rb") as stream:
        magic, version = stream.read(4), int.from_bytes(stream.read(4), "little")
    if magic != MAGIC:
        out = "give a folder with config.json and *.safetensors, or a .gguf file"
        raise refused(file, f"a GGUF file begins with {MAGIC!r}", magic, out)
    if version not in VERSIONS:
        out = "convert it anew; big-endian files are not read"
        raise refused(file, f"its version must be one of {VERSIONS}", version, out)
    try:
        reader = _bounded_reader()(file)
    except CheckpointError:
        raise
    except (ValueError, LookupError, TypeError, OverflowError, struct.error) as error:
        raise refused(file, "gguf must be able to read it", f"{error!r}") from error
    names = [each.name for each in reader.tensors]
    _check_values(reader.fields, names, file)
    nbytes = sum(each.n_bytes for each in reader.tensors)
    left = len(reader.data) - reader.data_offset
    if nbytes > left:  # each lies within the file: some overlap
        raise refused(file, f"its tensors may have {left} bytes together", nbytes)
    elements = sum(math.prod(each.shape.tolist()) for each in reader.tensors)
    return GGUF(frozenset(reader.fields), Contents(frozenset(names), elements, nbytes))


def _check_values(fields: dict[str, Any], names: list[str], file: Path) -> None:
    """Raise unless every number is one that a model could have, and the count of blocks is that of
    the tensors: readers would build blocks without weights."""
    values = {
        key: field.parts[-1][0].item()
        for key, field in fields.items()
        if field.types[0] not in (STRING, ARRAY)
    }
    for key, value in values.items():
        check_number(key, value, file)
    architecture = fields.get("general.architecture")
    kind = bytes(architecture.parts[-1]).decode("utf-8", "replace") if architecture else ""
    blocks = {number for name in names for number in BLOCK.findall(name)}
    count = values.get(f"{kind}.block_count")
    if not isinstance(count, int) or not 1 <= count <= len(blocks):
        rule = f"'{kind}.block_count' must be 1 to {len(blocks)}, its blocks of tensors"
        raise refused(file, rule, count)


@contextmanager
def read_once() -> Iterator[None]:
    """Replace `gguf.GGUFReader`, inside of the `with` block, by one quick reader for each file.

    Files must have been checked by `check_gguf`.
    """
    import gguf

    readers: dict[str, Any] = {}

    def reader(path: Any, mode: str = "r") -> Any:
        if str(path) not in readers:
            readers[str(path)] = _bounded_reader()(path, mode)
        return readers[str(path)]

    with _LOCK:
        before = gguf.GGUFReader
        gguf.GGUFReader = reader
        try:
            yield
        finally:
            gguf.GGUFReader = before


def _bounded_reader() -> Any:
    """gguf's reader, which reads nothing past the end of a file and bounds every count, with the
    arrays of a header as Python values instead of numpy arrays."""
    from gguf import GGUFValueType, gguf_reader

    class Reader(gguf_reader.GGUFReader):  # type: ignore[misc]
        def __init__(self, path: Any, mode: str = "r") -> None:
            self.file, self.items = Path(path), 0
            super().__init__(path, mode)

        def _get(self, offset: int, dtype: Any, count: int = 1, *order: Any, **named: Any) -> Any:
            end = int(offset) + int(count) * dtype().itemsize
            _check(self.file, "what its header describes", end, len(self.data), "end by byte")
            return super()._get(int(offset), dtype, count, *order, **named)

        def _get_str(self, offset: int) -> Any:
            import numpy

            _check(self.file, "the length of a string", self._get(offset, numpy.uint64)[0], TEXT)
            return super()._get_str(offset)

        def _build_fields(self, offs: int, count: int) -> Any:
            _check(self.file, "its number of keys", count, ENTRIES)
            return super()._build_fields(offs, count)

        def _build_tensor_info(self, offs: int, count: int) -> Any:
            _check(self.file, "its number of tensors", count, ENTRIES)
            return super()._build_tensor_info(offs, count)

        def _get_tensor_info_field(self, orig_offs: int) -> Any:
            field = super()._get_tensor_info_field(orig_offs)
            _check(self.file, "the number of dimensions of a tensor", field.parts[2][0], DIMENSIONS)
            return field

        def _get_field_parts(self, orig_offs: Any, raw_type: Any) -> Any:
            """Size in bytes, parts, the indices of those that are items, and their types."""
            if raw_type != ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            kind, length, items, end = _array(self.data, int(orig_offs), self.file)
            self.items += length
            _check(self.file, "the number of items of its arrays", self.items, ITEMS)
            _check(self.file, "an array", end, len(self.data), "end by byte")
            types = [GGUFValueType.ARRAY, GGUFValueType(kind)]
            return end - orig_offs, items, list(range(length)), types[: 1 + bool(length)]

    return Reader


def _check(file: Path, what: str, number: int, limit: int, rule: str = "be at most") -> None:
    if number > limit:
        raise refused(file, f"{what} must {rule} {limit}", int(number))


def _array(data: Any, at: int, file: Path) -> tuple[int, int, list[Any], int]:
    """The type of the items of an array, their number, the items, and the offset of their end."""
    kind, length = struct.unpack_from("<IQ", data, at)
    if kind not in (*FORMATS, STRING):
        raise refused(file, "items of an array must be strings or numbers", kind)
    _check(file, "the number of items of its arrays", length, ITEMS)
    return kind, length, *(_strings if kind == STRING else _numbers)(data, at + 12, kind, length)


def _strings(data: Any, at: int, kind: int, length: int) -> tuple[list[bytes], int]:
    """The strings, each of which follows its length, and the offset of their end."""
    view, read = memoryview(data), struct.Struct("<Q").unpack_from
    items = []
    for _ in range(length):
        start = at + 8
        at = start + read(view, at)[0]
        items.append(bytes(view[start:at]))
    return items, at


def _numbers(data: Any, at: int, kind: int, length: int) -> tuple[list[tuple[Any]], int]:
    """The numbers, each as a tuple of one, as gguf expects, and the offset of their end."""
    form = f"<{length}{FORMATS[kind]}"
    values = struct.unpack_from(form, data, at)
    return [(value,) for value in values], at + struct.calcsize(form)
