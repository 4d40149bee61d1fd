"""Masks that are typed: Python's own parser reads the text, and a whitelist builds the mask.

Nothing is evaluated: calls of the rules in `RULES`, `&`, `|`, `~`, brackets, whole numbers, `True`,
`False`, `None` and lists of them are taken, and every other syntax of Python is refused.
"""

import ast
import inspect
import re
from typing import Any, NoReturn

import torch

from regard.masks import (
    EVERYTHING,
    NOTHING,
    Causal,
    Chunked,
    Dense,
    Documents,
    Everything,
    Mask,
    Nothing,
    Padding,
    Prefix,
    SlidingWindow,
    Tree,
)

LONGEST = 100_000  # characters of a mask: a dense one of 128 x 128 written out has 98,000
MOST_RULES = 64  # of one mask: combining compares each with each
LARGEST = 10**18  # a number is smaller, and fits 64 bits
EXCERPT = 60  # characters shown around a mistake, so that the caret stands on a line of 80

Value = int | bool | None | tuple[Any, ...]  # tuples of values

RULES: dict[str, type[Mask]] = {
    rule.__name__: rule for rule in (
        Everything, Nothing, Causal, SlidingWindow, Chunked, Prefix, Documents, Padding, Dense,
        Tree,
    )
}  # fmt: skip
CONSTANTS = {"EVERYTHING": EVERYTHING, "NOTHING": NOTHING}
DATA = (ast.Constant, ast.List, ast.Tuple, ast.UnaryOp, ast.USub, ast.Load)
REFUSED = {  # names, characters and lengths that no mask has, before Python's parser reads the text
    r"\bWhere\b": "Where(function) holds Python, which is not run from a text; draw it in Python: "
    "mask.draw(), or regard.see.mask_picture.svg(mask)",
    r"<": "the numbers of a tensor are not in the mask's code; write them out, as in "
    "Padding([[1, 1, 0]])",
    r"[^A-Za-z0-9_.\s()\[\],=&|~-]": "{!r} means nothing here; masks combine with & | ~ "
    "and brackets",
    rf"\w{{{EXCERPT + 1}}}": f"a name or number has at most {EXCERPT} characters",
}
PYTHONS = {  # other operators, by the node of Python's parser
    "And": "masks combine with &, not `and`",
    "Or": "masks combine with |, not `or`",
    "Not": "the complement of a mask is ~mask, not `not`",
}


def mask_from(text: str) -> Mask:
    """The mask that a text says, as `repr` writes masks.

    Args:
        text: rules with their data, combined by `&`, `|`, `~` and brackets; whole numbers, `True`,
            `False` and lists of them, which become tensors where a rule takes one. In `Dense`, 1
            and `True` are visible.

    Raises:
        ValueError: if the text says no mask; the message points at the place.

    Examples:
        >>> from regard.see import mask_from
        >>> mask_from("(Causal() | Prefix(2)) & Padding([[0, 1, 1]])").draw(3).splitlines()[0]
        '(Causal() | Prefix(lengths=2)) & Padding(valid=<[1, 3] bool>)'
        >>> mask_from("Causal() & SlidingWindow")
        Traceback (most recent call last):
        ValueError: SlidingWindow needs data: SlidingWindow(size)
          Causal() & SlidingWindow
                     ^
    """
    if len(text) > LONGEST:
        raise ValueError(
            f"a mask that is typed has at most {LONGEST:,} characters, got {len(text):,}; build "
            "larger ones in Python, from tensors"
        )
    for pattern, why in REFUSED.items():
        if found := re.search(pattern, text, re.ASCII):
            _refuse(text, found.start(), why.format(found[0]))
    operators = [match.start() for match in re.finditer(r"[&|]", text)]
    if len(operators) >= MOST_RULES:
        _refuse(text, operators[MOST_RULES - 1], f"a mask has at most {MOST_RULES} rules")
    line = re.sub(r"\s", " ", text)
    left = len(line) - len(line.lstrip())  # Python would take it for an indent
    try:
        return _Builder(text, left).mask(ast.parse(line[left:], mode="eval").body)
    except SyntaxError as error:
        at = left + error.offset - 1 if error.offset else len(text.rstrip())
        plain = error.msg == "invalid syntax"
        _refuse(text, at, "a rule, or &, | or ) is missing here" if plain else error.msg)
    except (MemoryError, RecursionError):  # of Python's parser, or of the builder
        _refuse(text, 0, "brackets and ~ are too deep inside each other")


