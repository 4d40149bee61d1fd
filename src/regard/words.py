"""Text in messages: counts of things, and the code that builds a value."""

from dataclasses import fields
from typing import Any

from torch import Tensor


def counted(number: int, one: str, many: str = "") -> str:
    """A count with its noun; `many` is the plural, by default `one` with an s.

    Examples:
        >>> counted(1, "law"), counted(1_234, "law"), counted(2, "query", "queries")
        ('1 law', '1,234 laws', '2 queries')
    """
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"


def code_of(value: Any, positional: int = 0, **derived: Any) -> str:
    """The code that builds a dataclass: `positional` fields, then those that are not the default.

    `derived` are values that the constructor computes for fields that are not given. Tensors are
    written as `<[shape] dtype>`.
    """
    parts = []
    for i, field in enumerate(each for each in fields(value) if each.init and each.repr):
        content = getattr(value, field.name)
        text = _tensor_text(content) if isinstance(content, Tensor) else repr(content)
        if i < positional:
            parts.append(text)
        elif isinstance(content, Tensor) or content != derived.get(field.name, field.default):
            parts.append(f"{field.name}={text}")
    return f"{type(value).__name__}({', '.join(parts)})"


def _tensor_text(value: Tensor) -> str:
    return f"<{list(value.shape)} {str(value.dtype).removeprefix('torch.')}>"
