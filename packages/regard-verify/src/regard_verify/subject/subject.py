"""A subject: the code under test behind one canonical call, with what was found out about it."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard_verify.blame import line_of, said
from regard_verify.law import Sizes, Trial
from regard_verify.oracle import Reference, attention, pattern, rotated
from regard_verify.subject.conventions import THETA, Conventions, Kind
from regard_verify.subject.mask_forms import NO_MASK, MaskForm
from regard_verify.visibility import read_weights


class SubjectError(Exception):
    """The error for a subject that raised, or returned what is not attention; carries a sentence.

    Attributes:
        line: of the subject, where that is not in the traceback, as `FILE:NUMBER: CODE`.
        crashes: whether the subject's own error, the cause of this one, is a broken law.

    Examples:
        >>> from regard_verify import SubjectError, understand
        >>> try:
        ...     understand(7)
        ... except SubjectError as error:
        ...     print(error)
        it is of type int, which cannot be called
    """

    line: str = ""
    crashes: bool = False


@dataclass
class Abilities:
    """The abilities of a subject; a law applies where the abilities that it needs are there."""

    # How it can be called.
    heads: bool = False  # with q, k and v: laws of the attention itself
    layer: bool = False  # with x: laws of layers
    module: bool = False  # as an nn.Module: weights, train and eval mode
    # Sizes that a call may have.
    several_heads: bool = False  # more than one head
    gqa: bool = False  # fewer key heads than query heads
    cross: bool = False  # other numbers of keys than of queries
    even_width: bool = False  # only an even number of channels, as where they are halved
    wide: bool = False  # values of any number of channels: all weights are read in one call
    # Arguments of a call.
    mask: bool = False  # a mask with an axis of queries
    padding: bool = False  # a mask of any form, with at least an axis of keys
    unusable_mask: bool = False  # an argument named as a mask that hides nothing as it should
    causal: bool = False  # a switch for the causal rule
    causal_alone: bool = False  # ... of a module, that hides later keys without a mask as well
    window: bool = False  # the size of a sliding window
    scale: bool = False  # the factor of the scores
    softcap: bool = False  # the bound of the scores
    bias: bool = False  # a bias that is added to the scores
    dropout: bool = False  # of a function an argument, of a module any dropout when training
    weights: bool = False  # a switch that also returns the attention weights
    context: bool = False  # another sequence to attend to: cross-attention
    documents: bool = False  # which tokens of a row are of one document
    cache: bool = False  # keys and values of earlier tokens
    unusable_cache: bool = False  # an argument for a cache that is declared and does not work
    # What is known of it.
    unknown_positions: bool = False  # positions change the scores in a way that is not known
    negative_weights: bool = False  # its weights are those of one softmax less those of another
    reference: bool = False  # a function or module that should return the same is declared

    def any_of(self, names: str) -> bool:
        """Whether one of the abilities is there that `"heads|layer"` lists."""
        return any(getattr(self, name) for name in names.split("|"))


class Call(NamedTuple):
    """A call that is ready to run: `target` on the tensors `given`, by name."""

    label: str
    target: Callable[..., Tensor]
    given: dict[str, Tensor]

    def __call__(self, **instead: Tensor) -> Tensor:
        """The output, without gradients, on copies of `given` or of what replaces it."""
        with torch.no_grad():
            return self.target(**{n: x.clone() for n, x in {**self.given, **instead}.items()})

    def with_gradients(self) -> tuple[Tensor, dict[str, Tensor]]:
        """The output, and the copies of `given` that it was computed from."""
        given = {n: x.clone().requires_grad_() for n, x in self.given.items()}
        return self.target(**given), given


@dataclass
class Subject:
    """The code under test.

    Attributes:
        name: its name in the report.
        kind: what it is.
        conventions: declared ones, and those found out by probing.
        thing: the object itself: a function or a module.
        inferred: what was found out, in words.
        attend: q [B, H, L, D], k [B, G, S, D], v [B, G, S, Dv] to [B, H, L, Dv]; also takes
            `keep`, `causal`, `window`, `scale`, `bias`, `softcap`, `dropout`, and `raw`, a mask in
            the subject's own form.
        layer: x [B, L, E] to [B, L, E]; also takes `keep`, `context`.
        stepper: the layer called piece by piece with a cache, a `subject.decoding.Steps`.
        module: the module, if it is one.
        form: the form of its masks.
        layer_form: the same for `layer`.
        has: its abilities.
        fixed: sizes that it cannot change.
        sinks: one learned score per head, if it has them.
        notes: remarks for the report.
        reference: what should return the same, if declared.
        another: builds a second module of the same kind, if that is known; takes changes of its
            arguments by name.
        switches: its boolean arguments, with the values that it was built with.
        forgot_super: `FILE:NUMBER: CODE` of its `__init__` if that does not call
            `super().__init__()`.
        total: what the weights of a query sum to.
    """

    name: str
    kind: Kind
    conventions: Conventions
    thing: Any = None
    inferred: dict[str, str] = field(default_factory=dict)
    attend: Any = None
    layer: Any = None
    stepper: Any = None
    module: Any = None
    form: MaskForm = NO_MASK
    layer_form: MaskForm = NO_MASK
    has: Abilities = field(default_factory=Abilities)
    fixed: dict[str, int] = field(default_factory=dict)
    sinks: Tensor | None = None
    notes: list[str] = field(default_factory=list)
    reference: Any = None
    another: Any = None
    switches: Mapping[str, bool] = field(default_factory=dict)
    forgot_super: str = ""
    total: float = 1.0

    def length(self, wanted: int) -> int:
        """The next length that it takes: a multiple of what it declares or seems to need."""
        multiple = self.conventions.multiple or 1
        return -(-wanted // multiple) * multiple

    def fit(self, sizes: Sizes) -> Sizes:
        """The nearest sizes that it can take."""
        sizes = sizes._replace(**self.fixed)
        sizes = sizes._replace(L=self.length(sizes.L), S=self.length(sizes.S))
        if self.has.even_width:
            sizes = sizes._replace(D=sizes.D + sizes.D % 2)
        if not self.has.gqa and "G" not in self.fixed:
            sizes = sizes._replace(G=sizes.H)
        if not self.has.cross:
            sizes = sizes._replace(S=sizes.L)
        if not self.has.wide and "V" not in self.fixed:
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

    def tokens(self, batch: int, length: int, trial: Trial) -> Tensor:
        """Random x [B, L, E]; L is rounded up to a length that the layer takes."""
        return trial.randn(batch, self.length(length), self.conventions.width or 1)

    def visible(self, queries: int, keys: int, *, causal: bool = False, window: int = 0) -> Tensor:
        """The keys that each query may attend to [L, S], by its own pattern and the call's
        options.
        """
        own = self.conventions
        return pattern(
            queries, keys, causal=causal or bool(own.causal), window=window or (own.window or 0),
            alignment=own.alignment or "bottom-right", after=own.after, block=own.block or 0,
            blocks=own.blocks or (0, 0),
        )  # fmt: skip

    def declared_padding(self, keep: Tensor | None, form: MaskForm | None = None) -> Tensor:
        """The queries [.., L, 1] that a mask of tokens hides as keys: their outputs are free."""
        shape = (form or self.form).shape
        if keep is None or shape not in ("BS", "B11S") or keep.shape[-1] != keep.shape[-2]:
            return torch.tensor([[False]])
        return ~keep.diagonal(dim1=-2, dim2=-1)[..., None]

    def expected(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        keep: Tensor | None = None,
        causal: bool = False,
        window: int = 0,
        **options: Any,
    ) -> Reference:
        """The output of the definition for the same call, under the subject's conventions."""
        own = self.conventions
        visible = self.visible(q.shape[2], k.shape[2], causal=causal, window=window)[None, None]
        visible = visible if keep is None else visible & keep
        if own.pairing in ("halves", "pairs"):
            first = max(k.shape[2] - q.shape[2], 0)
            theta = own.theta or THETA
            q = rotated(q, first + torch.arange(q.shape[2]), own.pairing, theta)
            k = rotated(k, torch.arange(k.shape[2]), own.pairing, theta)
        options = {"scale": own.scale, "softcap": own.softcap, "sinks": self.sinks, **options}
        options.setdefault("tiled", own.head_order == "tiled")
        right = attention(q, k, v, keep=visible, **options)
        if own.fully_masked != "mean":
            return right
        mean = self.total * v.double().mean(2, keepdim=True)
        mean = mean.repeat_interleave(q.shape[1] // v.shape[1], 1)
        attends = visible.any(-1, keepdim=True).expand_as(right.out)
        return right._replace(out=torch.where(attends, right.out, mean))

    def run(self, *given: Tensor, **options: Any) -> Tensor:
        """`attend`, without gradients and on copies, so that no call changes another's inputs."""
        with torch.no_grad():
            return self.attend(*(x.clone() for x in given), **options)

    def run_layer(self, x: Tensor, **options: Any) -> Tensor:
        """`layer`, without gradients and on a copy of x."""
        with torch.no_grad():
            return self.layer(x.clone(), **options)

    def layer_of(self, module: nn.Module) -> Callable[..., Tensor]:
        """`layer` with another module of the same kind in it."""
        call: Any = copy.copy(self.layer)
        call.module = module
        return call

    def read_weights(self, q: Tensor, k: Tensor, **options: Any) -> Tensor:
        """The attention weights [B, H, L, S] of a call, measured from outside."""
        width = None if self.has.wide else self.fixed.get("V", q.shape[-1])
        return read_weights(partial(self.run, **options), q, k, width=width)

    def attended(self, sizes: Sizes, trial: Trial, **options: Any) -> Tensor:
        """The keys [B, H, L, S] with a weight above 0, for random inputs."""
        q, k, _ = self.inputs(sizes, trial)
        return self.read_weights(q, k, **options) != 0

    def causal_options(self) -> dict[str, Any] | None:
        """The options of a causal call: none if it is causal by itself, None if it cannot be."""
        if self.conventions.causal:
            return {}
        alone = self.has.causal if self.module is None else self.has.causal_alone
        return {"causal": True} if alone else None

    def calls(self, sizes: Sizes, trial: Trial) -> list[Call]:
        """Each call that it has, on heads and on tokens, with inputs of these sizes."""
        found = []
        if self.attend is not None:
            heads = dict(zip("qkv", self.inputs(self.fit(sizes), trial), strict=True))
            found.append(Call(str(sizes), self.attend, heads))
        if self.layer is not None:
            x = self.tokens(sizes.B, sizes.L, trial)
            found.append(Call(str(sizes), self.layer, {"x": x}))
        return found


def output_of(result: Any, numel: int) -> Tensor:
    """The output in what a subject returned: a tensor, or the first in it of the right size.

    Raises:
        SubjectError: if there is none.
    """
    if isinstance(result, Mapping):
        result = list(result.values())
    parts = result if isinstance(result, (tuple, list)) else [result]
    found = [x for x in parts if isinstance(x, Tensor)]
    if not found:
        name = "None" if result is None else f"a {type(result).__name__}"
        raise SubjectError(f"it returned {name}, and no tensor in it")
    return next((x for x in found if x.numel() == numel), found[0])


def called(target: Callable[..., Any], *given: Any, **options: Any) -> Any:
    """The result of a call of `target`; any error becomes a `SubjectError` in one sentence.

    Raises:
        SubjectError: if it raises, or exits.
    """
    try:
        return target(*given, **options)
    except SubjectError:
        raise
    except SystemExit as error:
        raise SubjectError(f"it ended the program with exit code {error.code}") from error
    except Exception as error:
        raise SubjectError(f"it raised {said(error, line_of(error))}") from error
