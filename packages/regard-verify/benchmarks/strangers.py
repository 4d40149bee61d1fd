"""Does `regard verify` judge attentions that nobody here wrote? Drawn ones, right and with a fault.

From the folder of this package:

    python benchmarks/strangers.py                        60 right ones, by name, one after another
    python benchmarks/strangers.py --inside --quick       in this process: a minute or two
    python benchmarks/strangers.py --faults 2             and each with two single faults
    python benchmarks/strangers.py --faults all --right no
    python benchmarks/strangers.py --show 0:17            a source; with a fault 0:17:FAULT

A false alarm is a law that is called broken in a right attention. A fault is noticed if any law is
broken, and by the right sentence if the first cause of the report names it. `--keep FOLDER` keeps
the sources that were misjudged.
"""

import argparse
import importlib.util
import json
import sys
import tempfile
import time
from collections import Counter, defaultdict
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch

from regard_verify import Report, check

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from strangers.changing import changes  # noqa: E402
from strangers.draw import draw  # noqa: E402
from strangers.faults import FAULTS, declared  # noqa: E402
from strangers.write import write  # noqa: E402

ASKED = ("passed", "failed", "follows", "advice", "undecided")


@dataclass
class Row:
    """The verdict on one subject.

    Attributes:
        at: `SEED:INDEX` or `SEED:INDEX:FAULT`.
        family: of the drawing.
        problem, unjudged: of the report.
        causes: of the report, as pairs of a law and its text.
        follows, undecided, asked: names of laws of that status; defects: with their reasons.
    """

    at: str
    family: str
    problem: str = ""
    unjudged: str = ""
    causes: list[tuple[str, str]] = field(default_factory=list)
    follows: list[str] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)
    defects: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def fault(self) -> str:
        return self.at.partition(":")[2].partition(":")[2]

    @property
    def broken(self) -> bool:
        return bool(self.causes or self.follows)

    @property
    def rightly(self) -> bool:
        """Whether the first cause names the fault."""
        if not self.causes:
            return False
        return FAULTS[self.fault].named_by(*self.causes[0])


@dataclass(frozen=True)
class Effort:
    """How subjects are judged."""

    quick: bool
    inside: bool
    limit: float
    folder: Path


def row_from(at: str, family: str, report: Report, seconds: float) -> Row:
    """What a report says."""
    causes = [(each.law, f"{each.law}: {each.example}") for each in report.causes]

    def having(*status: Any) -> list[str]:
        return [each.law for name in status for each in report.having(name)]

    return Row(
        at,
        family,
        report.problem,
        report.unjudged,
        causes,
        having("follows"),
        having("undecided"),
        [f"{each.law} ({each.reason[:200]})" for each in report.having("defect")],
        having(*ASKED),
        seconds,
    )


def judge(seed: int, index: int, fault: str, effort: Effort) -> Row:
    """Write one subject and let it be judged."""
    drawing = draw(seed, index)
    source = write(drawing, fault)
    at = f"{seed}:{index}" + (f":{fault}" if fault else "")
    path = effort.folder / (at.replace(":", "_") + ".py")
    path.write_text(source.text)
    like = declared(drawing, fault) if fault else {}
    start = time.perf_counter()
    try:
        if effort.inside:
            report = check(loaded(path, source.name), like, quick=effort.quick)
        else:
            report = check(f"{path}:{source.name}", like, quick=effort.quick, limit=effort.limit)
    except Exception as error:  # the suite's own: it is measured, not raised
        text = f"{type(error).__name__}: {str(error)[:200]}"
        return Row(at, drawing.family, text, defects=["check"])
    return row_from(at, drawing.family, report, time.perf_counter() - start)


