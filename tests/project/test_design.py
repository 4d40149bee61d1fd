"""docs/design.md is true: its folders, its imports, and the outline of the layers."""

import ast
import inspect
import re
import textwrap
from pathlib import Path

import pytest

from module_state import state_in, state_of
from regard import Attention, LatentKVAttention, MultiHeadLatentAttention
from regard.ops.backends import BACKENDS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/design.md").read_text()


SOURCES = ("src/regard", "packages/regard-verify/src/regard_verify")
PACKAGE = ROOT / SOURCES[0]
LINES = ("For", "In", "Out", "Start", "Must not know")
CORE = {"layers", "rope", "cache", "cache/paging", "masks", "ops", "ops/backends", "ops/kernels"}


def test_the_tree_has_every_folder_and_no_other():
    (tree,) = re.findall(r"```\nsrc/regard/ .*?\n(.*?)packages/", PAGE, re.DOTALL)
    named, folders = set(), []
    for line in tree.splitlines():
        indent = (len(line) - len(line.lstrip())) // 2 - 1
        folders[indent:] = [line.split()[0].rstrip("/")]
        named.add("/".join(folders))
    found = {str(path.parent.relative_to(PACKAGE)) for path in PACKAGE.rglob("*/__init__.py")}
    assert named == found


def test_the_path_from_the_readme_to_a_kernel_is_twelve_files():
    files = re.findall(r"^\d+\. `([\w/.]+)`: ", PAGE, re.MULTILINE)
    (kernel,) = re.findall(r"a kernel after them \(`([\w/.]+)`\)", PAGE)
    assert len(files) == len({*files}) == 10
    assert all((PACKAGE / file).is_file() for file in (*files, kernel))


def rooms():
    """The folders that the page describes, each with its lines."""
    sections = re.findall(r"### `([\w/-]+)/`\n((?:- .*\n)+)", PAGE)
    lines = r"^- ([A-Za-z ]+): (.*\.)$"
    return {name: dict(re.findall(lines, text, re.MULTILINE)) for name, text in sections}


def test_every_room_has_its_five_lines():
    found = {path.parent.name for path in PACKAGE.glob("*/__init__.py")} | CORE
    assert set(rooms()) == found | {"packages/regard-verify"}
    assert all((*lines,) == LINES for lines in rooms().values())


@pytest.mark.parametrize("room", rooms())
def test_a_room_starts_at_a_file_and_does_not_know_what_it_must_not(room):
    lines = rooms()[room]
    own = ROOT / room / "src" if room.startswith("packages/") else PACKAGE / room
    for file in re.findall(r"`([\w/.-]+\.py)`", lines["Start"]):
        assert (PACKAGE / file).is_file() or (ROOT / file).is_file(), file
    refused = re.findall(r"`(\w+)`", lines["Must not know"])
    names = {each if each == "regard" else f"regard.{each}" for each in refused}
    for path in own.rglob("*.py"):
        for module in imports_of(path):
            assert not any(f"{module}.".startswith(f"{name}.") for name in names), (path, module)


def imports_of(path):
    """The modules that a module imports when it is imported itself."""
    body = ast.parse(path.read_text()).body
    for node in (each for each in body if isinstance(each, ast.Import | ast.ImportFrom)):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{each.name}" for each in node.names)
        else:
            yield from (each.name for each in node.names)


LAYERS = [Attention, MultiHeadLatentAttention, LatentKVAttention]


def outlines():
    return re.findall(r"```python[^\n]*\n(at = arrive\(self.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize(("layer", "outline"), [*zip(LAYERS, outlines(), strict=True)])
def test_the_outline_is_the_forward_of_the_layer(layer, outline):
    """Its whole body, without the docstring: a statement more is one to explain, too."""
    source = textwrap.dedent(inspect.getsource(layer.forward))
    (forward,) = ast.parse(source).body
    docstring, *body = forward.body
    assert isinstance(docstring, ast.Expr) and isinstance(docstring.value, ast.Constant)
    written = [ast.unparse(statement) for statement in ast.parse(outline).body]
    assert written == [ast.unparse(statement) for statement in body]


@pytest.mark.parametrize("layer", LAYERS)
def test_weights_and_explain_begin_as_forward_does(layer):
    def body(name):
        (function,) = ast.parse(textwrap.dedent(inspect.getsource(getattr(layer, name)))).body
        return [ast.unparse(statement) for statement in function.body[1:]]

    arrival, *before_the_cache = [each for each in body("forward") if not each.startswith("with ")]
    assert body("weights")[0] == body("explain")[0] == arrival
    assert body("queries_and_keys")[: len(before_the_cache)] == before_the_cache


def test_the_global_state_is_in_the_table():
    _, section = PAGE.split("\n## Global state\n")
    rows = re.findall(r"`([\w/]+)\.py: ([\w, ]+)`", section)
    named = [f"{file}.{name}" for file, names in rows for name in names.split(", ")]
    listed = {*named}
    assert len(named) == len(listed), "a name stands in two rows"
    found = state_of(ROOT / SOURCES[0])
    for source in ("src/regard_cli", SOURCES[1]):
        found |= {f"{Path(source).name}/{name}" for name in state_of(ROOT / source)}
    assert found - listed == set(), "in src/, and not in the table"
    assert listed - found == set(), "in the table, and not in src/"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import functools\n@functools.cache\ndef f(): ...", {"f"}),
        ("from functools import lru_cache\n@lru_cache(maxsize=4)\ndef f(): ...", {"f"}),
        ("from functools import lru_cache\ndef f(g): return lru_cache(9)(g)", {"f"}),
        ("from weakref import WeakKeyDictionary as W, WeakSet\nA: W[int] = WeakSet()", {"A"}),
        ("import threading\nA, B = 1, 2\n_LOCAL = threading.local()", {"_LOCAL"}),
        ("_MEMO = {}\ndef f(key):\n    _MEMO[key] = 1", {"_MEMO"}),
        ("_MEMO = {}\ndef f(key):\n    return lambda: _MEMO.pop(key)", {"_MEMO"}),
        ("_LIST = []\nclass C:\n    def m(self):\n        _LIST.append(self)", {"_LIST"}),
        ("_LAST = None\ndef f():\n    global _LAST\n    _LAST = 1", {"_LAST"}),
        ("def f():\n    import torch\n    torch.add = None", {"torch"}),
        ("from a import C\ndef f():\n    setattr(C, 'run', None)", {"C"}),
        ("import torch\ndef f():\n    torch.set_num_threads(1)", {"torch"}),
        ("import os\ndef f():\n    os.environ.setdefault('A', 'b')", {"os"}),
        ("TABLE = {1: 2}\ndef f(key):\n    return TABLE[key]", set()),
        ("FOUND = []\ndef f():\n    FOUND = []\n    FOUND.append(1)", set()),
    ],
)
def test_state_is_found_in_a_source(source, found):
    assert state_in(source) == found


def test_the_table_names_every_backend():
    assert re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE) == list(BACKENDS)
