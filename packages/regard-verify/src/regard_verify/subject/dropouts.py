"""The probabilities of dropout in a module, found by type and by name, and set."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from regard_verify.subject.guesses import role_of

_DROPOUTS = (nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.Dropout1d, nn.Dropout2d)


def set_dropout(module: nn.Module, p: float) -> bool:
    """Set each probability in a module, and in its configuration; whether there is one."""
    found = list(_probabilities(module))
    for holder, name in found:
        if isinstance(holder, dict):
            holder[name] = p
        else:
            object.__setattr__(holder, name, p)  # also where it is frozen
    return bool(found)


def declares_dropout(module: nn.Module) -> bool:
    """Whether it has a submodule of dropout, or a probability above 0."""
    held = ((vars(holder), name) for holder, name in _probabilities(module))
    return any(isinstance(each, _DROPOUTS) for each in module.modules()) or any(
        values.get(name, 0.0) > 0 for values, name in held
    )


def _probabilities(module: nn.Module) -> Iterator[tuple[Any, str]]:
    """Each object or dictionary that holds a probability of dropout, and its name there."""
    for each in module.modules():
        if isinstance(each, _DROPOUTS):
            yield each, "p"
            continue
        for holder in (each, *vars(each).values()):
            settings = holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})
            if holder is not each and isinstance(holder, (nn.Module, Tensor, type)):
                continue
            for name, value in list(settings.items()):
                if _is_probability(name, value):
                    yield holder, name


def _is_probability(name: Any, value: Any) -> bool:
    """Whether an attribute is a probability of dropout, by its name and its value."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1
    named = isinstance(name, str) and role_of(name) == "dropout"
    return number and named and not {"keep", "path"} & set(name.split("_"))
