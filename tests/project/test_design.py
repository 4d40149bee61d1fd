"""docs/design.md is true: its tree is that of the files, and its outline that of the layers."""

import inspect
import re
from pathlib import Path

from regard import Attention
from regard.ops.backends import BACKENDS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/design.md").read_text()


def files_of_the_tree():
    """Every file of the tree, as a path in src/."""
    (tree,) = re.findall(r"```\n(src/regard/\n.*?)```", PAGE, re.DOTALL)
    folders: list[str] = []
    for line in tree.splitlines():
        indent = (len(line) - len(line.lstrip())) // 2
        first, *rest = line.split()
        if first.endswith("/"):
            folders[indent:] = [first.removeprefix("src/")]
            continue
        alone = not all(name.endswith(".py") for name in rest)  # one file, and what it is
        for name in [first] if alone else [first, *rest]:
            yield "".join(folders[:indent]) + name.removeprefix("src/")


def test_the_tree_has_every_file_and_no_other():
    named = list(files_of_the_tree())
    hidden = ("__init__.py", "__main__.py")
    found = {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src").rglob("*.py")
        if path.name not in hidden and path.parts[-2] != "regard_cli"
    }
    assert len(found) > 100
    assert len(named) == len(set(named))
    assert set(named) - found == set(), "in the tree, and not in src/"
    assert found - set(named) == set(), "in src/, and not in the tree"


def test_the_outline_is_the_forward_of_attention():
    (outline,) = re.findall(r"```python[^\n]*\n(at = .*?)```", PAGE, re.DOTALL)
    steps = [line.partition("#")[0].strip() for line in outline.splitlines()]
    forward = inspect.getsource(Attention.forward)
    source = [line.partition("#")[0].strip() for line in forward.splitlines()]
    assert source[-len(steps) :] == steps


def test_the_table_names_every_backend():
    assert re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE) == list(BACKENDS)
