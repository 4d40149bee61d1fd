"""Every public name has a docstring that a reference page can show; of a function, with an example.

The examples themselves are run by `--doctest-modules`. Here they are read, from the source: what
has a docstring has one of its own, neither inherited nor generated.
"""

import ast
import builtins
import doctest
import functools
import importlib
import inspect
import re
from pathlib import Path

import griffe

from logged import records_of

ROOT = Path(__file__).parents[2]
SOURCES = [ROOT / "src", ROOT / "packages/regard-verify/src"]
PACKAGES = (
    ["regard"]
    + [
        f"regard.{name}"
        for name in (
            *("masks", "cache", "sparse", "rope", "hf", "convert", "compare", "bench"),
            *("plan", "see", "distributed"),
        )
    ]
    + ["regard_verify"]
)
LIBRARIES = ("regard", "regard_verify")


@functools.cache
def library(name: str) -> griffe.Object:
    """The package, read for the first test that asks: not by the workers that run none of them."""
    return griffe.load(name, search_paths=SOURCES, docstring_parser="google")


@functools.cache
def public_names() -> dict[str, str]:
    """The path of each public name, as users import it, and of the module that defines it."""
    names: dict[str, str] = {}
    for package in PACKAGES:
        for name in importlib.import_module(package).__all__:
            thing = named(f"{package}.{name}")
            names.setdefault(thing.path, f"{package}.{name}")
    return {path: home for home, path in names.items()}


def named(path: str) -> griffe.Object:
    name, _, inside = path.partition(".")
    thing = library(name)[inside] if inside else library(name)
    return thing.final_target if thing.is_alias else thing


def constants() -> list[str]:
    return sorted(path for path in public_names() if named(path).is_attribute)


def documented() -> list[str]:
    return sorted(public_names().keys() - set(constants()))


def methods() -> list[str]:
    return sorted(
        f"{path}.{name}"
        for path in documented()
        if named(path).is_class
        for name, member in named(path).members.items()
        if not name.startswith("_") and (member.is_function or "property" in member.labels)
    )


ITEM = r"(?:[-*] |\d+\. )"  # of a list in Markdown


def faults_of_text(thing: griffe.Object) -> list[str]:
    """What is wrong with the docstring, as a page shows it."""
    if thing.docstring is None:
        return ["there is no docstring"]
    first, *rest = thing.docstring.value.splitlines()
    faults = []
    if rest and rest[0]:
        first, faults = "", ["the first sentence takes more than a line"]
    if not first.endswith(".") and not faults:
        faults.append(f"the first line ends without a full stop: {first}")
    if len(first) > 100:
        faults.append(f"the first line has {len(first)} columns")
    for section in thing.docstring.parse("google"):
        if section.kind is griffe.DocstringSectionKind.admonition:
            faults.append(f"this is read as a section: {section.title}")
        if section.kind is griffe.DocstringSectionKind.text:
            if ">>>" in section.value:
                faults.append("an example stands outside of a section `Examples:`")
            if re.search(rf"(?m)^(?!{ITEM}|  )\S.*\n{ITEM}", section.value):
                faults.append("a list follows its paragraph without a blank line")
    return faults


def faults_of(thing: griffe.Object) -> list[str]:
    """Everything that is wrong with the docstring of a name that users import."""
    faults = faults_of_text(thing)
    if thing.docstring is not None:
        faults += faults_of_sections(thing) + faults_of_examples(thing)
    return faults


STARS = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}


def faults_of_sections(thing: griffe.Object) -> list[str]:
    """What the parser of the site refuses, and arguments that are not those of the signature."""
    with records_of("griffe") as records:
        sections = thing.docstring.parse("google")
    messages = [record.getMessage() for record in records]
    faults = [message for message in messages if ".py:" in message]
    takes = [
        STARS.get(each.kind, "") + each.name
        for each in getattr(thing, "parameters", [])
        if each.name not in ("self", "cls")
    ]
    args = [s for s in sections if s.kind is griffe.DocstringSectionKind.parameters]
    for section in args:
        described = [each.name for each in section.value]
        if described != takes:
            faults.append(f"Args has {described}, the signature {takes}")
    fields = [s for s in sections if s.kind is griffe.DocstringSectionKind.attributes]
    for section in fields:
        described, own = [each.name for each in section.value], fields_of(thing)
        if described != own:
            faults.append(f"Attributes has {described}, the class {own}")
    if len(takes) >= 3 and not args and not fields:
        faults.append(f"{len(takes)} parameters, and no section `Args:`")
    for section in sections:
        if section.kind is griffe.DocstringSectionKind.raises:
            for each in section.value:
                for name in str(each.annotation).strip("()").split(", "):
                    if not is_exception(name):
                        faults.append(f"Raises has {name}, which is no exception")
    return faults


