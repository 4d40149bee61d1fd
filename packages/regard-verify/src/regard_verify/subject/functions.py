"""Calling a function of (q, k, v) in its own layout, with its own masks, options and pages."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from regard_verify.subject.conventions import Conventions
from regard_verify.subject.guesses import role_of
from regard_verify.subject.mask_forms import NO_MASK, MaskForm
from regard_verify.subject.signatures import EMPTY, order_of, parameters_of, required_of
from regard_verify.subject.subject import SubjectError, called, output_of

OPTIONS: dict[str, tuple[str, ...]] = {  # options by ability, and the usual names of the argument
    "causal": ("is_causal", "causal", "use_causal", "use_causal_mask", "apply_causal_mask",
               "causal_mask", "autoregressive", "mask", "masked"),
    "window": ("window", "window_size", "sliding_window", "attention_window"),
    "scale": ("scale", "scaling", "softmax_scale", "sm_scale", "scale_factor", "attn_scale"),
    "softcap": ("softcap", "soft_cap", "logit_cap", "logits_soft_cap", "logit_soft_cap"),
    "bias": ("bias", "score_bias", "attn_bias", "position_bias"),
    "dropout": ("dropout_p", "dropout", "p_dropout", "attn_dropout", "p", "dropout_prob"),
    "gqa": ("enable_gqa",),
    "weights": ("need_weights", "return_weights", "output_attentions", "return_attention",
                "return_attn", "return_attention_weights"),
}  # fmt: skip
LAYOUTS = ("BHLD", "BLHD", "BLD", "LD")  # of inputs, the likeliest first
ONE_HEAD = ("BLD", "LD")  # layouts without an axis of heads
BLOCK = 4  # tokens of a page


def options_of(target: Any, own: Conventions) -> dict[str, str]:
    """The options that a function takes, each with the name of its argument."""
    names = parameters_of(target)
    found = {
        option: next(name for name in usual if name in names)
        for option, usual in OPTIONS.items()
        if any(name in names for name in usual)
    }
    switch = found.pop("causal", "")
    switches = [
        name
        for name in OPTIONS["causal"]
        if name in names
        and (isinstance(names[name].default, bool) or names[name].annotation in (bool, "bool"))
    ]
    if switches or switch in ("is_causal", "causal"):
        found["causal"] = (switches or [switch])[0]
    if own.window_argument:
        found["window"] = own.window_argument
    return found


@dataclass
class FunctionCall:
    """The canonical call, translated into the arguments of the function, and its output back.

    Attributes:
        target: the function, or an object that is called as one.
        own: its conventions; their options are given in every call.
        form: of its masks.
        layout: of its inputs.
        returns: the layout of its output.
        names: its arguments for options.
        spare: masks that it requires and that are None in every call.
    """

    target: Callable[..., Any]
    own: Conventions
    form: MaskForm = NO_MASK
    layout: str = "BHLD"
    returns: str = "BHLD"
    names: dict[str, str] = field(default_factory=dict)
    spare: tuple[str, ...] = ()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        shape = (*q.shape[:3], v.shape[3])
        result = self.result(q, k, v, **options)
        returned = self.layout if self.layout in ONE_HEAD else self.returns
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
            added = given.get(self.form.argument) if self.form.polarity == "additive" else None
            given[self.form.argument] = raw if added is None else raw + added
        named = {"q": q, "k": k, "v": v}
        order = order_of(self.target) or "qkv"
        inputs = (laid_out(named[letter], self.layout) for letter in order)
        return called(self.target, *inputs, **given)

    def arguments(self, q: Tensor, k: Tensor, options: dict[str, Any]) -> dict[str, Any]:
        """The function's own arguments for these options."""
        widths = [name for name in required_of(self.target) if role_of(name) == "head width"]
        given = {**dict.fromkeys(self.spare), **dict.fromkeys(widths, q.shape[-1])}
        given |= {**self._neutral(q), **self.own.options}
        if "gqa" in self.names and k.shape[1] != q.shape[1]:
            given[self.names["gqa"]] = True
        for option, value in options.items():
            if value is None or value is False or (option == "dropout" and value == 0.0):
                continue
            if option not in self.names:
                raise SubjectError(f"it has no argument for {option}")
            if option == "dropout" and "training" in parameters_of(self.target):
                given["training"] = True
            taken = parameters_of(self.target).get(self.names[option])
            pair = taken and (isinstance(taken.default, tuple) or "uple" in str(taken.annotation))
            if option == "window" and pair:
                value = (value - 1, 0)  # earlier keys, and later ones, beside its own
            given[self.names[option]] = value
        return given

    def _neutral(self, q: Tensor) -> dict[str, Any]:
        """Values for options that are required, or that are not neutral by default."""
        taken, given = parameters_of(self.target), dict[str, Any]()
        values = {"scale": q.shape[-1] ** -0.5, "causal": False, "weights": False}
        for option, name in self.names.items():
            default = taken[name].default if name in taken else None
            if option == "dropout" and (default is EMPTY or isinstance(default, float)):
                given[name] = 0.0
            elif default is EMPTY:
                given[name] = values.get(option)
        if "training" in taken:
            given["training"] = False
        return given

    def requires_a_mask(self) -> bool:
        """Whether its mask argument has no default."""
        return self.form.argument in required_of(self.target)


