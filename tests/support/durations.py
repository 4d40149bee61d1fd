"""How many seconds of a processor each file of tests takes, and which files grew by half.

`./scripts/test` has every worker add its seconds to a file (`REGARD_DURATIONS`), and calls this one
at the end: it compares the shares of the run with those in `tests/durations.json`, or, with
`--durations`, writes them. Shares and not seconds, and time of the processor and not of the clock:
so another machine, or another program that runs beside, makes no file look slow.
"""

import argparse
import json
import os
import platform
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest

RECORD = Path(__file__).parents[1] / "durations.json"
SMALL = 0.01  # of the whole run: less growth than that is not worth a failure, and noise besides
GROWTH = 1.5
TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100

Seconds = dict[str, float]


def processor_time() -> float:
    """Seconds that this process, its former children and those alive have used so far."""
    times = os.times()
    own = times.user + times.system + times.children_user + times.children_system
    return own + _of_children("self")


def _of_children(process: str) -> float:
    """Of the children that are alive, and of theirs; 0 where there is no `/proc`."""
    total = 0.0
    for tasks in Path(f"/proc/{process}/task").glob("*/children"):
        try:
            for child in tasks.read_text().split():
                fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                total += sum(map(int, fields[11:15])) / TICKS + _of_children(child)
        except OSError:  # it ended in between
            continue
    return total


class Measured:
    """A plugin of pytest: the seconds of each file, appended to `output` as a line at the end."""

    def __init__(self, output: Path) -> None:
        self.output, self.seconds = output, defaultdict(float)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        before = processor_time()
        try:
            return (yield)
        finally:
            file = item.nodeid.partition("::")[0]
            self.seconds[file] += processor_time() - before

    def pytest_sessionfinish(self):
        with self.output.open("a") as lines:
            lines.write(json.dumps(self.seconds) + "\n")


def total_of(file: Path) -> Seconds:
    """The sum over all workers."""
    total: Seconds = {}
    for line in file.read_text().splitlines():
        for name, seconds in json.loads(line).items():
            total[name] = total.get(name, 0.0) + seconds
    return total


def grown(before: Mapping[str, float], now: Mapping[str, float]) -> list[str]:
    """A sentence for each file whose share of the run grew by half, and by 1 % of the run."""
    whole_before, whole = sum(before.values()), sum(now.values())
    sentences = []
    for name, seconds in sorted(now.items()):
        was, share = before.get(name, 0.0) / whole_before, seconds / whole
        if share > GROWTH * was and share - was > SMALL:
            sentences.append(
                f"{name} takes {share:.1%} of the processor time of the tests ({seconds:.0f} s), "
                f"and took {was:.1%}"
            )
    return sentences


def recorded() -> Seconds:
    """The seconds of every file in `tests/durations.json`."""
    seconds: Seconds = json.loads(RECORD.read_text())["seconds"]
    return seconds


def record(seconds: Mapping[str, float], minutes: float) -> None:
    """Write `tests/durations.json`: the slowest file first."""
    slowest = sorted(seconds.items(), key=lambda item: -item[1])
    content = {
        "processor": processor(),
        "cores": os.cpu_count(),
        "minutes": round(minutes, 1),
        "seconds": {name: round(each, 1) for name, each in slowest},
    }
    RECORD.write_text(json.dumps(content, indent=1) + "\n")


def processor() -> str:
    """What Linux calls it, or Python."""
    described = Path("/proc/cpuinfo")
    lines = described.read_text().splitlines() if described.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="the seconds that the workers added")
    parser.add_argument(
        "--record", type=float, metavar="SECONDS", help="write them, and how long the run took"
    )
    given = parser.parse_args()
    seconds = total_of(given.file)
    if given.record is not None:
        record(seconds, given.record / 60)
        return 0
    sentences = grown(recorded(), seconds)
    for sentence in sentences:
        print(sentence, file=sys.stderr)
    if sentences:
        print(
            "Make these tests quicker, or move a part of them behind --all. If they are worth it, "
            "`./scripts/test --durations` writes tests/durations.json anew.",
            file=sys.stderr,
        )
    return bool(sentences)


if __name__ == "__main__":
    sys.exit(main())
