"""The structure of the package: public names, imports in one direction, short files."""

import ast
import inspect
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import regard
import regard.ops.call

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src/regard").rglob("*.py"))


def test_the_public_names_are_sorted_and_there():
    listed = regard.__all__
    assert listed == sorted(listed, key=lambda n: (not n.isupper(), not n[0].isupper(), n))
    assert all(hasattr(regard, name) for name in listed)
    public = {
        n for n, v in vars(regard).items() if not n.startswith("_") and not inspect.ismodule(v)
    }
    assert public == set(listed)


KNOWS = {  # which folders a folder may import from; "." is the files at the root
    ".": set(),
    "page": {"."},
    "masks": {"."},
    "cache": {"."},
    "rope": {"."},
    "ops": {".", "masks", "cache"},
    "layers": {".", "masks", "cache", "rope", "ops"},
}
KNOWS["sparse"] = {*KNOWS} - {"page"}
KNOWS["public"] = {*KNOWS}  # the public names
KNOWS["regard"] = {*KNOWS}  # loads them; what stands below may import them
KNOWS["hf"] = {*KNOWS}
KNOWS["auto"] = {"hf"}
KNOWS["convert"] = {*KNOWS}
KNOWS["plan"] = {*KNOWS}
KNOWS["compare"] = KNOWS["bench"] = {*KNOWS}
KNOWS["see"] = {*KNOWS}
KNOWS["compare"] = {*KNOWS["compare"], "page"}
KNOWS["distributed"] = {*KNOWS["hf"], "hf", "plan"}  # plan counts the bytes that ranks send
KNOWS["cli"] = {*KNOWS}


def folder_of(module):
    """The folder of a module's file, in KNOWS' words."""
    if module in ("regard", "regard.auto", "regard.public"):  # names for what stands below
        return module.rpartition(".")[2]
    home = ROOT / "src" / Path(*module.split("."))
    return module.split(".")[1] if home.is_dir() or module.count(".") > 1 else "."


def imports_of(path):
    """The regard modules that a file imports, however it spells that."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports by a relative name"
            names = [f"{node.module}.{each.name}" for each in node.names]
        for name in names:
            while name.split(".")[0] == "regard" and name not in MODULES:
                name = name.rpartition(".")[0]
            if name in MODULES:
                yield name


def module_of(path):
    parts = path.relative_to(ROOT / "src").with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in SOURCES}


def test_imports_point_one_way():
    assert {folder_of(module) for module in MODULES} == KNOWS.keys(), "a folder is not in KNOWS"
    for module, path in MODULES.items():
        if module == "regard.__main__":
            continue
        me = folder_of(module)
        for other in map(folder_of, imports_of(path)):
            assert other == me or other in KNOWS[me], f"{module} imports from {other}"


INSIDE = {  # folders of a folder, each of which may import from those before it
    "hf": ["families", "running", "placing", "loading", "generating", "evaluating"],
    "convert": ["exact", "lossy", "healing"],
}


@pytest.mark.parametrize("package", INSIDE)
def test_folders_inside_a_folder_import_one_way(package):
    order = INSIDE[package]
    home = f"regard.{package}."
    assert {name for name in order if f"{home}{name}" in MODULES} == set(order)
    for module, path in MODULES.items():
        inside = module.removeprefix(home).split(".")[0]
        if module.startswith(home) and inside in order:
            for other in imports_of(path):
                room = other.removeprefix(home).split(".")[0]
                if other.startswith(home) and room in order:
                    assert order.index(room) <= order.index(inside), f"{module} imports {other}"


def test_no_modules_import_each_other():
    left = {module: {*imports_of(path)} - {module} for module, path in MODULES.items()}
    left["regard.masks.draw"].discard("regard.masks.mask")  # for its types only
    while ready := {module for module, known in left.items() if not known & left.keys()}:
        left = {module: known for module, known in left.items() if module not in ready}
    assert not left, f"in a circle: {sorted(left)}"


def test_backends_do_not_import_each_other():
    backends = sorted((ROOT / "src/regard/ops/backends").glob("*.py"))
    assert {"sdpa", "eager", "fused"} <= {path.stem for path in backends}
    for path in backends:
        if path.stem not in ("__init__", "blocked"):  # which cuts a call into calls for others
            known = {other.rpartition(".") for other in imports_of(path)}
            inside = {name for home, _, name in known if home == "regard.ops.backends"}
            assert inside <= {"common"}, f"{path.stem} imports {inside}"


def test_importing_regard_brings_only_itself():
    """What it costs in time is measured by benchmarks/importing.py."""
    code = (
        "import sys, torch, jaxtyping; before = set(sys.modules); import regard; regard.attend; "
        "new = {m.split('.')[0] for m in set(sys.modules) - before}; "
        "print(sorted(new - set(sys.stdlib_module_names)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['regard']"


def test_no_file_holds_two_things():
    for path in SOURCES:
        assert len(path.read_text().splitlines()) <= 400, path


def test_functions_are_short():
    """Constructors and documented signatures aside, what a function does fits a screen."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                if body:
                    lines = body[-1].end_lineno - body[0].lineno + 1
                    assert lines <= 45, f"{path}:{node.lineno} {node.name} has {lines}"


