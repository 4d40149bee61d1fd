"""The public names are loaded at their first use, and are those of any other package then."""

import subprocess
import sys

import pytest

import regard
from covering import few
from regard import public


def python(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_regard_imports_no_torch():
    assert python("import regard, sys; print('torch' in sys.modules, regard.__version__)") == (
        f"False {regard.__version__}"
    )


@pytest.mark.parametrize(
    "use",
    few(
        [
            "regard.Causal()",
            "regard.masks.Causal()",
            "(lambda: __import__('regard', fromlist=['Causal']).Causal())()",
        ],
        2,
    ),
)
def test_the_first_use_of_a_name_loads_it(use):
    assert python(f"import regard; print({use})") == "Causal()"


def test_every_name_is_that_of_its_module():
    assert {each: getattr(regard, each) for each in public.__all__} == {
        each: getattr(public, each) for each in public.__all__
    }
    assert set(public.__all__) <= set(dir(regard))
    assert regard.__all__ is public.__all__


def test_a_star_imports_the_public_names():
    assert python("from regard import *; print(Causal(), 'Mask' in dir())") == "Causal() True"


def test_another_name_is_refused():
    with pytest.raises(AttributeError, match="module 'regard' has no attribute 'nonsense'"):
        regard.nonsense  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'nonsense'"):
        from regard import nonsense  # noqa: F401
    assert not hasattr(regard, "__wrapped__")


@pytest.mark.long
def test_a_compiled_function_may_use_a_name_first():
    code = (
        "import torch, regard\n"
        "def f(q): return regard.attend(q, q, q, mask=regard.Causal())\n"
        "q = torch.randn(1, 2, 5, 8)\n"
        "compiled = torch.compile(f, backend='eager', fullgraph=True)\n"
        "print(torch.equal(compiled(q), f(q)))"
    )
    assert python(code) == "True"
