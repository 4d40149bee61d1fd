"""The meaning of a class's argument, by its name as tutorials and libraries use it."""

import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from regard_verify.subject.signatures import EMPTY

WIDTH, HEADS, KV_HEADS, HEAD_DIM, CONTEXT = 32, 4, 2, 8, 128
VALUES: dict[str, Any] = {  # by what an argument stands for
    "width": WIDTH, "heads": HEADS, "key heads": KV_HEADS, "heads per key head": HEADS // KV_HEADS,
    "head width": HEAD_DIM, "key width": HEAD_DIM, "length": CONTEXT, "dropout": 0.0,
    "layer index": 0, "layers": 1, "flag": False, "rope base": 10_000.0, "window": 4, "batch": 16,
    "rank": 12, "rotated width": 4, "epsilon": 1e-6, "device": "cpu", "dtype": torch.float32,
    "vocabulary": 40, "inner width": 64, "padding": 0, "batch first": True, "ratio": 2,
    "scale": HEAD_DIM**0.5,
}  # fmt: skip
SIZES = frozenset({  # what a size that is too large can be replaced by
    "width", "heads", "key heads", "head width", "key width", "length", "batch", "rank",
    "rotated width", "layers", "vocabulary", "inner width", "heads per key head",
})  # fmt: skip
LARGE = {"width": 1024, "inner width": 4096, "length": 4096, "batch": 64, "heads": 16}

_EXACT = {
    role: frozenset(names.split())
    for role, names in {
        "width": "hidden_size embed_dim d_model n_embd dim d_in d_out emb_dim e c d k kdim vdim "
        "all_head_size",
        "heads": "h head heads nhead n_q nq hq num_q q_num",
        "key heads": "g n_kv nkv hkv num_kv kv_num nb_kv groups group gqa_groups query_groups",
        "head width": "d_k d_v dk dv d_q dq head_dim d_qk d_h dh hd hdim d_kv kv_channels",
        "key width": "key_dim value_dim",
        "length": "t max_t n_ctx n_positions max_position l",
        "dropout": "p pdrop",
        "batch": "b",
        "layer index": "layer layer_num",
        "flag": "bias causal masked mask cross",
        "rope base": "theta base",
        "rank": "d_c d_c_prime d_c1 dc r",
        "rotated width": "d_r d_rh d_rope",
    }.items()
}
_COUNTS = {"num", "n", "nb", "nr", "no", "number", "of", "count", "total", "the"}
_WIDTHS = {
    "dim", "width", "size", "channel", "feature", "hidden", "embed", "embedding", "emb", "embd",
    "model", "inner", "input", "output", "in", "out", "ch", "units", "unit", "dimension", "d",
    "query", "context", "state", "chan",
}  # fmt: skip
_FLAGS = {"use", "is", "has", "with", "add", "do", "enable", "apply", "return", "need", "no"}
_LENGTHS = {"len", "length", "context", "ctx", "block", "position", "pos", "seq", "sequence",
            "token", "maxlen", "seqlen", "time", "step"}  # fmt: skip


def words_of(name: str) -> list[str]:
    """The words of a name, in lower case and singular, without words of counting.

    Examples:
        >>> words_of("numAttentionHeads"), words_of("num_kv_heads"), words_of("nheads")
        (['attention', 'head'], ['kv', 'head'], ['head'])
    """
    parts = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().strip("_").split("_")
    parts = [re.sub(r"^n(heads?|embd|ctx)$", r"\1", word) for word in parts]
    singular = [re.sub(r"(?<=...)(?<!s)(?<!ia)s$", "", word) for word in parts]
    return [word for word in singular if word and word not in _COUNTS]


