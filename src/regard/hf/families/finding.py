"""The attention modules of a model: those with a row in the table of families, and others."""

import inspect
from collections import Counter
from typing import NamedTuple

from torch import nn

from regard.hf.families.recognising import family_of, is_named_attention

# methods of transformers' caches that linear attention calls
_STATES = {"update_recurrent_state", "update_conv_state", "set_linear_cache"}


class Found(NamedTuple):
    """Attention modules by name, in order: those with a row in `regard.hf.families`, and others."""

    known: dict[str, nn.Module]
    unknown: dict[str, nn.Module]


def find(model: nn.Module) -> Found:
    """The attention modules of a model.

    A module is attention if its family is known; or if it has parameters, calls transformers'
    AttentionInterface or has "attention" in the name of its class or of a base class, neither
    contains nor is part of other attention, and is not recurrent.

    Raises:
        TypeError: if `model` is no module, such as a path.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a module as regard.hf.load returns, got {type(model).__name__}")
    known = {name: module for name, module in model.named_modules() if family_of(module)}
    unknown: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if not (is_named_attention(type(module)) or calls_the_interface(module)):
            continue
        if not list(module.parameters()) or is_recurrent(module):
            continue
        wraps = any(each == name or each.startswith(f"{name}.") for each in known)
        inside = any(name.startswith(f"{each}.") for each in (*known, *unknown))
        if not wraps and not inside:
            unknown[name] = module
    return Found(known, unknown)


def is_recurrent(module: nn.Module) -> bool:
    """Whether a module writes recurrent or convolutional states, and calls no attention: linear
    attention, whatever the name of its class says."""
    forwards = [inspect.unwrap(type(each).forward) for each in module.modules()]
    codes = [each.__code__ for each in forwards if hasattr(each, "__code__")]
    has_states = any(_STATES & {*code.co_names} for code in codes)
    return has_states and not any(map(calls_the_interface, module.modules()))


def calls_the_interface(module: nn.Module) -> bool:
    """Whether the module's forward gets its attention function from transformers'
    AttentionInterface, by the name in its config."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    names = {"ALL_ATTENTION_FUNCTIONS", "_attn_implementation"}
    return code is not None and names <= set(code.co_names) and hasattr(module, "config")


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Every attention module of a model by its name, in order.

    Raises:
        ValueError: if there is none, or one whose type has no row in `regard.hf.FAMILIES`.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from regard.hf import attention_modules
        >>> config = LlamaConfig(hidden_size=16, num_attention_heads=2, vocab_size=20,
        ...     num_hidden_layers=2, intermediate_size=16)
        >>> model = LlamaForCausalLM(config)
        >>> list(attention_modules(model))
        ['model.layers.0.self_attn', 'model.layers.1.self_attn']
    """
    found = find(model)
    if found.unknown or not found.known:
        raise ValueError(
            f"{unknown_attention(model, found)}; what has no row is run by regard.hf.register(), "
            "and neither converted nor compared"
        )
    return found.known


def unknown_attention(model: nn.Module, found: Found) -> str:
    """The first half of an error: the attention of a model that has no row, and what it lacks."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    what = type(model).__name__ + (f" (model_type {model_type!r})" if model_type else "")
    if not found.unknown:
        return (
            f"{what} has no attention module that regard knows; regard.hf.FAMILIES names those of "
            "transformers that it knows"
        )
    counts = Counter(type(module).__name__ for module in found.unknown.values())
    names = ", ".join(f"{kind} ({count} modules)" for kind, count in counts.items())
    return (
        f"{what} has attention that regard does not know: {names}; regard.hf.FAMILIES, which "
        "names those that it knows, has no such class"
    )
