"""A mask is a rule before it is a tensor: combine it, ask it, simplify it, and only then lower it.

Calling one is calling a FlexAttention `mask_mod`. `True` means *may look*; indices are slots in the
sequence as the cache counts them. The rules themselves are in `masks`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce

import torch
from jaxtyping import Bool
from torch import Tensor

from regard.masks.draw import frame, picture
from regard.span import Span

Reach = tuple[int | None, int | None]


class Mask:
    """A rule for which keys a query may see. Combine rules with `&`, `|` and `~`."""

    @property
    def batch(self) -> int | None:
        """The batch size the rule speaks of; 1 and None serve any."""
        return None

    @property
    def heads(self) -> int | None:
        """The number of query heads the rule speaks of; 1 and None serve any."""
        return None

    @property
    def extent(self) -> Span | None:
        """The slots the rule holds data about; None if it holds none."""
        return None

    @property
    def opaque(self) -> bool:
        """Whether `reach` may be wider than the truth, because the rule cannot be analysed."""
        return False

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Bool[Tensor, "..."]:
        """Whether query slot `q_idx` may see key slot `kv_idx`; index tensors that broadcast.

        The answer leaves out the axes that make no difference.
        """
        raise NotImplementedError

    def within(self, span: Span) -> "Mask":
        """The simplest mask that agrees with this one everywhere inside `span`. Reads no tensor.

        >>> from regard.masks import Causal, SlidingWindow
        >>> (Causal() & SlidingWindow(4096)).within(Span(0, 512, 0, 512))
        Causal()
        >>> Causal().within(Span(511, 512, 0, 512))
        Everything()
        """
        return self

    def reach(self, span: Span) -> Reach:
        """The lowest and highest key slot that any query of `span` may see, also outside its keys;
        None where no bound is known. Never narrower than the truth.

        >>> from regard.masks import Causal, SlidingWindow
        >>> (Causal() & SlidingWindow(4)).reach(Span(10, 12, 0, 12))
        (7, 11)
        """
        return 0, None

    def dense(
        self,
        span: Span,
        *,
        batch: int = 1,
        heads: int = 1,
        device: torch.device | str | None = None,
    ) -> Bool[Tensor, "*B L S"]:
        """The rule as a tensor: `[L, S]`, or four-dimensional and broadcasting to `[B, H, L, S]`.

        It may be an expanded view: read it, do not write to it.

        Raises:
            ValueError: if the rule speaks of another batch size or number of heads.
        """
        for what, own, asked in (("batch", self.batch, batch), ("heads", self.heads, heads)):
            if own is not None and own != 1 and own != asked:
                raise ValueError(
                    f"{self!r} speaks of {what}={own}, the call has {what}={asked}; "
                    f"give {what}={own}, or a mask of size 1 there, which serves any"
                )
        return self._dense(span, batch, heads, device)

    def _dense(
        self, span: Span, batch: int, heads: int, device: torch.device | str | None
    ) -> Tensor:
        b = torch.arange(batch, device=device).view(-1, 1, 1, 1)
        h = torch.arange(heads, device=device).view(-1, 1, 1)
        q = span.positions(device).unsqueeze(-1)
        q = q.unsqueeze(1) if q.dim() == 3 else q  # [B, 1, L, 1] where rows differ
        kv = torch.arange(span.kv_start, span.kv_stop, device=device)
        seen = self(b, h, q, kv)
        seen = seen.unsqueeze(0) if seen.dim() == 3 else seen
        leading = seen.shape[:-2] if seen.dim() >= 2 else ()
        return seen.expand(*leading, span.num_queries, span.num_keys)

    def explain(self, b: int, h: int, q: int, k: int) -> str:
        """In one sentence, whether a query slot may see a key slot, and which part decides it.

        >>> from regard.masks import Causal, SlidingWindow
        >>> (Causal() & SlidingWindow(3)).explain(0, 0, 1, 3)
        'query 1 may not see key 3: Causal() hides keys after the query (3 > 1)'
        """
        may = "may" if self._shows(b, h, q, k) else "may not"
        return f"query {q} {may} see key {k}: {self._because(b, h, q, k)}"

    def _shows(self, b: int, h: int, q: int, k: int) -> bool:
        return bool(self(*(torch.tensor(i, device="cpu") for i in (b, h, q, k))))

    def _because(self, b: int, h: int, q: int, k: int) -> str:
        shows = self._shows(b, h, q, k)
        return f"{self!r} shows it" if shows else f"{self!r} hides {self._hides(b, q, k)}"

    def _hides(self, b: int, q: int, k: int) -> str:
        """What it is that hides a hidden cell."""
        return "it"

    def draw(
        self,
        queries: "int | Span | None" = None,
        keys: int | None = None,
        *,
        b: int = 0,
        h: int = 0,
    ) -> str:
        """A picture for a terminal: lines are queries, columns keys, `■` is visible.

        Its size is what you ask for, in slots from 0 or as a `Span`; else that of the mask's data.

        >>> from regard.masks import Causal
        >>> print(Causal().draw(3))
        Causal()
          0 1 2
        0 ■ · ·
        1 ■ ■ ·
        2 ■ ■ ■
        """
        return picture(self, frame(self, queries, keys), b, h)

    def __and__(self, other: "Mask") -> "Mask":
        return _one_or(AllOf, (self, _rule(other)))

    def __or__(self, other: "Mask") -> "Mask":
        return _one_or(AnyOf, (self, _rule(other)))

    def __invert__(self) -> "Mask":
        return Not(self)

    def __rand__(self, other: object) -> "Mask":
        return _one_or(AllOf, (_rule(other), self))

    def __ror__(self, other: object) -> "Mask":
        return _one_or(AnyOf, (_rule(other), self))

    def __bool__(self) -> bool:
        raise TypeError(
            "a mask is neither true nor false; combine masks with & | ~, not and/or/not"
        )


def _rule(other: object) -> Mask:
    if isinstance(other, Mask):
        return other
    raise TypeError(
        f"masks combine with masks, got {type(other).__name__}; wrap a tensor in Dense(keep) "
        "([.., L, S], True where a query may look) or Padding(valid) ([B, S], True for real tokens)"
    )


@dataclass(frozen=True)
class Everything(Mask):
    """Hides nothing: the neutral element of `&`."""

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx == kv_idx


@dataclass(frozen=True)
class Nothing(Mask):
    """Shows nothing: the neutral element of `|`."""

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx != kv_idx

    def reach(self, span: Span) -> Reach:
        return 0, -1

    def _hides(self, b: int, q: int, k: int) -> str:
        return "everything"


EVERYTHING = Everything()
NOTHING = Nothing()


@dataclass(frozen=True)
class _Parts(Mask):
    """Several rules together. Abstract: `AllOf` and `AnyOf` say how."""

    parts: tuple[Mask, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", _flat(type(self), self.parts))

    @staticmethod
    def _join(one: Tensor, other: Tensor) -> Tensor:
        raise NotImplementedError

    @property
    def batch(self) -> int | None:
        return _agreed("batch", self, [part.batch for part in self.parts])

    @property
    def heads(self) -> int | None:
        return _agreed("heads", self, [part.heads for part in self.parts])

    @property
    def extent(self) -> Span | None:
        known = [part.extent for part in self.parts if part.extent is not None]
        return max(known, key=lambda span: span.num_keys, default=None)

    @property
    def opaque(self) -> bool:
        return any(part.opaque for part in self.parts)

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return reduce(self._join, [part(b, h, q_idx, kv_idx) for part in self.parts])

    def _dense(
        self, span: Span, batch: int, heads: int, device: torch.device | str | None
    ) -> Tensor:
        return reduce(self._join, [part._dense(span, batch, heads, device) for part in self.parts])


@dataclass(frozen=True, repr=False)
class AllOf(_Parts):
    """What every part shows. Write it `a & b`."""

    @staticmethod
    def _join(one: Tensor, other: Tensor) -> Tensor:
        return one & other

    def within(self, span: Span) -> Mask:
        return _simplest(AllOf, self.parts, span)

    def reach(self, span: Span) -> Reach:
        low, high = self.parts[0].reach(span)
        for part in self.parts[1:]:
            other_low, other_high = part.reach(span)
            low = _tighter(max, low, other_low)
            high = _tighter(min, high, other_high)
        return low, high

    def _because(self, b: int, h: int, q: int, k: int) -> str:
        hiders = [part for part in self.parts if not part._shows(b, h, q, k)]
        reasons = (part._because(b, h, q, k) for part in hiders)
        return "; ".join(reasons) if hiders else "every rule shows it"

    def __repr__(self) -> str:
        return " & ".join(f"({p!r})" if isinstance(p, AnyOf) else repr(p) for p in self.parts)


@dataclass(frozen=True, repr=False)
class AnyOf(_Parts):
    """What some part shows. Write it `a | b`."""

    @staticmethod
    def _join(one: Tensor, other: Tensor) -> Tensor:
        return one | other

    def within(self, span: Span) -> Mask:
        return _simplest(AnyOf, self.parts, span)

    def reach(self, span: Span) -> Reach:
        low, high = self.parts[0].reach(span)
        for part in self.parts[1:]:
            other_low, other_high = part.reach(span)
            low = None if low is None or other_low is None else min(low, other_low)
            high = None if high is None or other_high is None else max(high, other_high)
        return low, high

    def _because(self, b: int, h: int, q: int, k: int) -> str:
        showing = [part for part in self.parts if part._shows(b, h, q, k)]
        if showing:
            return showing[0]._because(b, h, q, k)
        return "no rule shows it: " + "; ".join(p._because(b, h, q, k) for p in self.parts)

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.parts))


@dataclass(frozen=True)
class Not(Mask):
    """What a rule hides. Write it `~a`."""

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
        return True  # what a rule hides has no bounds that its reach could give

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return ~self.mask(b, h, q_idx, kv_idx)

    def within(self, span: Span) -> Mask:
        inner = self.mask.within(span)
        match inner:
            case Everything():
                return NOTHING
            case Nothing():
                return EVERYTHING
            case Not():
                return inner.mask
        return Not(inner)

    def _dense(
        self, span: Span, batch: int, heads: int, device: torch.device | str | None
    ) -> Tensor:
        return ~self.mask._dense(span, batch, heads, device)

    def _because(self, b: int, h: int, q: int, k: int) -> str:
        verb = "shows" if self._shows(b, h, q, k) else "hides"
        return f"{self!r} {verb} it, as {self.mask._because(b, h, q, k)}"

    def __repr__(self) -> str:
        simple = not isinstance(self.mask, AllOf | AnyOf)
        return f"~{self.mask!r}" if simple else f"~({self.mask!r})"


def _tighter(choose: Callable[[int, int], int], bound: int | None, other: int | None) -> int | None:
    if bound is None or other is None:
        return other if bound is None else bound
    return choose(bound, other)


def _flat(kind: type[_Parts], parts: Iterable[Mask]) -> tuple[Mask, ...]:
    """The parts of parts of the same kind, each once, in order."""
    flat: list[Mask] = []
    for part in map(_rule, parts):
        for piece in part.parts if isinstance(part, kind) else (part,):
            if piece not in flat:
                flat.append(piece)
    if not flat:
        raise ValueError(
            f"{kind.__name__} combines one mask or more, got none; "
            "EVERYTHING hides nothing, NOTHING shows nothing"
        )
    return tuple(flat)


def _one_or(kind: type[_Parts], parts: tuple[Mask, ...]) -> Mask:
    """The parts combined, without neutral ones; the part itself if there is but one."""
    neutral: Mask = EVERYTHING if kind is AllOf else NOTHING
    left = tuple(part for part in _flat(kind, parts) if part != neutral)
    if len(left) > 1:
        return kind(left)
    return left[0] if left else neutral


def _simplest(kind: type[_Parts], parts: tuple[Mask, ...], span: Span) -> Mask:
    """The parts simplified and combined; the absorbing one swallows the rest."""
    absorbing: Mask = NOTHING if kind is AllOf else EVERYTHING
    simple = tuple(part.within(span) for part in parts)
    return absorbing if absorbing in simple else _one_or(kind, simple)


def _agreed(what: str, mask: Mask, sizes: list[int | None]) -> int | None:
    """The size that all parts agree on: None says nothing, 1 serves any."""
    known = [size for size in sizes if size is not None]
    insisting = {size for size in known if size != 1}
    if len(insisting) > 1:
        raise ValueError(
            f"the parts of {mask!r} speak of different sizes, {what}={sorted(insisting)}; "
            "give all of them one row for each, or a single one for all"
        )
    return insisting.pop() if insisting else (1 if known else None)
