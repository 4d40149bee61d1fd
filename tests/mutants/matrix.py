"""Every mutant before every check, as a page: `python tests/mutants/matrix.py`.

Writes docs/verify-matrix.md; takes two minutes.
"""

import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "verify-matrix.md"
HEAD = """# Which check notices which fault

{mutants} attentions, caches, allocators and rotations with one fault each, kept in
`tests/mutants/`, before all {checks} checks of `regard verify`. {killed} of them are noticed.
**Bold** checks are those that name the cause; the others notice it too. Regenerate with
`python tests/mutants/matrix.py`.

"""


def rows():
    """Each mutant with the checks that must notice it, and those that do."""
    from mutants import callers, functions, layers, things
    from regard.verify import check

    for module in (functions, layers, things, callers):
        for mutant in module.MUTANTS:
            report = check(mutant.make(), mutant.like, quick=not mutant.slow)
            named = check(mutant.make(), mutant.like, only=mutant.kills)
            noticed = [*report.failed, *report.advice, *named.failed, *named.advice]
            yield mutant, set(noticed)


def main():
    from regard.verify import LAWS

    found = list(rows())
    counts = Counter(name for _, noticed in found for name in noticed)
    killed = sum(bool(noticed) for _, noticed in found)
    lines = [HEAD.format(mutants=len(found), checks=len(LAWS), killed=killed)]
    lines.append("| fault | found in | noticed by |\n|---|---|---|")
    for mutant, noticed in found:
        names = [f"**{name}**" for name in mutant.kills if name in noticed]
        names += [name for name in LAWS if name in noticed and name not in mutant.kills]
        lines.append(f"| {mutant.name} | {mutant.after} | {', '.join(names) or 'nothing'} |")
    lines.append("\n## How much each check notices\n\n| check | faults |\n|---|---|")
    lines += [f"| {name} | {counts[name]} |" for name in sorted(LAWS, key=lambda n: -counts[n])]
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{killed} of {len(found)} noticed; {PAGE}")
    return int(killed != len(found))


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests/support"), str(ROOT / "src")]
    sys.exit(main())
