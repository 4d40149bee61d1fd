"""What runs while a model runs: the calls of attention, and how often each backend."""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from regard.cache import Part
from regard.ops.attend import prepare
from regard.ops.backends import BACKENDS
from regard.ops.call import Backend
from regard.ops.choose import objection_of
from regard.ops.prepared import Prepared

Seen = Callable[[Prepared, Tensor, tuple[Part, ...]], object]
_ONE_AT_A_TIME = threading.RLock()  # blocks of other threads wait: they replace the same method


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


@contextmanager
def calls_run(seen: Seen) -> Iterator[None]:
    """Pass every call that this thread runs inside the block to `seen`, after it ran.

    `seen` gets what `prepare` returned, the queries and the parts; the parts are those of a cache,
    valid until its next call. Outside of the block nothing is added to a call.

    Examples:
        >>> import torch
        >>> from regard import attend
        >>> q, lengths = torch.randn(1, 2, 3, 8), []
        >>> with calls_run(lambda prepared, q, parts: lengths.append(q.shape[2])):
        ...     out = attend(q, q, q)
        >>> lengths
        [3]
    """
    with _ONE_AT_A_TIME:
        own, thread = Prepared.run, threading.get_ident()

        def run(prepared: Prepared, q: Tensor, parts: Iterable[Part]) -> Tensor:
            parts = tuple(parts)
            out = own(prepared, q, parts)
            if threading.get_ident() == thread:
                seen(prepared, q, parts)
            return out

        type.__setattr__(Prepared, "run", run)
        try:
            yield
        finally:
            type.__setattr__(Prepared, "run", own)


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

    name = backend.run.__module__.rpartition(".")[2]

    def counted(work: Callable[..., Any] | None) -> Callable[..., Any] | None:
        if work is None:
            return None

        def run(*given: Any, **options: Any) -> Any:
            ran[name] += 1
            return work(*given, **options)

        return run

    run, partial = counted(backend.run), counted(backend.partial)
    assert run is not None
    assert partial is not None
    return backend._replace(
        run=run,
        partial=partial,
        quantized=counted(backend.quantized),
        quantized_partial=counted(backend.quantized_partial),
        paged=counted(backend.paged),
        paged_partial=counted(backend.paged_partial),
    )
