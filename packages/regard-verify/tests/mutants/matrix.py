"""Checks every law on every mutant, and writes docs/verify-matrix.md in about two minutes.

python packages/regard-verify/tests/mutants/matrix.py
"""

import sys
from collections import Counter
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


def rows():
    """Each mutant with the laws that must find it, and those that do."""
    from mutants import callers, defects, functions, layers, things
    from regard_verify import check

    for module in (functions, layers, things, callers, defects):
        for mutant in module.MUTANTS:
            report = check(mutant.make(), mutant.like, quick=not mutant.slow)
            named = check(mutant.make(), mutant.like, only=mutant.kills)
            broken = [*report.failed, *report.advice, *named.failed, *named.advice]
            yield mutant, set(broken)


def main():
    from regard_verify import LAWS

    found = list(rows())
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
    sys.path[:0] = [
        str(each)
        for each in (
            PACKAGE / "tests",
            PACKAGE / "tests/support",
            ROOT / "tests/support",
            PACKAGE / "src",
        )
    ]
    sys.exit(main())