def is_exception(name: str) -> bool:
    homes = [builtins, *map(importlib.import_module, PACKAGES)]
    found = next((getattr(home, name) for home in homes if hasattr(home, name)), None)
    return inspect.isclass(found) and issubclass(found, BaseException)


def fields_of(thing: griffe.Object) -> list[str]:
    """The annotated attributes of a class, in order."""
    return [
        name
        for name, member in thing.members.items()
        if member.is_attribute and member.annotation is not None
        if not name.startswith("_") and "property" not in member.labels
    ]


def examples_of(thing: griffe.Object) -> list[doctest.Example]:
    return doctest.DocTestParser().get_examples(thing.docstring.value)


def faults_of_examples(thing: griffe.Object) -> list[str]:
    """Why a reader cannot paste the example, or learns nothing from it."""
    examples = examples_of(thing)
    faults = []
    if not examples:  # of a class, its functions may show the use
        return ["there is no example"] if thing.is_function else []
    if any(doctest.SKIP in example.options for example in examples):
        faults.append("an example is skipped")
    if not any(example.want or "assert" in example.source for example in examples):
        faults.append("the example shows no result")
    code = ast.parse("".join(example.source for example in examples))
    if unknown := sorted(unbound(code)):
        faults.append(f"the example uses names that it does not import: {unknown}")
    return faults


def unbound(code: ast.Module) -> set[str]:
    """Names that are read and nowhere bound in the code."""
    bound = {*dir(builtins), "_"}
    for node in ast.walk(code):
        if isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.ExceptHandler):
            bound.add(node.name or "")
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
    return {node.id for node in ast.walk(code) if isinstance(node, ast.Name)} - bound


def test_the_packages_have_their_names():
    assert len(documented()) > 130 and {"regard.attend", "regard.hf.load"} <= set(documented())
    assert {"regard.EVERYTHING", "regard.hf.FAMILIES", "regard.rope.Pairing"} <= set(constants())
    assert len(methods()) > 100


def test_every_name_is_documented():
    found = {path: faults_of(named(path)) for path in documented()}
    assert {path: faults for path, faults in found.items() if faults} == {}


def faults_of_method(method: griffe.Object) -> list[str]:
    """A method needs a docstring, or overrides one that has one; fewer need a list of arguments."""
    if method.docstring is not None:
        found = faults_of_text(method) + faults_of_sections(method)
        return [fault for fault in found if "no section" not in fault]
    above = [base.members.get(method.name) for base in method.parent.mro()]
    documented = any(each is not None and each.docstring for each in above)
    return [] if documented else ["there is no docstring"]


def test_every_method_is_documented():
    found = {path: faults_of_method(named(path)) for path in methods()}
    assert {path: faults for path, faults in found.items() if faults} == {}


def faults_of_package(package: griffe.Object, constants: list[str]) -> list[str]:
    """Constants have no docstring that `help` shows: the package's examples show them."""
    code = ast.parse("".join(example.source for example in examples_of(package)))
    shown = {node.id for node in ast.walk(code) if isinstance(node, ast.Name)}
    return [
        *faults_of_text(package),
        *faults_of_sections(package),
        *(f"no example shows {name}" for name in constants if name not in shown),
        *(f"the example uses {name}, which it does not import" for name in unbound(code)),
    ]


def test_every_package_and_its_constants_are_documented():
    found = {}
    for package in PACKAGES:
        thing = named(package)
        exported = importlib.import_module(package).__all__
        shown = [name for name in exported if named(f"{package}.{name}").is_attribute]
        found[package] = faults_of_package(thing, shown)
    assert {package: faults for package, faults in found.items() if faults} == {}


