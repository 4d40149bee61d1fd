"""A subject that has been understood: one canonical call, whatever it looks like outside."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from regard.verify.law import Sizes, Trial
from regard.verify.oracle import Judged, attention, pattern, rotated
from regard.verify.subject.conventions import Conventions, Kind
from regard.verify.subject.mask_forms import NO_MASK, MaskForm

Attend = Callable[..., Tensor]


class SubjectError(Exception):
    """The subject raised, or gave back what is not attention; carries a sentence."""


@dataclass
class Stepper:
    """A layer with a past.

    Attributes:
        new: makes a past.
        step: the output for x, and the past after it; without gradients and with a copy of x.
        style: how the past is passed: `object`, `tuple` or `internal`.
        follow: `step` of x itself, with gradients; `columns` keys are added to its mask.
        of: the stepper of another module of the same kind.
    """

    new: Callable[[], Any]
    step: Callable[[Tensor, Any], tuple[Tensor, Any]]
    style: str
    follow: Callable[..., tuple[Tensor, Any]]
    of: "Callable[[nn.Module], Stepper]"


@dataclass
class Subject:
    """What is judged.

    Attributes:
        name: how it was called.
        kind: what it is.
        conventions: those declared and those found out.
        inferred: what was found out, in words.
        attend: q [B, H, L, D], k [B, G, S, D], v [B, G, S, Dv] to [B, H, L, Dv]; also takes
            `keep`, `causal`, `window`, `scale`, `bias`, `softcap`, `dropout`, `raw`.
        layer: x [B, L, E] to [B, L, E]; also takes `keep`, `context`.
        stepper: the layer with a past.
        module: the module, if it is one.
        thing: the object itself: a cache, an allocator, a function.
        form: how it is told what to hide.
        has: what it has, for the checks to ask.
        fixed: sizes it cannot change.
        sinks: one learned score a head, if it has them.
        dtypes: of inputs it accepts.
        notes: remarks for the report.
    """

    name: str
    kind: Kind
    conventions: Conventions
    thing: Any = None
    inferred: dict[str, str] = field(default_factory=dict)
    attend: Attend | None = None
    layer: Callable[..., Tensor] | None = None
    stepper: Stepper | None = None
    module: nn.Module | None = None
    form: MaskForm = NO_MASK
    layer_form: MaskForm = NO_MASK
    has: set[str] = field(default_factory=set)
    fixed: dict[str, int] = field(default_factory=dict)
    sinks: Tensor | None = None
    notes: list[str] = field(default_factory=list)
    other: dict[str, Any] = field(default_factory=dict)

    def fit(self, sizes: Sizes) -> Sizes:
        """The nearest sizes that it can take."""
        sizes = sizes._replace(**self.fixed)
        if "gqa" not in self.has and "G" not in self.fixed:
            sizes = sizes._replace(G=sizes.H)
        if "cross" not in self.has:
            sizes = sizes._replace(S=sizes.L)
        if "wide" not in self.has and "V" not in self.fixed:
            sizes = sizes._replace(V=sizes.D)
        return sizes

    def inputs(
        self, sizes: Sizes, trial: Trial, dtype: torch.dtype = torch.float32, peak: float = 1.0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of these sizes; `peak` sharpens the softmax."""
        q = trial.randn(sizes.B, sizes.H, sizes.L, sizes.D, dtype=dtype, times=peak)
        k = trial.randn(sizes.B, sizes.G, sizes.S, sizes.D, dtype=dtype)
        v = trial.randn(sizes.B, sizes.G, sizes.S, sizes.V, dtype=dtype)
        return q, k, v

    def tokens(
        self, batch: int, length: int, trial: Trial, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """x [B, L, E] for the layer."""
        return trial.randn(batch, length, self.conventions.width or 1, dtype=dtype)

    def visible(self, queries: int, keys: int, *, causal: bool = False, window: int = 0) -> Tensor:
        """Which key [L, S] a query may see: its own pattern, and what a call asks for."""
        own = self.conventions
        return pattern(
            queries,
            keys,
            causal=causal or bool(own.causal),
            window=window or (own.window or 0),
            alignment=own.alignment or "bottom-right",
        )

    def judge(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        keep: Tensor | None = None,
        causal: bool = False,
        window: int = 0,
        **options: Any,
    ) -> Judged:
        """What the definition gives for the same call, by its conventions."""
        own = self.conventions
        seen = self.visible(q.shape[2], k.shape[2], causal=causal, window=window)[None, None]
        seen = seen if keep is None else seen & keep
        if own.pairing in ("halves", "pairs"):
            past = max(k.shape[2] - q.shape[2], 0)
            q = rotated(q, past + torch.arange(q.shape[2]), own.pairing, own.theta)
            k = rotated(k, torch.arange(k.shape[2]), own.pairing, own.theta)
        options = {
            "scale": own.scale,
            "softcap": own.softcap,
            "sinks": self.sinks,
            "tiled": own.head_order == "tiled",
            **options,
        }
        judged = attention(q, k, v, keep=seen, **options)
        if own.fully_masked != "mean":
            return judged
        return judged._replace(out=_means(judged.out, v, seen, q.shape[1]))

    def run(self, *given: Tensor, **options: Any) -> Tensor:
        """`attend`, without gradients and with copies, so that no call changes another."""
        assert self.attend is not None
        with torch.no_grad():
            return self.attend(*(x.clone() for x in given), **options)

    def through(self, x: Tensor, **options: Any) -> Tensor:
        """`layer`, in the same way."""
        assert self.layer is not None
        with torch.no_grad():
            return self.layer(x.clone(), **options)

    def calls(self, sizes: Sizes, trial: Trial) -> "list[tuple[Attend, dict[str, Tensor]]]":
        """Each call it has, with inputs by name: laws of any function are asked of all of them."""
        found: list[tuple[Attend, dict[str, Tensor]]] = []
        if self.attend is not None:
            given = dict(zip("qkv", self.inputs(self.fit(sizes), trial), strict=True))
            found.append((self.attend, given))
        if self.layer is not None:
            found.append((self.layer, {"x": self.tokens(sizes.B, sizes.L, trial)}))
        return found


def _means(out: Tensor, v: Tensor, seen: Tensor, heads: int) -> Tensor:
    """Rows that see nothing read the mean of all values, as a finite fill makes them."""
    mean = v.double().mean(2, keepdim=True).repeat_interleave(heads // v.shape[1], 1)
    return torch.where(seen.any(-1, keepdim=True).expand_as(out), out, mean)


def output_of(result: Any, numel: int) -> Tensor:
    """The output in what a subject gave back: a tensor, or the first in it of the right size.

    Raises:
        SubjectError: if there is none.
    """
    found = [x for x in _flat(result) if isinstance(x, Tensor)]
    if not found:
        raise SubjectError(f"it gave back {_named(result)}, and no tensor in it")
    right = [x for x in found if x.numel() == numel]
    return (right or found)[0]


def _flat(result: Any) -> list[Any]:
    if isinstance(result, Mapping):
        return list(result.values())
    return list(result) if isinstance(result, (tuple, list)) else [result]


def _named(result: Any) -> str:
    return "None" if result is None else f"a {type(result).__name__}"


def called(target: Callable[..., Any], *given: Any, **options: Any) -> Any:
    """What `target` gives; whatever it raises is a `SubjectError` in one sentence.

    Raises:
        SubjectError: if it raises or leaves.
    """
    try:
        return target(*given, **options)
    except SubjectError:
        raise
    except SystemExit as error:
        raise SubjectError(f"it ended the program with exit code {error.code}") from error
    except Exception as error:
        said = " ".join(str(error).split())[:300]
        raise SubjectError(f"it raised {type(error).__name__}: {said}") from error