def _refuse(text: str, at: int, why: str) -> NoReturn:
    """Raise with a caret below the place in the text."""
    first = max(0, min(at - EXCERPT // 2, len(text) - EXCERPT))
    line = "".join(c if c.isprintable() else " " for c in text[first : first + EXCERPT])
    raise ValueError(f"{why}\n  {line}\n  {' ' * (at - first)}^")


class _Builder:
    """Builds a mask from the nodes of its text, whose columns count from `left`."""

    def __init__(self, text: str, left: int) -> None:
        self._text, self._left = text, left

    def _refuse(self, node: ast.AST, why: str) -> NoReturn:
        _refuse(self._text, self._left + getattr(node, "col_offset", 0), why)

    def mask(self, node: ast.expr) -> Mask:
        match node:
            case ast.BinOp(left, ast.BitAnd(), right):
                return self.mask(left) & self.mask(right)
            case ast.BinOp(left, ast.BitOr(), right):
                return self.mask(left) | self.mask(right)
            case ast.UnaryOp(ast.Invert(), operand):
                return ~self.mask(operand)
            case ast.Name(name) if name in CONSTANTS:
                return CONSTANTS[name]
            case ast.Call(ast.Name(name)) if name in RULES:
                return self._rule(node, name)
            case ast.Name(name) if name in RULES:
                needs = "needs data" if _parameters(name) else "is called"
                self._refuse(node, f"{name} {needs}: {_call(name)}")
            case ast.BoolOp(op) | ast.UnaryOp(op) if type(op).__name__ in PYTHONS:
                self._refuse(node, PYTHONS[type(op).__name__])
        called = node.func if isinstance(node, ast.Call) else node
        code = ast.get_source_segment(self._text[self._left :], called) or ""
        listed = ", ".join((*RULES, *CONSTANTS))
        self._refuse(node, f"{code[:EXCERPT]!r} is no rule; the rules are {listed}")

    def _rule(self, node: ast.Call, name: str) -> Mask:
        given = {word.arg: word.value for word in node.keywords}
        try:
            if len(given) < len(node.keywords):
                raise TypeError("an argument is given twice")
            bound = inspect.signature(RULES[name]).bind(*node.args, **given)
            if other := bound.arguments.keys() - set(_parameters(name)):
                raise TypeError(f"got an unexpected keyword argument {other.pop()!r}")
        except TypeError as error:
            self._refuse(node, f"{error}: {_call(name)}")
        values = {each: self._value(value) for each, value in bound.arguments.items()}
        try:
            return RULES[name](**{each: _data(name, each, value) for each, value in values.items()})
        except (TypeError, ValueError) as error:
            self._refuse(node, str(error))

    def _value(self, node: ast.expr) -> Value:
        why = "data are whole numbers, True, False, None and lists of them"
        for part in ast.walk(node):
            value = part.value if isinstance(part, ast.Constant) else 0
            if not isinstance(part, DATA) or not isinstance(value, int | None):
                self._refuse(part, why)
            if value is not None and value >= LARGEST:
                self._refuse(part, f"a number is below {LARGEST:,}")
        try:
            return _tuples(ast.literal_eval(node))
        except ValueError:  # a sign before a list or a word
            self._refuse(node, why)


def _parameters(name: str) -> list[str]:
    """The data of a rule that can be typed, by name."""
    found = inspect.signature(RULES[name]).parameters.values()
    return [each.name for each in found if each.kind is each.POSITIONAL_OR_KEYWORD]


def _call(name: str) -> str:
    required = inspect.signature(RULES[name]).parameters
    needed = [
        each for each in _parameters(name) if required[each].default is inspect.Parameter.empty
    ]
    return f"{name}({', '.join(needed)})"


def _tuples(value: Any) -> Value:
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


def _data(rule: str, name: str, value: Value) -> object:
    """An argument as the rule takes it: a list as a tensor, or as Python numbers."""
    if not isinstance(value, tuple):
        return value
    shape = _shape(name, value)
    if name == "lengths":
        return value
    numbers = torch.tensor(value, device="cpu").reshape(shape)
    if rule == "Dense" and bool(((numbers == 0) | (numbers == 1)).all()):
        return numbers.bool()
    return numbers


def _shape(name: str, value: Value) -> tuple[int, ...]:
    """The lengths of nested lists, whose rows must be alike."""
    if not isinstance(value, tuple):
        if value is None:
            raise ValueError(f"{name} is a list of whole numbers, got None in it")
        return ()
    if not value:
        raise ValueError(f"{name} is a list of one number or more, got an empty one")
    shapes = {_shape(name, each) for each in value}
    if len(shapes) > 1:
        raise ValueError(f"the rows of {name} have one length, got {sorted(shapes)}")
    return (len(value), *shapes.pop())
