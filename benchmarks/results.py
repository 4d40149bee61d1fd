"""What the suite found: shown beside its targets, and kept in a file that parts of a run fill."""

import json
import sys
from pathlib import Path
from typing import Any

from cases import BEST, CASES, Target

Result = dict[str, Any]
Rows = dict[str, dict[str, float]]


def best_peer(rows: Rows) -> str | None:
    """The fastest contestant that is not regard's."""
    peers = [name for name in rows if not name.startswith("regard")]
    return min(peers, key=lambda name: rows[name]["ms"], default=None)


def judged(target: Target, rows: Rows) -> Result:
    """A target beside what was measured; both None where its base did not run."""
    name = best_peer(rows) if target.base == BEST else target.base
    ratio = rows[name]["ratio"] if name in rows else None
    met = None if ratio is None else ratio <= target.most
    found = {"contestant": name, "ratio": ratio, "met": met}
    return {"most": target.most, "base": target.base, **found}


def show(result: Result) -> None:
    """Print a case."""
    print(f"\n{result['case']}")
    for name, row in result.get("rows", {}).items():
        spread = f"[{row['low']:.2f}, {row['high']:.2f}]"
        share = f"{row['of_limit']:.0%} of {result['bound']}"
        print(f"  {name:<32}{row['ms']:>11.3f} ms{row['ratio']:>8.2f} {spread:<14} {share}")
    for each in result.get("targets", []):
        told = {True: "met", False: "MISSED", None: "not measured"}[each["met"]]
        ratio = "" if each["ratio"] is None else f" {each['ratio']:.2f},"
        which = f" ({each['contestant']})" if each["base"] == BEST else ""
        print(f"  target {each['most']:.2f} of {each['base']}{which}:{ratio} {told}")
    if "remark" in result:
        print(f"  {result['remark']}")
    sys.stdout.flush()  # of a run that takes long, each case at once


def count_targets(results: list[Result]) -> str:
    """How many targets were met, in a sentence; those missed by name."""
    each = [(result["case"], one) for result in results for one in result.get("targets", [])]
    met = sum(one["met"] is True for _, one in each)
    missed = [f"{case} ({one['ratio']:.2f})" for case, one in each if one["met"] is False]
    unknown = sum(one["met"] is None for _, one in each)
    told = f"targets: {met} met, {len(missed)} MISSED, {unknown} not measured"
    return "\n  ".join([told, *missed])


def earlier(file: Path, machine: dict[str, Any]) -> list[Result]:
    """The results of a file, to which a part of a run adds its own.

    Raises:
        ValueError: if they were measured on another machine, or with other versions.
    """
    if not file.exists():
        return []
    whole = json.loads(file.read_text())
    was = whole["machine"]
    differing = [name for name in was | machine if was.get(name) != machine.get(name)]
    if differing:
        pairs = "; ".join(f"{name}: {was.get(name)}, now {machine.get(name)}" for name in differing)
        raise ValueError(
            f"{file} was measured elsewhere, and one file holds one machine ({pairs}); "
            "run all cases, or give --json another file"
        )
    results: list[Result] = whole["results"]
    return results


def merged(old: list[Result], new: list[Result]) -> list[Result]:
    """New results in the place of old ones, in the order of CASES; what is no case is dropped."""
    found = {each["case"]: each for each in old} | {each["case"]: each for each in new}
    return [found[case.name] for case in CASES if case.name in found]


def keep(file: Path, whole: dict[str, Any]) -> None:
    """Write a file in one step, so that an interrupted run leaves a whole one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(file.name + ".part")
    part.write_text(json.dumps(whole, indent=1) + "\n")
    part.replace(file)
