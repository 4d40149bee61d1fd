"""Compiling with numba, and numba's cache of machine code on disk."""

import hashlib
import inspect
import sys
from contextlib import suppress
from typing import Any, no_type_check

import numba
from numba.core.caching import FunctionCache
from numba.core.registry import cpu_target

from regard.ops.kernels import intrinsics, tiles, vectors


@no_type_check
def compiled_from(function: Any, signature: Any) -> Any:
    """A C callback from a Python function, cached on disk by numba where a folder can be written.

    Without such a folder, on a full disk, or where a file is damaged, it is compiled for this
    process alone, which takes about a second; damaged files are replaced by the next process.
    """
    function.__name__ = function.__qualname__ = _name_of(function)
    try:
        return numba.cfunc(signature, cache=True, error_model="numpy")(function)
    except Exception:  # also where it cannot be compiled: then the next line says so
        with suppress(Exception):  # an index that cannot be read is emptied
            FunctionCache(function).flush()
        return numba.cfunc(signature, error_model="numpy")(function)


@no_type_check
def _name_of(function: Any) -> str:
    """A name that no other code has: a hash of the sources, the constants and the processor.

    numba names files after the function, and an index says what they hold. Two processes that save
    different code under one name can leave an index that points to the other's code, and so can a
    process that is stopped between writing the index and the code. A file with a name of its own
    holds this code or none.
    """
    modules = sys.modules[function.__module__], intrinsics, tiles, vectors
    constants = sorted(inspect.getclosurevars(function).nonlocals.items())
    codegen = cpu_target.target_context.codegen()
    facts = [_source(each) for each in modules], constants, codegen.magic_tuple(), numba.__version__
    return "decode_" + hashlib.sha256(repr(facts).encode()).hexdigest()[:24]


def _source(module: Any) -> str:
    try:
        return inspect.getsource(module)
    except OSError:  # installed without sources; numba then caches nothing on disk
        return ""
