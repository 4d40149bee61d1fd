"""Files of tensors: checked before anything is allocated, written as a whole or not at all.

The format is safetensors: eight bytes, the length of a header in JSON, the header, and the bytes of
the tensors without gaps (https://github.com/huggingface/safetensors). Reading and writing it takes
no package, and needs memory for one piece of a tensor at a time.
"""

import ctypes
import json
import math
import os
import reprlib
import struct
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from regard.whole_file import errors_that_name

HEADER_LIMIT = 16 << 20  # bytes: enough for 100,000 tensors
COMMAS = 1 << 20  # in a header: each can make an object of fifty times its own bytes
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
    start: int  # byte of the data
    stop: int


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

    @property
    def nbytes(self) -> int:
        """The bytes of the tensor in the file."""
        return len(self.pieces) * self.pieces[0].nbytes


def refused(path: Path, rule: str, came: object, out: str = "save it again") -> ValueError:
    """The error for a file: the rule, the value that breaks it, and what to do.

    Args:
        path: of the file.
        rule: what holds for a file that is right.
        came: what it has.
        out: what to do.

    Returns:
        The error, to be raised.

    Examples:
        >>> from pathlib import Path
        >>> from regard.cache.files import refused
        >>> refused(Path("a.safetensors"), "its version is 1", 7)
        ValueError('a.safetensors: its version is 1, got 7; save it again')
    """
    return ValueError(f"{path}: {rule}, got {reprlib.repr(came)}; {out}")


def _check_regular(path: Path) -> None:
    if path.exists() and not path.is_file():
        came = "a folder" if path.is_dir() else "something else"
        raise refused(path, "it is a file", came, "give the path of a file")


