"""How many small faults in the library do the tests notice?

    python benchmarks/mutations.py record faults.jsonl          # which tests reach which fault
    python benchmarks/mutations.py judge faults.jsonl verdicts.jsonl

Faults are drawn by a seed from the source of `layers masks cache ops rope hf convert`: a comparison
flipped, a number off by one, two arguments swapped, `and` for `or`, `+` for `-`, a statement
dropped. `record` runs the suite once with a probe before each faulty statement, and writes which
tests reach the probe, and their processor time. `judge` puts in one fault at a time and runs the
tests that reach it, the tests of the faulty file first, until one fails; a test that fails without
the fault as well does not count. Further arguments go to pytest, so that two suites can be
compared: the same seed draws the same faults.

Everything is imported and collected once; each fault is put into a forked process by replacing the
code of one function. So tests that start Python anew notice nothing, and the share is a lower
bound.
"""

import argparse
import ast
import builtins
import dataclasses
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faults import PROBE, ROOT, Fault, draw, faulty, install, place_of_probe, probed

PATIENCE = 20.0  # times the recorded seconds of a test after which a fault counts as a hang
LEAST = 60.0  # seconds that any test may take
MOST = 600  # seconds of a test that is recorded: threads of a forked process can wait for ever


def seconds() -> float:
    """Processor time of this process and of those that it has waited for."""
    return sum(os.times()[:4])


def run_item(item: pytest.Item, following: pytest.Item | None) -> bool:
    """Run one test; whether it failed."""
    from _pytest.runner import runtestprotocol

    reports = runtestprotocol(item, nextitem=following, log=False)
    return any(report.failed for report in reports)


class Recorder:
    """Runs all tests in forked processes and writes which faults each reaches."""

    def __init__(self, faults: list[Fault], path: Path, workers: int) -> None:
        self.faults, self.path, self.workers = faults, path, workers

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """In place of pytest's own loop: the files are shared out, the next to who is free."""
        reached: set[int] = set()
        setattr(builtins, PROBE, reached.add)
        probes = list(enumerate(map(place_of_probe, self.faults)))
        for file in {probe.file for _, probe in probes}:
            mine = [(at, probe) for at, probe in probes if probe.file == file]
            tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
            install(file, probed(tree, mine), {probe.function for _, probe in mine})
        files = list(dict.fromkeys(item.path for item in session.items))
        queue, ends = os.pipe()
        os.write(ends, b"".join(at.to_bytes(4) for at in range(len(files))))
        os.close(ends)
        running = {self.begin(session, files, queue, reached) for _ in range(self.workers)}
        while running:
            child, status = os.wait()
            running.discard(child)
            if os.WIFSIGNALED(status):  # a test hung or crashed: other files are recorded yet
                running.add(self.begin(session, files, queue, reached))
        return True

    def begin(self, *given: Any) -> int:
        """The number of a process that records tests."""
        return fork(lambda: self.run(*given))

    def run(
        self, session: pytest.Session, files: list[Path], queue: int, reached: set[int]
    ) -> None:
        """Run the tests of one file after another, until none is left."""
        with self.path.open("a", buffering=1) as file:
            while at := os.read(queue, 4):
                items = [item for item in session.items if item.path == files[int.from_bytes(at)]]
                for item, following in zip(items, [*items[1:], None], strict=True):
                    reached.clear()
                    cpu, wall = seconds(), time.perf_counter()
                    signal.alarm(MOST)
                    failed = run_item(item, following)
                    row = {
                        "id": item.nodeid,
                        "cpu": round(seconds() - cpu, 4),
                        "wall": round(time.perf_counter() - wall, 4),
                        "failed": failed,
                        "reached": sorted(reached),
                    }
                    file.write(json.dumps(row) + "\n")


