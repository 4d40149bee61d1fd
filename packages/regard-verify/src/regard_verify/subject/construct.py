"""Building a class: its arguments are declared, have a default, or are guessed from their names.

A configuration is of the class that is annotated or stands in the file, or is guessed name by name.
"""

import dataclasses
import json
import re
import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch import nn

from regard_verify.blame import first_line_of, line_of_subject
from regard_verify.subject.adapters import is_of
from regard_verify.subject.conventions import DECLARED, Conventions
from regard_verify.subject.guesses import (
    CONTEXT,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    SIZES,
    WIDTH,
    guess,
    has_large,
    role_of,
)
from regard_verify.subject.signatures import EMPTY, annotations_of, arguments_of, parameters_of
from regard_verify.subject.subject import SubjectError, called

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


class Built(NamedTuple):
    """An object that was built, and how.

    Attributes:
        made: the object.
        arguments: what it was built with, in a form that can be printed.
        forgot_super: the line of its `__init__`, if that does not call `super().__init__()`.
        switches: its boolean arguments, with their values.
    """

    made: Any
    arguments: dict[str, Any]
    forgot_super: str = ""
    switches: Mapping[str, bool] = {}


def build(made_by: Any, own: Conventions, **changes: Any) -> Built:
    """An object of a class or from a function.

    Its defaults are kept, or first of all replaced where a size is large; then the other way.

    Args:
        made_by: the class or function.
        own: `arguments` in it are declared.
        changes: further arguments, by name.

    Raises:
        SubjectError: if an argument cannot be guessed, or building fails.
    """
    given = {**own.arguments, **changes}
    first = has_large(arguments_of(made_by))
    refusal: SubjectError | None = None
    for resize in (first, not first):
        arguments: dict[str, Any] = {}
        try:
            arguments = complete(made_by, given, resize)
            return _built(made_by, arguments)
        except SubjectError as error:
            refusal = refusal or (_explained(made_by, arguments, error) if arguments else error)
    if given and any(each.kind is each.VAR_KEYWORD for each in parameters_of(made_by).values()):
        return _built(made_by, given)  # as declared, whatever it takes out of them
    assert refusal is not None
    raise refusal


def complete(made_by: Any, given: Mapping[str, Any], resize: bool) -> dict[str, Any]:
    """All arguments to build it with; `resize` as of `guess`.

    Raises:
        SubjectError: for a name that it does not take, and a value that cannot be guessed.
    """
    taken, types = arguments_of(made_by), annotations_of(made_by)
    found, inside = _placed(made_by, given, types)
    for name, each in taken.items():
        if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
            continue
        annotation = types.get(name)
        settings = takes_configuration(name, annotation)
        if settings and isinstance(found.get(name), Mapping):
            found[name] = _settings(made_by, annotation, found[name], resize)
        elif name not in found and settings and (each.default is EMPTY or inside):
            found[name] = _settings(made_by, annotation, inside, resize)
        elif name not in found:
            value = guess(name, annotation, each.default, resize=resize)
            if value is EMPTY:
                raise SubjectError(
                    f"the value of {name!r} of {_name(made_by)} cannot be guessed; "
                    f"{how({name: '...'})}"
                )
            if value is not each.default:
                found[name] = value
    return found


