"""A module from x to output behind two canonical calls: on x, and on queries, keys and values.

For the second, hooks replace the outputs of its projections while it runs, and read the input of
its output projection. So any module of linear projections can be called as a function of (q, k, v).
"""

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard_verify.subject.adapters import inner_of
from regard_verify.subject.conventions import Conventions
from regard_verify.subject.guesses import role_of
from regard_verify.subject.mask_forms import NO_MASK, MaskForm, mask_arguments
from regard_verify.subject.signatures import parameters_of, required_of
from regard_verify.subject.subject import SubjectError, called, output_of

_DROPOUTS = (nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.Dropout1d, nn.Dropout2d)


def set_dropout(module: nn.Module, p: float) -> bool:
    """Set each probability in a module, and in its configuration; whether there is one."""
    found = list(_probabilities(module))
    for holder, name in found:
        if isinstance(holder, dict):
            holder[name] = p
        else:
            object.__setattr__(holder, name, p)  # also where it is frozen
    return bool(found)


def declares_dropout(module: nn.Module) -> bool:
    """Whether it has a submodule of dropout, or a probability above 0."""
    held = ((vars(holder), name) for holder, name in _probabilities(module))
    return any(isinstance(each, _DROPOUTS) for each in module.modules()) or any(
        values.get(name, 0.0) > 0 for values, name in held
    )


def _probabilities(module: nn.Module) -> Iterator[tuple[Any, str]]:
    """Each object or dictionary that holds a probability of dropout, and its name there."""
    for each in module.modules():
        if isinstance(each, _DROPOUTS):
            yield each, "p"
            continue
        for holder in (each, *vars(each).values()):
            settings = holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})
            if holder is not each and isinstance(holder, (nn.Module, Tensor, type)):
                continue
            for name, value in list(settings.items()):
                number = isinstance(value, (int, float)) and not isinstance(value, bool)
                named = isinstance(name, str) and role_of(name) == "dropout"
                if number and 0 <= value <= 1 and named and not _SHARES & set(name.split("_")):
                    yield holder, name


_SHARES = {"keep", "path"}  # words of other probabilities: of what is kept, of whole layers


SIZES = {
    "width": ("hidden_size", "embed_dim", "d_model", "n_embd", "dim", "d_in", "emb_dim", "d_out"),
    "heads": ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead", "h"),
    "kv_heads": ("num_kv_heads", "num_key_value_heads", "n_kv_heads", "n_kv_head", "kv_heads",
                 "num_kv_groups", "n_kv_groups"),
    "head_dim": ("head_dim", "d_k", "attention_head_size", "d_head", "head_size", "dim_head"),
}  # fmt: skip


MOST_WIDTHS = 6  # that are tried where nothing names the width


def size_of(module: nn.Module, what: str) -> int | None:
    """A size of the module, by one of its usual names on the module or its configuration."""
    inner = inner_of(module)
    for holder in (inner, getattr(inner, "config", None)):
        for name in SIZES[what]:
            value = getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def widths_of(module: nn.Module, declared: int | None) -> list[int]:
    """Widths that its input may have: the declared one alone, or those of names and weights."""
    if declared is not None:
        return [declared]
    named = size_of(module, "width")
    sizes = [size for each in module.parameters() if each.ndim >= 2 for size in each.shape[:0:-1]]
    first = [each.shape[0] for each in module.parameters() if each.ndim >= 2]
    return list(dict.fromkeys([*([named] if named else []), *sizes, *first]))[:MOST_WIDTHS]


def softcap_of(module: nn.Module) -> float | None:
    """The bound of the scores, by an attribute that is called so."""
    for name, value in vars(inner_of(module)).items():
        if re.search("soft_?cap|logits?_cap", name) and type(value) in (int, float):
            return float(value) if 0 < value < float("inf") else None
    return None