class Judge:
    """Puts in one fault at a time and runs the tests that reach it."""

    def __init__(
        self, faults: dict[int, Fault], rows: list[dict], path: Path, workers: int, budget: float
    ) -> None:
        self.faults, self.path, self.workers, self.budget = faults, path, workers, budget
        self.rows = [row for row in rows if not row["failed"]]

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """In place of pytest's own loop: a process for each fault."""
        items = {item.nodeid: item for item in session.items}
        running: dict[int, int] = {}
        waiting = list(self.faults)
        while waiting or running:
            while waiting and len(running) < self.workers:
                number = waiting.pop(0)
                running[fork(lambda number=number: self.judge(number, items))] = number
            child, _ = os.wait()
            running.pop(child, None)
        return True

    def judge(self, number: int, items: dict[str, pytest.Item]) -> None:
        """Write the verdict on one fault."""
        fault, spent, ran = self.faults[number], 0.0, 0
        rows = [row for row in self.tests(number) if row["id"] in items]
        verdict, by = "survived" if rows else "reached by no test", None
        while ran < len(rows) and spent < self.budget:
            begun = time.perf_counter()
            failed = first_failure(rows[ran:], items, fault, self.budget - spent)
            spent += time.perf_counter() - begun
            if failed is None:
                break
            ran += failed + 1
            if first_failure([rows[ran - 1]], items, None, self.budget) is None:
                verdict, by = "noticed", rows[ran - 1]["id"]
                break
        row = {"number": number, "verdict": verdict, "by": by, "seconds": round(spent, 1)}
        with self.path.open("a") as file:
            file.write(json.dumps(row | dataclasses.asdict(fault)) + "\n")

    def tests(self, number: int) -> list[dict]:
        """The tests that reach a fault: those of its file first, one of each function before
        others of the same function, quick ones before slow ones."""
        stem = Path(self.faults[number].file).stem
        rows = [row for row in self.rows if number in row["reached"]]
        random.Random(number).shuffle(rows)
        seen: dict[str, int] = {}
        keys = {}
        for row in sorted(rows, key=lambda row: row["cpu"]):
            name = row["id"].partition("[")[0]
            seen[name] = seen.get(name, 0) + 1
            keys[row["id"]] = (seen[name], f"test_{stem}.py" not in name, row["cpu"])
        return sorted(rows, key=lambda row: keys[row["id"]])


def first_failure(
    rows: list[dict], items: dict[str, pytest.Item], fault: Fault | None, budget: float
) -> int | None:
    """Run tests in a process of their own; the number of the first that fails, hangs or crashes.

    No further test begins after `budget` seconds.
    """
    reader, writer = os.pipe()

    def run() -> None:
        if fault is not None:
            tree = ast.parse((ROOT / fault.file).read_text(encoding="utf-8"))
            install(fault.file, faulty(tree, fault), {fault.function})
        stop = time.perf_counter() + budget
        for at, row in enumerate(rows):
            if time.perf_counter() > stop:
                break
            os.write(writer, at.to_bytes(4))
            signal.alarm(int(LEAST + PATIENCE * row["wall"]))
            if run_item(items[row["id"]], None):
                os._exit(1)
        os._exit(0)

    child = fork(run)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        begun = file.read()
    failed = os.waitpid(child, 0)[1] != 0
    return max(0, len(begun) // 4 - 1) if failed else None


def fork(work: Callable[[], None]) -> int:
    """The number of a process that works and ends, silently."""
    sys.stdout.flush()
    if child := os.fork():
        return child
    try:
        if os.environ.get("SHOW") != "1":
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
        work()
        os._exit(0)
    except BaseException:
        if os.environ.get("SHOW") == "1":
            raise
        os._exit(2)


def summary(path: Path) -> dict[str, int]:
    """How many faults were noticed, survived, or were reached by no test."""
    verdicts = [json.loads(line)["verdict"] for line in path.read_text().splitlines()]
    return {name: verdicts.count(name) for name in sorted(set(verdicts))}


def main() -> None:
    """Record or judge."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("verb", choices=["record", "judge"])
    parser.add_argument("records", type=Path)
    parser.add_argument("verdicts", type=Path, nargs="?")
    parser.add_argument("--number", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of tests for a fault")
    parser.add_argument("--only", default="", help="numbers of faults, by commas")
    arguments, rest = parser.parse_known_args()
    faults = draw(arguments.number, arguments.seed)
    if arguments.verb == "record":
        plugin = Recorder(faults, arguments.records.resolve(), arguments.workers)
    else:
        rows = [json.loads(line) for line in arguments.records.read_text().splitlines()]
        only = {int(each) for each in arguments.only.split(",") if each} or set(range(len(faults)))
        chosen = {at: fault for at, fault in enumerate(faults) if at in only}
        verdicts = arguments.verdicts.resolve()
        plugin = Judge(chosen, rows, verdicts, arguments.workers, arguments.budget)
    os.chdir(ROOT)
    pytest.main(["-p", "no:xdist", "-p", "no:randomly", "-q", *rest], plugins=[plugin])
    if arguments.verb == "judge":
        print(json.dumps(summary(verdicts)))


if __name__ == "__main__":
    main()
