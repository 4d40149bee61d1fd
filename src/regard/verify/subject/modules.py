"""A module from x to output behind two canonical calls: on x, and on queries, keys and values.

For the second, hooks replace the outputs of its projections while it runs, and read the input of
its output projection. So any module of linear projections can be called as a function of (q, k, v).
"""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from regard.verify.subject.adapters import Adapter
from regard.verify.subject.conventions import Conventions
from regard.verify.subject.mask_forms import (
    NO_MASK,
    MaskForm,
    is_required,
    mask_arguments,
    parameters_of,
)
from regard.verify.subject.subject import SubjectError, called, output_of

SIZES = {
    "width": ("hidden_size", "embed_dim", "d_model", "n_embd", "dim", "d_in", "emb_dim", "d_out"),
    "heads": ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead", "h"),
    "kv_heads": ("num_kv_heads", "num_key_value_heads", "n_kv_heads", "n_kv_head", "kv_heads",
                 "num_kv_groups", "n_kv_groups"),
    "head_dim": ("head_dim", "d_k", "attention_head_size", "d_head", "head_size", "dim_head"),
}  # fmt: skip
_QUERY = re.compile(r"(^|[._])(w?_?q|q_?proj|w_?quer(y|ies)|quer(y|ies)(_proj)?|to_q)$", re.I)
_KEY = re.compile(r"(^|[._])(w?_?k|k_?proj|w_?keys?|keys?(_proj)?|to_k)$", re.I)
_VALUE = re.compile(r"(^|[._])(w?_?v|v_?proj|w_?values?|values?(_proj)?|to_v)$", re.I)


def size_of(module: nn.Module, what: str) -> int | None:
    """A size of the module, by one of its usual names on the module or its configuration."""
    inner = module.inner if isinstance(module, Adapter) else module
    for holder in (inner, getattr(inner, "config", None)):
        for name in SIZES[what]:
            value = getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


@dataclass
class ModuleCall:
    """The module's own call, on x, or on the same x as queries, keys and values.

    Attributes:
        inputs: how many tensors its forward takes first: 1, or 3.
        context: the argument for another sequence, or "".
        names: the names of its arguments for options.
    """

    module: Any
    own: Conventions
    form: MaskForm = NO_MASK
    layout: str = "BLE"
    inputs: int = 1
    context: str = ""
    heads: int = 1
    names: dict[str, str] = field(default_factory=dict)

    def __call__(self, x: Tensor, **options: Any) -> Tensor:
        return self.out(self.result(x, **options), x)

    def result(
        self,
        x: Tensor,
        *,
        keep: Tensor | None = None,
        raw: Tensor | None = None,
        context: Tensor | None = None,
        before: int = 0,
        others: tuple[Tensor, ...] = (),
        **options: Any,
    ) -> Any:
        """All that the module returns; `before` is the number of cached tokens."""
        given = dict(self.own.options)
        given |= {self.names.get(name, name): value for name, value in options.items()}
        if keep is None and raw is None and self.requires_a_mask():
            keep = torch.ones(1, 1, x.shape[1], before + x.shape[1], dtype=torch.bool)
        if keep is not None:
            raw = self.form.encode(keep, (x.shape[0], self.heads), x.dtype)
        if raw is not None:
            given[self.form.argument] = raw
        if context is None and is_required(forward_of(self.module), self.context):
            context = x  # it must be given another sequence: here, its own
        if context is not None:
            given[self.context] = self.laid_out(context)
        inputs = (x, *others) if others else (x,) * self.inputs
        return called(self.module, *(self.laid_out(each) for each in inputs), **given)

    def out(self, result: Any, x: Tensor) -> Tensor:
        """The output [B, L, E] in what the module returned."""
        out = output_of(result, x.numel())
        batch, length = x.shape[:2]
        wanted = (length, batch) if self.layout == "LBE" else (batch, length)
        if out.ndim != 3 or tuple(out.shape[:2]) != wanted:
            raise SubjectError(f"from {list(x.shape)} it returned shape {list(out.shape)}")
        return self.laid_out(out)

    def laid_out(self, x: Tensor) -> Tensor:
        """x [B, L, E] in the module's layout, and back."""
        return x.transpose(0, 1) if self.layout == "LBE" else x

    def requires_a_mask(self) -> bool:
        """Whether its mask argument has no default."""
        return is_required(forward_of(self.module), self.form.argument)


def forward_of(module: Any) -> Any:
    """The function whose arguments are those of a call."""
    return getattr(module, "forward", module)


CONTEXTS = ("context", "encoder_hidden_states", "encoder_out", "memory", "key_value_states")


