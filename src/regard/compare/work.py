"""Progress of a comparison, in seconds of work."""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]  # the present step, the work done, all of it

# Seconds on two cores with a model of 135M parameters, about: their ratios make the share of work.
ROW = 6
CONVERTING = 12
PREFILLING = 8


class Work:
    """Calls `progress` with the present step, the seconds of work before it, and of all work."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total = progress, total
        self._done = self._present = 0

    def begin(self, what: str, seconds: int) -> None:
        """The next step begins, and those before it are done."""
        self._done += self._present
        self._present = seconds
        self._progress(what, self._done, self._total)

    def part(self, what: str, done: int, total: int) -> None:
        """So many parts of the present step are done."""
        share = round(self._present * done / total)
        self._progress(f"{what}: {done} of {total}", self._done + share, self._total)

    def end(self) -> None:
        """All steps are done."""
        self._progress("done", self._total, self._total)
