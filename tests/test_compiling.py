"""The cache of compiled kernels on disk: found again, never mixed up, not needed."""

import ctypes
import errno
import logging
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("numba")

import numba
from numba import carray, types
from numba.core import ccallback, config
from numba.core.caching import IndexDataCacheFile
from numba.core.codegen import CPUCodeLibrary

from logged import records_of
from regard import compiling
from regard.compiling import compiled_from

SOURCES = Path(__file__).parents[1] / "src"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of numba's cache during a test."""
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def compiles(monkeypatch):
    """The functions that this process compiled and did not find on disk."""
    done = []
    compile = ccallback.CFunc._compile_uncached
    monkeypatch.setattr(
        ccallback.CFunc, "_compile_uncached", lambda self: done.append(self) or compile(self)
    )
    return done


def use(number):
    """Compile or find a function, as every process does once, and call it."""

    def run(data):
        carray(data, 1)[0] = number

    compiled = compiled_from(run, types.void(types.CPointer(types.int64)))
    found = ctypes.c_int64()
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(compiled.address)(ctypes.addressof(found))
    assert found.value == number


def test_a_part_is_optimised_within_its_kernel_alone(folder, compiles, monkeypatch):
    optimised, real = [], CPUCodeLibrary._optimize_final_module
    monkeypatch.setattr(
        CPUCodeLibrary,
        "_optimize_final_module",
        lambda self: optimised.append(self.name) or real(self),
    )

    @compiling.part
    def doubled(x):
        return 2 * x

    @compiling.part
    def quadrupled(x):
        return doubled(doubled(x))

    for _ in range(2):  # compiled, and read from the disk

        def run(data):
            carray(data, 1)[0] = quadrupled(carray(data, 1)[0])

        compiled = compiled_from(run, types.void(types.CPointer(types.int64)))
        found = ctypes.c_int64(5)
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(compiled.address)(ctypes.addressof(found))
        assert found.value == 20
    assert len(compiles) == 1
    assert any(name.endswith(compiled.__name__) for name in optimised)
    assert not [
        name for name in optimised if name == "part" or name.endswith(("doubled", "quadrupled"))
    ]


@pytest.fixture
def impatient(monkeypatch):
    """A user is told at once that code is compiled; nothing was said before."""
    monkeypatch.setattr(compiling, "PATIENCE", 0.0)
    compiling._announce.cache_clear()
    yield
    compiling._announce.cache_clear()


@pytest.fixture
def logged():
    """What a user is told."""
    with records_of("regard") as records:
        yield records


def test_a_user_is_told_once_what_is_waited_for(folder, compiles, impatient, logged):
    use(1)
    use(2)
    assert len(compiles) == 2
    (record,) = logged
    line = record.getMessage()
    assert line.startswith("regard: compiling for this processor")
    assert f"once on this machine: the code is stored in {folder}" in line
    assert (record.name, record.levelno) == ("regard", logging.WARNING)


def test_code_that_is_on_disk_or_compiled_quickly_is_not_mentioned(
    folder, compiles, monkeypatch, logged
):
    monkeypatch.setattr(compiling, "PATIENCE", 600.0)
    use(1)
    monkeypatch.setattr(compiling, "PATIENCE", 0.0)
    use(1)
    assert len(compiles) == 1
    assert logged == []


def test_code_is_stored_in_the_folder_of_regard(compiles, impatient, monkeypatch, tmp_path, logged):
    monkeypatch.setattr(config, "CACHE_DIR", "")
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "mine"))
    use(1)
    use(1)
    assert len(compiles) == 1
    assert {each.parent for each in files_of(tmp_path, "nb[ic]")} == {tmp_path / "mine/compiled"}
    assert f"stored in {tmp_path / 'mine/compiled'}" in logged[0].getMessage()


def test_without_any_folder_every_process_says_so(
    compiles, impatient, monkeypatch, logged, tmp_path
):
    (tmp_path / "file").write_text("")  # in the folder's place
    monkeypatch.setattr(config, "CACHE_DIR", "")
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "file"))
    use(1)
    use(1)
    assert len(compiles) == 2
    assert (
        "in every process, since no folder can be written; REGARD_CACHE" in logged[0].getMessage()
    )


def test_code_is_read_from_a_folder_that_cannot_be_written(folder, compiles, monkeypatch):
    def refuse(self):
        raise OSError(30, "Read-only file system")

    use(1)
    monkeypatch.setattr(compiling._Folder, "ensure_cache_path", refuse)
    use(1)
    use(2)
    assert len(compiles) == 2


def files_of(folder, suffix):
    return sorted(folder.rglob(f"*.{suffix}"))


def test_what_one_process_compiled_the_next_one_finds(folder, compiles):
    use(1)
    use(1)
    assert len(compiles) == 1


@pytest.fixture
def locked(folder, compiles):
    """A function that another process compiles: its lock is held, and what it will have stored is
    elsewhere."""
    fcntl = pytest.importorskip("fcntl")
    use(1)
    compiles.clear()
    (index,), elsewhere = files_of(folder, "nbi"), folder / "elsewhere"
    elsewhere.mkdir()
    stored = [shutil.move(each, elsewhere) for each in index.parent.glob("*.nb?")]
    with index.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file, stored, index.parent


def test_code_that_another_process_compiles_is_waited_for(locked, compiles):
    file, stored, home = locked
    waiting = threading.Thread(target=use, args=[1])
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    for each in stored:
        shutil.move(each, home)
    file.close()
    waiting.join()
    assert not compiles
    assert not files_of(home, "lock")


