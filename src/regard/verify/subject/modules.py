"""A module from x to output behind two canonical calls: as it is, and on heads of our choosing.

What its projections give is replaced while it runs, and what reaches its output projection is read:
so any module of linear projections becomes a function of (q, k, v), its own weights aside.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from regard.verify.subject.conventions import Conventions
from regard.verify.subject.mask_forms import NO_MASK, MaskForm, mask_arguments, parameters_of
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
    """A size that the module, or its configuration, holds under one of its usual names."""
    for holder in (module, getattr(module, "config", None)):
        for name in SIZES[what]:
            value = getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


@dataclass
class ModuleCall:
    """The module's own call: x, or the same x for queries, keys and values."""

    module: Any
    own: Conventions
    form: MaskForm = NO_MASK
    layout: str = "BLE"
    inputs: int = 1
    context: str = ""
    heads: int = 1

    def __call__(
        self,
        x: Tensor,
        *,
        keep: Tensor | None = None,
        raw: Tensor | None = None,
        context: Tensor | None = None,
        **asked: Any,
    ) -> Tensor:
        result = self.raw(x, keep=keep, raw=raw, context=context, **asked)
        return self.out(result, x)

    def raw(
        self,
        x: Tensor,
        *,
        keep: Tensor | None = None,
        raw: Tensor | None = None,
        context: Tensor | None = None,
        before: int = 0,
        others: tuple[Tensor, ...] = (),
        **asked: Any,
    ) -> Any:
        """What the module gives back, whatever it is."""
        given = {**self.own.options, **asked}
        if keep is not None:
            raw = self.form.encode(keep, (x.shape[0], self.heads), x.dtype)
        elif raw is None and self._mask_is_required():
            raw = self._nothing_hidden(x, before)
        if raw is not None:
            given[self.form.argument] = raw
        if context is None and self._is_required(self.context):
            context = x  # it reads another sequence: here, its own
        if context is not None:
            given[self.context] = self._laid_out(context)
        inputs = (x, *others) if others else (x,) * self.inputs
        return called(self.module, *(self._laid_out(each) for each in inputs), **given)

    def out(self, result: Any, x: Tensor) -> Tensor:
        """The output [B, L, E] in what the module gave back."""
        out = output_of(result, x.numel())
        batch, length = x.shape[:2]
        wanted = (length, batch) if self.layout == "LBE" else (batch, length)
        if out.ndim != 3 or tuple(out.shape[:2]) != wanted:
            raise SubjectError(f"from {list(x.shape)} it gave back shape {list(out.shape)}")
        return out.transpose(0, 1) if self.layout == "LBE" else out

    def _laid_out(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1) if self.layout == "LBE" else x

    def _nothing_hidden(self, x: Tensor, before: int) -> Tensor:
        shape = (1, 1, x.shape[1], before + x.shape[1])
        return self.form.encode(torch.ones(shape).bool(), (x.shape[0], self.heads), x.dtype)

    def _mask_is_required(self) -> bool:
        return self._is_required(self.form.argument)

    def _is_required(self, name: str) -> bool:
        parameter = parameters_of(_forward(self.module)).get(name)
        return parameter is not None and parameter.default is inspect.Parameter.empty


def _forward(module: Any) -> Any:
    return getattr(module, "forward", module)


