"""A mask is a rule before it is a tensor: combine it, ask it, simplify it, and only then lower it.

Calling one is calling a FlexAttention `mask_mod`. `True` means *may look*; indices are slots in the
sequence as the cache counts them. The rules themselves are in `masks`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from regard.span import Span

Reach = tuple[int | None, int | None]


class Mask:
    """A rule for which keys a query may see. Combine rules with `&`, `|` and `~`."""

    @property
    def batch(self) -> int | None:
        """The batch size the rule insists on; None if it serves any."""
        return None

    @property
    def opaque(self) -> bool:
        """Whether `reach` may be wider than the truth, because the rule cannot be analysed."""
        return False

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Bool[Tensor, "..."]:
        """Whether query slot `q_idx` may see key slot `kv_idx`; index tensors that broadcast."""
        raise NotImplementedError

    def within(self, span: Span) -> "Mask":
        """The simplest mask that agrees with this one everywhere inside `span`. Reads no tensor."""
        return self

    def reach(self, span: Span) -> Reach:
        """The lowest and highest key slot that any query of `span` may see, also outside its keys;
        None where no bound is known. Never narrower than the truth."""
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

        Raises:
            ValueError: if the rule speaks of another batch size.
        """
        if self.batch not in (None, 1, batch):
            raise ValueError(
                f"{self!r} speaks of a batch of {self.batch}, asked for one of {batch}"
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
        seen = torch.as_tensor(self(b, h, q, kv), device=device)
        leading = seen.shape[:-2] if seen.dim() >= 2 else ()
        return seen.expand(*leading, span.num_queries, span.num_keys)

    def explain(self, b: int, h: int, q: int, k: int) -> str:
        """In one sentence, whether a query slot may see a key slot, and which part hides it.

        >>> from regard import Causal, SlidingWindow
        >>> (Causal() & SlidingWindow(3)).explain(0, 0, 5, 1)
        'query 5 may not see key 1: hidden by SlidingWindow(size=3)'
        """
        if self._shows(b, h, q, k):
            return f"query {q} may see key {k}: shown by {self!r}"
        return f"query {q} may not see key {k}: hidden by {self._hider(b, h, q, k)}"

    def _shows(self, b: int, h: int, q: int, k: int) -> bool:
        return bool(self(*(torch.tensor(i) for i in (b, h, q, k))))

    def _hider(self, b: int, h: int, q: int, k: int) -> str:
        return repr(self)

    def draw(
        self, queries: "int | Span" = 8, keys: int | None = None, *, b: int = 0, h: int = 0
    ) -> str:
        """A picture for a terminal: rows are queries, columns keys, `■` is visible.

        >>> from regard import Causal
        >>> print(Causal().draw(3))
        Causal()
        0 ■ · ·
        1 ■ ■ ·
        2 ■ ■ ■
        """
        if isinstance(queries, Span):
            span = queries
        else:
            span = Span(0, queries, 0, queries if keys is None else keys)
        mask = self.within(span)
        seen = mask.dense(span, batch=max(b + 1, mask.batch or 1), heads=h + 1)
        while seen.dim() < 4:
            seen = seen.unsqueeze(0)
        grid = seen[b if seen.shape[0] > 1 else 0, h if seen.shape[1] > 1 else 0].tolist()
        slots = span.positions().reshape(-1, span.num_queries)
        rows = slots[b if len(slots) > 1 else 0].tolist()
        width = len(str(rows[-1])) if rows else 1
        lines = [
            f"{slot:>{width}} " + " ".join("■" if cell else "·" for cell in row)
            for slot, row in zip(rows, grid, strict=True)
        ]
        return "\n".join([repr(self), *lines])

    def __and__(self, other: "Mask") -> "Mask":
        return _joined(AllOf, self, _rule(other), neutral=EVERYTHING)

    def __or__(self, other: "Mask") -> "Mask":
        return _joined(AnyOf, self, _rule(other), neutral=NOTHING)

    def __invert__(self) -> "Mask":
        return Not(self)

    def __rand__(self, other: object) -> "Mask":
        return _rule(other) & self

    def __ror__(self, other: object) -> "Mask":
        return _rule(other) | self

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
        return (q_idx == q_idx) & (kv_idx == kv_idx)


@dataclass(frozen=True)
class Nothing(Mask):
    """Shows nothing: the neutral element of `|`."""

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx != q_idx) & (kv_idx == kv_idx)

    def reach(self, span: Span) -> Reach:
        return 0, -1


EVERYTHING = Everything()
NOTHING = Nothing()