def _asks_for_members(node):
    """Whether a call asks an object for a member that it may not have."""
    called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
    return called == "hasattr" or (called == "getattr" and len(node.args) == 3)


def _is_any_cache(node):
    """Whether a parameter that is a cache has no type."""
    return isinstance(node, ast.arg) and "cache" in node.arg and _names_any(node.annotation)


def _names_any(annotation):
    nodes = ast.walk(annotation) if annotation is not None else ()
    return any(isinstance(each, ast.Name) and each.id == "Any" for each in nodes)


@pytest.mark.parametrize("folder", ["ops", "cache"])
def test_members_of_caches_are_those_of_their_types(folder):
    """What is stored how is a type: no object is asked whether it has a member."""
    for path in (ROOT / "src/regard" / folder).rglob("*.py"):
        if not {"paging", "kernels"} & {*path.parts}:
            nodes = list(ast.walk(ast.parse(path.read_text())))
            wrong = [
                each.lineno for each in nodes if _asks_for_members(each) or _is_any_cache(each)
            ]
            assert not wrong, f"{path}: lines {wrong}"


def test_streams_and_calls_know_no_storage():
    """A stream is a tensor or an object of its own class, in the module of its feature."""
    storages = {"regard.cache.codes", "regard.cache.paging", "regard.distributed"}
    for name in ("cache/streams", "cache/parts", "ops/call", "ops/parts", "ops/prepared"):
        known = {*imports_of(ROOT / f"src/regard/{name}.py")}
        assert not {each for each in known if each.startswith(tuple(storages))}, name
    assert len(regard.ops.call.Backend._fields) <= 7


SHARED_NAMES = {"heads.py": 4, "layers.py": 3, "attending.py": 3, "texts.py": 3}  # may only shrink
COMMAND = "__main__.py"  # a folder of them is a command


def test_no_file_name_stands_more_than_twice():
    found = Counter(path.name for path in SOURCES if path.name not in ("__init__.py", COMMAND))
    more = {name: count for name, count in found.items() if count > 2}
    assert more.keys() <= SHARED_NAMES.keys(), more
    assert all(count <= SHARED_NAMES[name] for name, count in more.items()), more


def test_no_class_name_stands_twice_in_a_folder():
    """A folder of the package, with the folders in it."""
    found = Counter(
        (path.relative_to(ROOT / "src/regard").parts[0], node.name)
        for path in SOURCES
        if path.is_relative_to(ROOT / "src/regard")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert {each: count for each, count in found.items() if count > 1} == {}
