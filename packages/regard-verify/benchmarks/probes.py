"""On how many subjects is each function of the suite needed? The rare and long ones are listed.

From the folder of this package:

    python benchmarks/probes.py                     60 right drawings, and 60 with one fault each
    python benchmarks/probes.py --count 500 --most 5

A function that no drawing needs may still be needed by a mutant, by transformers or by a test: look
there before deleting it.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from inspect import CO_OPTIMIZED
from pathlib import Path
from random import Random
from types import CodeType, FrameType
from typing import Any

import torch

import regard_verify
from regard_verify import check

HOME = Path(regard_verify.__file__).parent
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from strangers.calls import load  # noqa: E402
from strangers.draw import draw  # noqa: E402
from strangers.faults import declared  # noqa: E402
from strangers.write import write  # noqa: E402


def needed_by(subject: Any, like: dict[str, Any] | None) -> set[CodeType]:
    """The functions of the suite that run while it judges one subject."""
    found: set[CodeType] = set()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            found.add(frame.f_code)

    sys.setprofile(profile)
    try:
        check(subject, like, quick=True)
    finally:
        sys.setprofile(None)
    return {code for code in found if code.co_filename.startswith(str(HOME))}


def subjects(seed: int, count: int) -> Any:
    """Right drawings, then as many with one fault, each with what is declared."""
    for index in range(count):
        yield load(write(draw(seed, index))), None
    random = Random(seed)
    for index in range(count):
        drawing = draw(seed + 1, index)
        fault = random.choice(sorted(write(drawing).offered))
        yield load(write(drawing, fault)), declared(drawing, fault)


def functions() -> dict[tuple[str, int], tuple[str, int]]:
    """Of each function: file and first line, its name, and how many lines it has."""
    found = {}
    for path in (HOME / folder for folder in ("subject", "laws")):
        for file in sorted(path.glob("*.py")):
            whole = compile(file.read_text(encoding="utf-8"), str(file), "exec")
            for code in inside(whole):
                last = max(line for *_, line in code.co_lines() if line)
                name = f"{path.name}/{file.name} {code.co_qualname}"
                found[str(file), code.co_firstlineno] = name, last - code.co_firstlineno + 1
    return found


def inside(code: CodeType) -> Iterator[CodeType]:
    """The functions of a module and the methods of its classes."""
    for each in code.co_consts:
        if isinstance(each, CodeType) and each.co_flags & CO_OPTIMIZED:
            yield each
        elif isinstance(each, CodeType):
            yield from inside(each)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=60, help="of right drawings, and of faults")
    parser.add_argument("--seed", type=int, default=30, help="of the drawings")
    parser.add_argument("--most", type=int, default=2, help="subjects that need a listed function")
    options = parser.parse_args()
    torch.set_num_threads(1)
    needed: Counter[tuple[str, int]] = Counter()
    for subject, like in subjects(options.seed, options.count):
        codes = needed_by(subject, like)
        needed.update({(code.co_filename, code.co_firstlineno) for code in codes})
    rows = [(needed[place], -lines, name) for place, (name, lines) in functions().items()]
    print(f"{'needed by':>9} {'lines':>6}  of {2 * options.count} subjects")
    for many, lines, name in sorted(row for row in rows if row[0] <= options.most):
        print(f"{many:>9} {-lines:>6}  {name}")


if __name__ == "__main__":
    main()
