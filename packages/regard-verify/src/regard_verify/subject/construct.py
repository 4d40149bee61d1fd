"""Building a class: its arguments are declared, have a default, or are guessed from their names."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from regard_verify.blame import first_line_of, line_of_subject
from regard_verify.subject.adapters import is_of
from regard_verify.subject.configurations import (
    LATENT,
    TINY,
    Configuration,
    Guesser,
    annotations_of,
    arguments_of,
    class_beside,
    configuration,
    how,
    is_configuration,
    takes_configuration,
)
from regard_verify.subject.conventions import Conventions
from regard_verify.subject.guesses import SIZES, is_large, role_of
from regard_verify.subject.signatures import EMPTY, parameters_of
from regard_verify.subject.subject import SubjectError, called


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
    first = _has_large(made_by)
    refusal: SubjectError | None = None
    for resize in (first, not first):
        arguments: dict[str, Any] = {}
        try:
            arguments = complete(made_by, given, Guesser(resize))
            return _built(made_by, arguments)
        except SubjectError as error:
            refusal = refusal or (_explained(made_by, arguments, error) if arguments else error)
    if given and any(each.kind is each.VAR_KEYWORD for each in parameters_of(made_by).values()):
        return _built(made_by, given)  # as declared, whatever it takes out of them
    assert refusal is not None
    raise refusal


def complete(made_by: Any, given: Mapping[str, Any], guesser: Guesser) -> dict[str, Any]:
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
        settings = takes_configuration(name, annotation)
        if settings and isinstance(found.get(name), Mapping):
            found[name] = _settings(made_by, annotation, found[name], guesser)
        elif name not in found and settings and (each.default is EMPTY or inside):
            found[name] = _settings(made_by, annotation, inside, guesser)
        elif name not in found:
            value = guesser.value(name, annotation, each.default)
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


def _settings(made_by: Any, annotation: Any, given: Mapping[str, Any], guesser: Guesser) -> Any:
    """A configuration: of the class that is annotated or stands in the file, or a guessed one."""
    typed = isinstance(annotation, type) and (
        is_configuration(annotation) or hasattr(annotation, "model_type")
    )
    own: Any = annotation if typed else None if annotation is dict else class_beside(made_by)
    if own is None:
        return configuration(given)
    if hasattr(own, "model_type"):  # of transformers
        latent = LATENT if "kv_lora_rank" in parameters_of(own) else {}
        settings = called(own, **{**TINY, **latent, **given})
        settings._attn_implementation = given.get("attn_implementation", "eager")
        return settings
    if not parameters_of(own):  # values in the body of its class
        held = {name: x for name, x in vars(own).items() if not name.startswith("_")}
        sized = {name: Guesser(resize=True).value(name, None, x) for name, x in held.items()}
        return configuration({**sized, **given})
    return called(own, **complete(own, given, Guesser(guesser.resize or _has_large(own))))


def _has_large(made_by: Any) -> bool:
    """Whether a default makes a module that is slow to check."""
    return any(is_large(role_of(n), each.default) for n, each in arguments_of(made_by).items())


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


def _forgot_super(made_by: Any, error: SubjectError) -> bool:
    module = isinstance(made_by, type) and issubclass(made_by, nn.Module)
    return module and ("before Module.__init__() call" in str(error) or "_modules" in str(error))


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
