"""How long a process has worked: seconds that do not depend on what else the machine does.

A limit in seconds of wall-clock time is reached sooner on a busy machine. Two other counts are not:
seconds of processor time, and seconds in which every thread of the process waited for something
other than a processor.
"""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PATIENCE = 10.0  # a limit in wall-clock seconds is so many times that in processor seconds
_RUNNABLE = "RD"  # states of /proc: runs or could run, or waits for a disk or for swapped memory
_PROC = Path("/proc")


@dataclass
class Clock:
    """Seconds since `restart`, for a process and all that it has started.

    Attributes:
        busy: seconds of processor time; None where the system does not tell.
        idle: seconds in which no thread could have run.
        wall: seconds of wall-clock time.
    """

    pid: int
    busy: float | None = 0.0
    idle: float = 0.0
    wall: float = 0.0
    _start: float = field(default_factory=time.monotonic)
    _seen: float = field(default_factory=time.monotonic)
    _used: float | None = None

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Count from now."""
        self._start = self._seen = time.monotonic()
        self._used = processor_seconds(self.pid)
        self.busy, self.idle, self.wall = (None if self._used is None else 0.0), 0.0, 0.0

    def read(self) -> None:
        """Count until now."""
        now = time.monotonic()
        self.wall = now - self._start
        used = processor_seconds(self.pid)
        if used is not None and self._used is not None:
            busy = max(used - self._used, self.busy or 0.0)  # of an ended process nothing is known
            if busy == self.busy and not runnable(self.pid):
                self.idle += now - self._seen
            self.busy = busy
        self._seen = now

    def over(self, limit: float) -> str:
        """Which count is above the limit, in words; empty if none is."""
        self.read()
        if self.busy is None:  # wall-clock time alone is known
            return f"{limit:g} s" if self.wall > limit else ""
        if self.busy > limit:
            return f"{limit:g} s of processor time"
        if self.idle > limit:
            return f"{limit:g} s, in which it computed nothing"
        return f"{PATIENCE * limit:g} s" if self.wall > PATIENCE * limit else ""


def processor_seconds(pid: int) -> float | None:
    """Processor time of a process and of all that it has started, as far as Linux tells.

    Examples:
        >>> import os
        >>> processor_seconds(os.getpid()) is None or processor_seconds(os.getpid()) > 0.0
        True
    """
    found = None
    for each in _family(pid):
        fields = _stat(_PROC / str(each) / "stat")
        if fields:
            found = (found or 0.0) + sum(int(x) for x in fields[11:15]) / _ticks()
    return found


def runnable(pid: int) -> bool:
    """Whether a thread of the process, or of one that it has started, runs or waits its turn."""
    states = (_stat(each)[:1] for p in _family(pid) for each in _PROC.glob(f"{p}/task/*/stat"))
    return any(state and state[0] in _RUNNABLE for state in states)


def _family(pid: int) -> Iterator[int]:
    """The process and all that it has started, and those have."""
    yield pid
    for listed in _PROC.glob(f"{pid}/task/*/children"):
        try:
            children = listed.read_text().split()
        except OSError:
            continue  # it has just ended
        for child in children:
            yield from _family(int(child))


def _stat(path: Path) -> list[str]:
    """The fields of /proc/PID/stat after the name, which may hold spaces; none if there is none."""
    try:
        return path.read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _ticks() -> int:
    return int(os.sysconf("SC_CLK_TCK"))
