"""Writes regard's attention as a repository for the `kernels` package, which transformers loads.

python scripts/kernel_repository.py build/regard-attention

In the folder stands one build for every machine, `build/torch-universal`: the modules that
`regard.hf.register` needs, with imports relative to each other, and a stand-in for jaxtyping, whose
annotations do nothing. It needs torch and transformers alone. With it a program whose only option
is a string needs no regard:

    LOCAL_KERNELS=me/regard-attention=build/regard-attention python program.py

and in the program `from_pretrained(path, attn_implementation="me/regard-attention")`.
"""

import ast
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
NAME = "regard-attention"
FIRST = "regard.hf.running.registering"  # the module with the function that transformers calls
IMPORT = re.compile(r"^(\s*)from (regard|jaxtyping)\b(\.[\w.]+)? import ", re.MULTILINE)

ENTRY = '''"""regard's attention for transformers: `attn_implementation` names this repository."""

from .hf.running.registering import attention as flash_attn_forward


def supports_flash_attn() -> bool:
    """Tells transformers to call `flash_attn_forward` with the arguments of an attention function
    and the masks of SDPA."""
    return True


__all__ = ["flash_attn_forward", "supports_flash_attn"]
'''

ANNOTATIONS = '''"""Stands in for jaxtyping: an annotation with a shape is the type of its array."""

from typing import Any


class Annotation:
    def __class_getitem__(cls, item: Any) -> Any:
        return item[0]


def __getattr__(name: str) -> type:
    return Annotation
'''


def path_of(module: str) -> Path:
    path = SOURCE / Path(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def imported(module: str) -> Iterator[str]:
    """The modules of regard that a module imports anywhere, also in a function."""
    for node in ast.walk(ast.parse(path_of(module).read_text())):
        if isinstance(node, ast.Import) and any(n.name.startswith("regard") for n in node.names):
            raise ValueError(
                f"{module}: `import regard...` cannot be made relative; import from it"
            )
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "regard":
            for each in node.names:
                name = f"{node.module}.{each.name}"
                yield name if path_of(name).exists() else str(node.module)


def needed() -> list[str]:
    """The first module and all that it imports, directly or not."""
    found: set[str] = set()
    waiting = [FIRST]
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            waiting += imported(module)
    return sorted(found)


def relative(module: str) -> str:
    """The text of a module with relative imports."""
    depth = module.count(".") + (path_of(module).name == "__init__.py")
    dots = "." * depth

    def rewritten(found: re.Match[str]) -> str:
        space, package, rest = found.groups()
        inner = "jaxtyping" if package == "jaxtyping" else (rest or "").removeprefix(".")
        return f"{space}from {dots}{inner} import "

    return IMPORT.sub(rewritten, path_of(module).read_text())


def write(folder: Path) -> list[str]:
    """Write the repository; returns the modules in it.

    Raises:
        FileExistsError: if the folder exists and is not empty.
    """
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty; give a new folder, or remove it")
    build = folder / "build" / "torch-universal"
    modules = needed()
    for module in modules:
        path = build / path_of(module).relative_to(SOURCE / "regard")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(relative(module))
    for inner in (path for path in build.rglob("*") if path.is_dir()):
        (inner / "__init__.py").touch()  # empty, of packages whose own one nobody imports
    (build / "__init__.py").write_text(ENTRY)
    (build / "jaxtyping.py").write_text(ANNOTATIONS)
    metadata = {
        "id": f"{NAME.replace('-', '_')}_universal",
        "name": NAME,
        "version": 1,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": "cpu"},
    }
    (build / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    shutil.copy(ROOT / "LICENSE", folder)
    return modules


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(f"{len(write(Path(sys.argv[1])))} modules in {sys.argv[1]}")
