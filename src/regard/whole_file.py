"""Files that are written whole: an error leaves no half file, and an earlier file as it was."""

import shutil
from pathlib import Path
from uuid import uuid4


def write_whole(path: Path, content: bytes) -> None:
    """Write a file beside the path, then rename it; a device or a pipe is written as it is.

    Raises:
        OSError: naming the path, if the disk is full or the folder cannot be written.

    Examples:
        >>> import tempfile
        >>> from regard.whole_file import write_whole
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_whole(Path(folder, "a.txt"), b"text")
        ...     [(each.name, each.read_bytes()) for each in Path(folder).iterdir()]
        [('a.txt', b'text')]
    """
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
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(path)) from error
    finally:
        part.unlink(missing_ok=True)
