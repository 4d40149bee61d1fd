"""The source of an attention class as comparable text: what its forward and its helpers compute.

Names of classes and of local variables, annotations, docstrings and decorators are left out, so two
classes that compute the same in the same words have the same text.
"""

import ast
import builtins
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from types import FunctionType
from typing import Any

LIBRARIES = ("torch", "math", "typing", "collections", "functools")  # used as they are


@cache
def text_of(kind: type) -> tuple[str, ...]:
    """The lines of the forward of a class and of each function that it calls; () if they cannot be
    read, or call a base class."""
    try:
        lines = tuple(_lines(kind, vars_of(kind)["forward"], set()))
    except (OSError, TypeError, SyntaxError, KeyError):
        return ()
    return () if any("super()" in line for line in lines) else lines


def first_difference(ours: tuple[str, ...], others: tuple[str, ...]) -> str:
    """In words: the first line of one text that the other lacks."""
    for own, other in zip(ours, others, strict=False):
        if own != other:
            return f"`{own.strip()}`, where the other has `{other.strip()}`"
    return "one has more lines than the other"


def vars_of(kind: type) -> dict[str, Any]:
    """The attributes of a class and of its bases, without those of every module."""
    found: dict[str, Any] = {}
    for each in reversed(kind.__mro__):
        if not each.__module__.startswith("torch.") and each is not object:
            found |= vars(each)
    return found


def _lines(kind: type | None, function: Any, seen: set[Any]) -> Iterator[str]:
    """The lines of a function and then of those that it calls, each once."""
    function = inspect.unwrap(getattr(function, "__func__", getattr(function, "fget", function)))
    seen.add(function)
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    form = _Form(function, vars_of(kind) if kind else {})
    yield from ast.unparse(ast.fix_missing_locations(form.visit(tree))).splitlines()
    for called in form.called:
        if inspect.unwrap(getattr(called, "fget", called)) not in seen:
            yield from _lines(kind, called, seen)


class _Form(ast.NodeTransformer):
    """Rewrites one function, and collects the functions that it calls."""

    def __init__(self, function: FunctionType, attributes: dict[str, Any]) -> None:
        code = function.__code__
        self.arguments = set(inspect.signature(function).parameters)
        self.locals = {*code.co_varnames, *code.co_cellvars} - self.arguments
        self.names: dict[str, str] = {}
        self.globals, self.attributes = function.__globals__, attributes
        self.called: list[Any] = []

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.decorator_list, node.returns, node.name = [], None, "function"
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        return self.generic_visit(node)

    def visit_arguments(self, node: ast.arguments) -> ast.AST:
        """Whether an argument may be left out changes nothing that is computed from it."""
        node.defaults = [each for each in node.defaults if ast.unparse(each) != "None"]
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is None:
            return ast.Pass()
        return self.visit(ast.Assign(targets=[node.target], value=node.value, lineno=node.lineno))

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id in self.locals:
            node.id = self.names.setdefault(node.id, f"v{len(self.names)}")
        elif node.id not in self.arguments and not hasattr(builtins, node.id):
            node.id = self._outside(node.id)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            found = self.attributes.get(node.attr)
            if isinstance(found, FunctionType | property):
                self.called.append(found)
        return self.generic_visit(node)

    def _outside(self, name: str) -> str:
        """The name of a global: of a function that is followed, its turn."""
        found = self.globals.get(name)
        if isinstance(found, FunctionType) and not found.__module__.startswith(LIBRARIES):
            if found not in self.called:
                self.called.append(found)
            return f"function_{self.called.index(found)}"
        return name
