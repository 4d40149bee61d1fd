"""The target of a conversion, as a value, and how it is read from the command line's `--to`.

mha          a key head for every query head                      exact
gqa:N, mqa   fewer key heads, aligned and merged                  lossy
mla:R        a joint latent of R elements, RoPE after it          lossy below full rank
mla:R+P      DeepSeek's form: a latent of R, P channels with RoPE  lossy
latent-50    as mla:R, in half of the cache, as `regard compare` names it
deepseek-50  as mla:R+P, in half of the cache; portable-50 as a stock checkpoint
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

import torch

from regard.convert.exact.portable import lacking
from regard.convert.linear import JOINT_LATENT, refuse_unsupported, refuse_width_norm
from regard.convert.lossy.directions import frequencies_of
from regard.heads import shared_rotary_dim
from regard.layers.attention import Attention
from regard.names import TARGETS
from regard.words import counted

Form = Literal["exact-rope", "deepseek"]
MEANT = {  # patterns of names that other commands have, or that are often written: what is meant
    "gqa": "gqa:2",
    r"(?:joint )?latent": "latent-50",
    r"deepseek": "deepseek-50",
    r"portable": "portable-50",
    r"mla-(\d+)": r"deepseek-\1",
    r"(latent|deepseek)-(\d+)-int8": r"\1-\2",
}
NAMES = ("mha", "mqa", "gqa:2", "latent-50", "deepseek-50", "portable-50", "mla:128")
OF_CACHES = r"shipped|int8|int4|k\dv\d"  # names of rows of compare that no checkpoint can have
# the rows of `regard compare` by the beginnings of their names: form, and portable
SHARES: dict[str, tuple[Form, bool]] = {
    "latent": ("exact-rope", False),
    "deepseek": ("deepseek", False),
    "portable": ("deepseek", True),
}
FORMS = {"exact-rope": JOINT_LATENT, "deepseek": "DeepSeek's MLA"}
POSITION = 4  # bytes of the int32 position that a cache holds beside a latent with exact rotation
BY_LAYER = 0.3  # budget below which the ranks of joint latents differ by layer


@dataclass(frozen=True)
class Target:
    """One kind of attention for every layer of a model; `target_of` makes it from text.

    Args:
        kind: `"heads"` or a form of MLA.
        num_kv_heads: of `"heads"`.
        rank: of the latent; the mean over layers if `by_layer`.
        rope_dim: channels of the rotary key, in DeepSeek's form.
        portable: whether all layers have the same frequencies, so that a stock `deepseek_v3`
            checkpoint can hold them. One element of the rank is then used for its norm.
        by_layer: whether the rank differs by layer, as it does below 30 % of the cache.
        method: how heads are merged, see `regroup`.
        refit: whether output projections are refitted, see `refit_output`.
        passes: over the text, in which gradient steps refine each layer before it is refitted
            again. `regard convert` takes two; none are quicker, as in `regard compare`.

    Examples:
        >>> from regard.convert import Target
        >>> print(Target("deepseek", rank=96, rope_dim=32))
        mla:96+32 deepseek
    """

    kind: Literal["heads", "exact-rope", "deepseek"]
    num_kv_heads: int = 0
    rank: int = 0
    rope_dim: int = 0
    portable: bool = False
    by_layer: bool = False
    method: Literal["aligned", "mean", "first"] = "aligned"
    refit: bool = True
    passes: int = 0

    @property
    def name(self) -> str:
        """The name of this attention in the tables of `regard compare`."""
        if self.kind == "heads":
            return str(self)
        named = "joint latent" if self.kind == "exact-rope" else FORMS[self.kind]
        return f"{named}, portable" if self.portable else named

    def __str__(self) -> str:
        if self.kind == "heads":
            heads = counted(self.num_kv_heads, "key head")
            return heads if self.method == "aligned" else f"{heads}, {self.method}"
        rotary = f"+{self.rope_dim}" if self.kind == "deepseek" else ""
        return f"mla:{self.rank}{rotary} {self.kind}{', portable' if self.portable else ''}"


def target_of(
    to: str,
    shipped: Sequence[Attention],
    *,
    form: Form | None = None,
    portable: bool = False,
    budget: float | None = None,
    dtype: torch.dtype | None = None,
    stored: torch.dtype | None = None,
) -> Target:
    """The target that `--to` describes, for a model with these layers.

    Args:
        to: `mha`, `gqa:N`, `mqa`, `mla:RANK`, `mla:RANK+ROPE`, or `mla` with a budget; or the name
            of a row of `regard compare`, as `latent-50`, `deepseek-50` or `portable-50`. Upper and
            lower case are one.
        shipped: the model's layers, from `regard.hf.attention_of`.
        form: of MLA; if None, DeepSeek's if `to` has rotary channels or `portable` is set, else
            `"exact-rope"`.
        portable: see `Target`.
        budget: bytes of the new cache as a share of the shipped one's, at most, if `to` is `"mla"`
            alone; 1 for no loss, in the same dtype.
        dtype: of the result, which its cache has; that of the layers if None.
        stored: of the shipped model, which its cache has; that of the layers if None.

    Raises:
        TypeError: if `shipped` is a layer, and no list, or is empty; if `to` is no text.
        ValueError: if `to` is none of these, or does not fit the model.

    Examples:
        >>> from regard import GroupedQueryAttention, Rotary
        >>> from regard.convert import target_of
        >>> gqa = GroupedQueryAttention(64, 8, 4, rope=Rotary(8))
        >>> print(target_of("mla", [gqa], budget=0.5))  # 31 numbers and a position: 128 of 256
        mla:31 exact-rope
    """
    if isinstance(shipped, Attention) or not shipped:
        raise TypeError("shipped is a list of the model's layers, not empty; give [layer] for one")
    if not isinstance(to, str):
        raise TypeError(f"to is text, such as 'mqa' or 'mla:128', got {to!r}")
    to = to.lower()
    named = re.fullmatch(r"(latent|deepseek|portable)-(\d+)", to)
    if named is not None:
        _refuse_latent(to, form, portable, budget)
        to, budget = "mla", int(named[2]) / 100
        form, portable = SHARES[named[1]]
    first = shipped[0]
    found = re.fullmatch(r"(mha|mqa|gqa[:-](\d+)|mla(?::(\d+)(?:\+(\d+))?)?)", to)
    if found is None:
        raise ValueError(f"to={to!r} is not one of {TARGETS}{_meant(to)}")
    if to.startswith("mla"):
        rank, rope_dim = (int(part) if part else 0 for part in found.group(3, 4))
        kind = form or ("deepseek" if rope_dim or portable else "exact-rope")
        _check_latent(to, rank, rope_dim, kind, portable, budget)
        for layer in shipped:  # first, since no size helps a layer with such a feature
            refuse_unsupported(layer, FORMS[kind])
        if kind == "deepseek" and not rope_dim:
            rope_dim = _rope_dim(first, budget)
        if budget is not None:
            own = next(first.parameters()).dtype
            rank = _rank(first, budget, rope_dim, dtype or own, stored or own)
        by_layer = kind == "exact-rope" and budget is not None and budget < BY_LAYER
        target = Target(kind, rank=rank, rope_dim=rope_dim, portable=portable, by_layer=by_layer)
    else:
        _refuse_latent(to, form, portable, budget)
        heads = {"mha": first.num_heads, "mqa": 1}.get(to) or int(found[2])
        target = Target("heads", num_kv_heads=heads)
    for layer in shipped:
        check_fits(target, layer)
    return target


def _meant(to: str) -> str:
    """The end of a sentence that refuses a target: what was probably meant."""
    if re.fullmatch(OF_CACHES, to):
        return f"; {to} is a cache of the model as it is: regard generate --cache {to}"
    meant = [
        re.sub(pattern, name, to) for pattern, name in MEANT.items() if re.fullmatch(pattern, to)
    ]
    meant += get_close_matches(to, NAMES, 1)
    return f"; did you mean {meant[0]!r}?" if meant else ""


def _check_latent(
    to: str, rank: int, rope_dim: int, kind: Form, portable: bool, budget: float | None
) -> None:
    """Raise a ValueError if the options of a latent contradict each other."""
    if portable and kind != "deepseek":
        raise ValueError("portable=True is about DeepSeek's form; exact-rope needs regard")
    if rope_dim and kind != "deepseek":
        raise ValueError(
            f"to={to!r} gives a number of rotated channels, and exact-rope rotates all of them"
        )
    if (budget is None) == (rank == 0):
        raise ValueError(f"to={to!r}: give either a rank, as in mla:128, or budget=0.5 (--budget)")


def check_fits(target: Target, layer: Attention) -> None:
    """Raise a ValueError if `layer` cannot be converted to `target`."""
    if target.kind == "heads":
        wanted, have = target.num_kv_heads, layer.num_kv_heads
        if wanted < 1 or (have % wanted and (wanted % have or layer.num_heads % wanted)):
            every, heads = range(1, layer.num_heads + 1), layer.num_heads
            fitting = [n for n in every if have % n == 0 or n % have == heads % n == 0]
            raise ValueError(
                f"{wanted} key heads: the model has {have} for {layer.num_heads} query heads, and "
                f"can have {', '.join(map(str, fitting))}"
            )
        if wanted != have:
            refuse_width_norm(layer)
        if wanted < have and target.method == "aligned":
            refuse_unsupported(layer, "an aligned merge")
        return
    refuse_unsupported(layer, FORMS[target.kind])
    width = 2 * layer.num_kv_heads * layer.head_dim
    full = min(width, layer.hidden_size)
    if not 1 <= target.rank <= full:
        raise ValueError(f"rank={target.rank} is not in 1..{full}, keys and values together")
    if target.kind == "deepseek":
        frequencies_of(layer.rope)
        if target.portable and (found := lacking(layer)):
            raise ValueError(
                f"a deepseek_v3 checkpoint cannot hold a layer: {'; '.join(found)}; without "
                "portable, regard.hf.load reads the converted model"
            )
        most = layer.num_kv_heads * layer.rope.dim
        if target.rope_dim % 2 or not 2 <= target.rope_dim <= most:
            raise ValueError(
                f"rope_dim={target.rope_dim} is not an even number in 2..{most}, the number of "
                "rotated channels of all keys"
            )


def _refuse_latent(to: str, form: object, portable: bool, budget: object) -> None:
    given = {"form": form, "portable": portable or None, "budget": budget}
    named = [name for name, value in given.items() if value is not None]
    if named:
        raise ValueError(f"to={to!r} has no {', '.join(named)}; only mla has")


def _rope_dim(layer: Attention, budget: float | None) -> int:
    if budget is None:
        return layer.rope.dim
    elements = budget * 2 * layer.num_kv_heads * layer.head_dim
    return shared_rotary_dim(elements, layer.rope.dim, layer.num_kv_heads)


def _rank(
    layer: Attention, budget: float, rope_dim: int, dtype: torch.dtype, stored: torch.dtype
) -> int:
    """The largest rank whose cache, with all that is beside it, takes no more than the budget."""
    if not 0 < budget <= 1:
        raise ValueError(
            f"budget is a share of the shipped cache, over 0 and at most 1, got {budget}"
        )
    elements = 2 * layer.num_kv_heads * layer.head_dim
    if budget == 1 and dtype == stored and not rope_dim:
        return min(elements, layer.hidden_size)  # no loss, for the bytes of a position more
    shipped = elements * stored.itemsize
    beside = rope_dim * dtype.itemsize if rope_dim else POSITION
    rank = (int(shipped * budget) - beside) // dtype.itemsize
    if rank < 1:
        what = "the rotary key" if rope_dim else "the position"
        raise ValueError(
            f"budget={budget} of {shipped} bytes a token is {int(shipped * budget)}, and "
            f"{beside} of them are {what}; give a larger budget, or fewer channels as in "
            "mla:RANK+ROPE"
        )
    return min(rank, elements, layer.hidden_size)
