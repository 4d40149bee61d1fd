"""Building a class: its arguments are declared, have a default, or are guessed from their names."""

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn

from regard_verify.blame import first_line_of, line_of_subject
from regard_verify.subject.configurations import (
    EMPTY,
    LATENT,
    PLAIN,
    TINY,
    Configuration,
    Guesser,
    annotations_of,
    arguments_of,
    class_beside,
    configuration,
    how,
    is_configuration,
    settings_beside,
    takes_configuration,
)
from regard_verify.subject.conventions import Conventions
from regard_verify.subject.guesses import HEADS, SIZES, VALUES, WIDTH, is_large, role_of
from regard_verify.subject.signatures import parameters_of
from regard_verify.subject.subject import SubjectError, called

DEPTH = 3  # objects that an argument is built from, at most: a configuration in a configuration


class Built(NamedTuple):
    """An object that was built, and how.

    Attributes:
        made: the object.
        arguments: what it was built with, in a form that can be printed.
        forgot_super: the line of its `__init__`, if that does not call `super().__init__()`.
        dropouts: names of its probabilities of dropout.
        switches: its boolean arguments, with their values.
        widths: sizes among its arguments that may be the width of its input.
    """

    made: Any
    arguments: dict[str, Any]
    forgot_super: str = ""
    dropouts: tuple[str, ...] = ()
    switches: Mapping[str, bool] = {}
    widths: tuple[int, ...] = ()


def build(made_by: Any, own: Conventions, *, dropout: float | None = None, **changes: Any) -> Built:
    """An object of a class or from a function.

    Args:
        made_by: the class or function.
        own: `arguments` in it are declared.
        dropout: every probability of dropout, in its arguments and its configuration.
        changes: further arguments, by name.

    Raises:
        SubjectError: if an argument cannot be guessed, or building fails.
    """
    given = {**own.arguments, **changes}
    failures: list[SubjectError] = []
    tried: list[dict[str, Any]] = []
    for guesser in _guessers(made_by, dropout):
        try:
            arguments = complete(made_by, given, guesser)
        except SubjectError as error:
            failures.append(error)
            continue
        if all(_plain(arguments) != _plain(other) for other in tried):
            tried.append(arguments)
    for arguments in sorted(tried, key=lambda each: not _divides(made_by, each)):
        try:
            return _built(made_by, arguments)
        except SubjectError as error:
            failures.append(_explained(made_by, arguments, error))
    if given and any(each.kind is each.VAR_KEYWORD for each in parameters_of(made_by).values()):
        return _built(made_by, given)  # as declared, whatever it takes out of them
    raise failures[0]


def _divides(made_by: Any, arguments: Mapping[str, Any]) -> bool:
    """Whether heads divide the width, and key heads the heads, defaults included."""
    values = {name: each.default for name, each in arguments_of(made_by).items()} | {**arguments}
    sizes = {role_of(n): x for n, x in values.items() if isinstance(x, int) and x > 0}
    heads = sizes.get("heads", 1)
    return sizes.get("width", heads) % heads == 0 == heads % sizes.get("key heads", 1)


def _guessers(made_by: Any, dropout: float | None) -> Iterator[Guesser]:
    """Ways of guessing arguments, the most careful first: defaults are kept unless large."""
    roles = {name: role_of(name) for name in arguments_of(made_by)}
    large = any(is_large(roles[n], each.default) for n, each in arguments_of(made_by).items())
    wide = {**VALUES, "key width": WIDTH}
    for values in (VALUES, wide, {**VALUES, "key heads": HEADS}):
        for resize in (True, False) if large else (False, True):
            for own_classes in (True, False):
                yield Guesser(values, resize, dropout, own_classes)


def complete(
    made_by: Any, given: Mapping[str, Any], guesser: Guesser, depth: int = 0
) -> dict[str, Any]:
    """All arguments to build it with.

    Raises:
        SubjectError: for a name that it does not take, and a value that cannot be guessed.
    """
    taken, types = arguments_of(made_by), annotations_of(made_by)
    found, inside = _placed(made_by, given, types)
    for name, each in taken.items():
        if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
            continue
        annotation = types.get(name)
        settings = takes_configuration(name, annotation) and depth < DEPTH
        if name in found:
            if isinstance(found[name], Mapping) and settings:
                found[name] = _settings(made_by, annotation, found[name], guesser, depth)
        elif settings and (each.default is EMPTY or inside):
            found[name] = _settings(made_by, annotation, inside, guesser, depth)
        else:
            value = _value(made_by, name, annotation, each.default, guesser, depth)
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
    settings = [name for name in taken if takes_configuration(name, types.get(name))]
    if inside and not settings:
        raise SubjectError(
            f"{_name(made_by)} has no argument {next(iter(inside))!r}; it has {', '.join(taken)}"
        )
    return {name: value for name, value in given.items() if name in taken}, inside


def _is_beside(annotation: Any, made_by: Any) -> bool:
    """Whether an argument is an object of a class in the same file."""
    home = getattr(made_by, "__module__", "")
    return isinstance(annotation, type) and annotation.__module__ == home != "builtins"


