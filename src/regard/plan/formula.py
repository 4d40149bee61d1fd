"""Formulas of named sizes: evaluated, written in words, put in numbers, and given to web pages.

One formula is the source of a figure in the terminal, in JSON and on a page.
"""

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

Number = int | float
Evaluate = Callable[[Mapping[str, Number]], Number]


@dataclass(frozen=True, repr=False)
class Formula:
    """An expression of numbers and named sizes. Made by `number`, `size` and operators.

    Args:
        operation: `"number"`, `"size"`, or a key of `OPERATIONS`.
        parts: the number, the name, or the operands.

    Examples:
        >>> from regard.plan import Formula
        >>> from regard.plan.formula import minimum, size
        >>> kept = 2 * size("num_kv_heads") * minimum(size("context"), size("window"))
        >>> isinstance(kept, Formula)
        True
        >>> kept
        2 x num_kv_heads x min(context, window)
        >>> kept.with_numbers(num_kv_heads=8, window=1024)
        '2 x 8 x min(context, 1024)'
        >>> kept.evaluate(num_kv_heads=8, window=1024, context=4096)
        16384
        >>> kept.to_json()
        ['*', 2, 'num_kv_heads', ['min', 'context', 'window']]
    """

    operation: str
    parts: tuple[Any, ...]

    def __add__(self, other: "Formula | Number") -> "Formula":
        return _joined("+", self, other)

    def __radd__(self, other: "Formula | Number") -> "Formula":
        return _joined("+", other, self)

    def __mul__(self, other: "Formula | Number") -> "Formula":
        return _joined("*", self, other)

    def __rmul__(self, other: "Formula | Number") -> "Formula":
        return _joined("*", other, self)

    def __sub__(self, other: "Formula | Number") -> "Formula":
        return Formula("-", (self, _formula(other)))

    def __rsub__(self, other: "Formula | Number") -> "Formula":
        return Formula("-", (_formula(other), self))

    def evaluate(self, **sizes: Number) -> Number:
        """The value for these sizes; of whole numbers a whole number, without rounding.

        Args:
            **sizes: a number for each of `names()`; others are ignored.

        Raises:
            ValueError: if a size is missing, or something is divided by zero.
        """
        try:
            return self._evaluate(sizes)
        except KeyError:
            missing = sorted(self.names() - sizes.keys())
            raise ValueError(
                f"{self.written()} needs {', '.join(missing)}; give evaluate() a number for each"
            ) from None
        except ZeroDivisionError:
            raise ValueError(f"{self.with_numbers(**sizes)} divides by zero") from None

    def names(self) -> set[str]:
        """The names of the sizes."""
        if self.operation == "size":
            return {self.parts[0]}
        return set().union(*(each.names() for each in self._operands))

    def written(self) -> str:
        """The formula with the names of its sizes."""
        return self.with_numbers()

    def with_numbers(self, **sizes: Number) -> str:
        """The formula with numbers in place of the names given; divisions by 1 are left out.

        Args:
            **sizes: numbers by name; others stay names.

        Examples:
            >>> from regard.plan.formula import ceil_div, size
            >>> heads = ceil_div(size("num_kv_heads"), size("tp"))
            >>> heads.with_numbers(num_kv_heads=8, tp=1), heads.with_numbers(num_kv_heads=8, tp=4)
            ('8', 'ceil(8 / 4)')
        """
        return _written(self, sizes, 0)

    def to_json(self) -> Any:
        """Numbers, names, and lists of an operation (a key of `OPERATIONS`) and its operands."""
        if self.operation in _LEAVES:
            return self.parts[0]
        return [self.operation, *(each.to_json() for each in self._operands)]

    @property
    def _operands(self) -> tuple["Formula", ...]:
        return () if self.operation in _LEAVES else self.parts

    @cached_property
    def _evaluate(self) -> Evaluate:
        if self.operation == "number":
            value: Number = self.parts[0]
            return lambda sizes: value
        if self.operation == "size":
            return operator.itemgetter(self.parts[0])
        first, *others = [each._evaluate for each in self._operands]
        function = OPERATIONS[self.operation]
        if not others:
            return lambda sizes: function(first(sizes))
        return reduce(lambda left, right: _both(function, left, right), others, first)

    def __repr__(self) -> str:
        return self.written()

    def __reduce__(self) -> tuple[Any, ...]:
        return Formula, (self.operation, self.parts)  # without the compiled function


