"""A call with the backend chosen for it, run on keys that lie in one or several parts."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from regard.cache import Part
from regard.cache.parts import TENSORS, Storage, storage_of
from regard.masks import Mask, Span
from regard.ops.backends import BACKENDS
from regard.ops.call import Backend, Call
from regard.ops.choose import choose
from regard.ops.observed import BACKEND_RUNS, CALLS, report_call
from regard.ops.partial import Partial, merge
from regard.ops.parts import (
    attend_rows,
    concatenated,
    readable,
    reads_in_parts,
    visible_parts,
)
from regard.tracing import without_autocast

_MERGED = 16  # partial results merged at a time: more take memory, and gain nothing
_HELD = 1 << 22  # elements of the partial results that are merged at a time: about the L3 cache


class Prepared(NamedTuple):
    """What `prepare` returns: a call, and the backend that was chosen for it.

    Attributes:
        call: the description of the call.
        name: the name of the backend.
        requested: the backend that was asked for: its name, or "auto".
        choices: the backends chosen so far for this call, by how its keys are stored.

    Examples:
        >>> import torch
        >>> from regard import Part, attend, prepare
        >>> q = torch.randn(1, 2, 3, 8)
        >>> prepared = prepare(q, q, q, backend="eager")
        >>> prepared.name
        'eager'
        >>> torch.equal(prepared.run(q, [Part(0, 3, (q, q))]), attend(q, q, q, backend="eager"))
        True
    """

    call: Call
    name: str
    requested: str
    choices: dict[Storage, str]

    @property
    def backend(self) -> Backend:
        """The functions of the backend, as the table of backends has them now."""
        return BACKENDS[self.name]

    @property
    def mask(self) -> Mask:
        """The mask, simplified."""
        return self.call.mask

    @property
    def span(self) -> Span:
        """Which queries meet which keys, without keys that are hidden from all of them."""
        return self.call.span

    def run(self, q: Float[Tensor, "B H L D"], parts: Iterable[Part]) -> Float[Tensor, "B H L Dv"]:
        """Attend to keys in one or several parts, as caches return them.

        Args:
            q: queries, `[B, H, L, D]`.
            parts: streams (keys, values), or one stream whose first `v_head_dim` columns are the
                values.
        """
        if (keys := self._plain(parts)) is not None:
            return BACKENDS[self.name].run(self.call, q, *keys)
        if CALLS:
            parts = tuple(parts)  # the hooks read the parts, too
        with without_autocast(self.call.device):
            here, seen = self._reading(parts)
            out = here._run(q, seen)
        if CALLS:
            report_call(here, q, tuple(parts))
        return out

    def _plain(self, parts: Iterable[Part]) -> Sequence[Tensor] | None:
        """The keys and values of a call that goes straight to the backend; None if there are
        several parts, other streams than tensors, rows that share keys, or hooks."""
        call, span = self.call, self.call.span
        if type(parts) is not tuple or len(parts) != 1 or CALLS or BACKEND_RUNS:
            return None
        start, stop, streams = parts[0]
        if span is not call.given_span or (start, stop) != (span.kv_start, span.kv_stop):
            return None
        if type(streams) is not tuple or not call.immediate or torch._C._is_any_autocast_enabled():
            return None
        if call.batch > 1 and streams[0].stride(0) == 0 and parts[0].is_shared:
            return None
        if call.joined != (len(streams) == 1):
            return None
        return (streams[0], streams[0][..., : call.v_head_dim]) if call.joined else streams

    def partial(self, q: Float[Tensor, "B H L D"], parts: Iterable[Part]) -> Partial:
        """As `run`, with the log-sum-exp, to be merged with attention over other keys."""
        with without_autocast(self.call.device):
            here, seen = self._reading(parts)
            return here._partial(q, here._read(seen))

    def stored_as(self, storage: Storage) -> "Prepared":
        """This call with another storage of the keys, and the backend chosen for it.

        Raises:
            ValueError: if the backend that was asked for objects.
        """
        if storage == self.call.storage:
            return self
        call = self.call.but(storage=storage)
        name = self.choices.get(storage) if call.immediate else None
        if name is None:
            name = choose(call, self.requested)
            if call.immediate:
                self.choices[storage] = name
        return self._replace(call=call, name=name)

    def over(self, parts: Sequence[Part]) -> "Prepared":
        """This call over the keys of these parts, and the backend chosen for how they are stored.

        Raises:
            ValueError: if the backend that was asked for objects.
        """
        return self.stored_as(storage_of(tuple(visible_parts(self.span, parts))))

    def _reading(self, parts: Iterable[Part]) -> tuple["Prepared", Iterable[Part]]:
        """This call with the storage of these parts, and the parts it sees. Parts that are computed
        while they are read are stored alike: the first two are looked at."""
        seen = visible_parts(self.span, parts)
        if isinstance(parts, (tuple, list)):
            every = tuple(seen)
            return self.stored_as(storage_of(every)), every
        some = tuple(islice(seen, 2))
        return self.stored_as(storage_of(some)), chain(some, seen)

    def _run(self, q: Float[Tensor, "B H L D"], parts: Iterable[Part]) -> Float[Tensor, "B H L Dv"]:
        call, read, run_parts = self.call, iter(parts), self.backend.run_parts
        if run_parts is not None and call.storage != TENSORS and isinstance(parts, tuple):
            out = run_parts(call, q, parts)
            if out is not None:
                return out
        if call.storage.several:
            read = self._read(parts)
        first, second = next(read), next(read, None)
        if second is None:
            return attend_rows(self.backend, call.over(first), q, first)[0]
        return self._partial(q, chain((first, second), read)).out.to(call.dtype)

    def _read(self, parts: Iterable[Part]) -> Iterator[Part]:
        """The parts as the backend reads them: as one, if it cannot merge several."""
        if not reads_in_parts(self.call, self.backend):
            yield concatenated(part.in_one() for part in parts)
            return
        for part in parts:
            yield from readable(part, self.backend)

    def _partial(self, q: Tensor, parts: Iterable[Part]) -> Partial:
        """Attention to parts as the backend reads them, merged, with the sinks."""
        call = self.call if self.call.sinks is None else self.call.but(sinks=None)
        found: list[Partial] = []
        most = _most_held(call)
        for part in parts:
            if len(found) == most:
                found = [merge(*found)]
            results = attend_rows(self.backend, call.over(part), q, part, partial=True)
            found.append(Partial(*results))
        if self.call.sinks is not None:
            found.append(Partial.of_sinks(self.call.sinks))
        if len(found) == 1:
            return found[0]
        out, lse = merge(*found)
        shape = (*q.shape[:3], self.call.v_head_dim)
        return Partial(out.expand(shape), lse.expand(shape[:3]))


def _most_held(call: Call) -> int:
    """Partial results that are merged at a time: fewer of long chunks, whose outputs are large."""
    if torch.compiler.is_compiling():  # lengths are symbolic
        return _MERGED
    outputs = call.batch * call.num_heads * call.num_queries * call.v_head_dim
    return max(2, min(_MERGED, _HELD // max(1, outputs)))
