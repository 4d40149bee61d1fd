"""Compiling with numba, and numba's cache of machine code on disk."""

import functools
import hashlib
import inspect
import logging
import pickle
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, ClassVar, no_type_check

import numba
from numba.core import sigutils
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator
from numba.core.ccallback import CFunc
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.registry import cpu_target
from numba.core.serialize import dumps
from numba.core.typed_passes import InlineOverloads, NopythonRewrites
from numba.core.untyped_passes import (
    GenericRewrites,
    InlineClosureLikes,
    InlineInlinables,
    LiteralUnroll,
    WithLifting,
)

from regard.cache_folder import cache_folder


class _Inlined(JITCodeLibrary):  # type: ignore[misc]
    """LLVM code of a part of a kernel, which is optimised and compiled within the kernel alone.

    Numba would do both for each part, too: that takes a third of the time to compile a kernel.
    """

    def _optimize_functions(self, module: Any) -> None:
        pass

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        self._ensure_finalized()
        return 0  # as numba says that a library has no such function

    @property
    def codegen(self) -> "_Inlined":
        return self  # numba asks the codegen of a finished function for `set_env` alone

    def set_env(self, name: str, env: Any) -> None:
        """Code that is not compiled has no address for Python's environment, nor does it use it."""


# Passes of numba that rewrite arrays, closures and lists: kernels have numbers and addresses
_SKIPPED = {GenericRewrites, InlineClosureLikes, InlineInlinables, InlineOverloads, LiteralUnroll,
            NopythonRewrites, WithLifting}  # fmt: skip


class _KernelCompiler(Compiler):  # type: ignore[misc]
    @no_type_check
    def define_pipelines(self):
        (passes,) = super().define_pipelines()
        passes.passes = [each for each in passes.passes if each[0] not in _SKIPPED]
        return [passes]


class _PartCompiler(_KernelCompiler):
    @no_type_check
    def __init__(self, typing, target, library, *options):
        library = _Inlined(target.codegen(), "part")
        library.enable_object_caching()
        super().__init__(typing, target, library, *options)


# The decorator of a part of a kernel, which only the kernel calls: LLVM inlines it. (Numba's own
# inlining copies every variable for each block of the caller.)
PART = {"error_model": "numpy", "pipeline_class": _PartCompiler, "forceinline": True}
PART |= {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
part = numba.njit(**PART)
summing_part = numba.njit(fastmath={"reassoc", "contract"}, **PART)  # of sums in any order
# Seconds between attempts at a lock, and attempts: a process that holds it longer has been stopped
_WAIT, _WAITS = 0.02, 1000
PATIENCE = 0.5  # seconds of compiling after which a user is told what is waited for


@no_type_check
def compiled_from(function: Any, signature: Any, *modules: Any) -> Any:
    """A C callback from a Python function, stored by numba in a folder of the user. It contains the
    sources of the `modules`, beside those of its own.

    Without such a folder, on a full disk, or with a damaged file, this process compiles it anew.
    """
    function.__name__ = function.__qualname__ = _name_of(function, *modules)
    types, result = sigutils.normalize_signature(signature)
    options = {"error_model": "numpy"}
    compiled = CFunc(function, (types, result), {}, options, pipeline_class=_KernelCompiler)
    with suppress(Exception):  # the user has no home, or the sources are missing
        compiled._cache = _Stored(function)
    with _announced(compiled._cache):
        compiled.compile()
    return compiled


class _Folder(_CacheLocator):  # type: ignore[misc]
    """`compiled` in regard's folder, or the folder that numba's NUMBA_CACHE_DIR names.

    The name of a function says all that its code depends on: a source file's date does not matter.
    """

    def get_cache_path(self) -> str:
        return str(numba.config.CACHE_DIR or cache_folder().absolute() / "compiled")

    def ensure_cache_path(self) -> None:
        """Raise an OSError unless a file of usual size can be written."""
        Path(self.get_cache_path()).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self.get_cache_path()) as file:
            file.write(bytes(1 << 17))

    def get_source_stamp(self) -> str:
        return ""

    def get_disambiguator(self) -> str:
        return ""

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> "_Folder":
        inspect.getsource(py_func)  # raises an OSError without sources: then no name is its own
        return cls()