def _value(
    made_by: Any, name: str, annotation: Any, default: Any, guesser: Guesser, depth: int
) -> Any:
    value = guesser.value(name, annotation, default)
    if value is EMPTY and depth < DEPTH and _is_beside(annotation, made_by):
        return called(annotation, **complete(annotation, {}, guesser, depth + 1))
    return value


def _settings(
    made_by: Any, annotation: Any, given: Mapping[str, Any], guesser: Guesser, depth: int
) -> Any:
    """A configuration: of the class that is annotated or stands in the file, or a guessed one."""
    own = annotation if isinstance(annotation, type) and annotation not in PLAIN else None
    if own is None and annotation is not dict and guesser.own_classes:
        own = class_beside(made_by)
    if hasattr(own, "model_type"):  # of transformers
        return _of_transformers(own, given, guesser)
    if own is None or not guesser.own_classes:
        beside = settings_beside(made_by) if guesser.own_classes else {}
        return configuration({**beside, **given}, guesser)
    arguments = complete(own, given, guesser, depth + 1)
    if _has_large(own) or not _divides(own, arguments):
        guesser = dataclasses.replace(guesser, resize=True)
        arguments = complete(own, given, guesser, depth + 1)
    made = called(own, **arguments)
    _adjust(made, {**arguments, **given}, guesser)
    return made


def _of_transformers(made_by: Any, given: Mapping[str, Any], guesser: Guesser) -> Any:
    """A configuration of transformers, with every probability of dropout that is wanted."""
    latent = LATENT if "kv_lora_rank" in parameters_of(made_by) else {}
    drops = [name for name in TINY if "dropout" in name and guesser.dropout is not None]
    sizes = {**TINY, **latent, **dict.fromkeys(drops, guesser.dropout), **given}
    settings = called(made_by, **sizes)
    settings._attn_implementation = given.get("attn_implementation", "eager")
    return settings


def _has_large(settings: type) -> bool:
    defaults = {n: each.default for n, each in arguments_of(settings).items()}
    held = {**vars(settings), **defaults}
    return any(is_large(role_of(name), value) for name, value in held.items())


def _adjust(settings: Any, given: Mapping[str, Any], guesser: Guesser) -> None:
    """The same values for what is no argument of it: attributes of its class, and settings in it.

    A class of settings may say `n_embd = 768` in its body, and hold other settings by default.
    """
    held = {**vars(type(settings)), **getattr(settings, "__dict__", {})}
    for name, value in held.items():
        if name.startswith("_") or (name in given and name in arguments_of(type(settings))):
            continue
        if is_configuration(type(value)):
            value = copy.copy(value)  # a default is shared by all settings of its class
            _adjust(value, {}, guesser)
            object.__setattr__(settings, name, value)
        elif role_of(name) and isinstance(value, (int, float)):
            wanted = given.get(name, guesser.value(name, None, value))
            if wanted is not value:
                object.__setattr__(settings, name, wanted)  # also where it is frozen


def _built(made_by: Any, arguments: dict[str, Any]) -> Built:
    forgot = ""
    try:
        made = called(made_by, **arguments)
        complete_module = not isinstance(made, nn.Module) or "_parameters" in made.__dict__
    except SubjectError as error:
        if not _forgot_super(made_by, error):
            raise
        complete_module = False
    if not complete_module:
        made = made_by.__new__(made_by)
        nn.Module.__init__(made)
        called(made.__init__, **arguments)
        forgot = first_line_of(made_by.__init__) or f"{made_by.__name__}.__init__"
    types, taken = annotations_of(made_by), arguments_of(made_by)
    values = {name: arguments.get(name, each.default) for name, each in taken.items()}
    settings = {n: x for each in values.values() for n, x in _settings_in(each).items()}
    held = {**values, **settings}
    switches = {name: value for name, value in held.items() if isinstance(value, bool)}
    drops = [n for n in values if role_of(n, types.get(n)) == "dropout" and n not in switches]
    drops += [name for name in settings if role_of(name) == "dropout"]
    widths = [x for n, x in held.items() if role_of(n) == "width" and type(x) is int]
    unique = tuple(dict.fromkeys(drops))
    return Built(made, _plain(arguments), forgot, unique, switches, tuple(dict.fromkeys(widths)))


def _settings_in(settings: Any) -> Mapping[str, Any]:
    """The names and values that a configuration holds."""
    if isinstance(settings, (str, int, float, type(None), type)):
        return {}
    held = settings if isinstance(settings, dict) else getattr(settings, "__dict__", {})
    return {str(name): value for name, value in held.items()}


def _forgot_super(made_by: Any, error: SubjectError) -> bool:
    return (
        isinstance(made_by, type)
        and issubclass(made_by, nn.Module)
        and ("before Module.__init__() call" in str(error) or "_modules" in str(error))
    )


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
    return {
        name: dict(value)
        if isinstance(value, Configuration)
        else value
        if isinstance(value, (int, float, str, bool, type(None)))
        else _guessed(value)
        for name, value in arguments.items()
    }


def _guessed(value: Any) -> str:
    """An object that was built for an argument, with the sizes that it holds."""
    held = _settings_in(value).items()
    sizes = ", ".join(f"{n}={x}" for n, x in held if type(x) is int and role_of(n) in SIZES)
    return f"(a guessed {type(value).__name__}{f' of {sizes}' if sizes else ''})"
