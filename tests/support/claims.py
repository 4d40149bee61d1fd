"""What a page claims to exist: names of regard, calls, files, options, commands.

`faults` reads a page and says what is not there. Only code is read: text in backticks and blocks
of commands. What cannot be understood is passed over, so that pages may show code of others.
"""

import ast
import builtins
import importlib
import inspect
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn.attention import flex_attention

import regard
import regard.convert.report
import regard.hf
import regard_verify
from command_lines import FOLDERS, OPTION, commands, faults_of_command, options, verbs
from pages import ROOT, fences, inline_codes
from regard.hf.generating.generation_cache import GenerationCache
from regard_verify import Report

PACKAGES = (
    "masks", "cache", "rope", "sparse", "hf", "convert", "compare", "plan", "see",
    "distributed", "bench",
)  # fmt: skip
CONTRIBUTORS = ("CONTRIBUTING.md", "docs/design.md", "docs/verify-details.md")  # know the inside
FOREIGN = {  # names that pages mention, by the library they come from
    "a heading of CHANGELOG.md": ["Unreleased"],
    "jaxtyping": ["Bool", "Float", "Int", "Shaped"],
    "sentence-transformers": ["SentenceTransformer"],
    "sizes": ["Dk", "Dv"],
    "torchtune": ["Llama3ScaledRoPE", "RotaryPositionalEmbeddings"],
    "trl": ["SFTConfig"],
    "xformers": [
        "BlockDiagonalCausalLocalAttentionMask",
        "BlockDiagonalCausalMask",
        "BlockDiagonalMask",
        "LocalAttentionFromBottomRightMask",
        "LowerTriangularFromBottomRightLocalAttentionMask",
        "LowerTriangularFromBottomRightMask",
        "LowerTriangularMask",
        "LowerTriangularMaskWithTensorBias",
    ],
}
FILES = ("py", "json", "md", "html", "sh", "svg", "png", "toml")  # what such names end in
CAMEL = re.compile(r"[A-Z][a-z]\w*")
INSIDE = tuple(path.name for path in (ROOT / "src/regard").iterdir() if path.is_dir())


@cache
def public() -> dict[str, list[Any]]:
    """What is public in regard, by its name."""
    found: dict[str, list[Any]] = {}
    packages = [importlib.import_module(f"regard.{name}") for name in PACKAGES]
    for module in (regard, regard_verify, *packages):
        for name in module.__all__:
            found.setdefault(name, []).append(getattr(module, name))
    return found


