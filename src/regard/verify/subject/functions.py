"""A function of (q, k, v) behind the canonical call: layouts, masks, names of options."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from regard.verify.subject.conventions import Conventions
from regard.verify.subject.mask_forms import NO_MASK, MaskForm, is_required, parameters_of
from regard.verify.subject.subject import SubjectError, called, output_of

OPTIONS: dict[str, tuple[str, ...]] = {  # options by ability, and the usual names of the argument
    "causal": ("is_causal", "causal"),
    "window": ("window", "window_size", "sliding_window"),
    "scale": ("scale", "scaling", "softmax_scale", "sm_scale"),
    "softcap": ("softcap", "soft_cap", "logit_cap"),
    "bias": ("bias", "score_bias", "attn_bias", "position_bias"),
    "dropout": ("dropout_p", "dropout", "p_dropout", "attn_dropout"),
    "gqa": ("enable_gqa",),
    "weights": ("need_weights", "return_weights", "output_attentions", "return_attention"),
}


def options_of(target: Any, own: Conventions) -> dict[str, str]:
    """The options that a function takes, each with the name of its argument."""
    names = parameters_of(target)
    found = {
        option: next(name for name in usual if name in names)
        for option, usual in OPTIONS.items()
        if any(name in names for name in usual)
    }
    if own.window_argument:
        found["window"] = own.window_argument
    return found


@dataclass
class FunctionCall:
    """The canonical call, translated into the arguments of the function, and its output back."""

    target: Callable[..., Any]
    own: Conventions
    form: MaskForm = NO_MASK
    layout: str = "BHLD"
    returns: str = "BHLD"
    names: dict[str, str] = field(default_factory=dict)
    dropout_is_a_module: bool = False

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        shape = (*q.shape[:3], v.shape[3])
        result = self.result(q, k, v, **options)
        returned = self.returns if self.layout in ("BHLD", "BLHD") else self.layout
        return canonical(output_of(result, torch.Size(shape).numel()), returned, shape)

    def result(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        keep: Tensor | None = None,
        raw: Tensor | None = None,
        **options: Any,
    ) -> Any:
        """All that the function returns; `raw` is a mask already in its own form."""
        given = self.arguments(q, k, options)
        if keep is None and raw is None and self.requires_a_mask():
            keep = torch.ones(1, 1, q.shape[2], k.shape[2], dtype=torch.bool)
        if keep is not None:
            raw = self.form.encode(keep, (q.shape[0], q.shape[1]), q.dtype)
        if raw is not None:
            given[self.form.argument] = raw
        return called(self.target, *(laid_out(x, self.layout) for x in (q, k, v)), **given)

    def arguments(self, q: Tensor, k: Tensor, options: dict[str, Any]) -> dict[str, Any]:
        """The function's own arguments for these options."""
        given = dict(self.own.options)
        if "gqa" in self.names and k.shape[1] != q.shape[1]:
            given[self.names["gqa"]] = True
        for option, value in options.items():
            if value is None or value is False or (option == "dropout" and value == 0.0):
                continue
            if option not in self.names:
                raise SubjectError(f"it has no argument for {option}")
            if option == "dropout" and self.dropout_is_a_module:
                value = nn.Dropout(value)
            given[self.names[option]] = value
        return given

    def requires_a_mask(self) -> bool:
        """Whether its mask argument has no default."""
        return is_required(self.target, self.form.argument)


def laid_out(x: Tensor, layout: str) -> Tensor:
    """x [B, H, L, D] in the function's layout."""
    if layout == "BLHD":
        return x.transpose(1, 2)
    if layout == "BLD":
        return x[:, 0]
    return x[0, 0] if layout == "LD" else x


def shape_in(layout: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape [B, H, L, D] in a layout."""
    batch, heads, length, dim = shape
    return {
        "BHLD": (batch, heads, length, dim),
        "BLHD": (batch, length, heads, dim),
        "BLE": (batch, length, heads * dim),
        "BLD": (batch, length, dim),
        "LD": (length, dim),
    }[layout]


def canonical(out: Tensor, layout: str, shape: tuple[int, ...]) -> Tensor:
    """An output of the function as [B, H, L, Dv].

    Raises:
        SubjectError: if it has another shape.
    """
    wanted = shape_in(layout, shape)
    if tuple(out.shape) != wanted:
        raise SubjectError(f"it returned shape {list(out.shape)} instead of {list(wanted)}")
    if layout in ("BLHD", "BLE"):
        return out.reshape(shape_in("BLHD", shape)).transpose(1, 2)
    return out.reshape(shape)
