"""Masks are rules, functions of positions, and combine with `&`, `|` and `~`.

A rule becomes a tensor only where a kernel needs one. Slots count from the first cached token.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce
from typing import ClassVar

import torch
from jaxtyping import Bool
from torch import Tensor

from regard.constants import Device
from regard.masks.draw import as_html, frame, picture
from regard.span import Span

Reach = tuple[int | None, int | None]


class Mask:
    """A rule for which keys a query may attend to: a FlexAttention `mask_mod`, True for visible.

    Examples:
        >>> from regard.masks import Causal, Mask
        >>> isinstance(Causal(), Mask), isinstance(~Causal(), Mask)
        (True, True)
    """

    @property
    def batch(self) -> int | None:
        """The batch size of the rule's data; 1 and None fit any batch."""
        return None

    @property
    def heads(self) -> int | None:
        """The number of query heads in the rule's data; 1 and None fit any number."""
        return None

    @property
    def extent(self) -> Span | None:
        """The slots that the rule has data for; None if it has no data."""
        return None

    @property
    def opaque(self) -> bool:
        """Whether `reach` may be wider than necessary, because the rule cannot be analysed."""
        return False

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Bool[Tensor, "..."]:
        """Whether `q_idx` may attend to `kv_idx`; indices broadcast, unused ones give no axis."""
        raise NotImplementedError

    def within(self, span: Span) -> "Mask":
        """The simplest mask that equals this one on the slots of `span`. Reads no tensor.

        Examples:
            >>> from regard.masks import Causal, SlidingWindow
            >>> (Causal() & SlidingWindow(4096)).within(Span(0, 512, 0, 512))
            Causal()
        """
        return self

    def reach(self, span: Span) -> Reach:
        """The lowest and highest key slot that any query of `span` may attend to.

        They may lie outside the keys of `span`, and may be wider than necessary, but hide no
        visible key. None where no bound is known.
        """
        return 0, None

    def dense(
        self, span: Span, *, batch: int = 1, heads: int = 1, device: Device = None
    ) -> Bool[Tensor, "*B L S"]:
        """The rule as booleans: `[L, S]`, or broadcasting to `[B, H, L, S]`. Do not write to them.

        Raises:
            ValueError: if the rule's data has another batch size or number of heads.
        """
        for name, own, given in (("batch", self.batch, batch), ("heads", self.heads, heads)):
            if own is not None and own != 1 and own != given:
                raise ValueError(
                    f"{self!r} is for {name}={own}, the call has {name}={given}; "
                    f"give {name}={own}, or a mask of size 1 there, which broadcasts"
                )
        return self._dense(span, batch, heads, device)

    def _dense(self, span: Span, batch: int, heads: int, device: Device) -> Tensor:
        b = torch.arange(batch, device=device).view(-1, 1, 1, 1)
        h = torch.arange(heads, device=device).view(-1, 1, 1)
        q = span.positions(device).unsqueeze(-1)
        q = q.unsqueeze(1) if q.dim() == 3 else q  # [B, 1, L, 1] where rows differ
        kv = torch.arange(span.kv_start, span.kv_stop, device=device)
        visible = self(b, h, q, kv)
        visible = visible.unsqueeze(0) if visible.dim() == 3 else visible
        leading = visible.shape[:-2] if visible.dim() >= 2 else ()
        return visible.expand(*leading, span.num_queries, span.num_keys)

    def explain(self, b: int, h: int, q: int, k: int) -> str:
        """In one sentence, whether query `q` may attend to key `k`, and which rule decides it.

        Examples:
            >>> from regard.masks import Causal, SlidingWindow
            >>> (Causal() & SlidingWindow(3)).explain(0, 0, 1, 3)
            'query 1 may not attend to key 3: Causal() hides keys after the query (3 > 1)'
        """
        may = "may" if self._allows(b, h, q, k) else "may not"
        return f"query {q} {may} attend to key {k}: {self._reason(b, h, q, k)}"

    def _allows(self, b: int, h: int, q: int, k: int) -> bool:
        return bool(self(*(torch.tensor(i, device="cpu") for i in (b, h, q, k))))

    def _reason(self, b: int, h: int, q: int, k: int) -> str:
        allows = self._allows(b, h, q, k)
        return f"{self!r} allows it" if allows else f"{self!r} hides {self._hidden_keys(b, q, k)}"

    def _hidden_keys(self, b: int, q: int, k: int) -> str:
        """The keys that the rule hides from a query, in words; key `k` is one of them."""
        return "it"

    def draw(
        self, queries: int | Span | None = None, keys: int | None = None, *, b: int = 0, h: int = 0
    ) -> str:
        """The mask as text: a line for each query, a column for each key, `■` where visible.

        `queries` and `keys` are counts from slot 0, or `queries` is a `Span`; the default is the
        size of the mask's data. `b` and `h` are the batch row and the head.
        """
        return picture(self, frame(self, queries, keys), b, h)

    def _repr_html_(self) -> str | None:
        return as_html(self)

    def __and__(self, other: "Mask") -> "Mask":
        return self if other is EVERYTHING else _combined(AllOf, (self, _checked(other)))

    def __or__(self, other: "Mask") -> "Mask":
        return _combined(AnyOf, (self, _checked(other)))

    def __invert__(self) -> "Mask":
        return Not(self)

    __rand__ = __and__  # for other types on the left: raises a TypeError
    __ror__ = __or__

    def __bool__(self) -> bool:
        raise TypeError(
            "a mask is neither true nor false; combine masks with & | ~, not and/or/not"
        )


