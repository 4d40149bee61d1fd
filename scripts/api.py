"""Write docs/api.json: every public name with its signature; `tests/project/test_api.py` compares.

    python scripts/api.py

A change of that file is a change that users of the library may have to follow: it belongs in
CHANGELOG.md, and a name goes only after a release in which `regard.deprecating` warned of it.
"""

import importlib
import inspect
import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
API = ROOT / "docs" / "api.json"
PLAIN = (type(inspect.Parameter.empty), type(None), bool, int, float, str)


class Other:
    """A default whose text differs between versions, such as that of an object."""

    def __repr__(self) -> str:
        return "..."


def entry(value: object) -> object:
    """The signature of a function; of a class, its own and those of its methods; else a type."""
    if inspect.isfunction(value):
        return signature(value)
    if not inspect.isclass(value):
        return type(value).__name__
    methods = {name: member_entry(each) for name, each in sorted(members(value).items())}
    return {"": signature(value), **methods}


def members(value: type) -> dict[str, object]:
    """Public methods and properties that the library defines for a class."""
    found: dict[str, object] = {}
    for base in reversed(value.__mro__):
        if base.__module__.partition(".")[0] in ("regard", "regard_verify"):
            found |= {name: each for name, each in vars(base).items() if not name.startswith("_")}
    kinds = (property, staticmethod, classmethod)
    return {n: x for n, x in found.items() if inspect.isfunction(x) or isinstance(x, kinds)}


def member_entry(member: object) -> str:
    if isinstance(member, property):
        return "property"
    return signature(member.__func__ if isinstance(member, staticmethod | classmethod) else member)


def signature(value: object) -> str:
    """Names, kinds and defaults of parameters. Annotations may become more general at any time."""
    try:
        found = inspect.signature(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # a class that C constructs
        return "(...)"
    plain = [
        each.replace(
            annotation=inspect.Parameter.empty,
            default=each.default if isinstance(each.default, PLAIN) else Other(),
        )
        for each in found.parameters.values()
    ]
    return str(inspect.Signature(plain))


def api() -> dict[str, object]:
    """Every public name by its shortest path."""
    sys.path.insert(0, str(ROOT / "scripts"))
    from reference import public  # type: ignore[import-not-found]

    found = {}
    for path in sorted(public()):
        module, _, name = path.rpartition(".")
        found[path] = entry(getattr(importlib.import_module(module), name))
    return found


def text() -> str:
    """The file that this version of the library has."""
    return json.dumps(api(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    API.write_text(text(), encoding="utf-8")
