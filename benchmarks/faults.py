"""Small faults in the library's source, drawn by a seed, and put into a process that runs."""

import ast
import copy
import dataclasses
import gc
import importlib
import linecache
import random
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("layers", "masks", "cache", "ops", "rope", "hf", "convert")
PROBE = "__regard_reached__"  # a builtin while tests are recorded
FLIPPED = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OTHER = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult}


COMPILED = {  # files whose functions numba compiles, and the function that starts their code
    "ops/kernels/": ("src/regard/ops/kernels/threads.py", "launch"),
    "cache/quantizing_kernel.py": ("src/regard/cache/quantizing.py", "quantized"),
}
NOT_COMPILED = (
    "launching.py",
    "launching_prefill.py",
    "threads.py",
    "stepping.py",
    "specification.py",
)


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault: the node of a file's syntax tree that changes, counted in `ast.walk`, and how.

    Attributes:
        file: below the root of the repository.
        function: the qualified name of the module's function, or method, that holds the node.
        line: of the node.
        node: its number.
        kind: "flip", "off by one", "swap", "other operator" or "drop".
        text: the statement that changes, or its first line.
    """

    file: str
    function: str
    line: int
    node: int
    kind: str
    text: str


def draw(number: int, seed: int) -> list[Fault]:
    """Faults drawn at random from all that are possible."""
    files = sorted(path for each in PACKAGES for path in (ROOT / "src/regard" / each).rglob("*.py"))
    possible = {path: list(faults_of(path)) for path in files}
    every = [fault for path in files for fault in possible[path]]
    return random.Random(seed).sample(every, number)


def faults_of(path: Path) -> Iterator[Fault]:
    """Every fault that a file can have."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    numbers = {id(node): at for at, node in enumerate(ast.walk(tree))}
    for name, function in functions(tree):
        for statement in function.body:
            for node, line in changeable(statement):
                for kind in kinds(node):
                    text = source.splitlines()[line - 1].strip()
                    file = path.relative_to(ROOT).as_posix()
                    yield Fault(file, name, line, numbers[id(node)], kind, text)


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """The functions of a module and the methods of its classes, by qualified name."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    yield f"{node.name}.{method.name}", method


def changeable(node: ast.AST) -> Iterator[tuple[ast.AST, int]]:
    """The nodes of a statement and their lines, without annotations and messages of errors."""
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr):
        return
    yield node, getattr(node, "lineno", 0)
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from changeable(child)


def kinds(node: ast.AST) -> list[str]:
    """The faults that a node can have."""
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in FLIPPED:
            return ["flip"]
        case ast.BoolOp():
            return ["other operator"]
        case ast.BinOp(op=operator) if type(operator) in OTHER:
            return ["other operator"]
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            return ["off by one"]
        case ast.Call(func=ast.Name(id="isinstance" | "getattr" | "hasattr")):
            return []  # swapped, they always raise
        case ast.Call(args=[first, second, *_]) if ast.dump(first) != ast.dump(second):
            starred = isinstance(first, ast.Starred) or isinstance(second, ast.Starred)
            return [] if starred else ["swap"]
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            return ["drop"]
    return []


def faulty(tree: ast.Module, fault: Fault) -> ast.Module:
    """The syntax tree of a file with one fault."""
    tree = copy.deepcopy(tree)
    node = next(each for at, each in enumerate(ast.walk(tree)) if at == fault.node)
    match node:
        case ast.Compare():
            node.ops = [FLIPPED[type(node.ops[0])]()]
        case ast.BoolOp():
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        case ast.BinOp():
            node.op = OTHER[type(node.op)]()
        case ast.Constant():
            node.value += 1
        case ast.Call():
            node.args[:2] = node.args[1::-1]
        case _:
            replace_statement(tree, node, ast.copy_location(ast.Pass(), node))
    return ast.fix_missing_locations(tree)


def place_of_probe(fault: Fault) -> Fault:
    """The fault, or, in code that numba compiles, a place in the function that starts the code:
    a probe cannot be compiled, and the code is often older than the test."""
    for files, (file, function) in COMPILED.items():
        if fault.file.startswith(f"src/regard/{files}") and not fault.file.endswith(NOT_COMPILED):
            tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
            body = dict(functions(tree))[function].body
            node = next(
                at for at, each in enumerate(ast.walk(tree)) if each is body[1]
            )  # after the docstring
            return dataclasses.replace(fault, file=file, function=function, node=node)
    return fault


def probed(tree: ast.Module, faults: list[tuple[int, Fault]]) -> ast.Module:
    """The syntax tree of a file that reports when a faulty statement is reached."""
    tree = copy.deepcopy(tree)
    nodes = list(ast.walk(tree))
    for number, fault in faults:
        statement = statement_of(tree, nodes[fault.node])
        call = ast.parse(f"{PROBE}({number})").body[0]
        replace_statement(tree, statement, ast.copy_location(call, statement), statement)
    return ast.fix_missing_locations(tree)


def statement_of(tree: ast.Module, node: ast.AST) -> ast.stmt:
    """The innermost statement that holds a node, in a list of statements."""
    holders = [
        each for body in bodies(tree) for each in body if any(one is node for one in ast.walk(each))
    ]
    return min(holders, key=lambda each: sum(1 for _ in ast.walk(each)))


def replace_statement(tree: ast.Module, old: ast.AST, *new: ast.stmt) -> None:
    """Put statements in the place of one."""
    for body in bodies(tree):
        for at, each in enumerate(body):
            if each is old:
                body[at : at + 1] = new
                return


def bodies(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    """Every list of statements in a tree."""
    for parent in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            body = getattr(parent, name, None)
            if isinstance(body, list):
                yield body


def install(file: str, tree: ast.Module, names: set[str]) -> None:
    """Replace the code of functions of a file that is imported, and of functions that these have
    made, by that of a changed tree.

    The changed source is what `inspect` shows from now on: code that is compiled and stored is
    named by its source.
    """
    path = str(ROOT / file)
    module = file.removeprefix("src/").removesuffix(".py").replace("/", ".")
    importlib.import_module(module.removesuffix(".__init__"))
    found = list(codes(compile(tree, path, "exec")))
    places = Counter((each.co_qualname, each.co_firstlineno) for each in found)
    changed = {(each.co_qualname, each.co_firstlineno): each for each in found}
    changed = {place: each for place, each in changed.items() if places[place] == 1}  # lambdas
    gc.unfreeze()  # `conftest` freezes what was imported, and frozen objects are not listed
    for each in gc.get_objects():
        if type(each) is types.FunctionType and each.__code__.co_filename == path:
            new = changed.get((each.__code__.co_qualname, each.__code__.co_firstlineno))
            known = each.__code__.co_qualname.partition(".<locals>")[0] in names
            if known and new is not None and each.__code__.co_freevars == new.co_freevars:
                each.__code__ = new
    lines = ast.unparse(tree).splitlines(keepends=True)
    linecache.cache[path] = (sum(map(len, lines)), None, lines, path)


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code of each function of a module, of its classes and of other functions."""
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield each
            yield from codes(each)