def _checked(other: object) -> Mask:
    if isinstance(other, Mask):
        return other
    raise TypeError(
        f"masks combine with masks, got {type(other).__name__}; wrap a tensor in Dense(keep) "
        "([.., L, S], True where a query may attend) or Padding(valid) ([B, S], True if real)"
    )


@dataclass(frozen=True)
class Everything(Mask):
    """The mask that hides nothing: the neutral element of `&`.

    Examples:
        >>> from regard.masks import Causal, Everything
        >>> Everything() & Causal()
        Causal()
    """

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx == kv_idx


@dataclass(frozen=True)
class Nothing(Mask):
    """The mask that hides every key: the neutral element of `|`.

    Examples:
        >>> from regard.masks import Causal, Nothing
        >>> Nothing() | Causal()
        Causal()
    """

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx != kv_idx

    def reach(self, span: Span) -> Reach:
        return 0, -1

    def _hidden_keys(self, b: int, q: int, k: int) -> str:
        return "everything"


EVERYTHING = Everything()
NOTHING = Nothing()


@dataclass(frozen=True)
class _Parts(Mask):
    """Several rules combined. Abstract: see `AllOf` and `AnyOf`."""

    parts: tuple[Mask, ...]
    neutral: ClassVar[Mask]  # the part that changes nothing
    absorbing: ClassVar[Mask]  # the part that decides the result alone

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", _flat(type(self), self.parts))

    @staticmethod
    def _join(one: Tensor, other: Tensor) -> Tensor:
        raise NotImplementedError

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

    @property
    def opaque(self) -> bool:
        return any(part.opaque for part in self.parts)

    def within(self, span: Span) -> Mask:
        simple = tuple(part.within(span) for part in self.parts)
        return self.absorbing if self.absorbing in simple else _combined(type(self), simple)

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return reduce(self._join, [part(b, h, q_idx, kv_idx) for part in self.parts])

    def _dense(self, span: Span, batch: int, heads: int, device: Device) -> Tensor:
        return reduce(self._join, [part._dense(span, batch, heads, device) for part in self.parts])


@dataclass(frozen=True, repr=False)
class AllOf(_Parts):
    """The intersection of masks, `a & b`: a key is visible if every part allows it.

    Examples:
        >>> from regard.masks import AllOf, Causal, SlidingWindow
        >>> AllOf((Causal(), SlidingWindow(2)))
        Causal() & SlidingWindow(size=2)
    """

    neutral, absorbing = EVERYTHING, NOTHING

    @staticmethod
    def _join(one: Tensor, other: Tensor) -> Tensor:
        return one & other

    def reach(self, span: Span) -> Reach:
        low, high = self.parts[0].reach(span)
        for part in self.parts[1:]:
            other_low, other_high = part.reach(span)
            low = _tighter(max, low, other_low)
            high = _tighter(min, high, other_high)
        return low, high

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

    @staticmethod
    def _join(one: Tensor, other: Tensor) -> Tensor:
        return one | other

    def reach(self, span: Span) -> Reach:
        low, high = self.parts[0].reach(span)
        for part in self.parts[1:]:
            other_low, other_high = part.reach(span)
            low = None if low is None or other_low is None else min(low, other_low)
            high = None if high is None or other_high is None else max(high, other_high)
        return low, high

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

    @property
    def batch(self) -> int | None:
        return self.mask.batch

    @property
    def heads(self) -> int | None:
        return self.mask.heads

    @property
    def extent(self) -> Span | None:
        return self.mask.extent

    @property
    def opaque(self) -> bool:
        return True  # the reach of a rule does not bound the keys that it hides

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


def _tighter(choose: Callable[[int, int], int], bound: int | None, other: int | None) -> int | None:
    if bound is None or other is None:
        return other if bound is None else bound
    return choose(bound, other)


def _flat(kind: type[_Parts], parts: Iterable[Mask]) -> tuple[Mask, ...]:
    """The parts in order, each once, with nested parts of the same kind unpacked."""
    flat: list[Mask] = []
    for part in map(_checked, parts):
        for piece in part.parts if isinstance(part, kind) else (part,):
            if piece not in flat:
                flat.append(piece)
    if not flat:
        raise ValueError(
            f"{kind.__name__} combines one mask or more, got none; "
            "EVERYTHING hides nothing, NOTHING hides every key"
        )
    return tuple(flat)


def _combined(kind: type[_Parts], parts: tuple[Mask, ...]) -> Mask:
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
