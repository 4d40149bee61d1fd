"""Combinations of masks: `&`, `|` and `~`. What they show follows from what their parts show."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from operator import and_, or_
from typing import ClassVar

from torch import Tensor

from regard.constants import Device
from regard.masks.mask import EVERYTHING, NOTHING, Everything, Mask, Nothing, Reach, checked
from regard.masks.runs import Finder, Runs, Shown, complement, intersection, union
from regard.span import Span


@dataclass(frozen=True)
class _Parts(Mask):
    """Several rules combined. Abstract: see `AllOf` and `AnyOf`."""

    parts: tuple[Mask, ...]
    neutral: ClassVar[Mask]  # the part that changes nothing
    absorbing: ClassVar[Mask]  # the part that decides the result alone
    join: ClassVar[Callable[[Tensor, Tensor], Tensor]]  # of booleans
    join_runs: ClassVar[Callable[[Runs, Runs], Runs]]

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", _flat(type(self), self.parts))

    @property
    def opaque(self) -> bool:
        return any(part.opaque for part in self.parts)

    @property
    def relative(self) -> bool:
        return all(part.relative for part in self.parts)

    @property
    def lasting(self) -> bool:
        return all(part.lasting for part in self.parts)

    @property
    def batch(self) -> int | None:
        return _common_size("batch", self, [part.batch for part in self.parts])

    @property
    def heads(self) -> int | None:
        return _common_size("heads", self, [part.heads for part in self.parts])

    @property
    def extent(self) -> Span | None:
        known = [part.extent for part in self.parts if part.extent is not None]
        return max(known, key=lambda span: span.num_keys, default=None)

    def runs(self, first: int, last: int) -> Shown:
        return self._shown([part.runs(first, last) for part in self.parts])

    def finder(self) -> Finder:
        finders = [part.finder() for part in self.parts]
        return lambda first, last: self._shown([find(first, last) for find in finders])

    def _shown(self, parts: list[Shown]) -> Shown:
        some, every, edges = zip(*parts, strict=True)
        some, every = (reduce(type(self).join_runs, runs) for runs in (some, every))
        return Shown(some, every, chain.from_iterable(edges))

    def row(self, row: int) -> Mask | None:
        rows = [part.row(row) for part in self.parts]
        known = tuple(each for each in rows if each is not None)
        return combined(type(self), known) if len(known) == len(rows) else None

    def within(self, span: Span) -> Mask:
        simple = tuple(part.within(span) for part in self.parts)
        return self.absorbing if self.absorbing in simple else combined(type(self), simple)

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return reduce(type(self).join, [part(b, h, q_idx, kv_idx) for part in self.parts])

    def _dense(self, span: Span, batch: int, heads: int, device: Device) -> Tensor:
        parts = [part._dense(span, batch, heads, device) for part in self.parts]
        return reduce(type(self).join, parts)


@dataclass(frozen=True, repr=False)
class AllOf(_Parts):
    """The intersection of masks, `a & b`: a key is visible if every part allows it.

    Examples:
        >>> from regard.masks import AllOf, Causal, SlidingWindow
        >>> AllOf((Causal(), SlidingWindow(2)))
        Causal() & SlidingWindow(size=2)
    """

    neutral, absorbing = EVERYTHING, NOTHING
    join, join_runs = and_, intersection

    def reach(self, span: Span) -> Reach:
        lows, highs = zip(*(part.reach(span) for part in self.parts), strict=True)
        low = [each for each in lows if each is not None]
        high = [each for each in highs if each is not None]
        return max(low) if low else None, min(high) if high else None

    def _reason(self, b: int, h: int, q: int, k: int) -> str:
        hiding = [part for part in self.parts if not part._allows(b, h, q, k)]
        reasons = (part._reason(b, h, q, k) for part in hiding)
        return "; ".join(reasons) if hiding else "every rule allows it"

    def __repr__(self) -> str:
        return " & ".join(f"({p!r})" if isinstance(p, AnyOf) else repr(p) for p in self.parts)


@dataclass(frozen=True, repr=False)
class AnyOf(_Parts):
    """The union of masks, `a | b`: a key is visible if any part allows it.

    Examples:
        >>> from regard.masks import AnyOf, Causal, Prefix
        >>> AnyOf((Causal(), Prefix(2)))
        Causal() | Prefix(lengths=2)
    """

    neutral, absorbing = NOTHING, EVERYTHING
    join, join_runs = or_, union

    def reach(self, span: Span) -> Reach:
        low, high = zip(*(part.reach(span) for part in self.parts), strict=True)
        return None if None in low else min(low), None if None in high else max(high)

    def _reason(self, b: int, h: int, q: int, k: int) -> str:
        for part in self.parts:
            if part._allows(b, h, q, k):
                return part._reason(b, h, q, k)
        return "no rule allows it: " + "; ".join(p._reason(b, h, q, k) for p in self.parts)

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.parts))


@dataclass(frozen=True)
class Not(Mask):
    """The complement of a mask, `~a`: a key is visible if the rule hides it.

    Examples:
        >>> from regard.masks import Causal, Not
        >>> Not(Causal())
        ~Causal()
    """

    mask: Mask
    opaque = True  # the reach of a rule does not bound the keys that it hides

    @property
    def relative(self) -> bool:
        return self.mask.relative

    @property
    def lasting(self) -> bool:
        return self.mask.lasting

    @property
    def batch(self) -> int | None:
        return self.mask.batch

    @property
    def heads(self) -> int | None:
        return self.mask.heads

    @property
    def extent(self) -> Span | None:
        return self.mask.extent

    def runs(self, first: int, last: int) -> Shown:
        return _inverted(self.mask.runs(first, last))

    def finder(self) -> Finder:
        find = self.mask.finder()
        return lambda first, last: _inverted(find(first, last))

    def row(self, row: int) -> Mask | None:
        inner = self.mask.row(row)
        return None if inner is None else Not(inner)

    def reach(self, span: Span) -> Reach:
        return 0, None

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return ~self.mask(b, h, q_idx, kv_idx)

    def within(self, span: Span) -> Mask:
        inner = self.mask.within(span)
        if isinstance(inner, Everything | Nothing):
            return NOTHING if isinstance(inner, Everything) else EVERYTHING
        return inner.mask if isinstance(inner, Not) else Not(inner)

    def _dense(self, span: Span, batch: int, heads: int, device: Device) -> Tensor:
        return ~self.mask._dense(span, batch, heads, device)

    def _reason(self, b: int, h: int, q: int, k: int) -> str:
        verb = "allows" if self._allows(b, h, q, k) else "hides"
        return f"{self!r} {verb} it, as {self.mask._reason(b, h, q, k)}"

    def __repr__(self) -> str:
        simple = not isinstance(self.mask, AllOf | AnyOf)
        return f"~{self.mask!r}" if simple else f"~({self.mask!r})"


def _inverted(shown: Shown) -> Shown:
    return Shown(complement(shown.every), complement(shown.some), shown.edges)


def _flat(kind: type[_Parts], parts: Iterable[Mask]) -> tuple[Mask, ...]:
    """The parts in order, each once, with nested parts of the same kind unpacked."""
    flat: list[Mask] = []
    for part in map(checked, parts):
        for piece in part.parts if isinstance(part, kind) else (part,):
            if piece not in flat:
                flat.append(piece)
    if not flat:
        raise ValueError(
            f"{kind.__name__} combines one mask or more, got none; "
            "EVERYTHING hides nothing, NOTHING hides every key"
        )
    return tuple(flat)


def combined(kind: type[_Parts], parts: tuple[Mask, ...]) -> Mask:
    """The parts combined, without neutral ones; one part is returned as it is."""
    rest = tuple(part for part in _flat(kind, parts) if part != kind.neutral)
    if len(rest) > 1:
        return kind(rest)
    return rest[0] if rest else kind.neutral


def _common_size(name: str, mask: Mask, sizes: list[int | None]) -> int | None:
    """The size that fits all parts; None fits any size, 1 broadcasts."""
    known = {size for size in sizes if size is not None}
    fixed = known - {1}
    if len(fixed) > 1:
        raise ValueError(
            f"the parts of {mask!r} have different sizes, {name}={sorted(fixed)}; "
            "give all of them one row for each, or a single one for all"
        )
    return max(fixed or known, default=None)


Mask.operators["&"] = lambda *parts: combined(AllOf, parts)
Mask.operators["|"] = lambda *parts: combined(AnyOf, parts)
Mask.operators["~"] = Not