def test_a_process_that_was_stopped_is_not_waited_for_longer(locked, compiles, monkeypatch):
    monkeypatch.setattr(compiling, "_WAITS", 2)
    use(1)
    assert len(compiles) == 1


def test_without_locks_every_process_compiles(locked, compiles, monkeypatch):
    def unsupported(*given):
        raise OSError(errno.ENOLCK, "no locks")

    with monkeypatch.context() as patch:
        patch.setattr("fcntl.flock", unsupported)
        use(1)
    shutil.rmtree(locked[2])
    monkeypatch.setitem(sys.modules, "fcntl", None)
    use(1)
    assert len(compiles) == 2


def test_every_function_and_processor_has_files_of_its_own(folder, compiles, monkeypatch):
    """Under one name, two processes that save at once can leave an index that names the other's
    code."""
    use(1)
    use(2)
    codegen = ccallback.registry.cpu_target.target_context.codegen()
    other = (*codegen.magic_tuple()[:2], "+another")
    with monkeypatch.context() as patch:
        patch.setattr(type(codegen), "magic_tuple", lambda self: other)
        use(1)
    assert len(files_of(folder, "nbi")) == len(files_of(folder, "nbc")) == len(compiles) == 3
    use(1)
    use(2)
    assert len(compiles) == 3


def test_the_race_of_two_processes_that_save_at_once(folder, monkeypatch):
    """Both read an empty index, both write theirs; the code of the first is written last."""
    save, late = IndexDataCacheFile._save_data, []

    def later(*given):
        late.append(given) if not late else save(*given)

    with monkeypatch.context() as patch:
        patch.setattr(IndexDataCacheFile, "_load_index", lambda self: {})
        patch.setattr(IndexDataCacheFile, "_save_data", later)
        use(1)
        use(2)
    save(*late[0])
    use(1)
    use(2)


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
@pytest.mark.parametrize("left", [0, 7, 100])
def test_damaged_files_are_replaced(folder, compiles, suffix, left):
    use(1)
    for file in files_of(folder, suffix):
        file.write_bytes(file.read_bytes()[:left])
    use(1)
    use(1)
    assert len(compiles) == 2


def test_code_with_one_changed_byte_is_not_run(folder, compiles):
    """In every part of the file: the machine code, and all that stands around it."""
    use(1)
    (code,) = files_of(folder, "nbc")
    good = code.read_bytes()
    for at in range(0, len(good), len(good) // 5):
        code.write_bytes(good[:at] + bytes([good[at] ^ 0x10]) + good[at + 1 :])
        use(1)
        compiles_before = len(compiles)
        use(1)  # it was replaced
        assert len(compiles) == compiles_before
    assert len(compiles) > 4


def test_a_process_stopped_between_index_and_code_leaves_nothing_wrong(folder, compiles):
    use(1)
    for code in files_of(folder, "nbc"):
        code.unlink()
    use(1)
    use(1)
    assert len(compiles) == 2


@pytest.mark.parametrize("what", ["_save_data", "_save_index"])
def test_a_full_disk(folder, compiles, monkeypatch, what, recwarn):
    def refuse(self, *given):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(IndexDataCacheFile, what, refuse)
        use(1)
    assert len(compiles) == 1
    use(1)
    use(1)
    assert len(compiles) == 2
    assert not recwarn.list


def test_a_chosen_folder_that_cannot_be_written(compiles, monkeypatch):
    monkeypatch.setattr(config, "CACHE_DIR", "/proc/nowhere")
    use(-1)
    use(-1)
    assert len(compiles) == 2


def test_code_that_cannot_be_compiled_is_an_error(folder):
    def run(data):
        return undefined(data)

    with pytest.raises(numba.TypingError, match="undefined"):
        compiled_from(run, types.void(types.CPointer(types.int64)))


DECODE = """
import sys, warnings, torch
warnings.simplefilter("error")
import regard
from regard.ops.kernels import decoding
assert regard.__file__.startswith({sources!r})
q, k = torch.randn(1, 2, 1, 32), torch.randn(1, 2, 300, 32)
for _ in range(3):
    out = regard.attend(q, k, k, backend="fused")
    assert (out - regard.attend(q, k, k, backend="eager")).abs().max() < 1e-5
assert decoding.kernel.cache_info().misses == 1
"""


@pytest.mark.parametrize(
    "zipped",
    [
        pytest.param(False, marks=pytest.mark.long, id="a folder"),
        pytest.param(True, id="a zip file"),
    ],
)
def test_without_a_folder_to_write_a_process_compiles_for_itself(tmp_path, zipped):
    sources = tmp_path / "sources"
    shutil.copytree(SOURCES, sources, ignore=shutil.ignore_patterns("__pycache__"))
    if zipped:
        sources = Path(shutil.make_archive(str(tmp_path / "zipped"), "zip", sources))
    paths = [str(sources), *(each for each in sys.path if each and each != str(SOURCES))]
    nowhere = dict.fromkeys(("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME"), "/proc/nowhere")
    environment = {**os.environ, **nowhere, "PYTHONPATH": os.pathsep.join(paths)}
    for name in ("NUMBA_CACHE_DIR", "REGARD_CACHE"):
        environment.pop(name, None)
    code = DECODE.format(sources=str(sources))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()  # none on a machine that compiles in half a second
    assert len(lines) <= 1 and all("in every process, since" in line for line in lines)
