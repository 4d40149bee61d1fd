"""The state that a module keeps between calls, read from its source: tables, memos and locks."""

import ast
from collections.abc import Iterator
from pathlib import Path

CHANGING = {  # methods of dicts, lists and sets that change them
    *("append", "extend", "insert", "remove", "pop", "clear", "add", "discard", "update"),
    *("setdefault", "popitem", "move_to_end", "appendleft", "popleft"),
}
KINDS = {  # constructors of objects that are made to be changed
    *("WeakKeyDictionary", "WeakValueDictionary", "WeakSet", "WeakIdKeyDictionary"),
    *("local", "Lock", "RLock", "Condition", "Event", "Semaphore", "ContextVar"),
    *("count", "cycle", "OrderedDict", "defaultdict", "deque", "Counter"),
}
MEMOS = {"cache", "lru_cache"}
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def state_of(sources: Path) -> set[str]:
    """`folder/module.name` of everything below a folder that calls leave behind."""
    return {
        f"{path.relative_to(sources).with_suffix('')}.{name}"
        for path in sources.rglob("*.py")
        for name in state_in(path.read_text())
    }


def state_in(source: str) -> set[str]:
    """The names of a module that hold state, or whose attributes functions replace."""
    module = ast.parse(source)
    names = {*_bound(module, inside=False), *_imported(module)}
    found = {name for name, value in _values(module) if _called(value) in KINDS}
    for node in ast.walk(module):
        if isinstance(node, ast.Global):
            found |= {*node.names}
        if isinstance(node, Function):
            found |= _changed(node) & (names - _own(node))
            if any(_called(each) in MEMOS for each in getattr(node, "decorator_list", [])):
                found.add(node.name)
    for statement in module.body:
        calls = (node for node in ast.walk(statement) if isinstance(node, ast.Call))
        if any(_called(call.func) == "lru_cache" for call in calls):  # `lru_cache(128)(function)`
            found |= {*_bound(statement, inside=False)}
    return found


def _values(module: ast.Module) -> Iterator[tuple[str, ast.expr | None]]:
    for node in module.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    yield target.id, node.value


def _bound(node: ast.AST, *, inside: bool) -> Iterator[str]:
    """Names that the node assigns or defines, those `inside` functions and classes, too."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
        if not inside:
            return
    for child in ast.iter_child_nodes(node):
        yield from _bound(child, inside=inside)


def _imported(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((each.asname or each.name).partition(".")[0] for each in node.names)


def _own(function: Function) -> set[str]:
    """The arguments and variables of a function."""
    arguments = {each.arg for each in ast.walk(function) if isinstance(each, ast.arg)}
    return arguments | {*_bound(function, inside=True)}


def _changed(function: Function) -> set[str]:
    """Names whose items or attributes the function sets, or whose changing methods it calls."""
    found = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Subscript | ast.Attribute):
            target = node.value if isinstance(node.ctx, ast.Store | ast.Del) else None
        elif isinstance(node, ast.Call) and _called(node.func) in ("setattr", "__setattr__"):
            target = node.args[0]
        elif isinstance(node, ast.Call) and _called(node.func) in CHANGING:
            target = getattr(node.func, "value", None)
        elif isinstance(node, ast.Call) and (_called(node.func) or "").startswith("set_"):
            target = getattr(node.func, "value", None)  # torch.set_num_threads
        else:
            continue
        if isinstance(root := _root(target), ast.Name):
            found.add(root.id)
    return found


def _root(node: ast.expr | None) -> ast.expr | None:
    """The first name of a chain of attributes: `os` of `os.environ`."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node


def _called(node: ast.expr | None) -> str | None:
    """The last name of what is called: `WeakSet` of `weakref.WeakSet[int]()`."""
    while isinstance(node, ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None
