"""The grammar of masks that are typed: rules, their data, and `&`, `|`, `~` as in Python.

    mask     = both { "|" both }
    both     = part { "&" part }
    part     = "~" part | "(" mask ")" | NAME [ "(" arguments ")" ]
    argument = [ NAME "=" ] value
    value    = [ "-" ] NUMBER | "True" | "False" | "None" | "[" values "]" | "(" values ")"

Nothing is evaluated as Python: names are looked up in one table, and all else is refused.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from operator import and_, or_
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

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
DEEPEST = 50  # brackets and ~ inside each other: far below Python's own limit of 1000 calls
MOST_RULES = 64  # of one mask: combining compares each with each
DIGITS = 18  # of a number: fits 64 bits
EXCERPT = 60  # characters shown around a mistake, so that the caret stands on a line of 80

Value = int | bool | None | tuple[Any, ...]  # tuples of values
TOKEN = re.compile(r"\s*(?:(?P<name>[^\W\d]\w*)|(?P<number>\d\w*(?:\.\w*)?)|(?P<sign>\S))")
SIGNS = frozenset("()[],=&|~-")


@dataclass(frozen=True)
class Rule:
    """A rule that can be typed.

    Args:
        make: its class.
        required: names of the arguments that it needs, in order.
        optional: names of those that follow.
        as_lists: names of the arguments that it takes as Python numbers; others are tensors.
    """

    make: type[Mask]
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    as_lists: tuple[str, ...] = ()


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "Everything": Rule(Everything),
        "Nothing": Rule(Nothing),
        "Causal": Rule(Causal),
        "SlidingWindow": Rule(SlidingWindow, ("size",)),
        "Chunked": Rule(Chunked, ("size",), ("start",)),
        "Prefix": Rule(Prefix, ("lengths",), ("start",), as_lists=("lengths",)),
        "Documents": Rule(Documents, ("ids",)),
        "Padding": Rule(Padding, ("valid",)),
        "Dense": Rule(Dense, ("keep",)),
        "Tree": Rule(Tree, ("parents",)),
    }
)
CONSTANTS: Mapping[str, Mask] = MappingProxyType({"EVERYTHING": EVERYTHING, "NOTHING": NOTHING})
WORDS: Mapping[str, Value] = MappingProxyType({"True": True, "False": False, "None": None})
REFUSED = {
    "Where": "Where(function) holds Python, which is not run from a text; draw it in Python: "
    "mask.draw(), or regard.see.mask_picture.svg(mask)",
    "and": "masks combine with &, not `and`",
    "or": "masks combine with |, not `or`",
    "not": "the complement of a mask is ~mask, not `not`",
}


class Token(NamedTuple):
    """A word, number or sign, and where it begins."""

    kind: str
    text: str
    at: int


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
    return _Parser(text).whole()


class _Parser:
    """Reads tokens one by one; a method for each line of the grammar."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0  # the next token
        self.depth = self.rules = 0
        self.tokens = [self._token(match) for match in TOKEN.finditer(text)]
        self.tokens.append(Token("end", "", len(text.rstrip())))

    def _token(self, match: re.Match[str]) -> Token:
        kind = match.lastgroup or ""
        return Token(kind, match[kind], match.start(kind))

    @property
    def next(self) -> Token:
        return self.tokens[self.at]

    def _take(self, *texts: str) -> bool:
        """Whether the next token is one of these signs, which is then read."""
        found = self.next.kind == "sign" and self.next.text in texts
        self.at += found
        return found

    def _need(self, text: str, why: str) -> None:
        if not self._take(text):
            self._refuse(self.next, why)

    def _deeper(self, token: Token) -> None:
        self.depth += 1
        if self.depth > DEEPEST:
            self._refuse(token, f"brackets and ~ are at most {DEEPEST} deep")

    def _refuse(self, token: Token, why: str) -> NoReturn:
        """Raise with the place of a token below the text around it."""
        if token.text == "<":
            why = (
                "the numbers of a tensor are not in the mask's code; write them out, as in "
                "Padding([[1, 1, 0]])"
            )
        elif token.kind == "sign" and token.text not in SIGNS:
            why = f"{token.text!r} means nothing here; masks combine with & | ~ and brackets"
        first = max(0, min(token.at - EXCERPT // 2, len(self.text) - EXCERPT))
        line = "".join(c if c.isprintable() else " " for c in self.text[first : first + EXCERPT])
        raise ValueError(f"{why}\n  {line}\n  {' ' * (token.at - first)}^")

    def whole(self) -> Mask:
        """The mask, and nothing after it."""
        mask = self._any_of()
        if self.next.kind != "end":
            why = REFUSED.get(self.next.text, "after a rule comes &, | or the end")
            self._refuse(self.next, why)
        return mask

    def _any_of(self) -> Mask:
        parts = [self._all_of()]
        while self._take("|"):
            parts.append(self._all_of())
        return reduce(or_, parts)

    def _all_of(self) -> Mask:
        parts = [self._part()]
        while self._take("&"):
            parts.append(self._part())
        return reduce(and_, parts)

    def _part(self) -> Mask:
        token = self.next
        if self._take("~"):
            self._deeper(token)
            mask = ~self._part()
        elif self._take("("):
            self._deeper(token)
            mask = self._any_of()
            self._need(")", "a bracket is not closed: ) is missing here")
        else:
            return self._rule()
        self.depth -= 1
        return mask

    def _rule(self) -> Mask:
        token = self.next
        name = token.text
        if token.kind != "name" or (name not in RULES and name not in CONSTANTS):
            listed = ", ".join((*RULES, *CONSTANTS))
            what = f"{name[:EXCERPT]!r} is no rule" if name else "a rule is missing"
            self._refuse(token, REFUSED.get(name, f"{what}; the rules are {listed}"))
        self.at += 1
        self.rules += 1
        if self.rules > MOST_RULES:
            self._refuse(token, f"a mask that is typed has at most {MOST_RULES} rules")
        if name in CONSTANTS:
            return CONSTANTS[name]
        rule = RULES[name]
        called = f"{name}({', '.join(rule.required)})"
        if not self._take("("):
            why = f"{name} needs data: {called}" if rule.required else f"a rule is called: {called}"
            self._refuse(token, why)
        given = self._arguments(rule, called)
        if missing := [each for each in rule.required if each not in given]:
            self._refuse(token, f"{name} needs {missing[0]}: {called}")
        try:
            return rule.make(**{each: _data(rule, each, given[each]) for each in given})
        except (TypeError, ValueError) as error:
            self._refuse(token, str(error))

    def _arguments(self, rule: Rule, called: str) -> dict[str, Value]:
        """The arguments by name, with the closing bracket."""
        names = (*rule.required, *rule.optional)
        given: dict[str, Value] = {}
        named = False
        while not self._take(")"):
            token = self.next
            follows = self.tokens[min(self.at + 1, len(self.tokens) - 1)]
            if token.kind == "name" and follows.text == "=":
                self.at += 2
                name, named = token.text, True
                if name not in names:
                    takes = " and ".join(names) or "no arguments"
                    self._refuse(token, f"{rule.make.__name__} takes {takes}, got {name[:60]!r}")
            else:
                if named or len(given) == len(names):
                    self._refuse(token, f"too many arguments here: {called}")
                name = names[len(given)]
            if name in given:
                self._refuse(token, f"{name} is given twice")
            given[name] = self._value()
            if not self._take(","):
                self._need(")", "after an argument comes , or )")
                break
        return given

    def _value(self) -> Value:
        token = self.next
        if self._take("[", "("):
            self._deeper(token)
            value = self._values("]") if token.text == "[" else self._bracket()
            self.depth -= 1
            return value
        self.at += 1
        if token.text == "-" and self.next.kind == "number":
            return -self._number()
        if token.kind == "number":
            self.at -= 1
            return self._number()
        if token.kind == "name" and token.text in WORDS:
            return WORDS[token.text]
        self._refuse(token, "data are whole numbers, True, False, None and lists of them")

    def _values(self, close: str) -> tuple[Value, ...]:
        """The values of a list, with the closing bracket."""
        values: list[Value] = []
        while not self._take(close):
            values.append(self._value())
            if not self._take(","):
                self._need(close, f"after a value comes , or {close}")
                break
        return tuple(values)

    def _bracket(self) -> Value:
        """A tuple, or one value in brackets, with the closing one."""
        values = self._values(")")
        return values[0] if len(values) == 1 and self.tokens[self.at - 2].text != "," else values

    def _number(self) -> int:
        token = self.next
        self.at += 1
        if not token.text.isascii() or not token.text.isdecimal():
            self._refuse(token, "data are whole numbers, as 0, 1 and 4096")
        if len(token.text) > DIGITS:
            self._refuse(token, f"a number has at most {DIGITS} digits, got {len(token.text):,}")
        return int(token.text)


def _data(rule: Rule, name: str, value: Value) -> object:
    """An argument as the rule takes it: a list as a tensor, or as Python numbers."""
    if not isinstance(value, tuple):
        return value
    shape = _shape(name, value)
    if name in rule.as_lists:
        return value
    numbers = torch.tensor(value, device="cpu").reshape(shape)
    if rule.make is Dense and bool(((numbers == 0) | (numbers == 1)).all()):
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
