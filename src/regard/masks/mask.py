"""A mask is a rule, a function of positions; and the rules that hide nothing and everything.

A rule becomes a tensor only where a kernel needs one. Slots count from the first cached token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool
from torch import Tensor

from regard.constants import Device
from regard.masks.draw import as_html, frame, picture
from regard.masks.runs import ALL, FAR, NONE, Finder, Shown, unknown
from regard.span import Span

Reach = tuple[int | None, int | None]


class Mask:
    """A rule for which keys a query may attend to: a FlexAttention `mask_mod`, True for visible.

    A rule is one class that answers two questions: whether a key is visible to a query
    (`__call__`), and which runs of keys are visible to a run of queries (`runs`). All else follows.

    Examples:
        >>> from regard.masks import Causal, SlidingWindow
        >>> (Causal() & SlidingWindow(3)).explain(b=0, h=0, q=1, k=2)
        'query 1 may not attend to key 2: Causal() hides keys after the query (2 > 1)'
    """

    operators: ClassVar[dict[str, Callable[..., "Mask"]]] = {}  # `regard.masks.algebra` adds them

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

    @property
    def relative(self) -> bool:
        """Whether the rule depends on the distance of query and key alone."""
        return False

    @property
    def lasting(self) -> bool:
        """Whether the rule holds few data and cannot change unnoticed: what it shows is kept."""
        return self.relative

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Bool[Tensor, "..."]:
        """Whether `q_idx` may attend to `kv_idx`; indices broadcast, unused ones give no axis."""
        raise NotImplementedError

    def runs(self, first: int, last: int) -> Shown:
        """The keys that are visible to some and to all of the queries `first..last`.

        Reads no tensor. Of a rule that does not say, any key may be visible and none surely is.
        """
        return unknown(first, last)

    def finder(self) -> Finder:
        """The function `runs`, with all that the rule's tensors say. Reads them, once."""
        return self.runs

    def row(self, row: int) -> "Mask | None":
        """The rule for one row of a batch; None where it is not known."""
        return self if self.relative else None

    def within(self, span: Span) -> "Mask":
        """The simplest mask that equals this one on the slots of `span`. Reads no tensor.

        Examples:
            >>> from regard.masks import Causal, SlidingWindow
            >>> (Causal() & SlidingWindow(4096)).within(Span(0, 512, 0, 512))
            Causal()
        """
        if torch.compiler.is_exporting() and vars(self):
            return self  # the program must hold for every length: none is compared with numbers
        some, every, _ = self.runs(span.first_query, span.last_query)
        start, stop = span.kv_start, span.kv_stop
        if any(low <= start and (high is FAR or stop <= high) for low, high in every):
            return EVERYTHING
        visible = any(low < stop and (high is FAR or start < high) for low, high in some)
        return self if visible else NOTHING

    def reach(self, span: Span) -> Reach:
        """The lowest and highest key slot that any query of `span` may attend to.

        They may lie outside the keys of `span`, and may be wider than necessary, but hide no
        visible key. None where no bound is known.
        """
        if not (some := self.runs(span.first_query, span.last_query).some):
            return 0, -1
        low, high = some[0][0], some[-1][1]
        return max(0, low), None if high is FAR else high - 1

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
        return visible.expand(*visible.shape[:-2], span.num_queries, span.num_keys)

    def explain(self, b: int, h: int, q: int, k: int) -> str:
        """In one sentence, whether query `q` may attend to key `k`, and which rule decides it.

        Raises:
            ValueError: if the rule's data has no batch row `b` or head `h`.
        """
        for name, size, given in (("b", self.batch, b), ("h", self.heads, h)):
            if size and size > 1 and given not in range(size):
                raise ValueError(f"{name} is 0 to {size - 1} in {self!r}, got {given}")
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
        return self if other is EVERYTHING else self.operators["&"](self, checked(other))

    def __or__(self, other: "Mask") -> "Mask":
        return self.operators["|"](self, checked(other))

    def __invert__(self) -> "Mask":
        return self.operators["~"](self)

    __rand__ = __and__  # for other types on the left: raises a TypeError
    __ror__ = __or__

    def __bool__(self) -> bool:
        raise TypeError("a mask is neither true nor false; combine masks with & | ~, not and, or")


def checked(other: object) -> Mask:
    if isinstance(other, Mask):
        return other
    if isinstance(other, type):
        raise TypeError(f"masks are objects, got the class {other.__name__}; call it")
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

    relative = True

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx == kv_idx

    def runs(self, first: int, last: int) -> Shown:
        return Shown(ALL, ALL)


@dataclass(frozen=True)
class Nothing(Mask):
    """The mask that hides every key: the neutral element of `|`.

    Examples:
        >>> from regard.masks import Causal, Nothing
        >>> Nothing() | Causal()
        Causal()
    """

    relative = True

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx != kv_idx

    def runs(self, first: int, last: int) -> Shown:
        return Shown(NONE, NONE)

    def _hidden_keys(self, b: int, q: int, k: int) -> str:
        return "everything"


EVERYTHING = Everything()
NOTHING = Nothing()
