"""Modules whose forward takes positions or rotary tables beside x, as modules from x alone.

The tables are those of RoPE for base 10,000, in the first usual layout that the module accepts.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard_verify.subject.adapters import Adapter, is_of
from regard_verify.subject.conventions import Conventions
from regard_verify.subject.guesses import role_of
from regard_verify.subject.mask_forms import mask_arguments
from regard_verify.subject.modules import widths_of
from regard_verify.subject.signatures import parameters_of, required_of
from regard_verify.subject.subject import SubjectError, called, output_of

PAIRS = ("position_embeddings", "position_embedding", "rotary_emb", "rotary_pos_emb", "rope",
         "rope_emb", "rotary_embeddings", "cos_sin", "rotary", "rope_cache")  # fmt: skip
COSINES, SINES = ("cos", "rope_cos", "rotary_cos", "cos_emb"), ("sin", "rope_sin", "rotary_sin",
                                                               "sin_emb")  # fmt: skip
COMPLEX = ("freqs_cis", "freqs_complex", "rotary_freqs", "freqs", "pos_cis", "freq_cis")
STARTS = ("start_pos", "past_length", "position_offset", "offset", "start_position", "cache_len")
IDS = ("position_ids", "positions", "input_pos", "cache_position", "pos_ids", "pos")
KNOWN = (*PAIRS, *COSINES, *SINES, *COMPLEX, *STARTS, *IDS)
SHAPES = ("BLD", "LD", "1LD", "11LD", "1L1D")  # axes of cosines and sines, in the order of trials
WIDTHS = (8, 4, 16, 32, 64, 128, 2)  # of a head, in the order of trials

Tables = Callable[[Tensor, torch.dtype], Any]  # from positions [B, L], the dtype of x, to tables


@dataclass(frozen=True)
class Angles:
    """Cosines and sines, or complex numbers, for positions [B, L].

    Attributes:
        dim: channels of a head that are rotated.
        shape: the axes of the tables; "complex" for complex numbers [L, D / 2], "stacked" for
            cosines and sines in one tensor [L, D / 2, 2].
        width: how often each angle stands in a row of D channels: 2 in halves, 1 for D / 2 columns.
    """

    dim: int
    shape: str = "BLD"
    width: int = 2
    theta: float = 10_000.0

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> Any:
        steps = torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim
        angles = positions[..., None].float() * self.theta**-steps  # [B, L, D / 2]
        if self.shape == "complex":
            return torch.polar(torch.ones_like(angles[0]), angles[0])
        if self.shape == "stacked":
            return torch.stack([angles[0].cos(), angles[0].sin()], -1)
        angles = torch.cat([angles] * self.width, -1)
        index: dict[str, Any] = {
            "LD": 0, "1LD": slice(1), "11LD": (slice(1), None),
            "1L1D": (slice(1), slice(None), None),
        }  # fmt: skip
        angles = angles[index[self.shape]] if self.shape in index else angles
        return angles.cos(), angles.sin()


class Positioned(Adapter):
    """A module as one from x alone: positions and tables follow from `past`, the earlier tokens."""

    def __init__(
        self, inner: Any, tables: Tables | None, names: Sequence[str], flat: bool = True
    ) -> None:
        super().__init__(inner)
        self.known, self.names = {}, names
        copied = any(name in PAIRS for name in parameters_of(inner.forward))
        if is_of("transformers", inner) and isinstance(getattr(inner, "scaling", None), float):
            self.known = {"scale": inner.scaling}
        # as transformers hides keys
        self.hidden = "min" if copied or is_of("transformers", inner) else "-inf"
        self.makes_tables, self.flat = tables, flat

    @property
    def signature_of_forward(self) -> dict[str, inspect.Parameter]:
        """The arguments of the module's forward that the caller gives."""
        left = {n: p for n, p in parameters_of(self.inner.forward).items() if n not in KNOWN}
        past = inspect.Parameter("past", inspect.Parameter.KEYWORD_ONLY, default=0, annotation=int)
        return {**left, "past": past}

    def forward(self, x: Tensor, *rest: Any, past: int = 0, **given: Any) -> Any:
        """The result of the module for x and its positions."""
        return self.inner(x, *rest, **given, **self.positions(x, past))

    def positions(self, x: Tensor, past: int) -> dict[str, Any]:
        """Its arguments for positions, by name."""
        batch, length = x.shape[:2]
        ids = torch.arange(past, past + length)[None].expand(batch, -1)
        tables = self.makes_tables(ids, x.dtype) if self.makes_tables else None
        if isinstance(tables, tuple):
            tables = tuple(each.to(x.dtype) for each in tables)
        given: dict[str, Any] = {}
        for name in self.names:
            if name in STARTS:
                given[name] = past
            elif name in IDS:
                given[name] = ids[0] if self.flat else ids
            elif tables is not None:
                at = 0 if name in COSINES else 1 if name in SINES else None
                given[name] = tables if at is None else tables[at]
        return given


