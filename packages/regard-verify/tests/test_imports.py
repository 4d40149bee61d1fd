"""Imports: torch and Python's own modules; further packages only in files that need them."""

import ast
import subprocess
import sys
from pathlib import Path

import regard_verify

FOLDER = Path(regard_verify.__file__).parent
FILES = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.py"))
FURTHER = {  # packages beside torch, by the files that import them
    "command.py": {"typer"},
    "plugin.py": {"pytest"},
    "subject/adapters.py": {"transformers"},
    "subject/caches.py": {"transformers"},
    "terminal.py": {"rich"},
    "writing.py": {"rich"},
}


def imported(path):
    """The packages of all imported modules, at the top of the file or inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (each.name.partition(".")[0] for each in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module.partition(".")[0]


def test_every_file_imports_torch_alone_and_no_file_regard():
    own = {*sys.stdlib_module_names, "torch", "regard_verify"}
    found = {name: {*imported(FOLDER / name)} - own for name in FILES}
    assert {name: packages for name, packages in found.items() if packages} == FURTHER


def packages_after(code):
    """The packages beside Python's own that a new Python has imported after the code."""
    code += "\nimport sys\nprint(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {*done.stdout.split()} - {*sys.stdlib_module_names}


def test_importing_it_imports_nothing_and_its_names_torch():
    assert "torch" not in packages_after("import regard_verify, regard_verify.plugin")
    checks = "from regard_verify import check\ncheck(lambda q, k, v: v, quick=True)"
    slow = {"jaxtyping", "regard", "rich", "sympy", "transformers", "typer"}
    assert not packages_after(checks) & slow


def test_every_public_name_is_listed_once():
    assert sorted(regard_verify._MODULES) == sorted(regard_verify.__all__)
    assert {*regard_verify.__all__} <= {*dir(regard_verify)}


FOLDERS = ["subject", "laws", "report", "run"]  # each may import from those before it


def test_folders_import_one_way():
    for number, folder in enumerate(FOLDERS):
        later = tuple(f"regard_verify.{name}" for name in FOLDERS[number + 1 :])
        for path in (FOLDER / folder).rglob("*.py"):
            nodes = [n for n in ast.walk(ast.parse(path.read_text())) if hasattr(n, "module")]
            wrong = [node.module for node in nodes if (node.module or "").startswith(later)]
            assert not wrong, f"{path} imports {wrong}"


def test_no_file_holds_two_things():
    for name in FILES:
        assert len((FOLDER / name).read_text().splitlines()) <= 400, name


def test_functions_are_short():
    """Documented signatures aside, the body of a function fits a screen."""
    for name in FILES:
        for node in ast.walk(ast.parse((FOLDER / name).read_text())):
            if isinstance(node, ast.FunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                if body:
                    lines = body[-1].end_lineno - body[0].lineno + 1
                    assert lines <= 45, f"{name}:{node.lineno} {node.name} has {lines}"
