"""The load of other programs on this machine during a measurement."""

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_STAT = Path("/proc/stat")  # Linux: processor time of all programs, in ticks
_BUSY = (0, 1, 2, 5, 6, 7)  # its columns: user, nice, system, interrupts, and what a host took
_WAITED = 0.1  # share of the time that the measuring thread may wait for a processor
_OTHERS = 0.1  # processors that other programs may keep busy, for each thread that measures


@dataclass(frozen=True)
class Load:
    """The share of this machine's processors that other programs took during a measurement.

    Attributes:
        waited: share of the time in which the measuring thread did not run.
        others: processors that other programs kept busy, on average; 0 where the system does not
            say it.

    Examples:
        >>> Load(0.02, 0.0).objection(threads=2)
        >>> Load(0.4, 1.0).objection(threads=2)
        'other programs kept 1.0 processors busy, and this one waited 40 % of the time'
    """

    waited: float
    others: float

    def objection(self, threads: int) -> str | None:
        """Why times measured under this load on so many threads mean little; None if they do not.

        Half of the processors that are left over may be busy: they share the memory.
        """
        spare = max(0, (os.cpu_count() or 1) - threads) / 2
        if self.waited <= _WAITED and self.others <= _OTHERS * threads + spare:
            return None
        return (
            f"other programs kept {self.others:.1f} processors busy, and this one waited "
            f"{self.waited:.0%} of the time".replace("%", " %")
        )


class Watch:
    """Watches the processors from its construction on; `load()` is the load since then.

    The thread that makes it must not sleep meanwhile: that counts as waiting.

    Examples:
        >>> watch = Watch()
        >>> 0 <= watch.load().waited <= 1
        True
    """

    def __init__(self) -> None:
        self.begun = _clocks()

    def load(self) -> Load:
        spent = (now - then for now, then in zip(_clocks(), self.begun, strict=True))
        wall, own, process, everyone = spent
        wall = max(wall, 1e-9)
        others = (everyone - process) / wall if everyone else 0.0
        return Load(min(1.0, max(0.0, 1 - own / wall)), max(0.0, others))


def _clocks() -> tuple[float, float, float, float]:
    """Wall-clock seconds, and processor seconds of this thread, of this process and of all
    programs."""
    everyone = 0.0
    with suppress(OSError, ValueError, IndexError):
        columns = [int(each) for each in _STAT.read_text().split("\n", 1)[0].split()[1:]]
        everyone = sum(columns[at] for at in _BUSY) / os.sysconf("SC_CLK_TCK")
    return time.perf_counter(), time.thread_time(), time.process_time(), everyone
