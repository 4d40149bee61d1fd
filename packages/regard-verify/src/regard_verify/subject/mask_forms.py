"""The forms in which functions and modules take a mask, and masks written in them."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard_verify.subject.conventions import Conventions
from regard_verify.subject.signatures import parameters_of


class MaskForm(NamedTuple):
    """The form of a mask: its argument, the meaning of its entries, its axes and its dtype.

    `hidden` is what an additive mask adds where a key is hidden: -inf, or the least finite value.
    """

    argument: str
    polarity: str = "keep"
    shape: str = "B1LS"
    dtype: str = "bool"
    hidden: str = "-inf"

    def __str__(self) -> str:
        meaning = {
            "keep": "true or 1 may attend",
            "drop": "true or 1 is hidden",
            "additive": f"added to the scores, {self.hidden} where hidden",
        }[self.polarity]
        return f"{self.argument}= {self.dtype} {self.shape}, {meaning}"

    def encode(self, keep: Tensor, sizes: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """`keep` [B | 1, H | 1, L, S] in this form, for `sizes` (B, H)."""
        batch, heads = sizes
        whole = keep.expand(batch, heads, *keep.shape[-2:])
        shaped = {
            "BHLS": whole,
            "B1LS": whole[:, :1],
            "NLS": whole.flatten(0, 1),
            "BLS": whole[:, 0],
            "LS": keep[0, 0],
            "B11S": whole[:, :1, :1],
            "BS": whole[:, 0, 0] if keep.shape[-2] else whole.new_ones(batch, keep.shape[-1]),
        }[self.shape]
        if self.polarity == "additive":
            low = float("-inf") if self.hidden == "-inf" else torch.finfo(dtype).min
            return torch.zeros(shaped.shape, dtype=dtype).masked_fill(~shaped, low)
        entries = shaped.clone() if self.polarity == "keep" else ~shaped
        return entries.to({"bool": torch.bool, "int": torch.int64, "float": dtype}[self.dtype])


NO_MASK = MaskForm("")
SHAPES = ("BHLS", "B1LS", "NLS", "BLS", "LS", "B11S", "BS")  # axes, in the order of trials
BIASES = ("attn_bias", "attention_bias")  # what is added to the scores: a mask of -inf as well


def forms(names: list[str], known: Conventions) -> Iterator[MaskForm]:
    """All forms that agree with the declared conventions `known`, the most common first."""
    for name in names:
        for dtype, polarity in (
            ("bool", "keep"), ("bool", "drop"), ("float", "drop"), ("float", "additive"),
            ("int", "keep"), ("int", "drop"), ("float", "keep"),
        ):  # fmt: skip
            if name in BIASES and polarity != "additive":
                continue
            for shape in SHAPES if "pad" not in name else ("BS", *SHAPES[:-1]):
                form = MaskForm(name, polarity, shape, dtype)
                declared = {
                    "mask": name, "polarity": polarity, "mask_shape": shape, "mask_dtype": dtype,
                }  # fmt: skip
                if all(getattr(known, n) in (None, value) for n, value in declared.items()):
                    yield form


def mask_arguments(target: Any) -> list[str]:
    """Names of arguments that may be a mask, the likeliest first.

    Examples:
        >>> def attention(q, k, v, key_padding_mask=None, attn_mask=None, masked=None): ...
        >>> mask_arguments(attention)
        ['attn_mask', 'masked', 'key_padding_mask']
    """
    names = []
    for name, each in parameters_of(target).items():
        kind = each.annotation
        own_class = isinstance(kind, type) and kind.__module__ not in ("builtins", "inspect")
        tensor = not own_class or issubclass(kind, Tensor)  # and no object
        switch = isinstance(each.default, bool) or kind in (bool, "bool")
        named = "mask" in name.lower() and "head_mask" not in name and "masked_" not in name
        named &= name != "block_mask"  # of flex_attention
        if (named or name in BIASES) and tensor and not switch:
            names.append(name)
    return sorted(
        names, key=lambda name: (name in BIASES, "pad" in name, "mask" not in name.split("_")[-1:])
    )