class _Files(CompileResultCacheImpl):  # type: ignore[misc]
    """Machine code with a digest: damaged code, as a power cut can leave it, would crash Python."""

    _locator_classes: ClassVar[list[type]] = [_Folder]

    @no_type_check
    def reduce(self, code: Any) -> tuple[bytes, bytes]:
        data = dumps(super().reduce(code))
        return hashlib.sha256(data).digest(), data

    @no_type_check
    def rebuild(self, target_context: Any, stored: tuple[bytes, bytes]) -> Any:
        digest, data = stored
        if hashlib.sha256(data).digest() != digest:
            raise ValueError("the file of machine code is damaged")
        return super().rebuild(target_context, pickle.loads(data))  # as numba's files are


class _Stored(FunctionCache):  # type: ignore[misc]
    """Machine code in files. An error of a file costs a compilation, and is not raised."""

    _impl_class = _Files

    @no_type_check
    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # a damaged file may raise any
            with suppress(Exception):
                self.flush()
            return None

    @no_type_check
    def save_overload(self, sig: Any, data: Any) -> None:
        with suppress(Exception):  # numba replaces each file whole, or leaves it
            super().save_overload(sig, data)


@contextmanager
def _announced(stored: Any) -> Iterator[None]:
    """Log once in a process that code is compiled now, which a user waits for, and where it is
    stored."""
    where = stored.cache_path
    if where is not None and Path(stored._cache_file._index_path).exists():
        yield  # stored by an earlier process, and only loaded here
        return
    try:
        stored._impl.locator.ensure_cache_path()
    except (OSError, AttributeError):  # no file can be written there, or there is no folder
        where = None
    timer = threading.Timer(PATIENCE, _announce, [where])
    timer.daemon = True
    with suppress(RuntimeError):  # no thread can be started
        timer.start()
    try:
        with nullcontext() if where is None else _alone(Path(stored._cache_file._index_path)):
            yield
    finally:
        timer.cancel()


@contextmanager
def _alone(index: Path) -> Iterator[None]:
    """Wait for another process that compiles the same code, such as a rank: it is then loaded. On
    systems or disks without locks each process compiles for itself."""
    name = index.with_suffix(".lock")
    try:
        import fcntl  # not on Windows

        file = name.open("w")
    except (ImportError, OSError):
        yield
        return
    with file:
        for _ in range(_WAITS):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_WAIT)
                continue
            except OSError:
                pass
            break
        try:
            yield
        finally:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)  # a child that was forked meanwhile has it, too
                name.unlink()


@functools.cache
def _announce(where: str | None) -> None:
    """One line, as a warning of the logger "regard": on stderr, unless logging is set up."""
    how_often = f"once on this machine: the code is stored in {where}"
    if where is None:
        how_often = "in every process, since no folder can be written; REGARD_CACHE may name one"
    logging.getLogger("regard").warning(
        f"regard: compiling for this processor, a second or two for each head size, {how_often}"
    )


@no_type_check
def _name_of(function: Any, *others: Any) -> str:
    """A name that no other code has: a hash of the sources, the constants and the processor.

    numba names files after the function. Two processes that save different code under one name, or
    one that is stopped while it saves, can leave an index that points to other code.
    """
    modules = sys.modules[__name__], sys.modules[function.__module__], *others
    constants = sorted(inspect.getclosurevars(function).nonlocals.items())
    codegen = cpu_target.target_context.codegen()
    facts = [_source(each) for each in modules], constants, codegen.magic_tuple(), numba.__version__
    return f"{function.__name__}_" + hashlib.sha256(repr(facts).encode()).hexdigest()[:24]


def _source(module: Any) -> str:
    try:
        return inspect.getsource(module)
    except OSError:  # installed without sources; numba then caches nothing on disk
        return ""
