"""An error of the subject with its line, and the line where a class or function begins."""

import inspect
from typing import Any

from regard_verify.blame import line_of, shown


def with_line(error: Exception) -> str:
    """The text of an error of the subject, and the line of its code that was reached."""
    line = line_of_subject(error)
    return f"{error} ({line})" if line and line not in str(error) else str(error)


def line_of_subject(error: BaseException) -> str:
    """The innermost line of the subject, of a file that cannot be parsed its own line; or ""."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return shown(error.filename, error.lineno)
    return line_of(error)


def first_line_of(definition: Any) -> str:
    """The line where a function or class begins: `FILE:NUMBER: CODE`; "" if it has no source."""
    try:
        filename = inspect.getsourcefile(definition)
        number = inspect.getsourcelines(definition)[1]
    except (OSError, TypeError):
        return ""
    return shown(filename, number) if filename else ""
