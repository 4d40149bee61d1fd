"""Configurations for classes that take one: of the file's own class, or guessed name by name."""

import dataclasses
import inspect
import json
import re
import sys
import typing
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from regard_verify.subject.conventions import DECLARED
from regard_verify.subject.guesses import (
    CONTEXT,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    SIZES,
    VALUES,
    WIDTH,
    is_short,
    role_of,
)
from regard_verify.subject.signatures import EMPTY, parameters_of

TINY = {  # sizes for configurations of transformers
    "hidden_size": WIDTH, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM, "intermediate_size": 16, "vocab_size": 40, "num_hidden_layers": 1,
    "max_position_embeddings": CONTEXT, "sliding_window": None, "attention_dropout": 0.0,
    "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0, "pad_token_id": 0,
}  # fmt: skip
LATENT = {  # those of latent attention
    "num_key_value_heads": HEADS, "q_lora_rank": 12, "kv_lora_rank": 12, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "head_dim": 4,
}  # fmt: skip
_NAMES = re.compile(r"(^|_)(config|cfg|args|conf|params|hparams|hp|opts?|configuration)$", re.I)
_CLASSES = re.compile(r"(config|args|params|conf|configuration|hparams)$", re.I)
PLAIN = (int, float, bool, str, dict, object, Any, SimpleNamespace, Mapping)


@dataclasses.dataclass
class Guesser:
    """The values that arguments get: by what they stand for, or their defaults.

    Attributes:
        resize: whether sizes get the values of `VALUES` even where they have a default.
    """

    resize: bool = False

    def value(self, name: str, annotation: Any, default: Any) -> Any:
        """The value for an argument: its default, a guess, or `EMPTY` where nothing is known."""
        role = role_of(name, annotation)
        if role == "layer index" and default is None:
            return 0
        if is_short(name, default):
            return VALUES["length"]
        number = isinstance(default, (int, float)) and not isinstance(default, bool)
        if default is not EMPTY and not (self.resize and role in SIZES and number):
            return default
        if role is None:
            return None if type(None) in getattr(annotation, "__args__", ()) else EMPTY
        return torch.float32 if role == "dtype" else VALUES[role]


class Configuration(dict[str, Any]):
    """A configuration with attributes and items; what it lacks is guessed from its name.

    Examples:
        >>> config = Configuration({"n_embd": 48})
        >>> config.n_embd, config["n_head"], config.get("drop_rate", 0.1)
        (48, 4, 0.1)
    """

    def __missing__(self, name: str) -> Any:
        value = EMPTY if name.startswith("_") else Guesser().value(name, None, EMPTY)
        if value is EMPTY:
            raise KeyError(
                f"the guessed configuration has no {name!r}; {how({'config': {name: '...'}})}"
            )
        self[name] = value
        return value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(error.args[0]) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


def configuration(values: Mapping[str, Any]) -> Configuration:
    """A configuration that holds these values, with configurations for mappings in them."""
    return Configuration(
        (name, configuration(value) if isinstance(value, Mapping) else value)
        for name, value in values.items()
    )


def how(arguments: Mapping[str, Any]) -> str:
    """A sentence: how to declare these arguments on the command line and in the file."""
    text = json.dumps(arguments).replace('"..."', "...")
    return (
        f"declare it: --like 'arguments={text}', or {DECLARED} = {{'arguments': ...}} in its file, "
        "or name a function without arguments that builds it"
    )


def takes_configuration(name: str, annotation: Any) -> bool:
    """Whether an argument is a configuration, by its name, or by the class it is annotated with."""
    if isinstance(annotation, type) and annotation not in PLAIN:
        return is_configuration(annotation) or (
            bool(_NAMES.search(name)) and not issubclass(annotation, nn.Module)
        )
    return bool(_NAMES.search(name))


def is_configuration(made_by: type) -> bool:
    """Whether a class holds settings: a dataclass, or one that is called a configuration."""
    holds = dataclasses.is_dataclass(made_by) or hasattr(made_by, "model_fields")
    named = bool(_CLASSES.search(made_by.__name__))
    return (holds or named) and not issubclass(made_by, nn.Module)


def class_beside(made_by: Any) -> type | None:
    """The class of configurations in the file of a class, if there is one.

    In files of transformers it is imported, and has the first words of the name of the class.
    """
    name = getattr(made_by, "__module__", "")
    held = [x for x in vars(sys.modules.get(name, object)).values() if isinstance(x, type)]
    own = [each for each in held if is_configuration(each) and each.__module__ == name]
    for each in (each for each in held if hasattr(each, "model_type")):
        if made_by.__name__.startswith(each.__name__.removesuffix("Config")):
            return each
    return own[0] if len(own) == 1 else None


def annotations_of(made_by: Any) -> dict[str, Any]:
    """The types of its arguments by name, as far as they can be resolved."""
    target: Any = made_by
    target = target.__init__ if isinstance(made_by, type) else target
    try:
        return typing.get_type_hints(target)
    except Exception:  # a name that does not exist: the annotations stay text
        return dict(getattr(target, "__annotations__", {}))


def arguments_of(made_by: Any) -> dict[str, inspect.Parameter]:
    """Its arguments; those of the class it is derived from, where it hands on all of them."""
    found = parameters_of(made_by)
    hands_on = found and all(
        each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in found.values()
    )
    if hands_on and isinstance(made_by, type):
        for base in made_by.__mro__[1:]:
            if "__init__" in vars(base) and base not in (object, nn.Module):
                return parameters_of(base)
    return found