class OfModule:
    """A function that takes a module before (query, key, value), as transformers calls it.

    It reads from the module whether it trains, and how many query heads share a key head.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__name__ = getattr(function, "__name__", "attention")

    @property
    def signature_of_call(self) -> dict[str, Any]:
        """The arguments after the module."""
        return dict(list(parameters_of(self.function).items())[1:])

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Any:
        """The function with a module of these heads, which trains where there is dropout."""
        module = nn.Module()
        shared = {"num_key_value_groups": query.shape[1] // key.shape[1]}
        for name, held in {**shared, "is_causal": False, "layer_idx": 0}.items():
            setattr(module, name, held)
        module.train(bool(given.get("dropout")))
        return self.function(module, query, key, value, **given)


class OnPages:
    """Calls a paged function with each query as a row that has pages of its own.

    The function takes q [B, H, D], k_pool [N, T, G, D], v_pool, block_table [B, M] and lengths [B],
    and returns [B, H, D]. Of S keys, query i of L sees the first S - L + i + 1. Places of the pools
    without a token are NaN, and entries of the table without a page are invalid.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__name__ = getattr(function, "__name__", "attention")

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The output [B, H, L, Dv]; a query that sees no key gives zeros."""
        batch, heads, queries, _ = q.shape
        lengths = (torch.arange(queries) + 1 + k.shape[2] - queries).clamp(min=0).repeat(batch)
        used = lengths > 0
        if not used.any():
            return q.new_zeros(*q.shape[:3], v.shape[3])
        lengths = lengths[used]
        count = -(-k.shape[2] // BLOCK)  # pages of a row
        order = torch.randperm(len(lengths) * count, generator=torch.Generator().manual_seed(0))
        pools = [self._pool(x.repeat_interleave(queries, 0)[used], lengths, order) for x in (k, v)]
        table = order.view(-1, count)
        table = torch.where(
            torch.arange(count) * BLOCK < lengths[:, None], table, len(order) * 1000
        )
        out = q.new_zeros(len(used), heads, v.shape[3])
        rows = q.transpose(1, 2).flatten(0, 1)[used]
        got = output_of(self.function(rows, *pools, table, lengths), rows.numel())
        out = out.to(got.dtype).index_put((used.nonzero()[:, 0],), got)
        return out.unflatten(0, (batch, queries)).transpose(1, 2)

    def _pool(self, x: Tensor, lengths: Tensor, order: Tensor) -> Tensor:
        """Pages [N, T, G, D] in this order, of x [B, G, S, D] for each row."""
        x = x.transpose(1, 2)
        x = torch.cat([x, x.new_zeros(len(x), -x.shape[1] % BLOCK, *x.shape[2:])], 1)
        held = torch.arange(x.shape[1]) < lengths[:, None]
        pages = torch.where(held[..., None, None], x, float("nan")).unflatten(1, (-1, BLOCK))
        return pages.flatten(0, 1)[order.argsort()]


def takes_module(target: Any) -> bool:
    """Whether it takes a module, and queries, keys and values after it."""
    names = list(parameters_of(target))
    return names[:1] == ["module"] and [n[:1] for n in names[1:4]] == ["q", "k", "v"]


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