def inputs_of(module: Any) -> tuple[int, str]:
    """How many tensors its forward takes first: x, or q, k and v; and its context argument."""
    names = [
        name
        for name, each in parameters_of(forward_of(module)).items()
        if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    first = [name.lower()[:1] for name in names[:3]]
    three = first in (["q", "k", "v"], ["q", "v", "k"])
    return 3 if three else 1, next((n for n in names if n in CONTEXTS), "")


@dataclass
class Projections:
    """The submodules that make queries, keys and values, and the output projection."""

    query: nn.Module | None = None
    key: nn.Module | None = None
    value: nn.Module | None = None
    fused: nn.Module | None = None
    output: nn.Module | None = None
    norms: list[nn.Module] = field(default_factory=list)
    gates: list[nn.Module] = field(default_factory=list)


def find_projections(call: ModuleCall, x: Tensor) -> Projections | None:
    """Run the module once: linear submodules that take x, and the one that returns the output."""
    module, readers, last = call.module, [], None
    runs: list[tuple[str, nn.Module, Tensor, Tensor]] = []

    def record(name: str, each: nn.Module, given: Any, returned: Any) -> None:
        if given and isinstance(given[0], Tensor) and isinstance(returned, Tensor):
            runs.append((name, each, given[0].detach().clone(), returned.detach().clone()))

    with ExitStack() as stack, torch.no_grad():
        for name, each in module.named_modules():
            if _is_linear(each):
                stack.enter_context(hooked(each, partial(record, name)))
        out = call.laid_out(call(x))
    for name, each, given, returned in runs:
        if given.shape == call.laid_out(x).shape and torch.equal(given, call.laid_out(x)):
            readers.append((name, each))
        elif returned.numel() == out.numel() and torch.equal(returned.flatten(), out.flatten()):
            last = each
    found = _sorted_out([(name, m) for name, m in readers if "gate" not in name.lower()])
    if found is None:
        return None
    found.output = last
    found.gates = [m for name, m in readers if "gate" in name.lower()]
    found.norms = [m for n, m in module.named_modules() if "norm" in n.lower() and n]
    return found


def _is_linear(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.ndim == 2 and not list(module.children())


@contextmanager
def hooked(module: nn.Module, hook: Callable[[nn.Module, Any, Any], Any]) -> Iterator[None]:
    """A forward hook, removed afterwards; what it returns replaces the module's output."""
    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _sorted_out(readers: list[tuple[str, nn.Module]]) -> Projections | None:
    named = {
        what: [m for name, m in readers if rule.search(name)]
        for what, rule in (("query", _QUERY), ("key", _KEY), ("value", _VALUE))
    }
    if all(len(each) == 1 for each in named.values()):
        return Projections(named["query"][0], named["key"][0], named["value"][0])
    if len(readers) == 3:
        query, key, value = (each for _, each in readers)
        return Projections(query, key, value)
    if len(readers) == 1:
        return Projections(fused=readers[0][1])
    return None


@dataclass
class HookedHeads:
    """The module as a function of heads: hooks replace the outputs of its projections."""

    call: ModuleCall
    at: Projections
    kv_heads: int
    by_head: bool = False

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        batch, heads, length = q.shape[:3]
        if k.shape[2] != length:
            raise SubjectError("it has as many keys as queries")
        x = torch.zeros(batch, length, self.call.own.width or 1, dtype=q.dtype)
        merged: list[Tensor] = []
        with ExitStack() as stack:
            for module, rows in self._projected(q, k, v):
                stack.enter_context(hooked(module, partial(_replace, rows)))
            for gate in self.at.gates:
                stack.enter_context(hooked(gate, _open))
            for norm in self.at.norms:
                stack.enter_context(hooked(norm, lambda norm, given, out: given[0]))
            if self.at.output is not None:
                stack.enter_context(
                    hooked(self.at.output, lambda last, given, out: merged.append(given[0]))
                )
            out = self.call(x, **options)
        out = self.call.laid_out(merged[-1]) if merged else out
        if out.numel() != batch * heads * length * v.shape[3]:
            raise SubjectError(f"its merged heads have shape {list(out.shape)}")
        return out.reshape(batch, length, heads, v.shape[3]).transpose(1, 2)

    def _projected(self, q: Tensor, k: Tensor, v: Tensor) -> list[tuple[nn.Module, Tensor]]:
        """Each projection, and the output that it is to return."""
        rows = [x.transpose(1, 2) for x in (q, k, v)]  # [B, L, H, D]
        if self.call.layout == "LBE":
            rows = [x.transpose(0, 1) for x in rows]
        if self.at.fused is not None:
            if self.by_head:
                return [(self.at.fused, torch.cat(rows, -1).flatten(-2))]
            return [(self.at.fused, torch.cat([x.flatten(-2) for x in rows], -1))]
        modules = (self.at.query, self.at.key, self.at.value)
        return [(m, x.flatten(-2)) for m, x in zip(modules, rows, strict=True) if m is not None]


def _replace(rows: Tensor, module: nn.Module, given: Any, out: Tensor) -> Tensor:
    return rows.reshape(out.shape)


def _open(gate: nn.Module, given: Any, out: Tensor) -> Tensor:
    """A gate that changes nothing: the sigmoid of 1e4 is 1."""
    return torch.full_like(out, 1e4)


@dataclass
class IdentityHeads:
    """A module of (q, k, v) whose square matrices are identities: it computes attention alone."""

    call: ModuleCall

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        heads, dim = q.shape[1], q.shape[3]
        merged = [x.transpose(1, 2).flatten(-2) for x in (q, k, v)]
        result = self.call.result(merged[0], others=tuple(merged[1:]), **options)
        out = self.call.out(result, merged[0])
        return out.unflatten(-1, (heads, dim)).transpose(1, 2)


def made_identity(module: nn.Module, width: int) -> bool:
    """Make every matrix of `width` columns identities, every bias 0; whether that is possible."""
    done = False
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 1:
                parameter.zero_()
            elif parameter.ndim == 2 and parameter.shape[1] == width:
                times, rest = divmod(parameter.shape[0], width)
                if rest:
                    return False
                parameter.copy_(torch.eye(width, dtype=parameter.dtype).repeat(times, 1))
                done = True
    return done


def masks_of(module: Any) -> list[str]:
    """Arguments of its forward that may be a mask."""
    return mask_arguments(forward_of(module))
