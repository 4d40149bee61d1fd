"""Text in messages: counts of things, and the code that builds a value."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from itertools import groupby
from types import MappingProxyType
from typing import Any


def counted(number: int, one: str, many: str = "") -> str:
    """A count with its noun; `many` is the plural, by default `one` with an s.

    Examples:
        >>> counted(1, "law"), counted(1_234, "law"), counted(2, "query", "queries")
        ('1 law', '1,234 laws', '2 queries')
    """
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"


def ranges(indices: Iterable[int]) -> str:
    """Numbers in ascending order as text.

    Examples:
        >>> ranges((0, 1, 2, 4, 6, 7))
        '0-2, 4, 6-7'
    """
    runs = groupby(enumerate(indices), key=lambda each: each[1] - each[0])
    listed = [[index for _, index in run] for _, run in runs]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in listed)


def one_of(
    what: str, name: str, names: Iterable[str], meant: Mapping[str, str] = MappingProxyType({})
) -> str:
    """The name of the list that a user's spelling stands for: upper and lower case are one, and so
    are -ise and -ize.

    Raises:
        ValueError: if it is none of them; the error has the list, and the name that `meant` has for
            it, or the nearest one.

    Examples:
        >>> one_of("kind", "k8v4", ["int8", "K8V4"]), one_of("kind", "Quantised", ["quantized"])
        ('K8V4', 'quantized')
    """
    known = {_spelled(each): each for each in names}
    found = known.get(_spelled(name))
    if found is None:
        near = [meant[_spelled(name)]] if _spelled(name) in meant else []
        near += [known[each] for each in get_close_matches(_spelled(name), known, 1)]
        nearest = f"; did you mean {near[0]!r}?" if near else ""
        listed = ", ".join(map(repr, known.values()))
        raise ValueError(f"{what}={name!r} is not one of {listed}{nearest}")
    return found


def _spelled(name: str) -> str:
    return name.lower().replace("quantised", "quantized")


# C0 and C1 but tab and line feed, and the characters that change the direction of text
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def without_controls(text: str) -> str:
    r"""Text of a document, with the characters that control a terminal or a direction as escapes.

    Examples:
        >>> without_controls("a\x1b[31mb\u202ec")
        'a\\x1b[31mb\\u202ec'
    """
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


def code_of(value: Any, positional: int = 0, **derived: Any) -> str:
    """The code that builds a dataclass: `positional` fields, then those that are not the default.

    `derived` are values that the constructor computes for fields that are not given. Tensors are
    written as `<[shape] dtype>`.
    """
    from torch import Tensor  # the command line counts words without torch

    parts = []
    for i, field in enumerate(each for each in fields(value) if each.init and each.repr):
        content = getattr(value, field.name)
        text = _tensor_text(content) if isinstance(content, Tensor) else repr(content)
        if i < positional:
            parts.append(text)
        elif isinstance(content, Tensor) or content != derived.get(field.name, field.default):
            parts.append(f"{field.name}={text}")
    return f"{type(value).__name__}({', '.join(parts)})"


def _tensor_text(value: Any) -> str:
    return f"<{list(value.shape)} {str(value.dtype).removeprefix('torch.')}>"
