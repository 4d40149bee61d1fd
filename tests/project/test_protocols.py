"""Layers ask for what a protocol names: no attribute is looked for, no layer or cache is `Any`."""

import ast
from pathlib import Path

import pytest

import regard.layers

FILES = sorted(Path(regard.layers.__file__).parent.glob("*.py"))


def faults(source):
    """Lines that look for an attribute, or that annotate an argument or a field with `Any`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if name == "hasattr" or (name == "getattr" and len(node.args) == 3):
            found.append(f"{node.lineno}: {ast.unparse(node)}")
        given = []
        if isinstance(node, ast.arguments):
            given = [*node.posonlyargs, *node.args, *node.kwonlyargs]
        elif isinstance(node, ast.AnnAssign):
            given = [node]
        for each in given:
            if isinstance(each.annotation, ast.Name) and each.annotation.id == "Any":
                found.append(f"{each.lineno}: {ast.unparse(each)}")
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_layers_name_what_they_ask_for(file):
    assert faults(file.read_text()) == []


@pytest.mark.parametrize("word", ["ranks", "head_split", "_hf_hook", "local("])
def test_layers_know_no_ranks(word):
    """Two messages name them: a cache or a matrix may have a share alone."""
    code = [ast.unparse(ast.parse(file.read_text())) for file in FILES]
    assert not any(word in _without_text(each) for each in code)


def _without_text(code):
    class Blank(ast.NodeTransformer):
        def visit_Constant(self, node):
            return ast.Constant("") if isinstance(node.value, str) else node

    names = ast.unparse(Blank().visit(ast.parse(code)))
    return names.replace("kv_lora_rank", "").replace("q_lora_rank", "")


@pytest.mark.parametrize(
    "source",
    [
        "hasattr(cache, 'pool')",
        "getattr(cache, 'bits', None)",
        "def f(layer: Any): ...",
        "class C:\n    cache: Any = None",
    ],
)
def test_faults_are_found(source):
    assert len(faults(source)) == 1


def test_arguments_of_constructors_may_be_anything():
    assert faults("def f(**options: Any): getattr(torch, name)\nx: dict[str, Any] = {}") == []