@dataclass(frozen=True)
class AllOf(Mask):
    """What every part shows. Write it `a & b`."""

    parts: tuple[Mask, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", _flat(AllOf, self.parts))

    @property
    def batch(self) -> int | None:
        return _batch(self, self.parts)

    @property
    def opaque(self) -> bool:
        return any(part.opaque for part in self.parts)

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        seen = self.parts[0](b, h, q_idx, kv_idx)
        for part in self.parts[1:]:
            seen = seen & part(b, h, q_idx, kv_idx)
        return seen

    def within(self, span: Span) -> Mask:
        return _simplest(AllOf, self.parts, span, neutral=EVERYTHING, absorbing=NOTHING)

    def reach(self, span: Span) -> Reach:
        low, high = self.parts[0].reach(span)
        for part in self.parts[1:]:
            other_low, other_high = part.reach(span)
            low = _tighter(max, low, other_low)
            high = _tighter(min, high, other_high)
        return low, high

    def _dense(
        self, span: Span, batch: int, heads: int, device: torch.device | str | None
    ) -> Tensor:
        seen, *rest = (part._dense(span, batch, heads, device) for part in self.parts)
        for other in rest:
            seen = seen & other
        return seen

    def _hider(self, b: int, h: int, q: int, k: int) -> str:
        hiders = [part for part in self.parts if not part._shows(b, h, q, k)]
        return " and by ".join(part._hider(b, h, q, k) for part in hiders)

    def __repr__(self) -> str:
        return " & ".join(f"({p!r})" if isinstance(p, AnyOf) else repr(p) for p in self.parts)


@dataclass(frozen=True)
class AnyOf(Mask):
    """What some part shows. Write it `a | b`."""

    parts: tuple[Mask, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", _flat(AnyOf, self.parts))

    @property
    def batch(self) -> int | None:
        return _batch(self, self.parts)

    @property
    def opaque(self) -> bool:
        return any(part.opaque for part in self.parts)

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        seen = self.parts[0](b, h, q_idx, kv_idx)
        for part in self.parts[1:]:
            seen = seen | part(b, h, q_idx, kv_idx)
        return seen

    def within(self, span: Span) -> Mask:
        return _simplest(AnyOf, self.parts, span, neutral=NOTHING, absorbing=EVERYTHING)

    def reach(self, span: Span) -> Reach:
        low, high = self.parts[0].reach(span)
        for part in self.parts[1:]:
            other_low, other_high = part.reach(span)
            low = None if low is None or other_low is None else min(low, other_low)
            high = None if high is None or other_high is None else max(high, other_high)
        return low, high

    def _dense(
        self, span: Span, batch: int, heads: int, device: torch.device | str | None
    ) -> Tensor:
        seen, *rest = (part._dense(span, batch, heads, device) for part in self.parts)
        for other in rest:
            seen = seen | other
        return seen

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

    def __repr__(self) -> str:
        simple = not isinstance(self.mask, AllOf | AnyOf)
        return f"~{self.mask!r}" if simple else f"~({self.mask!r})"


def _tighter(choose: Callable[[int, int], int], bound: int | None, other: int | None) -> int | None:
    if bound is None or other is None:
        return other if bound is None else bound
    return choose(bound, other)


def _flat(kind: type[AllOf] | type[AnyOf], parts: tuple[Mask, ...]) -> tuple[Mask, ...]:
    """The parts of parts of the same kind, each once, in order."""
    flat: list[Mask] = []
    for part in parts:
        for piece in part.parts if isinstance(part, kind) else (part,):
            if piece not in flat:
                flat.append(piece)
    return tuple(flat)


def _joined(kind: type[AllOf] | type[AnyOf], a: Mask, b: Mask, *, neutral: Mask) -> Mask:
    """Two masks as one, the neutral one left out."""
    if a == neutral or b == neutral:
        return a if b == neutral else b
    parts = _flat(kind, (a, b))
    return parts[0] if len(parts) == 1 else kind(parts)


def _simplest(
    kind: type[AllOf] | type[AnyOf],
    parts: tuple[Mask, ...],
    span: Span,
    *,
    neutral: Mask,
    absorbing: Mask,
) -> Mask:
    """The parts simplified, without neutral ones; the absorbing one swallows the rest."""
    simple = [part.within(span) for part in parts]
    if absorbing in simple:
        return absorbing
    left = _flat(kind, tuple(part for part in simple if part != neutral))
    if not left:
        return neutral
    return left[0] if len(left) == 1 else kind(left)


def _batch(mask: Mask, parts: tuple[Mask, ...]) -> int | None:
    """The batch size that all parts agree on."""
    sizes = {part.batch for part in parts} - {None, 1}
    if len(sizes) > 1:
        raise ValueError(f"the parts of {mask!r} speak of different batches: {sorted(sizes)}")  # type: ignore[type-var]
    if sizes:
        return sizes.pop()
    return 1 if any(part.batch == 1 for part in parts) else None
