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
from regard_verify.subject.mask_forms import parameters_of

TINY = {  # sizes for configurations of transformers
    "hidden_size": WIDTH, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM, "intermediate_size": 16, "vocab_size": 40, "num_hidden_layers": 1,
    "max_position_embeddings": CONTEXT, "sliding_window": None, "attention_dropout": 0.0,
    "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0, "pad_token_id": 0,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": HEADS, "q_lora_rank": 12, "kv_lora_rank": 12, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "head_dim": 4,
}  # fmt: skip
USUAL: dict[str, Any] = {  # settings of transformers whose names say something else
    "_attn_implementation": "eager", "rope_scaling": None, "sliding_window": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}, "rope_type": "default",
    "partial_rotary_factor": 1.0, "rotary_pct": 1.0, "pretraining_tp": 1, "clip_qkv": None,
    "attn_logit_softcapping": None, "query_pre_attn_scalar": HEAD_DIM, "scale_attn_weights": True,
    "layer_types": ["full_attention", "full_attention"], "position_embedding_type": "absolute",
    "scale_attn_by_inverse_layer_idx": False, "reorder_and_upcast_attn": False,
}  # fmt: skip
_NESTED = ("attention", "attn", "model", "transformer", "decoder", "encoder", "backbone", "arch")
_NAMES = re.compile(r"(^|_)(config|cfg|args|conf|params|hparams|hp|opts?|configuration)$", re.I)
_CLASSES = re.compile(r"(config|args|params|conf|configuration|hparams)$", re.I)
EMPTY = inspect.Parameter.empty


@dataclasses.dataclass
class Guesser:
    """The values that arguments get: by what they stand for, or their defaults.

    Attributes:
        values: by what an argument stands for, as `VALUES`.
        resize: whether sizes get these values even where they have a default.
        dropout: what every probability of dropout becomes; None to leave defaults.
        own_classes: whether the file's own class of configurations is used.
    """

    values: Mapping[str, Any] = dataclasses.field(default_factory=lambda: VALUES)
    resize: bool = False
    dropout: float | None = None
    own_classes: bool = True

    def value(self, name: str, annotation: Any, default: Any) -> Any:
        """The value for an argument: its default, a guess, or `EMPTY` where nothing is known."""
        role = role_of(name, annotation)
        settable = default is EMPTY or default is None or _is_number(default)
        if role == "dropout" and self.dropout is not None and settable:
            return self.dropout
        if role == "layer index" and default is None:
            return 0
        if is_short(name, default):
            return self.values["length"]
        if default is not EMPTY and not (self.resize and role in SIZES and _is_number(default)):
            return default
        if role == "dtype":
            return torch.float32
        may_be_none = type(None) in getattr(annotation, "__args__", ())
        if name in USUAL and (USUAL[name] is not None or may_be_none):
            return USUAL[name]
        if role is None:
            return None if may_be_none else EMPTY
        return self.values[role]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class Configuration(dict[str, Any]):
    """A configuration with attributes and items; what it lacks is guessed from its name.

    Examples:
        >>> config = Configuration({"n_embd": 48})
        >>> config.hidden_size, config["n_head"], config.get("drop_rate", 0.1)
        (48, 4, 0.1)
    """

    _guesser = Guesser()

    def __missing__(self, name: str) -> Any:
        value = USUAL.get(name, self._alike(name))
        if value is EMPTY and name in _NESTED:
            value = configuration({}, self._guesser)
        if value is EMPTY and not name.startswith("_"):
            value = self._guesser.value(name, None, EMPTY)
        if value is EMPTY:
            raise KeyError(
                f"the guessed configuration has no {name!r}; {how({'config': {name: '...'}})}"
            )
        self[name] = value
        return value

    def _alike(self, name: str) -> Any:
        """The size that it holds under another name; `EMPTY` without one."""
        role = role_of(name)
        alike = (held for other, held in self.items() if role_of(other) == role and held)
        return next((x for x in alike if type(x) is int), EMPTY) if role in SIZES else EMPTY

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(error.args[0]) from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_guesser":
            super().__setattr__(name, value)
        else:
            self[name] = value

    def get(self, name: str, default: Any = None) -> Any:
        """The value; of what it lacks only sizes are guessed where there is a default."""
        if dict.__contains__(self, name):
            return self[name]
        if default is None or role_of(name) in SIZES:
            try:
                return self[name]
            except KeyError:
                return default
        return self._guesser.value(name, None, default)

    def __contains__(self, name: object) -> bool:
        known = isinstance(name, str) and (role_of(name) in SIZES or role_of(name) == "dropout")
        return known or super().__contains__(name)


def configuration(values: Mapping[str, Any], guesser: Guesser) -> Configuration:
    """A configuration that holds these values, with configurations for mappings in them."""
    made = Configuration(
        (name, configuration(value, guesser) if isinstance(value, Mapping) else value)
        for name, value in values.items()
    )
    made._guesser = guesser
    for name, value in made.items():
        made[name] = value if value is None else guesser.value(name, None, value)
    return made


def how(arguments: Mapping[str, Any]) -> str:
    """A sentence: how to declare these arguments on the command line and in the file."""
    text = json.dumps(arguments).replace('"..."', "...")
    return (
        f"declare it: --like 'arguments={text}', or {DECLARED} = {{'arguments': ...}} in its file"
    )


def takes_configuration(name: str, annotation: Any) -> bool:
    """Whether an argument is a configuration, by its name, or by the class it is annotated with."""
    if isinstance(annotation, type) and annotation not in PLAIN:
        return is_configuration(annotation) or (
            bool(_NAMES.search(name)) and not issubclass(annotation, nn.Module)
        )
    return bool(_NAMES.search(name))


PLAIN = (int, float, bool, str, dict, object, Any, SimpleNamespace, Mapping)


def is_configuration(made_by: type) -> bool:
    """Whether a class holds settings: a dataclass, or one that is called a configuration."""
    holds = dataclasses.is_dataclass(made_by) or hasattr(made_by, "model_fields")
    named = bool(_CLASSES.search(made_by.__name__))
    return (holds or named) and not issubclass(made_by, nn.Module)


def class_beside(made_by: Any) -> type | None:
    """The class of configurations in the file of a class, if there is one."""
    home = sys.modules.get(getattr(made_by, "__module__", ""))
    held = [each for each in vars(home).values() if isinstance(each, type)] if home else []
    found = [each for each in held if is_configuration(each) and each.__module__ == home.__name__]
    named = [x for x in held if hasattr(x, "model_type") and _prefix(x.__name__, made_by.__name__)]
    return named[0] if named else found[0] if len(found) == 1 else None


def _prefix(configuration: str, made_by: str) -> bool:
    """Whether a class of transformers has the name of its configuration in its own."""
    return made_by.startswith(configuration.removesuffix("Config"))


def settings_beside(made_by: Any) -> Mapping[str, Any]:
    """The dictionary of settings in the file of a class, if there is one."""
    home = sys.modules.get(getattr(made_by, "__module__", ""))
    found = [
        each
        for name, each in (vars(home) if home else {}).items()
        if isinstance(each, dict) and _NAMED_SETTINGS.search(name) and name != DECLARED
    ]
    return found[0] if len(found) == 1 else {}


_NAMED_SETTINGS = re.compile(r"config|cfg|hparams|params|settings", re.I)


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
