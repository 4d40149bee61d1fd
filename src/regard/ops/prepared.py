"""A call with the backend chosen for it, run on keys that lie in one or several parts."""

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from regard.cache import Part
from regard.masks import Mask, Span
from regard.ops.call import Backend, Call
from regard.ops.partial import Partial, merge
from regard.tracing import without_autocast


class Prepared(NamedTuple):
    """What `prepare` returns: a call, and the backend that was chosen for it.

    Attributes:
        call: the description of the call.
        name: the name of the backend.
        backend: its functions.

    Examples:
        >>> import torch
        >>> from regard import Part, Prepared, attend, prepare
        >>> q = torch.randn(1, 2, 3, 8)
        >>> prepared = prepare(q, q, q, backend="eager")
        >>> isinstance(prepared, Prepared), prepared.name
        (True, 'eager')
        >>> torch.equal(prepared.run(q, [Part(0, 3, (q, q))]), attend(q, q, q, backend="eager"))
        True
    """

    call: Call
    name: str
    backend: Backend

    @property
    def mask(self) -> Mask:
        """The mask, simplified."""
        return self.call.mask

    @property
    def span(self) -> Span:
        """Which queries meet which keys, without keys that are hidden from all of them."""
        return self.call.span

    @property
    def needs_grad(self) -> bool:
        """Whether gradients are wanted of anything that this call reads."""
        return self.call.needs_grad

    def run(self, q: Float[Tensor, "B H L D"], parts: Iterable[Part]) -> Float[Tensor, "B H L Dv"]:
        """Attend to keys in one or several parts, as caches return them.

        Args:
            q: queries, `[B, H, L, D]`.
            parts: streams (keys, values), or one stream whose first `v_head_dim` columns are the
                values.
        """
        with without_autocast(self.call.device):
            return self._run(q, visible_parts(self.call, parts))

    def partial(self, q: Float[Tensor, "B H L D"], parts: Iterable[Part]) -> Partial:
        """As `run`, with the log-sum-exp, to be merged with attention over other keys."""
        with without_autocast(self.call.device):
            return self._partial(q, visible_parts(self.call, parts))

    def _run(self, q: Float[Tensor, "B H L D"], parts: list[Part]) -> Float[Tensor, "B H L Dv"]:
        if len(parts) > 1 and (self.backend.partial is None or self.call.dropout):
            parts = [concatenated(parts)]
        if len(parts) > 1:
            return self._partial(q, parts).out.to(self.call.dtype)
        (part,) = parts
        call, backend = self.call.over(part), self.backend
        if backend.quantized is not None and (stored := part.quantized) is not None:
            return backend.quantized(call, q, stored)
        return backend.run(call, q, *call.keys_and_values(part))

    def _partial(self, q: Float[Tensor, "B H L D"], parts: list[Part]) -> Partial:
        without_sinks = replace(self.call, sinks=None)
        pieces = [partial_of(self.backend, without_sinks.over(part), q, part) for part in parts]
        if self.call.sinks is not None:
            pieces.append(Partial.of_sinks(self.call.sinks))
        if len(pieces) == 1:
            return pieces[0]
        out, lse = merge(*pieces)
        shape = (*q.shape[:3], self.call.v_head_dim)
        return Partial(out.expand(shape), lse.expand(shape[:3]))


def partial_of(backend: Backend, call: Call, q: Float[Tensor, "B H L D"], part: Part) -> Partial:
    """Attention to one part, as the call over it says; codes are read as such where possible."""
    assert backend.partial is not None
    stored = part.quantized
    if stored is not None and backend.quantized_partial is not None:
        return backend.quantized_partial(call, q, stored)
    return backend.partial(call, q, *call.keys_and_values(part))


def visible_parts(call: Call, parts: Iterable[Part]) -> list[Part]:
    """The parts without keys outside of the call's span; an empty one if none remains."""
    inside: list[Part] = []
    empty: list[Part] = []
    first, end = call.span.kv_start, call.span.kv_stop
    for part in parts:
        start, stop = max(part.kv_start, first), min(part.kv_stop, end)
        if start >= stop:
            nothing = part.narrow(part.kv_start, part.kv_start)
            empty = [Part(first, first, nothing.streams)]
            continue
        if (start, stop) != (part.kv_start, part.kv_stop):
            part = part.narrow(start, stop)
        inside.append(part)
    return inside or empty


def concatenated(parts: list[Part]) -> Part:
    """One part out of several whose keys follow one another."""
    if len(parts) == 1:
        return parts[0]
    streams = tuple(
        torch.cat(pieces, 2) for pieces in zip(*(p.streams for p in parts), strict=True)
    )
    return Part(parts[0].kv_start, parts[-1].kv_stop, streams)
