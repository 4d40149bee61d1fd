"""Files that are written whole: an error leaves no half file, and an earlier file as it was."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import EISDIR
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4


def write_whole(path: Path, content: bytes) -> None:
    """Write a file beside the path, then rename it; a device or a pipe is written as it is.

    Raises:
        OSError: naming the path and the way out, if the disk is full or the folder cannot be
            written.

    Examples:
        >>> import tempfile
        >>> from regard.whole_file import write_whole
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_whole(Path(folder, "a.txt"), b"text")
        ...     [(each.name, each.read_bytes()) for each in Path(folder).iterdir()]
        [('a.txt', b'text')]
    """
    with errors_that_name(path):
        if path.exists() and not path.is_file():
            path.write_bytes(content)
            return
        path = path.resolve()  # a link stays a link
        part = path.with_name(f".{uuid4().hex}.part")
        try:
            with part.open("xb") as file:
                file.write(content)
            if path.exists():
                shutil.copymode(path, part)
            part.replace(path)
        finally:
            with suppress(OSError):  # where the folder cannot be written, there is none
                part.unlink()


@contextmanager
def private_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which replaces the path at the end; only its owner can read it.

    Raises:
        OSError: naming the path and the way out; a file of that name is as before.
    """
    with errors_that_name(path):
        descriptor, name = tempfile.mkstemp(prefix=".saving-", suffix=".part", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def check_can_write(path: Path) -> None:
    """Refuse a file that could not be written, before the work whose result it is to hold.

    Raises:
        OSError: naming the path and the way out.
    """
    with errors_that_name(path):
        if path.is_dir():
            raise IsADirectoryError(EISDIR, "it is a folder")
        if path.is_file() or not path.exists():
            with tempfile.TemporaryFile(dir=path.resolve().parent) as file:
                file.write(bytes(1 << 16))


@contextmanager
def errors_that_name(path: Path) -> Iterator[None]:
    """Errors of the disk become sentences that name the path and the way out."""
    try:
        yield
    except OSError as error:
        sentence = type(error)(
            f"{path} cannot be written: {error.strerror or error}; give a path on a disk with "
            "room, in a folder that can be written"
        )
        sentence.errno = error.errno  # by which a closed pipe is told from a full disk
        raise sentence from error
