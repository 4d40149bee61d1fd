"""A model's attention modules, and each one said as a regard layer that shares its weights."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from regard.attention import Attention
from regard.hf.families import FAMILIES, Family, family_of
from regard.masks import Causal, Mask, SlidingWindow
from regard.rope import Rotary
from regard.scaling import LinearScaling, Llama3, Scaling, Yarn


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Every attention module of a model by its name, in order.

    Raises:
        ValueError: if there is none, or one whose type has no row in `regard.hf.families`.
    """
    found = {name: module for name, module in model.named_modules() if family_of(module)}
    unknown: dict[str, int] = {}
    for module in model.modules():
        kind = type(module).__name__
        if "attention" in kind.lower() and not family_of(module) and list(module.parameters()):
            unknown[kind] = unknown.get(kind, 0) + 1
    if unknown:
        names = ", ".join(f"{kind} ({count} modules)" for kind, count in unknown.items())
        raise ValueError(
            f"{type(model).__name__} has attention that regard does not know: {names}; what is "
            f"missing is a row in regard.hf.families, which has {', '.join(FAMILIES)}"
        )
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no attention module that regard knows; "
            f"it knows {', '.join(FAMILIES)}, as transformers builds them"
        )
    return found


def attention_of(module: nn.Module) -> Attention:
    """A regard layer that computes what this module does, with its very weights.

    The layer counts positions and holds the mask itself: it takes hidden states and a cache.

    Raises:
        ValueError: if the module is of no known family, or its rope is scaled in an unknown way.
    """
    family = family_of(module)
    if family is None:
        raise ValueError(
            f"{type(module).__name__} has no row in regard.hf.families; it has "
            f"{', '.join(FAMILIES)}"
        )
    linears = {name: module.get_submodule(name) for name in _projections(family)}
    head_dim, sizes = _size(module, "head_dim"), {}
    for name in ("q_proj", "k_proj"):
        sizes[name] = _size(linears[name], "out_features") // head_dim
    with torch.device("meta"):  # all that is built here is replaced by the module's own
        layer = Attention(
            _size(linears["q_proj"], "in_features"),
            sizes["q_proj"],
            num_kv_heads=sizes["k_proj"],
            head_dim=head_dim,
            bias={name for name in linears if getattr(linears[name], "bias", None) is not None},
            qk_norm="head" if family.qk_norm else None,
            dropout=float(getattr(module, "attention_dropout", 0.0)),
            rope=rope_of(module.config, head_dim),
            mask=_pattern(family, module),
            scale=_scale(module),
        )
    for name, linear in linears.items():
        setattr(layer, name, linear)
    return layer.train(module.training)


def rope_of(config: Any, head_dim: int) -> Rotary:
    """The rotary embedding that a model's config describes.

    Raises:
        ValueError: if `rope_type` is one that is not known here.
    """
    rope = config.rope_parameters
    kind = rope.get("rope_type", "default")
    if kind not in SCALINGS:
        raise ValueError(
            f"rope_type={kind!r} is not known here; regard.hf.layers.SCALINGS has "
            f"{', '.join(map(repr, SCALINGS))}"
        )
    dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    return Rotary(dim, theta=rope["rope_theta"], scaling=SCALINGS[kind](rope))


def _yarn(rope: Mapping[str, Any]) -> Scaling:
    optional = ("beta_fast", "beta_slow", "attention_factor", "truncate")
    options = {name: rope[name] for name in optional if rope.get(name) is not None}
    before = rope["original_max_position_embeddings"]
    return Yarn(rope["factor"], original_max_position=before, **options)


def _llama3(rope: Mapping[str, Any]) -> Scaling:
    return Llama3(
        rope["factor"],
        low_freq_factor=rope["low_freq_factor"],
        high_freq_factor=rope["high_freq_factor"],
        original_max_position=rope["original_max_position_embeddings"],
    )


SCALINGS: dict[str, Callable[[Mapping[str, Any]], Scaling | None]] = {
    "default": lambda rope: None,
    "linear": lambda rope: LinearScaling(rope["factor"]),
    "llama3": _llama3,
    "yarn": _yarn,
}


def _projections(family: Family) -> tuple[str, ...]:
    norms = ("q_norm", "k_norm") if family.qk_norm else ()
    return ("q_proj", "k_proj", "v_proj", "o_proj", *norms)


def _pattern(family: Family, module: nn.Module) -> Mask:
    window = family.window_of(module)
    return Causal() if window is None else Causal() & SlidingWindow(window)


def _size(module: nn.Module, name: str) -> int:
    size = getattr(module, name)
    assert isinstance(size, int)
    return size


def _scale(module: nn.Module) -> float:
    scale = module.scaling
    assert isinstance(scale, float)
    return scale
