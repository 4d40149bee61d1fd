"""A function of (q, k, v) behind the canonical call."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from regard.verify.subject.conventions import Conventions
from regard.verify.subject.mask_forms import NO_MASK, MaskForm, parameters_of
from regard.verify.subject.subject import SubjectError, called, output_of

OPTIONS: dict[str, tuple[str, ...]] = {
    "causal": ("is_causal", "causal"),
    "window": ("window", "window_size", "sliding_window"),
    "scale": ("scale", "scaling", "softmax_scale", "sm_scale"),
    "softcap": ("softcap", "soft_cap", "logit_cap"),
    "bias": ("bias", "score_bias", "attn_bias", "position_bias"),
    "dropout": ("dropout_p", "dropout", "p_dropout", "attn_dropout"),
    "training": ("training", "train"),
    "gqa": ("enable_gqa",),
    "weights": ("need_weights", "return_weights", "output_attentions", "return_attention"),
}


def options_of(target: Any, own: Conventions) -> dict[str, str]:
    """What a call may ask for, and the name of the argument that asks."""
    names = parameters_of(target)
    found = {
        option: next(name for name in spellings if name in names)
        for option, spellings in OPTIONS.items()
        if any(name in names for name in spellings)
    }
    if own.window_argument:
        found["window"] = own.window_argument
    return found


@dataclass
class FunctionCall:
    """Turns the canonical call into the function's own, and its answer back."""

    target: Callable[..., Any]
    own: Conventions
    form: MaskForm = NO_MASK
    layout: str = "BHLD"
    returns: str = "BHLD"
    names: dict[str, str] = field(default_factory=dict)
    dropout_is_a_module: bool = False

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
        """`raw` is a mask already in the function's own form."""
        given = self._options(q, k, asked)
        if keep is not None:
            raw = self.form.encode(keep, (q.shape[0], q.shape[1]), q.dtype)
        if raw is not None:
            given[self.form.argument] = raw
        elif self._mask_is_required():
            everything = torch.ones(1, 1, q.shape[2], k.shape[2], dtype=torch.bool)
            given[self.form.argument] = self.form.encode(
                everything, (q.shape[0], q.shape[1]), q.dtype
            )
        heads = [laid_out(x, self.layout) for x in (q, k, v)]
        shape = (q.shape[0], q.shape[1], q.shape[2], v.shape[3])
        result = called(self.target, *heads, **given)
        return brought_back(output_of(result, torch.Size(shape).numel()), self.returned, shape)

    @property
    def returned(self) -> str:
        """The layout of the answer: that of the question, unless told otherwise."""
        return self.returns if self.layout in ("BHLD", "BLHD") else self.layout

    def _options(self, q: Tensor, k: Tensor, asked: dict[str, Any]) -> dict[str, Any]:
        given = dict(self.own.options)
        if "gqa" in self.names and k.shape[1] != q.shape[1]:
            given[self.names["gqa"]] = True
        for option, value in asked.items():
            if value is None or value is False or (option == "dropout" and value == 0.0):
                continue
            if option not in self.names:
                raise SubjectError(f"it has no argument for {option}")
            if option == "dropout" and self.dropout_is_a_module:
                value = nn.Dropout(value)
            given[self.names[option]] = value
        return given

    def _mask_is_required(self) -> bool:
        parameter = parameters_of(self.target).get(self.form.argument)
        return parameter is not None and parameter.default is inspect.Parameter.empty


def laid_out(x: Tensor, layout: str) -> Tensor:
    """[B, H, L, D] as the function wants it."""
    if layout == "BLHD":
        return x.transpose(1, 2)
    if layout == "BLD":
        return x[:, 0]
    return x[0, 0] if layout == "LD" else x


def brought_back(out: Tensor, layout: str, shape: tuple[int, ...]) -> Tensor:
    """What the function gave, as [B, H, L, Dv].

    Raises:
        SubjectError: if it has another shape.
    """
    batch, heads, length, dim = shape
    wanted = {
        "BHLD": shape,
        "BLHD": (batch, length, heads, dim),
        "BLE": (batch, length, heads * dim),
        "BLD": (batch, length, dim),
        "LD": (length, dim),
    }[layout]
    if tuple(out.shape) != wanted:
        raise SubjectError(f"it gave back shape {list(out.shape)} where {list(wanted)} was due")
    if layout == "BLE":
        out = out.unflatten(-1, (heads, dim))
    if layout in ("BLHD", "BLE"):
        return out.transpose(1, 2)
    return out.reshape(shape)
