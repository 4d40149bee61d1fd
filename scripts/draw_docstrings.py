"""Draw docstrings at random, to judge whether each is understood at first reading.

python scripts/draw_docstrings.py --seed 1 --count 60 --without hf distributed
"""

import argparse
import ast
import random
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src/regard"


def docstrings(without: list[str]) -> Iterator[tuple[str, str]]:
    """The place and the text of every docstring, up to its examples."""
    for path in sorted(SOURCE.rglob("*.py")):
        home = path.relative_to(SOURCE)
        if any(home.is_relative_to(each) for each in without):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = (ast.get_docstring(node) or "").partition("Examples:")[0].strip()
                if text:
                    yield f"{home}:{getattr(node, 'lineno', 1)} {getattr(node, 'name', '')}", text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--without", nargs="*", default=[], help="folders that are left out")
    options = parser.parse_args()
    found = list(docstrings(options.without))
    print(f"{options.count} of {len(found):,} docstrings, seed {options.seed}")
    for place, text in random.Random(options.seed).sample(found, options.count):
        print(f"\n{place}\n    {text.replace(chr(10), chr(10) + '    ')}")


if __name__ == "__main__":
    main()
