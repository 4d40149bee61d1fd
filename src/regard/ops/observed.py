"""Observation of attention: hooks that the dispatcher runs after each call and for each backend."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from regard.cache import Part

Seen = Callable[..., object]  # of a `Prepared`, its queries and the parts that it read
CALLS: list[tuple[int, Seen]] = []  # hooks of `calls_run`, each with the number of its thread
BACKEND_RUNS: list[Callable[[str], None]] = []  # hooks of `backends_run`


@contextmanager
def backends_run() -> Iterator[Counter[str]]:
    """Count the calls that each backend runs inside the block, in every thread.

    Examples:
        >>> import torch
        >>> from regard import attend
        >>> q = torch.randn(1, 2, 3, 8)
        >>> with backends_run() as ran:
        ...     out = attend(q, q, q, backend="eager")
        >>> ran
        Counter({'eager': 1})
    """
    ran: Counter[str] = Counter()

    def count(name: str) -> None:
        ran[name] += 1

    BACKEND_RUNS.append(count)
    try:
        yield ran
    finally:
        BACKEND_RUNS.remove(count)


@contextmanager
def calls_run(seen: Seen) -> Iterator[None]:
    """Pass every call that this thread runs inside the block to `seen`, after it ran.

    `seen` gets what `prepare` returned, the queries and the parts; the parts are those of a cache,
    valid until its next call.

    Examples:
        >>> import torch
        >>> from regard import attend
        >>> q, lengths = torch.randn(1, 2, 3, 8), []
        >>> with calls_run(lambda prepared, q, parts: lengths.append(q.shape[2])):
        ...     out = attend(q, q, q)
        >>> lengths
        [3]
    """
    hook = threading.get_ident(), seen
    CALLS.append(hook)
    try:
        yield
    finally:
        CALLS.remove(hook)


def report_call(prepared: object, q: Tensor, parts: tuple[Part, ...]) -> None:
    """Pass a call that has been run to the hooks of this thread."""
    thread = threading.get_ident()
    for of_thread, seen in tuple(CALLS):
        if of_thread == thread:
            seen(prepared, q, parts)


def report_backend(run: Callable[..., object]) -> None:
    """Pass the name of a backend whose function is about to run, that of its file, to the hooks."""
    name = run.__module__.rpartition(".")[2]
    for count in tuple(BACKEND_RUNS):
        count(name)


def names(ran: Counter[str]) -> str:
    """The backends in words, the most frequent first."""
    return " and ".join(name for name, _ in ran.most_common())
