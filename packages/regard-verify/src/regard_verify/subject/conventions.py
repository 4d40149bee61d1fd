"""Conventions: what one attention may do otherwise than another, and both be right."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from math import isfinite
from numbers import Integral, Real
from typing import Any, Literal

Kind = Literal["function", "module", "paged"]

DECLARED = "regard_conventions"  # the name of a dictionary of conventions in the subject's file

_CHOICES: dict[str, tuple[str, ...]] = {
    "kind": ("function", "module", "paged"),
    "layout": ("BHLD", "BLHD", "BLD", "LD", "BLE", "LBE"),
    "returns": ("BHLD", "BLHD", "BLE", "BLD", "LD"),
    "polarity": ("keep", "drop", "additive"),
    "mask_shape": ("B1LS", "BHLS", "NLS", "BLS", "LS", "B11S", "BS"),
    "mask_dtype": ("bool", "int", "float"),
    "alignment": ("top-left", "bottom-right"),
    "head_order": ("grouped", "tiled"),
    "pairing": ("none", "halves", "pairs"),
    "fully_masked": ("zeros", "mean"),
    "cache_style": ("object", "single", "tuple", "internal"),
    "fused": ("blocked", "by head"),
}
THETA = 10_000.0  # the base of RoPE where none is declared or found out


def _whole(least: int) -> Callable[[Any], bool]:
    return lambda x: isinstance(x, Integral) and not isinstance(x, bool) and int(x) >= least


def _number(x: Any) -> bool:
    return isinstance(x, Real) and not isinstance(x, bool) and isfinite(x)


def _pair(x: Any) -> bool:
    return isinstance(x, (list, tuple)) and len(x) == 2


_MAPPINGS = "arguments options"
_RULES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (  # which values are right
    (_MAPPINGS, lambda x: isinstance(x, Mapping), "a mapping from names to values"),
    ("mask cache window_argument", lambda x: isinstance(x, str), "the name of an argument"),
    ("new_cache reference", lambda x: isinstance(x, str) or callable(x), "a name or a function"),
    ("causal", lambda x: isinstance(x, bool), "true or false"),
    ("window after block", _whole(0), "a whole number, 0 or more"),
    ("multiple ranks heads kv_heads head_dim width", _whole(1), "a whole number above 0"),
    ("scale theta cache_bytes", lambda x: _number(x) and x > 0, "a number above 0"),
    ("softcap", lambda x: _number(x) and x >= 0, "a number, 0 or more"),
    ("blocks", lambda x: _pair(x) and all(map(_whole(0), x)), "two whole numbers, 0 or more"),
)


@dataclass(frozen=True)
class Conventions:
    """The conventions of one attention. What is left `None` is found out by probing.

    A declared convention is a law: a subject that deviates from it fails. One that was found out is
    reported.

    Args:
        kind: `"function"` of (q, k, v), `"module"` from x, or `"paged"`, a function
            of queries and pages.
        arguments: of the class or of the factory.
        options: further arguments of every call.
        layout: of the inputs; of a function `"BHLD"`, `"BLHD"`, `"BLD"` or `"LD"`; of a module
            `"BLE"` or `"LBE"`.
        returns: the layout of a function's output; `"BLE"` has the heads side by side.
        mask: name of the mask argument; `""` for none.
        polarity: `"keep"` (true or 1 may attend), `"drop"`, or `"additive"` (added to the scores).
        mask_shape: the axes of a mask; `N` is batch times heads.
        mask_dtype: `"bool"`, `"int"` or `"float"`.
        causal: whether later keys are hidden by default.
        alignment: the corner of the causal rule where queries and keys differ in number.
        window: keys visible to a query by default, its own included; 0 for all.
        after: keys after its own that are visible to a query by default; None for what `causal`
            says, else it is not causal. A window to both sides of 3 keys each is
            `window=4, after=3`.
        block: tokens of a block, where the keys of a query depend on its block; 0 for none.
        blocks: how many blocks before and after its own a query sees, as `(1, 0)`.
        multiple: lengths of sequences are multiples of it.
        ranks: of a function, how many processes of a gloo group it is called in at once, each with
            its part of the tokens, as in context parallelism; it takes no mask then.
        scale: factor of the scores.
        softcap: bound of the scores; 0 for none.
        heads: query heads of a module.
        kv_heads: key heads of a module.
        head_dim: channels of one head of a module.
        width: channels of a module's input.
        head_order: `"grouped"`, neighbours share a key head, or `"tiled"`.
        fused: how a module's one projection for all three is laid out.
        pairing: which channels RoPE rotates together; `"none"` without RoPE.
        theta: the base of RoPE, 10,000 if only `pairing` is declared.
        fully_masked: the output of a fully masked query.
        cache: name of the cache argument; `""` for none.
        cache_style: `"object"` of all layers or `"single"` of one, changed in place; `"tuple"`,
            returned; `"internal"`, in the module.
        new_cache: name of a function or class in the subject's file that makes a cache.
        cache_bytes: bytes for one token and one row of the batch, at most.
        window_argument: name of the argument for a window.
        reference: name of a function or module in the subject's file that returns the right output.

    Raises:
        ValueError: if a value is none of those.

    Examples:
        >>> from regard_verify import Conventions
        >>> Conventions(polarity="drop").declared()
        {'polarity': 'drop'}
    """

    kind: Kind | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    layout: str | None = None
    returns: str | None = None
    mask: str | None = None
    polarity: str | None = None
    mask_shape: str | None = None
    mask_dtype: str | None = None
    causal: bool | None = None
    alignment: str | None = None
    window: int | None = None
    after: int | None = None
    block: int | None = None
    blocks: tuple[int, int] | None = None
    multiple: int | None = None
    ranks: int | None = None
    scale: float | None = None
    softcap: float | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    width: int | None = None
    head_order: str | None = None
    fused: str | None = None
    pairing: str | None = None
    theta: float | None = None
    fully_masked: str | None = None
    cache: str | None = None
    cache_style: str | None = None
    new_cache: str | None = None
    cache_bytes: float | None = None
    window_argument: str | None = None
    reference: str | None = None

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value is not None and value not in choices:
                raise ValueError(f"{name} is one of {', '.join(choices)}; got {value!r}")
        for names, is_right, words in _RULES:
            for name in names.split():
                value = getattr(self, name)
                if (value is not None or names is _MAPPINGS) and not is_right(value):
                    raise ValueError(f"{name} is {words}; got {value!r}")
        if self.blocks is not None:  # a list in JSON
            object.__setattr__(self, "blocks", tuple(self.blocks))
        if self.after and self.causal is None:
            object.__setattr__(self, "causal", False)

    def declared(self) -> dict[str, Any]:
        """The conventions that differ from the defaults, as a dictionary for JSON."""
        default = Conventions()
        return {n: value for n, value in asdict(self).items() if value != getattr(default, n)}

    def found(self, **values: Any) -> "Conventions":
        """These conventions, completed by `values` where nothing was declared."""
        return replace(self, **{n: v for n, v in values.items() if getattr(self, n) is None})


def probe_length(own: Conventions) -> int:
    """A length that shows whether all multiples are taken: no other multiple divides it."""
    return 11 * own.multiple if own.multiple else 3


def pattern_length(own: Conventions) -> int:
    """A length that shows which keys are visible: three blocks of 4, or of the multiple."""
    return max(12, 3 * (own.multiple or 1))


def conventions_from(given: Mapping[str, Any]) -> Conventions:
    """Conventions from a dictionary: of JSON, or of the subject's file.

    Raises:
        ValueError: for names and values that no convention has.

    Examples:
        >>> conventions_from({"heads": 4}).heads
        4
    """
    known = sorted(each.name for each in fields(Conventions))
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ValueError(f"no convention is called {unknown[0]!r}; there are {', '.join(known)}")
    own = Conventions(**given)
    if own.causal and own.after:
        raise ValueError(f"causal hides the keys that after={own.after} shows; declare one of them")
    return own