@dataclass
class ModuleCall:
    """The module's own call, on x, or on the same x as queries, keys and values.

    Attributes:
        order: what its forward takes first: "x", or queries, keys and values in this order.
        context: the argument for another sequence, or "".
        alone: whether x is enough where that argument has a default; otherwise x is given for it.
        names: the names of its arguments for options.
    """

    module: Any
    own: Conventions
    form: MaskForm = NO_MASK
    layout: str = "BLE"
    order: str = "x"
    context: str = ""
    alone: bool = True
    heads: int = 1
    names: dict[str, str] = field(default_factory=dict)

    @property
    def inputs(self) -> int:
        """How many sequences its forward takes first: 1, or 3."""
        return 1 if self.order == "x" else 3

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
            raw = self.form.encode(keep, (x.shape[0], max(self.heads, keep.shape[1])), x.dtype)
        needed = self.context and (not self.alone or self.context in required_of(self.module))
        if context is None and needed:  # it must be given another sequence: here, its own
            context = x
        if context is not None and self.inputs == 3:
            others, context = (context, context), None
        if raw is not None:
            own = context is None or not self.names.get("context mask")
            given[self.form.argument if own else self.names["context mask"]] = raw
        if context is not None:
            given[self.context] = self.laid_out(context)
        by_letter = dict(zip("qkv", (x, *others) if others else (x, x, x), strict=True))
        inputs = [by_letter[letter] for letter in self.order] if self.inputs == 3 else [x]
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
        return self.form.argument in required_of(self.module)


CONTEXT_WORDS = ("context", "encoder", "memory", "cross", "source", "key_value", "condition")
CONTEXT_NAMES = {"y", "z", "kv", "ctx", "enc", "src", "other", "mem", "cond", "x_kv", "kv_input"}
NO_CONTEXT = ("mask", "cache", "past", "pos", "freq", "cos", "sin", "bias", "causal", "len", "rope")


class Inputs(NamedTuple):
    """The sequences that a forward takes first: x, or queries, keys and values in some order.

    `order` is "x" or an order of "qkv"; `context` is the argument for another sequence, or "".
    """

    order: str
    context: str


def inputs_of(module: Any) -> Inputs:
    """How its forward takes its sequences, by the names of its arguments.

    Examples:
        >>> class Tutorial(nn.Module):
        ...     def forward(self, values, keys, query, mask=None): ...
        >>> inputs_of(Tutorial())
        Inputs(order='vkq', context='')
    """
    arguments = {
        name: each
        for name, each in parameters_of(module).items()
        if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    }
    names = list(arguments)
    order = "".join(_letter(name) for name in names[:3])
    if sorted(order) == ["k", "q", "v"]:
        return Inputs(order, "")
    return Inputs("x", next((n for n in names[1:] if _is_context(n, arguments[n])), ""))


def _letter(name: str) -> str:
    """The letter of "qkv" that a name begins or ends with; `x_q` is as good as `query`."""
    words = name.lower().split("_")
    return next((word[0] for word in words if word[:1] in ("q", "k", "v")), "-")


def _is_context(name: str, argument: inspect.Parameter) -> bool:
    """Whether an argument is another sequence: by its name, or because it must be given."""
    if any(word in name.lower() for word in NO_CONTEXT):
        return False
    named = _names_context(name.lower())
    plain = argument.annotation in (argument.empty, Tensor, "Tensor", "torch.Tensor")
    return named or (argument.default is argument.empty and plain)


def masks_of(module: Any) -> list[str]:
    """Arguments of its forward that may be a mask of its own tokens, if it has such."""
    names = mask_arguments(module)
    own = [name for name in names if not _of_context(name)]
    return own or names


def context_mask_of(module: Any) -> str:
    """The argument that masks another sequence, beside a mask of its own tokens; or ""."""
    names = mask_arguments(module)
    other = [name for name in names if _of_context(name)]
    return other[0] if other and len(other) < len(names) else ""


def _of_context(mask: str) -> bool:
    """Whether a mask is of another sequence, by its name.

    Examples:
        >>> [name for name in ("mask", "context_mask", "kv_mask", "encoder_attn_mask")
        ...  if not _of_context(name)]
        ['mask']
    """
    return _names_context(re.sub(r"_?(attn|attention)?_?(padding_)?mask$", "", mask.lower()))


def _names_context(name: str) -> bool:
    return name in CONTEXT_NAMES or any(word in name for word in CONTEXT_WORDS)