def loaded(path: Path, name: str) -> Any:
    """The object of a name in a file."""
    spec = importlib.util.spec_from_file_location(f"stranger_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return getattr(module, name)


def wanted(options: argparse.Namespace) -> list[tuple[int, int, str]]:
    """Seed, index and fault of all subjects."""
    found = []
    only = options.only.split(",") if options.only else None
    for index in range(options.start, options.start + options.count):
        if options.right == "yes":
            found += [(options.seed, index, "")]
        if options.faults == "0":
            continue
        drawing = draw(options.seed, index)
        offered = [each for each in write(drawing).offered if not only or each in only]
        Random(f"{options.seed}:{index}").shuffle(offered)
        most = len(offered) if options.faults == "all" else int(options.faults)
        chosen = [each for each in offered[: 2 * most] if changes(drawing, each)][:most]
        found += [(options.seed, index, each) for each in chosen]
    return found


def run(options: argparse.Namespace, folder: Path) -> list[Row]:
    """The verdicts on all subjects."""
    effort = Effort(options.quick, options.inside, options.limit, folder)
    subjects = wanted(options)
    if options.jobs == 1:
        return [told(judge(*each, effort), options) for each in subjects]
    pool: Executor
    if options.inside:
        pool = ProcessPoolExecutor(options.jobs, initializer=torch.set_num_threads, initargs=(1,))
    else:
        pool = ThreadPoolExecutor(options.jobs)
    with pool:
        waiting = [pool.submit(judge, *each, effort) for each in subjects]
        return [told(each.result(), options) for each in waiting]


def told(row: Row, options: argparse.Namespace) -> Row:
    """Print a subject that is misjudged, and keep its source."""
    text = misjudged(row)
    if text or options.verbose:
        print(f"{row.at:<28} {text or 'as it should be'} ({row.seconds:.1f} s)", flush=True)
    if text and options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
        seed, index, *_ = row.at.split(":")
        source = write(draw(int(seed), int(index)), row.fault)
        (options.keep / (row.at.replace(":", "_") + ".py")).write_text(
            f"# {row.at}: {text}".replace("\n", "\n# ") + "\n" + source.text
        )
    return row


def misjudged(row: Row) -> str:
    """What is wrong with a verdict, or ""."""
    if row.defects:
        return f"the suite's own error in {', '.join(row.defects)}. {row.problem}"
    if row.problem:
        return f"not understood: {row.problem[:300]}"
    causes = "\n    ".join(f"{text[:300]}" for _, text in row.causes[:3])
    if not row.fault:
        if row.broken:
            return (
                f"FALSE ALARM ({len(row.causes)} causes, {len(row.follows)} follow)\n    {causes}"
            )
        return f"partly judged: {row.unjudged[:200]}" if row.unjudged else ""
    if not row.broken:
        return "not noticed" + (" (partly judged)" if row.unjudged else "")
    return "" if row.rightly else f"noticed by another sentence\n    {causes}"


def share(rows: list[Row]) -> float:
    """Of the laws that are asked of any subject of the family, those that are asked of one."""
    all_of: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        all_of[row.family] |= set(row.asked)
    shares = [len(row.asked) / len(all_of[row.family]) for row in rows if all_of[row.family]]
    return sum(shares) / len(shares) if shares else 0.0


def measures(rows: list[Row]) -> dict[str, Any]:
    """The numbers that are printed."""
    right = [row for row in rows if not row.fault]
    wrong = [row for row in rows if row.fault]
    noticed = [row for row in wrong if row.broken]
    longest = max((row.seconds for row in rows), default=0.0)
    total = sum(row.seconds for row in rows)
    return {
        "right": len(right),
        "false_alarms": sum(row.broken for row in right),
        "not_understood": sum(bool(row.problem) for row in right),
        "partly_judged": sum(bool(row.unjudged) and not row.broken for row in right),
        "own_errors": sum(bool(row.defects) for row in rows),
        "undecided": sum(bool(row.undecided) for row in rows),
        "laws_asked": round(share(right), 4),
        "faults": len(wrong),
        "noticed": round(len(noticed) / len(wrong), 4) if wrong else None,
        "right_sentence_first": (
            round(sum(row.rightly for row in wrong) / len(wrong), 4) if wrong else None
        ),
        "seconds_mean": round(total / len(rows), 2) if rows else 0.0,
        "seconds_most": round(longest, 2),
    }


def show_tables(rows: list[Row]) -> None:
    """By family, by law and by fault."""
    right = [row for row in rows if not row.fault]
    alarms = Counter(row.causes[0][0] for row in right if row.causes)
    if alarms:
        print("\nfalse alarms by the first law:", dict(alarms.most_common()))
    for title, test in (("not understood", "problem"), ("partly judged", "unjudged")):
        found = Counter(row.family for row in right if getattr(row, test))
        if found:
            print(f"{title} by family:", dict(found))
    wrong = [row for row in rows if row.fault]
    if wrong:
        print(f"\n{'fault':<28}{'drawn':>7}{'noticed':>9}{'rightly':>9}")
    for name in FAULTS:
        mine = [row for row in wrong if row.fault == name]
        if mine:
            seen = sum(row.broken for row in mine)
            print(f"{name:<28}{len(mine):>7}{seen:>9}{sum(row.rightly for row in mine):>9}")


def show(text: str) -> None:
    """Print one source."""
    seed, index, *fault = text.split(":")
    drawing = draw(int(seed), int(index))
    source = write(drawing, fault[0] if fault else "")
    print(f"# {drawing}\n# {', '.join(source.offered)}\n{source.text}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=60, help="of drawings")
    parser.add_argument("--start", type=int, default=0, help="index of the first drawing")
    parser.add_argument("--seed", type=int, default=0, help="of the drawings")
    parser.add_argument("--faults", default="0", metavar="N|all", help="for each drawing")
    parser.add_argument("--only", default="", metavar="FAULTS", help="only these, with commas")
    parser.add_argument("--right", choices=["yes", "no"], default="yes", help="judge right ones")
    parser.add_argument("--quick", action="store_true", help="as regard verify --quick")
    parser.add_argument(
        "--inside", action="store_true", help="in this process: faster, unprotected"
    )
    parser.add_argument("--jobs", type=int, default=1, help="at once")
    parser.add_argument("--limit", type=float, default=30.0, help="seconds for one law")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="for misjudged sources")
    parser.add_argument("--verbose", action="store_true", help="print every subject")
    parser.add_argument("--show", metavar="SEED:INDEX[:FAULT]", help="print one source and stop")
    options = parser.parse_args()
    if options.show:
        show(options.show)
        return
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = run(options, Path(folder))
    show_tables(rows)
    result = {"benchmark": "strangers", "seed": options.seed, **measures(rows)}
    print()
    for name, value in result.items():
        print(f"{name:<24}{value}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
