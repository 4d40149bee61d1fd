"""Compiling with numba, and finding on disk what was compiled before."""

import hashlib
import inspect
import sys
from contextlib import suppress
from typing import Any, no_type_check

import numba
from numba.core.caching import FunctionCache
from numba.core.registry import cpu_target

from regard.ops.kernels import lanes


@no_type_check
def compiled_from(function: Any, signature: Any) -> Any:
    """A C callback from a Python function, kept on disk by numba where a folder can be written.

    Without such a folder, on a full disk, or where a file is damaged, it is compiled for this
    process alone, which takes about a second; damaged files are replaced by the next process.
    """
    function.__name__ = function.__qualname__ = _name_of(function)
    try:
        return numba.cfunc(signature, cache=True, error_model="numpy")(function)
    except Exception:  # also where it cannot be compiled: then the next line says so
        with suppress(Exception):
            FunctionCache(function).flush()
        return numba.cfunc(signature, error_model="numpy")(function)


@no_type_check
def _name_of(function: Any) -> str:
    """A name that no other code has: it says for which sources, numbers and processor.

    numba names files by the function, and keeps an index of what they hold. Two processes that
    save different code under one name can leave an index that points to the other's code, and so
    can one that is stopped between writing the index and the code. With a name of its own a file
    holds this code or none.
    """
    modules = sys.modules[function.__module__], lanes
    given = inspect.getclosurevars(function).nonlocals
    numbers = sorted((name, value) for name, value in given.items() if isinstance(value, int))
    codegen = cpu_target.target_context.codegen()
    facts = [_source(each) for each in modules], numbers, codegen.magic_tuple(), numba.__version__
    return "decode_" + hashlib.sha256(repr(facts).encode()).hexdigest()[:24]


def _source(module: Any) -> str:
    try:
        return inspect.getsource(module)
    except OSError:  # installed without sources; numba then keeps nothing on disk
        return ""
