"""The suite shares no code with the library that it checks, but for the frame of pages."""

import ast
from pathlib import Path

import regard.verify

FOLDER = Path(regard.verify.__file__).parent
ADAPTERS = {"subject/adapters.py"}  # they call regard, as they call transformers
FILES = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.py"))


def imported(path):
    """The names of all imported modules, at the top of the file or inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module
            yield from (f"{node.module}.{each.name}" for each in node.names)


def shared(path):
    names = {name for name in imported(path) if name.split(".")[0] == "regard"}
    return {name for name in names if name.split(".")[1:2] not in (["verify"], ["page"])}


def test_nothing_is_imported_from_the_rest_of_regard():
    imports = {name: shared(FOLDER / name) for name in FILES if name not in ADAPTERS}
    assert {name: names for name, names in imports.items() if names} == {}


def test_the_adapters_are_there_and_import_regard():
    assert set(FILES) > ADAPTERS
    assert all(shared(FOLDER / name) for name in ADAPTERS)
