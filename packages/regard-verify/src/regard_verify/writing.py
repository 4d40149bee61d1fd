"""Sentences on a terminal, whose lines end between words, and files that are written whole."""

import os
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import EISDIR
from pathlib import Path

from rich.console import Console
from rich.text import Text

UNWRAPPED = 1_000_000  # columns where the output is a file or a pipe: each paragraph is one line
WIDEST = 120  # columns of a terminal at most: longer lines are hard to read


def console_of(*, stderr: bool = False) -> Console:
    """Stdout or stderr, as wide as its terminal."""
    console = Console(highlight=False, stderr=stderr)
    console.width = min(console.width, WIDEST) if console.is_terminal else UNWRAPPED
    return console


def printable(text: str) -> str:
    r"""The text with control characters, which could move a terminal's cursor, as their escapes.

    Examples:
        >>> print(printable("a\x1b[31mb"))
        a\x1b[31mb
    """
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def say(
    console: Console, sentence: str, *, style: str = "", bold: str = "", colour: str = "",
    indent: int = 0,
) -> None:  # fmt: skip
    """Print a sentence, wrapped between words; `bold` is its beginning, printed so, in a colour."""
    lines = textwrap.wrap(
        printable(sentence), console.width, initial_indent=" " * indent,
        subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    text = Text("\n".join(lines), style=style)
    text.stylize(f"bold {colour}".strip(), 0, indent + len(printable(bold)) if bold else 0)
    if lines:
        console.print(text, soft_wrap=True)


def check_can_write(path: Path) -> None:
    """Refuse a file that could not be written, before the work whose result it is to hold.

    Raises:
        OSError: naming the path and the way out.
    """
    with _errors_that_name(path):
        if path.is_dir():
            raise IsADirectoryError(EISDIR, "it is a folder")
        if path.is_file() or not path.exists():
            with tempfile.TemporaryFile(dir=path.resolve().parent) as file:
                file.write(bytes(1 << 16))


def write_whole(path: Path, content: bytes) -> None:
    """Write a file beside the path, then rename it, so that an error leaves an earlier file.

    Raises:
        OSError: naming the path and the way out.
    """
    with _errors_that_name(path):
        if path.exists() and not path.is_file():  # a device or a pipe
            path.write_bytes(content)
            return
        path = path.resolve()  # a link stays a link
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            part.write_bytes(content)
            part.replace(path)
        finally:
            with suppress(OSError):
                part.unlink()


@contextmanager
def _errors_that_name(path: Path) -> Iterator[None]:
    """Raise errors of the disk as sentences that name the path and the way out."""
    try:
        yield
    except OSError as error:
        sentence = OSError(
            f"{path} cannot be written: {error.strerror or error}; give a path on a disk with "
            "room, in a folder that can be written"
        )
        sentence.errno = error.errno  # by which a closed pipe is told from a full disk
        raise sentence from error