def role_of(name: str, annotation: Any = None) -> str | None:
    """The meaning of an argument, a key of `VALUES`; None if its name does not tell.

    Examples:
        >>> role_of("group_num"), role_of("dim_per_head"), role_of("attn_pdrop"), role_of("alpha")
        ('key heads', 'head width', 'dropout', None)
    """
    plain = name.lower().strip("_")
    if annotation in (bool, "bool"):
        return "batch first" if plain == "batch_first" else "flag"
    exact = next((role for role, names in _EXACT.items() if plain in names), None)
    if exact:
        return exact
    words = words_of(name)
    first = plain.split("_")[0]
    if first in _FLAGS and len(plain.split("_")) > 1 and not {"head", "dim"} & set(words):
        return "flag"
    return _by_words(set(words), plain)


def _by_words(words: set[str], plain: str) -> str | None:
    """The first rule that a name's words fulfil."""
    has = words.intersection
    key = {"kv", "key", "group", "k", "value"}
    rules: Iterable[tuple[str, Any]] = (
        ("dropout", "drop" in plain or has({"prob", "probability"})),
        ("flag", has({"bias", "causal", "masked", "flash"})),
        ("batch first", plain == "batch_first"),
        ("epsilon", has({"eps", "epsilon"})),
        ("scale", plain in ("temperature", "scale", "scaling", "scale_factor")),
        ("dtype", has({"dtype"})),
        ("device", has({"device"})),
        ("padding", has({"pad", "padding"})),
        ("rope base", has({"theta"}) or (has({"rope", "rotary"}) and has({"base"}))),
        ("vocabulary", has({"vocab", "vocabulary"})),
        ("ratio", has({"ratio", "mult", "expansion"})),
        ("inner width", has({"ff", "ffn", "mlp", "intermediate", "feedforward"})),
        ("layer index", has({"layer"}) and has({"idx", "id", "index"})),
        ("layers", has({"layer", "depth"})),
        ("rank", has({"rank", "lora", "latent", "compression", "compressed", "bottleneck"})),
        ("head width", has({"nope"})),
        ("rotated width", has({"rope", "rotary", "rot"})),
        ("window", has({"window", "kernel", "chunk", "segment", "bucket"})),
        ("batch", has({"batch"})),
        ("heads per key head", has({"group"}) and has({"size", "per", "value"})),
        ("heads per key head", has({"rep", "repeat"}) and (has(key) or plain == "n_rep")),
        ("heads per key head", has({"head", "query", "querie", "q"}) and re.search(
            "per_(group|kv|key)", plain)),
        ("head width", has({"head", "heads"}) and has({"dim", "width", "size", "d", "per",
                                                       "channel", "feature", "dimension"})),
        ("key heads", has({"head"}) and has(key)),
        ("key heads", has({"group"})),
        ("heads", has({"head", "multihead", "nhead"})),
        ("length", has(_LENGTHS) and not has({"dim", "embed", "width", "channel"})),
        ("width", has(_WIDTHS)),
    )  # fmt: skip
    return next((role for role, holds in rules if holds), None)


def guess(name: str, annotation: Any, default: Any, *, resize: bool = False) -> Any:
    """The value for an argument: its default, a guess, or `EMPTY` where nothing is known.

    With `resize`, sizes get the values of `VALUES` even where they have a default.
    """
    role = role_of(name, annotation)
    number = isinstance(default, (int, float)) and not isinstance(default, bool)
    if role == "layer index" and default is None:
        return 0
    most = {"max", "context", "ctx"} & set(name.lower().split("_"))
    if most and role == "length" and number and 0 < default < CONTEXT:
        return CONTEXT  # the inputs of the laws are longer than that default
    if default is not EMPTY and not (resize and role in SIZES and number):
        return default
    if role is None:
        return None if type(None) in getattr(annotation, "__args__", ()) else EMPTY
    return VALUES[role]


def has_large(taken: Mapping[str, inspect.Parameter]) -> bool:
    """Whether a default among these arguments makes a module that is slow to check."""
    return any(
        type(each.default) is int and each.default > LARGE.get(role_of(name) or "", each.default)
        for name, each in taken.items()
    )