def test_examples_have_one_style():
    """Those of private functions too, so that any of them can become public."""
    kinds = ast.FunctionDef | ast.ClassDef | ast.Module
    homes = [source / name for source in SOURCES for name in LIBRARIES]
    for path in sorted(path for home in homes for path in home.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            text = ast.get_docstring(node) if isinstance(node, kinds) else None
            assert not re.search(r"(?m)^>>> ", text or ""), f"{path}: Examples: above {text}"


GOOD = '''
def scaled(q, k, scale):
    """Scores of queries and keys.

    Args:
        q: queries.
        k: keys.
        scale: a factor.

    Raises:
        ValueError: if shapes do not fit.

    Examples:
        >>> from sample import scaled
        >>> scaled(1, 2, 3)
        6
    """
'''.replace("(q, k, scale):", "(q: int, k: int, scale: int) -> int:")


def faults_of_code(code: str) -> list[str]:
    with griffe.temporary_visited_module(code, docstring_parser="google") as module:
        return faults_of(module["scaled"])


BROKEN = {
    "there is no docstring": lambda code: re.sub(r'""".*"""', "return 0", code, flags=re.DOTALL),
    "full stop": lambda code: code.replace("keys.\n\n", "keys\n\n", 1),
    "columns": lambda code: code.replace("Scores", "Scores" * 20),
    "more than a line": lambda code: code.replace(
        "keys.\n\n    Args", "keys,\n    scaled.\n\n    Args"
    ),
    "read as a section": lambda code: code.replace("Raises:", "Mind:"),
    "outside of a section": lambda code: code.replace("    Examples:\n    ", "").replace(
        "\n        >>>", "\n    >>>"
    ),
    "without a blank line": lambda code: code.replace(
        "    Args", "    Two:\n    - one\n\n    Args"
    ),
    "Failed to get": lambda code: code.replace("ValueError: if", "if"),
    "which is no exception": lambda code: code.replace("ValueError: if", "mistakes: if"),
    "Possible section skipped": lambda code: code.replace("\n\n    Raises", "\n    Raises").replace(
        "a factor.", "a factor.\n    Sizes divide."
    ),
    "does not appear in the function": lambda code: code.replace(
        "        k: keys", "        x: keys"
    ),
    "the signature": lambda code: code.replace("        k: keys.\n", ""),
    "no section": lambda code: re.sub(r"    Args:\n(        .*\n)+", "", code),
    "no example": lambda code: re.sub(r"    Examples:\n(        .*\n)+", "", code),
    "skipped": lambda code: code.replace("2, 3)", "2, 3)  # doctest: +SKIP"),
    "no result": lambda code: code.replace("        6\n", ""),
    "does not import": lambda code: code.replace(">>> from sample import scaled", ">>> 1"),
}


def test_broken_docstrings_are_found():
    assert faults_of_code(GOOD) == []
    for fault, breaks in BROKEN.items():
        code = breaks(GOOD)
        assert code != GOOD
        found = faults_of_code(code)
        assert any(fault in each for each in found), (fault, found)


CLASS = '''
class Base:
    def known(self) -> int:
        """A number."""

class Pair(Base):
    """Keys and values.

    Attributes:
        k: keys.
        v: values.
    """

    k: int
    v: int

    def known(self) -> int:
        return self.k

    def sum(self) -> int:
        """Both together."""
'''


def test_broken_classes_and_packages_are_found():
    def found(code):
        with griffe.temporary_visited_module(code, docstring_parser="google") as module:
            pair = module["Pair"]
            methods = [faults_of_method(pair[name]) for name in ("known", "sum")]
            return [fault for each in (faults_of_sections(pair), *methods) for fault in each]

    assert found(CLASS) == []
    assert "the class" in found(CLASS.replace("        v: values.\n", ""))[0]
    assert found(CLASS.replace('"""A number."""', "...")) == ["there is no docstring"]
    assert found(CLASS.replace('"""Both together."""', "...")) == ["there is no docstring"]

    package = named("regard.rope")
    assert faults_of_package(package, ["MISSING"]) == ["no example shows MISSING"]
