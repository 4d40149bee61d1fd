"""A reader for GGUF files that parses each file once; most of the time goes into the vocabulary.

transformers parses a file three times (tokenizer, configuration, weights) with gguf's own reader,
which makes two numpy arrays of every word: 85 s for 262,000 words and as many merges.
"""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any

from regard.hf.loading.untrusted_gguf import ARRAY, FORMATS, STRING

_LOCK = RLock()  # `gguf.GGUFReader` is replaced for all threads


@contextmanager
def read_once() -> Iterator[None]:
    """Replace `gguf.GGUFReader`, inside of the `with` block, by one quick reader for each file.

    Files must have been checked by `check_gguf`, which bounds every length.
    """
    import gguf

    readers: dict[str, Any] = {}

    def reader(path: Any, mode: str = "r") -> Any:
        if str(path) not in readers:
            readers[str(path)] = _quick_reader()(path, mode)
        return readers[str(path)]

    with _LOCK:
        before = gguf.GGUFReader
        gguf.GGUFReader = reader
        try:
            yield
        finally:
            gguf.GGUFReader = before


def _quick_reader() -> Any:
    """gguf's reader with the arrays of a header read as Python values instead of numpy arrays."""
    from gguf import GGUFValueType, gguf_reader

    class Reader(gguf_reader.GGUFReader):  # type: ignore[misc]
        def _get_field_parts(self, orig_offs: Any, raw_type: Any) -> Any:
            """Size in bytes, parts, the indices of those that are items, and their types."""
            if raw_type != ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            kind, length = struct.unpack_from("<IQ", self.data, orig_offs)
            begin = int(orig_offs) + 12
            read = _strings if kind == STRING else _numbers
            items, end = read(self.data, begin, kind, length)
            types = [GGUFValueType.ARRAY, GGUFValueType(kind)]
            return end - orig_offs, items, list(range(length)), types[: 1 + bool(length)]

    return Reader


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
