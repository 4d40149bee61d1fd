"""Write docs/reference/index.md: every public name with its first sentence, and where it is.

    python scripts/reference.py

The names and their order are those of the reference pages, which say `::: regard.attend`.
"""

import importlib
import inspect
import re
from pathlib import Path

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"
PACKAGES = [
    *("masks", "cache", "sparse", "rope", "hf", "convert", "compare", "plan", "see"),
    *("distributed", "bench"),
]
PAGES = ["layers", "attend", *PACKAGES, "verify"]
# a name, its options, and a paragraph of the page itself below them
DIRECTIVE = re.compile(r"^::: (\S+)\n(?: {4}.*\n)*\n?((?:(?!:::|#|```).+\n)*)", re.MULTILINE)
SENTENCE = re.compile(r"(.+?)\.(?:\s|$)", re.DOTALL)
HEAD = """# Reference

All public names of `regard`: `attend` is `from regard import attend`, and `hf.load` is
`from regard.hf import load`. Those of `regard_verify` begin with it. Each page begins with what is
on it; each name has its arguments, its errors and an example there.
[`regard` on the command line](command-line.md) has a page of its own.
"""


def documented(page: str) -> list[tuple[str, str]]:
    """The names on a page, and what the page itself says below each."""
    return DIRECTIVE.findall((REFERENCE / f"{page}.md").read_text(encoding="utf-8"))


def public() -> set[str]:
    """Every public name by its shortest path: what `regard` exports, it exports first."""
    top = importlib.import_module("regard")
    found = {f"regard.{name}" for name in top.__all__}
    for package in PACKAGES:
        module = importlib.import_module(f"regard.{package}")
        for name in module.__all__:
            if name not in top.__all__ or getattr(module, name) is not getattr(top, name):
                found.add(f"regard.{package}.{name}")
    verify = importlib.import_module("regard_verify")
    return found | {f"regard_verify.{name}" for name in verify.__all__}


def first_sentence(path: str, on_page: str) -> str:
    """Of the docstring; of a constant, of what its page says about it."""
    package, _, name = path.rpartition(".")
    value = getattr(importlib.import_module(package), name)
    is_documented = inspect.isclass(value) or inspect.isfunction(value)
    text = (inspect.getdoc(value) or "").partition("\n\n")[0] if is_documented else on_page
    found = SENTENCE.match(text)
    if found is None:
        raise ValueError(f"{path} has no sentence, neither in its docstring nor on its page")
    return re.sub(r"`([^`]*\|[^`]*)`", without_bars, " ".join(found[1].split()))


def without_bars(code: re.Match[str]) -> str:
    """A bar would end the cell of a table, even inside code."""
    return f"<code>{code[1].replace('|', '&#124;')}</code>"


def index() -> str:
    """The page of all names."""
    lines = [HEAD]
    for page in PAGES:
        title = (REFERENCE / f"{page}.md").read_text(encoding="utf-8").partition("\n")[0]
        lines += [f"#{title}", "", "| name | what it is |", "|---|---|"]
        for path, words in documented(page):
            link = f"[`{path.removeprefix('regard.')}`]({page}.md#{path})"
            lines.append(f"| {link} | {first_sentence(path, words)} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    (REFERENCE / "index.md").write_text(index(), encoding="utf-8")