def _both(function: Callable[..., Number], left: Evaluate, right: Evaluate) -> Evaluate:
    return lambda sizes: function(left(sizes), right(sizes))


def number(value: Number) -> Formula:
    """A number.

    Raises:
        TypeError: if it is none.
        ValueError: if it is not finite.
    """
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"a formula is made of numbers and formulas, got {value!r}; use size(name)")
    if not math.isfinite(value):
        raise ValueError(f"numbers of a formula are finite, got {value}")
    return Formula("number", (value,))


def size(name: str) -> Formula:
    """A size that is given when the formula is evaluated.

    Raises:
        ValueError: if the name is not one of Python's.
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"the name of a size has letters, digits and underscores, got {name!r}")
    return Formula("size", (name,))


def minimum(*values: Formula | Number) -> Formula:
    """The smallest value."""
    return reduce(lambda left, right: _joined("min", left, right), values[1:], _formula(values[0]))


def maximum(*values: Formula | Number) -> Formula:
    """The largest value."""
    return reduce(lambda left, right: _joined("max", left, right), values[1:], _formula(values[0]))


def ceil_div(value: Formula | Number, divisor: Formula | Number) -> Formula:
    """The quotient, rounded up to a whole number.

    Examples:
        >>> from regard.plan.formula import ceil_div, size
        >>> ceil_div(size("context"), 16).evaluate(context=17)
        2
    """
    return Formula("ceil_div", (_formula(value), _formula(divisor)))


def floor_div(value: Formula | Number, divisor: Formula | Number) -> Formula:
    """The quotient, rounded down to a whole number.

    Examples:
        >>> from regard.plan.formula import floor_div, size
        >>> floor_div(size("context"), 16).evaluate(context=17)
        1
    """
    return Formula("floor_div", (_formula(value), _formula(divisor)))


def power_of_two(value: Formula | Number) -> Formula:
    """The smallest power of two that is not below the value; 1 for values below 1.

    Examples:
        >>> from regard.plan.formula import power_of_two, size
        >>> [power_of_two(size("n")).evaluate(n=n) for n in (0, 1, 3, 4, 1025)]
        [1, 1, 4, 4, 2048]
    """
    return Formula("power_of_two", (_formula(value),))


def _ceil_div(value: Number, divisor: Number) -> Number:
    return -(-value // divisor)


def _power_of_two(value: Number) -> int:
    return 1 << max(0, math.ceil(value) - 1).bit_length()


OPERATIONS: dict[str, Callable[..., Number]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "min": min,
    "max": max,
    "ceil_div": _ceil_div,
    "floor_div": operator.floordiv,
    "power_of_two": _power_of_two,
}
_LEAVES = ("number", "size")
_ROUNDED = {"ceil_div": "ceil", "floor_div": "floor"}  # as they are written
_ONE = number(1)
_SIGNS = {"+": (" + ", 1), "-": (" - ", 1), "*": (" x ", 2)}  # and how strongly they bind


def _formula(value: Formula | Number) -> Formula:
    return value if isinstance(value, Formula) else number(value)


def _joined(operation: str, *values: Formula | Number) -> Formula:
    """An associative operation, which takes over the operands of values that are of the same.

    Factors of 1 are left out.
    """
    parts: list[Formula] = []
    for each in map(_formula, values):
        parts += each.parts if each.operation == operation else [each]
    if operation == "*":
        parts = [each for each in parts if each != _ONE] or [_ONE]
    return Formula(operation, tuple(parts)) if len(parts) > 1 else parts[0]


def _written(formula: Formula, sizes: Mapping[str, Number], binding: int) -> str:
    """The text of a formula, in parentheses if what stands around it binds more strongly."""
    operation, parts = formula.operation, formula.parts
    if operation == "number":
        return str(parts[0])
    if operation == "size":
        return str(sizes.get(parts[0], parts[0]))
    if operation in _ROUNDED:
        if _written(parts[1], sizes, 0) == "1":
            return _written(parts[0], sizes, binding)
        above, below = _written(parts[0], sizes, 2), _written(parts[1], sizes, 3)
        return f"{_ROUNDED[operation]}({above} / {below})"
    if operation not in _SIGNS:
        return f"{operation}({', '.join(_written(each, sizes, 0) for each in parts)})"
    sign, own = _SIGNS[operation]
    first, *others = parts
    inner = own + 1 if operation == "-" else own  # a - (b - c)
    text = sign.join(
        [_written(first, sizes, own), *(_written(each, sizes, inner) for each in others)]
    )
    return f"({text})" if own < binding else text
