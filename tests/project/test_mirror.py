"""The tests mirror the package: for each folder a folder, for each module a file of its name."""

import ast
import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE, TESTS = ROOT / "src/regard", ROOT / "tests"
MIRRORED = [  # folders whose every module has its file of tests
    ".",
    "bench",
    "cache",
    "cache/paging",
    "compare",
    "convert",
    "convert/exact",
    "convert/healing",
    "convert/lossy",
    "layers",
    "layers/forms",
    "masks",
    "ops",
    "ops/backends",
    "ops/kernels",
    "page",
    "plan",
    "rope",
    "distributed",
    "distributed/context",
    "distributed/decode",
    "distributed/tensor",
    "see",
    "see/pages",
]
FOLDERS = [  # of these, the folder alone
    "cli",
    "hf",
    "sparse",
]
TOGETHER = {  # folders whose tests are in the folder above
    f"hf/{name}"
    for name in ("evaluating", "families", "generating", "loading", "placing", "running")
}
WITHOUT_MODULE = {  # folders of tests that mirror no folder, and what they hold
    "against": "comparisons with transformers, torch, and the documents of the source systems",
    "callers": "what users wrap around a call: tables, and the programs that run them",
    "gpu": "what needs a GPU; skipped without one",
    "laws": "what holds of all layers, caches, masks or backends, across modules",
    "project": "the repository: documents, package, scripts, structure",
    "support": "what tests share, and no tests",
}
OTHER = {  # files of tests in mirrored folders that are about no module of their name
    "bench/test_scaling_model.py": "time and memory over ranks and tokens, a model of arithmetic",
    "bench/test_bench.py": "the commands bench and tune, and the benchmarks of the repository",
    "cache/paging/test_pools_in_files.py": "stored prefixes of a pool, saved and found by another",
    "convert/test_low_memory.py": "conversions of a model whose weights stay on disk",
    "distributed/test_failures.py": "ranks that die, sleep or call for something else",
    "distributed/test_fsdp.py": "layers as torch's data parallelism wraps them",
    "bench/test_common.py": "what the benchmark programs share",
    "plan/test_bytes_moved.py": "bytes moved, counted by hand",
    "see/test_model_layers.py": "the attention layers of a model, and what runs in them",
    "layers/test_latent_options.py": "MLA's options beside transformers' classes",
    "plan/test_wrong_formulas.py": "costs with one mistake each, which named tests must notice",
}
TESTLESS = {  # modules without tests of their own
    "__main__.py": "two lines; tests/cli runs the command",
    "needles.py": "questions after compression; test_frontiers.py",
    "columns.py": "softmax and packing of the prefill kernel; test_launching_prefill.py runs them",
    "panels.py": "constants of the prefill kernel; test_launching_prefill.py",
    "prefilling.py": "the prefill kernel; test_launching_prefill.py runs it at both instructions",
    "quantizing_kernel.py": "one loop; test_quantizing.py compares its codes",
    "vectors.py": "instructions, one or two in each intrinsic; test_intrinsics.py runs them all",
}
PROGRAMS = ("callers",)  # tables that the tests beside them run


def modules(folder):
    """The modules of a folder of the package, by their names."""
    found = {path.name for path in (PACKAGE / folder).glob("*.py")} - {"__init__.py"}
    assert found, f"src/regard/{folder} has no modules"
    return found


def files_of_tests(folder):
    """The files of tests in a folder, by their names."""
    found = {path.name for path in (TESTS / folder).glob("test_*.py")}
    assert found, f"tests/{folder} has no tests"
    return found


def test_every_folder_of_the_package_is_mirrored():
    found = {path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")}
    assert found == {*MIRRORED, *FOLDERS, *TOGETHER}


@pytest.mark.parametrize("folder", [*MIRRORED, *FOLDERS])
def test_every_mirrored_folder_has_modules_and_tests(folder):
    assert modules(folder)
    assert any((TESTS / folder).rglob("test_*.py")), f"tests/{folder} has no tests"


@pytest.mark.parametrize("folder", MIRRORED)
def test_every_module_has_its_tests(folder):
    wanted = {f"test_{name}" for name in modules(folder) - TESTLESS.keys()}
    assert wanted <= files_of_tests(folder), (
        f"tests/{folder} lacks {sorted(wanted - files_of_tests(folder))}"
    )


@pytest.mark.parametrize("folder", MIRRORED)
def test_every_file_of_tests_has_its_module(folder):
    other = {name.rpartition("/")[2] for name in OTHER if (Path(name).parent == Path(folder))}
    assert other <= files_of_tests(folder), (
        f"no longer in tests/{folder}: {sorted(other - files_of_tests(folder))}"
    )
    found = {name.removeprefix("test_") for name in files_of_tests(folder) - other}
    assert found <= modules(folder), f"tests/{folder} tests no module in {sorted(found)}"


def test_every_other_folder_is_listed():
    found = {path.relative_to(TESTS).parts[0] for path in TESTS.glob("*/**/*.py")}
    mirrored = {folder.split("/")[0] for folder in (*MIRRORED, *FOLDERS)} - {"."}
    assert found == mirrored | WITHOUT_MODULE.keys()


def test_what_tests_share_is_in_support():
    paths = [path for path in TESTS.rglob("*.py") if path.name != "conftest.py"]
    assert any(path.parent.name == "support" for path in paths)
    for path in paths:
        folder = path.relative_to(TESTS).parts[0]
        is_test = path.name.startswith("test_")
        if folder == "support":
            assert not is_test, f"{path} holds tests"
        elif folder not in PROGRAMS:
            assert is_test, f"{path} belongs in tests/support"


def test_every_file_of_tests_has_tests():
    paths = sorted(TESTS.rglob("test_*.py"))
    assert len(paths) > 80
    for path in paths:
        functions = [n for n in ast.walk(ast.parse(path.read_text())) if hasattr(n, "name")]
        assert any(each.name.startswith("test_") for each in functions), f"{path} is empty"


def test_what_tests_share_has_names_of_its_own():
    """Modules of tests/support are imported by their bare names, which no library may have."""
    names = {path.stem for path in (TESTS / "support").glob("*.py")}
    assert not names & (set(sys.stdlib_module_names) | metadata.packages_distributions().keys())