def positioned(module: nn.Module, own: Conventions) -> nn.Module:
    """The module in its adapter, if its forward takes positions and cannot do without.

    Raises:
        SubjectError: if it takes tables, and none of the usual ones fit.
    """
    if isinstance(module, Adapter) or not hasattr(module, "forward"):
        return module
    names = [name for name in parameters_of(module.forward) if name in KNOWN]
    required = [name for name in names if name in required_of(module.forward)]
    if not required and (not names or not _failure(module, own)):
        return Positioned(module, None, ()) if is_of("transformers", module) else module
    failures: list[str] = []
    for given in dict.fromkeys((tuple(names), tuple(required or names))):  # all, or what it needs
        for tables in _ways(module, given, own):
            for flat in (True, False) if any(name in IDS for name in given) else (True,):
                tried = Positioned(module, tables, given, flat)
                failure = _failure(tried, own)
                if not failure:
                    return tried
                failures.append(failure)
    if not required:
        return module
    raise SubjectError(
        f"it needs {' and '.join(required)}, and none of the usual tables fit: {failures[-1]}; "
        "name a module or function that calls it with x alone"
    )


def moved(like: nn.Module, inner: nn.Module) -> nn.Module:
    """Another module of the same class, in an adapter like that of the first."""
    if not isinstance(like, Positioned):
        return inner
    return Positioned(inner, like.makes_tables, like.names, like.flat).train(inner.training)


def _ways(module: Any, names: Sequence[str], own: Conventions) -> Iterator[Tables | None]:
    """Makers of tables, the likeliest first."""
    if all(name in (*STARTS, *IDS) for name in names):
        yield None
        return
    held = [own.head_dim] if own.head_dim else []
    for holder in (module, getattr(module, "config", None)):
        for name, value in getattr(holder, "__dict__", {}).items():
            if role_of(name) == "head width" and type(value) is int:
                held.append(value)
    dims = dict.fromkeys([*held, *WIDTHS])  # of a head: those that it names come first
    if any(name in COMPLEX for name in names):
        yield from (Angles(dim, shape) for dim in dims for shape in ("complex", "stacked"))
    for dim in dims:
        for width in (2, 1):
            yield from (Angles(dim, shape, width) for shape in SHAPES)


def _failure(module: Any, own: Conventions) -> str:
    """Why calls on x of two sizes fail, in the likeliest width; "" if they do not."""
    names = required_of(module)
    masks = [name for name in mask_arguments(module) if name in names]
    given, failures = {**dict.fromkeys(masks), **own.options}, []
    for width in widths_of(module, own.width) or [32]:
        try:
            for batch, length in ((3, 7), (2, 3)):
                x = torch.randn(batch, length, width)
                with torch.no_grad():
                    out = output_of(called(module, x, **given), x.numel())
                if tuple(out.shape[:2]) != (batch, length):
                    raise SubjectError(f"from {list(x.shape)} it returned shape {list(out.shape)}")
            return ""
        except SubjectError as error:
            failures.append(str(error))
    return failures[0]
