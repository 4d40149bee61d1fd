"""Counting which backends run while a model runs, for tables that show its speed."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from regard.ops.attend import prepare
from regard.ops.backends import BACKENDS
from regard.ops.call import Backend
from regard.ops.choose import objection_of


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
    table = dict(BACKENDS)
    BACKENDS.update({name: _counting(backend, ran) for name, backend in table.items()})
    try:
        yield ran
    finally:
        BACKENDS.update(table)


def names(ran: Counter[str]) -> str:
    """The backends, the most frequent first.

    Examples:
        >>> names(Counter(fused=2, sdpa=3))
        'sdpa and fused'
    """
    return " and ".join(name for name, _ in ran.most_common())


def kernel_objection() -> str | None:
    """Why `fused`, the compiled kernel, cannot run the smallest decoding step; None if it can."""
    with torch.no_grad():
        q = torch.zeros(1, 1, 1, 16, dtype=torch.float32, device="cpu")
        return objection_of(prepare(q, q, q).call, "fused")


def _counting(backend: Backend, ran: Counter[str]) -> Backend:
    """A backend whose runs are counted under the name of its file."""

    def counted(work: Callable[..., Any] | None) -> Callable[..., Any] | None:
        if work is None:
            return None
        name = work.__module__.rpartition(".")[2]

        def run(*given: Any) -> Any:
            ran[name] += 1
            return work(*given)

        return run

    run = counted(backend.run)
    assert run is not None
    return backend._replace(
        run=run,
        partial=counted(backend.partial),
        quantized=counted(backend.quantized),
        quantized_partial=counted(backend.quantized_partial),
    )
