"""Checks every law on every mutant, and writes docs/verify-matrix.md: 4 minutes of processor time.

python packages/regard-verify/tests/mutants/matrix.py
"""

import argparse
import os
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

PACKAGE = Path(__file__).parents[2]
ROOT = PACKAGE.parents[1]
PAGE = ROOT / "docs" / "verify-matrix.md"
HEAD = """# Which law finds which fault

`packages/regard-verify/tests/mutants/` has {mutants} attentions, caches and rotations
with one fault each. All {laws} laws of `regard verify` are checked on them. {killed} of them are
found. **Bold** laws name the cause; the others find it too. Regenerate with
`python packages/regard-verify/tests/mutants/matrix.py`.

"""
sys.path[:0] = [
    str(each)
    for each in (
        PACKAGE / "tests",
        PACKAGE / "tests/support",
        ROOT / "tests/support",
        PACKAGE / "src",
    )
]


def mutants():
    """Every mutant, in the order of the page."""
    from mutants import callers, defects, functions, layers, things

    modules = (functions, layers, things, callers, defects)
    return [mutant for module in modules for mutant in module.MUTANTS]


def broken_laws(number):
    """The names of the laws that one mutant breaks. Laws that name its cause run on all sizes."""
    import torch

    from regard_verify import LAWS, check
    from regard_verify.run.in_process import FIRST

    torch.set_num_threads(1)
    mutant = mutants()[number]
    others = [name for name in LAWS if name == FIRST or name not in mutant.kills]
    reports = (
        check(mutant.make(), mutant.like, only=others, quick=not mutant.slow),
        check(mutant.make(), mutant.like, only=mutant.kills),
    )
    return {name for report in reports for name in (*report.failed, *report.advice)}


def main():
    from regard_verify import LAWS

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    every = mutants()
    with ProcessPoolExecutor(parser.parse_args().jobs) as pool:
        found = list(zip(every, pool.map(broken_laws, range(len(every))), strict=True))
    counts = Counter(name for _, broken in found for name in broken)
    killed = sum(bool(broken) for _, broken in found)
    lines = [HEAD.format(mutants=len(found), laws=len(LAWS), killed=killed)]
    lines.append("| fault | found in | found by |\n|---|---|---|")
    for mutant, broken in found:
        names = [f"**{name}**" for name in mutant.kills if name in broken]
        names += [name for name in LAWS if name in broken and name not in mutant.kills]
        lines.append(f"| {mutant.name} | {mutant.after} | {', '.join(names) or 'nothing'} |")
    lines.append("\n## How many faults each law finds\n\n| law | faults |\n|---|---|")
    lines += [f"| {name} | {counts[name]} |" for name in sorted(LAWS, key=lambda n: -counts[n])]
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{killed} of {len(found)} found; {PAGE}")
    return int(killed != len(found))


if __name__ == "__main__":
    sys.exit(main())
