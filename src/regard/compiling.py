"""Compiling with numba, and numba's cache of machine code on disk."""

import functools
import hashlib
import inspect
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, no_type_check

import numba
from numba.core.caching import FunctionCache
from numba.core.registry import cpu_target

PATIENCE = 0.5  # seconds of compiling after which a user is told what is waited for


@no_type_check
def compiled_from(function: Any, signature: Any, *modules: Any) -> Any:
    """A C callback from a Python function, cached on disk by numba where a folder can be written.

    Without such a folder, on a full disk, or where a file is damaged, it is compiled for this
    process alone, which takes about a second; damaged files are replaced by the next process.

    Args:
        modules: those whose sources it contains, beside its own.
    """
    function.__name__ = function.__qualname__ = _name_of(function, *modules)
    with _announced(function):
        try:
            return numba.cfunc(signature, cache=True, error_model="numpy")(function)
        except Exception:  # also where it cannot be compiled: then the next line says so
            with suppress(Exception):  # an index that cannot be read is emptied
                FunctionCache(function).flush()
            return numba.cfunc(signature, error_model="numpy")(function)


@contextmanager
def _announced(function: Any) -> Iterator[None]:
    """Says once in a process, while a user waits, that code is compiled and where it is stored."""
    where = _folder(function)
    if where is not None and any(Path(where).glob(f"*{function.__name__}*.nbc")):
        yield  # stored by an earlier process, and only loaded here
        return
    timer = threading.Timer(PATIENCE, _announce, [where])
    timer.daemon = True
    with suppress(RuntimeError):  # no thread can be started
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _folder(function: Any) -> str | None:
    """Where numba stores the code of this function; None where it can write no folder."""
    with suppress(Exception):  # numba raises RuntimeError; a chosen folder may raise others
        folder = Path(FunctionCache(function).cache_path)
        folder.mkdir(parents=True, exist_ok=True)  # numba does not try where sources are in a zip
        return str(folder)
    return None


@functools.cache
def _announce(where: str | None) -> None:
    """One line, as a warning of the logger "regard": on stderr, unless logging is set up."""
    how_often = f"once on this machine: the code is stored in {where}"
    if where is None:
        how_often = "in every process, since no folder can be written; NUMBA_CACHE_DIR may name one"
    logging.getLogger("regard").warning(
        f"regard: compiling for this processor, a second or two for each head size, {how_often}"
    )


@no_type_check
def _name_of(function: Any, *others: Any) -> str:
    """A name that no other code has: a hash of the sources, the constants and the processor.

    numba names files after the function, and an index says what they hold. Two processes that save
    different code under one name can leave an index that points to the other's code, and so can a
    process that is stopped between writing the index and the code. A file with a name of its own
    holds this code or none.
    """
    modules = sys.modules[function.__module__], *others
    constants = sorted(inspect.getclosurevars(function).nonlocals.items())
    codegen = cpu_target.target_context.codegen()
    facts = [_source(each) for each in modules], constants, codegen.magic_tuple(), numba.__version__
    return f"{function.__name__}_" + hashlib.sha256(repr(facts).encode()).hexdigest()[:24]


def _source(module: Any) -> str:
    try:
        return inspect.getsource(module)
    except OSError:  # installed without sources; numba then caches nothing on disk
        return ""