def write_tensors(
    path: str | Path, metadata: Mapping[str, str], tensors: Mapping[str, Tensor | Stacked]
) -> None:
    """Write tensors to a file, which appears under its name when it is complete.

    Args:
        path: of the file; one that is there is replaced. Only its owner can read it.
        metadata: texts for the header.
        tensors: by their names.

    Raises:
        OSError: if the disk is full or read-only; a file of that name is as before.
        ValueError: if a tensor has a dtype that the format lacks, the header is too large, or there
            is a folder, a pipe or a device of that name.

    Examples:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from regard.cache.files import TensorFile, write_tensors
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "a.safetensors")
        ...     write_tensors(path, {"made": "by hand"}, {"x": torch.arange(3)})
        ...     with TensorFile(path) as file:
        ...         file.metadata, file.read("x").tolist()
        ({'made': 'by hand'}, [0, 1, 2])
    """
    path = Path(path)
    _check_regular(path)  # a device or a pipe would be replaced by the file
    header = _header(metadata, tensors)
    with errors_that_name(path):
        descriptor, name = tempfile.mkstemp(prefix=".saving-", suffix=".part", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(header)
                for tensor in tensors.values():
                    for each in tensor.pieces if isinstance(tensor, Stacked) else (tensor,):
                        for piece in _pieces(each.detach()):
                            file.write(_memory(piece.cpu()))
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


class TensorFile:
    """A file of tensors whose header has been checked: sizes, names and shapes fit each other.

    Args:
        path: of the file.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it breaks a rule of the format or a limit of this module.

    Examples:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from regard.cache.files import TensorFile
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     try:
        ...         TensorFile(file.name)
        ...     except ValueError as error:
        ...         print(str(error).partition(": ")[2])
        it has at least 8 bytes, got 0; save it again
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        _check_regular(self.path)  # reading a pipe would never end
        self._file = self.path.open("rb")
        try:
            self.metadata, self.entries, self._data = _checked(self._file, self.path)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "TensorFile":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def read(self, name: str) -> Tensor:
        """The tensor of that name, in the memory of the CPU.

        Args:
            name: one of `entries`.

        Raises:
            ValueError: if the file has become shorter since it was opened.
        """
        entry = self.entries[name]
        return self._read(name, entry.shape, entry.start)

    def pieces(self, name: str) -> Iterator[Tensor]:
        """The tensor of that name, one after another along its first axis.

        Args:
            name: one of `entries`.

        Raises:
            ValueError: as `read`.
        """
        _, (count, *shape), start, stop = self.entries[name]
        for index in range(count):
            yield self._read(name, tuple(shape), start + (stop - start) // count * index)

    def _read(self, name: str, shape: tuple[int, ...], start: int) -> Tensor:
        with torch.inference_mode(False):
            found = torch.empty(shape, dtype=self.entries[name].dtype, device="cpu")
        self._file.seek(self._data + start)
        got = self._file.readinto(_memory(found))
        if got != found.nbytes:
            raise refused(self.path, f"{name!r} has {found.nbytes} bytes", got)
        return found


def _header(metadata: Mapping[str, str], tensors: Mapping[str, Tensor | Stacked]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name, each in tensors.items():
        if each.dtype not in NAMES:
            raise ValueError(
                f"tensors of {', '.join(NAMES.values())} can be saved, got {each.dtype}; convert it"
            )
        stop = at + each.nbytes
        entries[name] = {
            "dtype": NAMES[each.dtype],
            "shape": list(each.shape),
            "data_offsets": [at, stop],
        }
        at = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data is aligned
    if len(text) > HEADER_LIMIT or text.count(b",") > COMMAS:
        raise ValueError(
            f"the header of a file has up to {HEADER_LIMIT} bytes, got {len(text)}; save fewer "
            "caches in one file"
        )
    return struct.pack("<Q", len(text)) + text


def _pieces(x: Tensor) -> Iterator[Tensor]:
    """A tensor in contiguous pieces, in the order of its elements."""
    if x.is_contiguous():
        yield x
    elif x.dim() == 1:
        yield x.contiguous()
    else:
        for each in x:
            yield from _pieces(each)


def _memory(x: Tensor) -> Any:
    """The bytes of a contiguous tensor, as a buffer that is read from or written to."""
    if sys.byteorder != "little":
        raise OSError("files of tensors are little-endian, this machine is not; use another one")
    if not x.nbytes:
        return bytearray()
    buffer: Any = (ctypes.c_char * x.nbytes).from_address(x.data_ptr())
    buffer.owner = x  # alive as long as the buffer
    return buffer


def _checked(file: BinaryIO, path: Path) -> tuple[dict[str, str], dict[str, Entry], int]:
    """The texts of a header, its tensors, and the first byte of the data."""
    size = os.fstat(file.fileno()).st_size
    start = file.read(8)
    if min(size, len(start)) < 8:  # a file of the system that says 0 may have bytes
        raise refused(path, "it has at least 8 bytes", min(size, len(start)))
    (length,) = struct.unpack("<Q", start)
    if length > min(HEADER_LIMIT, size - 8):
        limit = min(HEADER_LIMIT, size - 8)
        raise refused(path, f"its header has up to {limit} bytes", length)
    header = parsed(file.read(length), path)
    if not isinstance(header, dict):
        raise refused(path, "its header is an object", header)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(t, str) for t in metadata.values()):
        raise refused(path, "'__metadata__' is an object of texts", metadata)
    entries = {name: _entry(name, each, path) for name, each in header.items()}
    end = 0
    for name, each in sorted(entries.items(), key=lambda pair: pair[1][2:]):
        if each.start != end:
            raise refused(path, f"{name!r} begins at byte {end}", each.start)
        end = each.stop
    if end != size - 8 - length:
        raise refused(path, f"its tensors fill {size - 8 - length} bytes", end)
    return metadata, entries, 8 + length


def parsed(text: str | bytes, path: Path) -> Any:
    """The value of JSON text of a bounded size, without keys that come twice.

    Args:
        text: from a file.
        path: of the file, for errors.

    Raises:
        ValueError: if it is no JSON, or too large.

    Examples:
        >>> from pathlib import Path
        >>> from regard.cache.files import parsed
        >>> parsed('{"length": 3}', Path("a.safetensors"))
        {'length': 3}
    """
    commas = text.count("," if isinstance(text, str) else b",")  # type: ignore[arg-type]
    if commas > COMMAS:
        raise refused(path, f"its JSON has up to {COMMAS} commas", commas)
    try:
        return json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise refused(path, "it holds valid JSON", str(error)) from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A dict without duplicate keys: parsers differ in which of two values they take."""
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key comes twice")
    return value


def _entry(name: str, value: Any, path: Path) -> Entry:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise refused(path, f"{name!r} has dtype, shape and data_offsets", value)
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise refused(path, f"the dtype of {name!r} is one of {', '.join(DTYPES)}", dtype)
    if not is_shape(shape):
        raise refused(path, f"the shape of {name!r} is a list of at most {DIMENSIONS} sizes", shape)
    if not is_naturals(offsets) or len(offsets) != 2:
        raise refused(path, f"the data_offsets of {name!r} are two numbers", offsets)
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != nbytes:
        rule = f"{name!r} of {dtype} and shape {reprlib.repr(shape)} spans {nbytes} bytes"
        raise refused(path, rule, offsets)
    return Entry(DTYPES[dtype], tuple(shape), *offsets)


def is_naturals(values: Any) -> bool:
    """Whether it is a list of whole numbers from 0 on; True and False are none.

    Examples:
        >>> from regard.cache.files import is_naturals
        >>> is_naturals([0, 3]), is_naturals([True]), is_naturals([-1])
        (True, False, False)
    """
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value <= ELEMENTS for value in values
    )


def is_shape(values: Any) -> bool:
    """Whether it is a list of the sizes of a tensor that a machine could have.

    Examples:
        >>> from regard.cache.files import is_shape
        >>> is_shape([2, 0, 3]), is_shape([1 << 40, 0, 1 << 40])
        (True, False)
    """
    if not is_naturals(values) or len(values) > DIMENSIONS:
        return False
    return math.prod(max(1, size) for size in values) <= ELEMENTS
