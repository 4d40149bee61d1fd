"""Attributing an error to a line of the subject, or to this suite."""

import ast
import inspect
import linecache
import os
import re
import sysconfig
import textwrap
import traceback
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

SUITE = str(Path(__file__).parent)
_PATHS = (sysconfig.get_paths()["stdlib"], str(Path(torch.__file__).parent))
_PACKAGES = ("site-packages", "dist-packages")  # may stand inside the folder of Python itself
_CHECKERS = ("jaxtyping", "beartype", "typeguard")  # they wrap functions to check their shapes
_CALLERS = ("called", "scaled_dot_product_attention")  # functions here that call the subject
_WATCHERS = ("__torch_function__", "_product", "<lambda>")  # that stand between it and torch
Place = tuple[str, int, str]  # a file, a line number, and the name of the function
LONGEST = 120  # characters of a line of code in a report


def files_of(*things: Any) -> frozenset[str]:
    """The files in which a subject is written: of a function, of the classes of all submodules."""
    found = set()
    for thing in things:
        parts = thing.modules() if isinstance(thing, nn.Module) else [thing]
        for part in parts:
            file = ""
            part = getattr(part, "func", part)  # of a partial
            for each in (part, type(part)):
                with suppress(TypeError, ValueError, OSError):
                    file = file or inspect.getsourcefile(inspect.unwrap(each)) or ""
            plain_layer = isinstance(part, nn.Module) and part is not thing and _of_torch(file)
            if file and not plain_layer and not _of_the_suite(file):
                found.add(file)
    return frozenset(found)


def places(error: BaseException) -> list[Place]:
    """Where an error and its causes were raised, the innermost first."""
    walked = traceback.walk_tb(error.__traceback__)
    own = [(frame.f_code.co_filename, number, frame.f_code.co_name) for frame, number in walked]
    return [*(places(error.__cause__) if error.__cause__ else ()), *reversed(own)]


def line_of(error: BaseException, files: Collection[str] = ()) -> str:
    """The innermost line of the subject, as `FILE:NUMBER: CODE`; "" if there is none.

    If none is in `files`, it is one that is neither in torch, nor in Python, nor in this suite.
    """
    found = places(error)
    own = [shown(file, number) for file, number, _ in found if file in files]
    other = [shown(file, number) for file, number, _ in found if _is_foreign(file)]
    return next(iter(own + other), "")


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


def shown(file: str, number: int) -> str:
    """A line of a file, as `FILE:NUMBER: CODE`."""
    path = Path(file)
    name = os.path.relpath(path) if path.is_relative_to(Path.cwd()) else path.name
    code = linecache.getline(file, number).strip()
    return f"{name}:{number}: {code[:LONGEST]}" if code else f"{name}:{number}"


def own_error(error: BaseException, files: Collection[str] = ()) -> str:
    """An error of this suite, as `TYPE: TEXT (FILE:NUMBER)`; "" if the subject raised it.

    It is this suite's if of all lines that are not torch's or Python's the innermost is.
    """
    for file, number, function in places(error):
        if file in files or _is_foreign(file):
            return ""
        if _of_the_suite(file) and function in _WATCHERS:
            continue
        if _of_the_suite(file) and function not in _CALLERS:
            where = f"{Path(file).relative_to(SUITE).as_posix()}:{number}"
            return f"{said(error)} ({where})"
        if _of_the_suite(file):
            return ""
    return ""


def said(error: BaseException, line: str = "") -> str:
    """The type and text of an error; without a text, the line where it was raised."""
    text = " ".join(str(error).split())[:300]
    if text or not line:
        return f"{type(error).__name__}{': ' * bool(text)}{text}"
    return f"{type(error).__name__} at {line}"


def _is_foreign(file: str) -> bool:
    folders = set(Path(file).parts)
    in_python = file.startswith(_PATHS[0] + os.sep) and not folders & set(_PACKAGES)
    known = _of_the_suite(file) or _of_torch(file) or in_python or folders & set(_CHECKERS)
    return not file.startswith("<") and not known


def _of_the_suite(file: str) -> bool:
    return file.startswith(SUITE + os.sep)


def _of_torch(file: str) -> bool:
    return file.startswith(_PATHS[1] + os.sep)


_TOPICS = {  # the words of a line, and the laws about what it does
    r"sqrt|\*\* ?\(?-?0?\.5|scal(e|ing)\b|scaled_dot_product": "scale_closed_form",
    r"softmax|scaled_dot_product": "score_shift convexity fully_masked_forward",
    r"dropout\w*\(": "dropout_in_eval eval_determinism dropout_stats",
    r"masked_fill|where\(|\+ ?mask": "mask_polarity mask_dtype mask_broadcast padding_content",
    r"tril|triu|is_causal": "mask_and_causal causality_exact causal_option self_visible",
    r"repeat|expand": "gqa_order",
    r"\bcat\(|index_copy": "decode_equals_full chunked_prefill one_past_two_layers memory_law",
}
WORDS = {law: words for words, laws in _TOPICS.items() for law in laws.split()}


def line_about(law: str, thing: Any) -> str:
    """The line as `FILE:NUMBER: CODE`; "" if several lines may be meant, or none."""
    thing = getattr(thing, "inner", getattr(thing, "function", thing))  # of what wraps it
    made_by = thing if inspect.isroutine(thing) else type(thing)
    try:
        file, (code, first) = inspect.getsourcefile(made_by), inspect.getsourcelines(made_by)
        tree = ast.parse(textwrap.dedent("".join(code)))
    except (OSError, TypeError, SyntaxError):
        return ""
    texts = [x for x in ast.walk(tree) if isinstance(x, ast.Constant) and isinstance(x.value, str)]
    skipped = {at for x in texts for at in range(x.lineno, (x.end_lineno or 0) + 1)}
    words = WORDS.get(law, "(?!)")
    lines = [(at, line.partition("#")[0]) for at, line in enumerate(code) if at + 1 not in skipped]
    found = [first + at for at, line in lines if re.search(words, line)]
    told = file and len(found) == 1 and not _of_the_suite(file)
    return shown(file, found[0]) if file and told else ""