def inputs_of(module: Any) -> tuple[int, str]:
    """How many tensors its forward takes first (x, or queries, keys, values), and the name of an
    argument for another sequence to read."""
    names = [
        name
        for name, each in parameters_of(_forward(module)).items()
        if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    context = next((n for n in names if n in CONTEXTS), "")
    first = [name.lower()[:1] for name in names[:3]]
    three = first in (["q", "k", "v"], ["q", "v", "k"])
    return 3 if three else 1, context


CONTEXTS = ("context", "encoder_hidden_states", "encoder_out", "memory", "key_value_states")


@dataclass
class Projections:
    """Where a module's queries, keys and values come from, and where its heads go."""

    query: nn.Module | None = None
    key: nn.Module | None = None
    value: nn.Module | None = None
    fused: nn.Module | None = None
    output: nn.Module | None = None
    norms: list[nn.Module] = field(default_factory=list)
    gates: list[nn.Module] = field(default_factory=list)


def find_projections(call: ModuleCall, x: Tensor) -> Projections | None:
    """Run it once and see which linear modules read x, and which one gives the output."""
    module, readers, last = call.module, [], None
    seen: list[tuple[str, nn.Module, Tensor, Tensor]] = []
    with ExitStack() as stack, torch.no_grad():
        for name, each in module.named_modules():
            if _is_linear(each):
                stack.enter_context(_recording(each, name, seen))
        out = call(x)
    for name, each, given, gave in seen:
        if given.shape == call._laid_out(x).shape and torch.equal(given, call._laid_out(x)):
            readers.append((name, each))
        elif gave.numel() == out.numel() and torch.equal(gave.flatten(), _flat(out, call)):
            last = each
    found = _sorted_out([(name, m) for name, m in readers if "gate" not in name.lower()])
    if found is None:
        return None
    found.output = last
    found.gates = [m for name, m in readers if "gate" in name.lower()]
    found.norms = [m for n, m in module.named_modules() if "norm" in n.lower() and n]
    return found


def _flat(out: Tensor, call: ModuleCall) -> Tensor:
    return call._laid_out(out).flatten()


def _is_linear(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.ndim == 2 and not list(module.children())


@contextmanager
def _recording(module: nn.Module, name: str, seen: list[Any]) -> Iterator[None]:
    def hook(each: nn.Module, given: Any, gave: Any) -> None:
        if given and isinstance(given[0], Tensor) and isinstance(gave, Tensor):
            seen.append((name, each, given[0].detach().clone(), gave.detach().clone()))

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
    """The module as a function of heads: what its projections would say is put in their mouths."""

    call: ModuleCall
    at: Projections
    kv_heads: int
    by_head: bool = False

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        keep: Tensor | None = None,
        raw: Tensor | None = None,
        **asked: Any,
    ) -> Tensor:
        batch, heads, length = q.shape[:3]
        if k.shape[2] != length:
            raise SubjectError("it has as many keys as queries")
        x = torch.zeros(batch, length, self.call.own.width or 1, dtype=q.dtype)
        held: list[Tensor] = []
        with ExitStack() as stack:
            for module, said in self._sayings(q, k, v):
                stack.enter_context(_answering(module, partial(_say, said)))
            for gate in self.at.gates:
                stack.enter_context(_answering(gate, _open))
            for norm in self.at.norms:
                stack.enter_context(_answering(norm, _pass_on))
            if self.at.output is not None:
                stack.enter_context(_hearing(self.at.output, held))
            out = self.call(x, keep=keep, raw=raw, **asked)
        merged = held[-1] if held else out
        if self.call.layout == "LBE" and held:
            merged = merged.transpose(0, 1)
        if merged.numel() != batch * heads * length * v.shape[3]:
            raise SubjectError(f"its heads side by side have shape {list(merged.shape)}")
        return merged.reshape(batch, length, heads, v.shape[3]).transpose(1, 2)

    def _sayings(self, q: Tensor, k: Tensor, v: Tensor) -> list[tuple[nn.Module, Tensor]]:
        rows = [x.transpose(1, 2) for x in (q, k, v)]  # [B, L, H, D]
        if self.call.layout == "LBE":
            rows = [x.transpose(0, 1) for x in rows]
        if self.at.fused is not None:
            if self.by_head:
                return [(self.at.fused, torch.cat(rows, -1).flatten(-2))]
            return [(self.at.fused, torch.cat([x.flatten(-2) for x in rows], -1))]
        modules = (self.at.query, self.at.key, self.at.value)
        return [(m, x.flatten(-2)) for m, x in zip(modules, rows, strict=True) if m is not None]


@contextmanager
def _answering(module: nn.Module, answer: Callable[[Tensor, Tensor], Tensor]) -> Iterator[None]:
    """The module answers otherwise, by what it was given and gave."""
    handle = module.register_forward_hook(lambda m, given, gave: answer(given[0], gave))
    try:
        yield
    finally:
        handle.remove()


def _say(said: Tensor, given: Tensor, gave: Tensor) -> Tensor:
    return said.reshape(gave.shape)


def _open(given: Tensor, gave: Tensor) -> Tensor:
    """A gate lets everything through: the sigmoid of so much is 1."""
    return torch.full_like(gave, 1e4)


def _pass_on(given: Tensor, gave: Tensor) -> Tensor:
    """A norm of queries or keys lets through what it is given."""
    return given


@contextmanager
def _hearing(module: nn.Module, held: list[Tensor]) -> Iterator[None]:
    handle = module.register_forward_pre_hook(lambda m, given: held.append(given[0]))
    try:
        yield
    finally:
        handle.remove()


@dataclass
class IdentityHeads:
    """A module of (q, k, v) whose square matrices are identities: what is left is attention."""

    call: ModuleCall

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        keep: Tensor | None = None,
        raw: Tensor | None = None,
        **asked: Any,
    ) -> Tensor:
        heads, dim = q.shape[1], q.shape[3]
        merged = [x.transpose(1, 2).flatten(-2) for x in (q, k, v)]
        result = self.call.raw(merged[0], keep=keep, raw=raw, others=tuple(merged[1:]), **asked)
        out = self.call.out(result, merged[0])
        return out.unflatten(-1, (heads, dim)).transpose(1, 2)


def made_identity(module: nn.Module, width: int) -> bool:
    """Make every [width, width] matrix an identity and every bias zero; whether that was all."""
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
    return mask_arguments(_forward(module))
