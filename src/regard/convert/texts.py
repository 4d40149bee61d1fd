"""Text that every Python carries: enough kinds of it to calibrate on where the user gives none.

Half of the language reference, the documentation in the standard library's modules, and its source.
The other half of the reference is kept to measure on.
"""

import importlib
import inspect
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from regard.convert.windows import windows_of

LENGTH = 1024  # tokens of a window
WINDOWS = 18  # of calibration; `benchmarks/converting.py --windows` says what more take and give
CHARACTERS = 8  # a token has fewer on average: what is beyond is not even read
DOCUMENTED = (
    "argparse asyncio collections contextlib csv datetime decimal difflib email.message fractions "
    "functools http.client inspect json logging os pathlib random shutil socket sqlite3 statistics "
    "string subprocess tarfile tempfile textwrap threading typing unittest urllib.request zipfile"
)
SOURCES = "heapq textwrap statistics bisect calendar fractions"
SHORTEST = 200  # characters of a docstring that says something


def python_topics() -> tuple[str, str]:
    """The topics of Python's own help, every second one, and the others."""
    from pydoc_data.topics import topics

    names = sorted(topics)
    even, odd = ("\n\n".join(topics[name] for name in names[first::2]) for first in (0, 1))
    return even, odd


def python_texts() -> tuple[str, str, str]:
    """Three kinds to calibrate on: half of the reference, documentation, source."""
    return python_topics()[0], _documentation(), _source()


def calibration(
    tokenizer: Any,
    texts: Sequence[str] = (),
    *,
    windows: int = WINDOWS,
    length: int = LENGTH,
) -> Int[Tensor, "N L"]:
    """Windows in equal parts from the beginnings of `texts`; Python's own texts if there are none.

    Raises:
        ValueError: if they do not fill a window of that length.
    """
    given = texts or python_texts()
    each = -(-windows // len(given))
    found = []
    for text in given:
        start = text[: CHARACTERS * each * length]
        found.append(windows_of(tokenizer, [start], length=length, most=each))
    return torch.cat(found)[:windows] if len(found) == 1 else torch.cat(found)


def read_texts(files: Iterable[Path]) -> list[str]:
    """The files' texts, lines of a paragraph joined.

    Raises:
        FileNotFoundError, UnicodeDecodeError: as Python says it.
    """
    return [unwrapped(file.read_text(encoding="utf-8")) for file in files]


def unwrapped(text: str) -> str:
    """Paragraphs that were broken into lines, in one line each.

    >>> unwrapped("One\\nparagraph.\\n\\nAnother.")
    'One paragraph.\\n\\nAnother.'
    """
    return re.sub(r"(?<=\S)\n[ \t]*(?=\S)", " ", text)


def _documentation() -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some of it says, when looked at, that it is going away
        texts = [inspect.getdoc(thing) or "" for thing in _documented()]
    return "\n\n".join(dict.fromkeys(text for text in texts if len(text) >= SHORTEST))


def _documented() -> Iterator[Any]:
    for name in DOCUMENTED.split():
        module = importlib.import_module(name)
        yield module
        for _, thing in sorted(inspect.getmembers(module)):
            if inspect.isclass(thing) or inspect.isfunction(thing):
                yield thing


def _source() -> str:
    return "\n\n".join(inspect.getsource(importlib.import_module(name)) for name in SOURCES.split())