def _placed(
    made_by: Any, given: Mapping[str, Any], types: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The declared arguments, and those that belong into its configuration."""
    taken = arguments_of(made_by)
    if any(each.kind is each.VAR_KEYWORD for each in taken.values()):
        return dict(given), {}
    inside = {name: value for name, value in given.items() if name not in taken}
    if inside and not any(takes_configuration(name, types.get(name)) for name in taken):
        raise SubjectError(
            f"{_name(made_by)} has no argument {next(iter(inside))!r}; it has {', '.join(taken)}"
        )
    return {name: value for name, value in given.items() if name in taken}, inside


def _settings(made_by: Any, annotation: Any, given: Mapping[str, Any], resize: bool) -> Any:
    """A configuration: of the class that is annotated or stands in the file, or a guessed one."""
    typed = isinstance(annotation, type) and (
        is_configuration(annotation) or hasattr(annotation, "model_type")
    )
    own: Any = annotation if typed else None if annotation is dict else class_beside(made_by)
    if own is None:
        return Configuration(given)
    if hasattr(own, "model_type"):  # of transformers
        latent = LATENT if "kv_lora_rank" in parameters_of(own) else {}
        settings = called(own, **{**TINY, **latent, **given})
        settings._attn_implementation = given.get("attn_implementation", "eager")
        return settings
    if not parameters_of(own):  # values in the body of its class
        held = {name: x for name, x in vars(own).items() if not name.startswith("_")}
        sized = {name: guess(name, None, x, resize=True) for name, x in held.items()}
        return Configuration({**sized, **given})
    return called(own, **complete(own, given, resize or has_large(arguments_of(own))))


def _built(made_by: Any, arguments: dict[str, Any]) -> Built:
    forgot = ""
    try:
        made = called(made_by, **arguments)
        complete_module = not isinstance(made, nn.Module) or "_parameters" in made.__dict__
    except SubjectError as error:
        told = "before Module.__init__() call" in str(error) or "_modules" in str(error)
        if not (told and isinstance(made_by, type) and issubclass(made_by, nn.Module)):
            raise
        complete_module = False
    if not complete_module:
        made = made_by.__new__(made_by)
        nn.Module.__init__(made)
        called(made.__init__, **arguments)
        forgot = first_line_of(made_by.__init__) or f"{made_by.__name__}.__init__"
    held = {name: arguments.get(name, each.default) for name, each in arguments_of(made_by).items()}
    for each in list(held.values()):
        held |= _settings_in(each)
    switches = {name: value for name, value in held.items() if isinstance(value, bool)}
    if is_of("transformers", made_by):  # the model gives the mask that such a switch stands for
        switches = {}
    return Built(made, _plain(arguments), forgot, switches)


def _settings_in(settings: Any) -> Mapping[str, Any]:
    """The names and values that a configuration holds."""
    if isinstance(settings, (str, int, float, type(None), type)):
        return {}
    held = settings if isinstance(settings, dict) else getattr(settings, "__dict__", {})
    return {str(name): value for name, value in held.items()}


def _explained(made_by: Any, arguments: Mapping[str, Any], error: SubjectError) -> SubjectError:
    """The error with the arguments that were tried, the line that refused them, and the way out."""
    line = line_of_subject(error)
    text = ", ".join(f"{name}={value!r}" for name, value in _plain(arguments).items())
    where = f" ({line})" if line else ""
    if "the guessed configuration has no" in str(error):
        explained = SubjectError(f"{_name(made_by)}: {error}{where}")
    else:
        explained = SubjectError(
            f"{_name(made_by)}({text}) could not be built: {error}{where}; if other arguments are "
            f"needed, {how(dict.fromkeys(list(arguments)[:1] or ['NAME'], '...'))}"
        )
    explained.__cause__ = error.__cause__
    return explained


def _name(made_by: Any) -> str:
    return getattr(made_by, "__name__", repr(made_by))


def _plain(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments in a form that can be printed: of an object, the sizes that it holds."""
    found: dict[str, Any] = {}
    for name, value in arguments.items():
        if isinstance(value, (int, float, str, bool, type(None), Configuration)):
            found[name] = dict(value) if isinstance(value, Configuration) else value
            continue
        held = _settings_in(value).items()
        sizes = ", ".join(f"{n}={x}" for n, x in held if type(x) is int and role_of(n) in SIZES)
        found[name] = f"(a guessed {type(value).__name__}{f' of {sizes}' if sizes else ''})"
    return found


class Configuration(dict[str, Any]):
    """A configuration with attributes and items; what it lacks is guessed from its name.

    Examples:
        >>> config = Configuration({"n_embd": 48})
        >>> config.n_embd, config["n_head"], config.get("drop_rate", 0.1)
        (48, 4, 0.1)
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        inner = {name: x for name, x in values.items() if isinstance(x, Mapping)}
        super().__init__({**values, **{name: Configuration(x) for name, x in inner.items()}})

    def __missing__(self, name: str) -> Any:
        value = EMPTY if name.startswith("_") else guess(name, None, EMPTY)
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