@cache
def inside() -> set[str]:
    """The classes of regard, also those that are not public."""
    sources = (path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    return {name for source in sources for name in re.findall(r"^class (\w+)", source, re.M)}


@cache
def known() -> set[str]:
    """Names in camel case that a page may mention beside those of regard."""
    others = {*dir(transformers), *regard.hf.FAMILIES, *dir(builtins)}.union(*FOREIGN.values())
    return others.union(
        *(dir(each) for each in (torch, nn, torch.nn.attention, flex_attention, Path))
    )


@cache
def variables() -> dict[str, list[Any]]:
    """Objects of the kinds that pages call by these names."""
    mla = regard.MultiHeadLatentAttention(
        8, 2, kv_lora_rank=4, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=4,
        rope=regard.Rotary(2, pairing="pairs"),
    )  # fmt: skip
    layer = regard.GroupedQueryAttention(8, num_heads=2, num_kv_heads=1)
    pool = regard.PagePool(num_pages=8)
    caches = [regard.KVCache(), regard.QuantizedCache(bits=8), transformers.DynamicCache()]
    caches.append(regard.PagedCache(pool))
    return {
        "layer": [layer, mla],
        "mla": [mla],
        "cache": [*caches, GenerationCache, regard.cache],
        "pool": [pool],
        "mask": [regard.Causal(), torch.zeros(1)],
        "rope": [regard.Rotary(4), regard.rope],
        "memory": [regard.Memory],
        "report": [Report, regard.convert.report.Report],
    }


@cache
def sources() -> str:
    """All programs of the repository, in which an environment variable must occur."""
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    files += [path for path in (ROOT / "scripts").iterdir() if path.is_file()]
    this = Path(__file__).name
    return "".join(p.read_text() for p in files if p.name not in (this, "test_pages.py"))


def faults(page: str, text: str) -> list[str]:
    """What a page claims to exist, and does not."""
    found = []
    names = bound(text)
    if page in CONTRIBUTORS:
        names |= inside()
    for code in inline_codes(text):
        found += faults_of_code(code, names)
    for block in fences(text, "sh", "bash", "shell", "console"):
        for line in commands(block):
            found += faults_of_command(line, whole=True)
    for block in fences(text, "", "text"):
        for line in block.splitlines():
            if re.match(rf"regard ({'|'.join(verbs())})\b", line):
                found += faults_of_command(line, whole=False)
    for name in set(re.findall(r"\bREGARD_[A-Z_]+", text)):
        if name not in sources():
            found.append(f"{name}: no such environment variable")
    for extras in re.findall(r"\bregard\[([\w, ]+)\]", text):
        unknown = {each.strip() for each in extras.split(",")} - all_extras()
        found += [f"regard[{each}]: no such extra" for each in sorted(unknown)]
    return found


@cache
def all_extras() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return set(project["optional-dependencies"])


def bound(text: str) -> set[str]:
    """The names that the snippets of a page define or import themselves."""
    found: set[str] = set()
    for block in fences(text, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.alias):
                found.add(node.asname or node.name)
            elif isinstance(node, ast.arg):
                found.add(node.arg)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
    return found


def faults_of_code(code: str, names: set[str]) -> list[str]:
    """The faults of one piece of code in a line of text."""
    if re.match(r"(regard|python|pip|pytest) \S|\./scripts/", code):
        return [fault for line in commands(code) for fault in faults_of_command(line, whole=False)]
    found = [f"{code}: no such file" for path in paths(code) if not exists(path)]
    found += [f"{each}: no such option" for each in OPTION.findall(code) if each not in options()]
    tree = parsed(code)
    if tree is None:
        chains = re.findall(r"(?<![\w/])regard(?:\.\w+)+", code)
        chains = [each for each in chains if each.rpartition(".")[2] not in FILES]
        return found + [f"{each}: no such name" for each in chains if resolved(each) is None]
    for node in ast.walk(tree):
        found += faults_of_node(node, names)
    return found


def parsed(code: str) -> ast.AST | None:
    """The code as an expression, or as arguments; None if it is neither."""
    code = code.replace("…", "...")
    for form in (code, f"_({code})"):
        try:
            return ast.parse(form, mode="eval")
        except (SyntaxError, ValueError):
            continue
    return None


def paths(code: str) -> Iterator[str]:
    """The code, if it names a file or folder of the repository."""
    if re.fullmatch(r"[\w.*-]+(/[\w.*<>-]+)*/?", code) and "/" in code:
        first, *rest = code.split("/")
        if first in FOLDERS or (first in INSIDE and (rest[-1] == "" or "." in rest[-1])):
            yield code


def exists(path: str) -> bool:
    """Whether a file is there, from the root, in the package or among the tests."""
    path = re.sub(r"\b[A-Z]+\b|<\w+>", "*", path).rstrip("/")
    homes = (ROOT, ROOT / "src/regard", ROOT / "tests", ROOT / "docs")
    return any(any(home.glob(path)) for home in homes)


ROOTS = {"regard": regard, "torch": torch, "nn": nn, "F": nn.functional}


def resolved(path: str) -> Any:
    """What a dotted name stands for; None if there is no such thing."""
    first, *rest = path.split(".")
    value = ROOTS[first]
    for name in rest:
        if not hasattr(value, name) and hasattr(value, "__path__"):
            inner = f"{value.__name__}.{name}"
            if find_spec(inner):
                importlib.import_module(inner)
        if not hasattr(value, name):
            return None
        value = getattr(value, name)
    return value


def faults_of_node(node: ast.AST, names: set[str]) -> list[str]:
    """The faults of one name, attribute or call."""
    if isinstance(node, ast.Name) and CAMEL.fullmatch(node.id):
        is_placeholder = node.id.startswith("My")
        if node.id not in {*public(), *names} | known() and not is_placeholder:
            return [f"{node.id}: no such name in regard, torch or transformers"]
    if isinstance(node, ast.Attribute):
        chain = ast.unparse(node)
        first, _, rest = chain.partition(".")
        if rest in FILES:
            return []
        if re.fullmatch(r"[\w.]+", chain) and first in ROOTS and resolved(chain) is None:
            return [f"{chain}: no such name"]
        known_objects = variables().get(first, []) if rest.isidentifier() else []
        if known_objects and not any(has(each, rest) for each in known_objects):
            return [f"{chain}: no such attribute"]
    if isinstance(node, ast.Call):
        callees = callees_of(node, names)
        if callees and not any(binds(each, node) for each in callees):
            return [f"{ast.unparse(node)}: no such arguments"]
    return []


def has(thing: Any, name: str) -> bool:
    fields = {*getattr(thing, "__dataclass_fields__", ()), *getattr(thing, "_fields", ())}
    return hasattr(thing, name) or name in fields


def callees_of(call: ast.Call, names: set[str]) -> list[Any]:
    """What is called, if that is of regard."""
    function = ast.unparse(call.func)
    first, _, rest = function.partition(".")
    if function in public() and function not in names - {*public()}:
        is_clear = CAMEL.fullmatch(function) or function in regard.__all__
        return public()[function] if is_clear and function != "explain" else []
    if first == "regard" and rest:
        return [each for each in [resolved(function)] if each is not None]
    if first in variables() and rest.isidentifier():
        return [getattr(each, rest) for each in variables()[first] if hasattr(each, rest)]
    return []


def binds(function: Callable[..., Any], call: ast.Call) -> bool:
    """Whether the function takes these arguments; `...` stands for any."""
    if any(isinstance(each, ast.Starred) for each in call.args):
        return True
    given = [each for each in call.args if not is_ellipsis(each)]
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    if len(given) < len(call.args):
        given = []
    is_unbound = inspect.isfunction(function) and "self" in signature.parameters
    try:
        keywords = {each.arg: None for each in call.keywords if each.arg}
        signature.bind_partial(*[None] * (len(given) + is_unbound), **keywords)
    except TypeError:
        return False
    return True


def is_ellipsis(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...


if __name__ == "__main__":
    for each in sys.argv[1:]:
        print(each, *faults(each, (ROOT / each).read_text(encoding="utf-8")), sep="\n  ")
