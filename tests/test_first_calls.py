"""Importing regard calls MKL's vector functions once, from one thread, in any context."""

import json
import subprocess
import sys

from covering import few
from regard.first_calls import is_needed

NAMES = {
    "acos", "asin", "atan", "cos", "erf", "erfc", "erfinv", "exp",
    "log", "log10", "log2", "sin", "sqrt", "tan", "tanh", "trunc",
}  # fmt: skip
WATCHED = """
import json, os, sys, threading, torch

VERSION = "Intel(R) oneAPI Math Kernel Library Version {version}-Product Build 2024"
torch.__config__.show = lambda: VERSION
torch.backends.mkl.is_available = lambda: True
calls = []

def watch(name):
    function = getattr(torch, name)

    def watched(x, *rest, **options):
        y = function(x, *rest, **options)
        plain = type(x) is type(y) is torch.Tensor and y.device.type == "cpu"
        calls.append((name, str(x.dtype).removeprefix("torch."), x.numel() if plain else None))
        return y

    setattr(torch, name, watched)

for name in {names}:
    watch(name)
for caller in {callers}:  # each in another process, which has imported torch but not regard
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            exec(caller, {{**globals()}})
            assert threading.active_count() == 1
            print(json.dumps(sorted(calls)), flush=True)
        except BaseException as error:
            print(json.dumps(repr(error)), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""
CALLERS = {
    "plainly": "import regard",
    "default device meta": "torch.set_default_device('meta'); import regard",
    "within a device": "with torch.device('meta'): import regard",
    "default dtype": "torch.set_default_dtype(torch.bfloat16); import regard",
    "inference": "with torch.inference_mode(): import regard",
    "autocast": "with torch.autocast('cpu', dtype=torch.bfloat16): import regard",
    "fake tensors": (
        "from torch._subclasses.fake_tensor import FakeTensorMode\n"
        "with FakeTensorMode(): import regard"
    ),
    "functorch": (
        "def f(x):\n    import regard\n    return 2 * x\n"
        "torch.func.vmap(torch.func.grad(f))(torch.ones(3))"
    ),
    "make_fx": (
        "from torch.fx.experimental.proxy_tensor import make_fx\n"
        "def f(x):\n    import regard\n    return 2 * x\n"
        "assert 'tanh' not in make_fx(f)(torch.ones(3)).code"
    ),
    "compile": (
        "def f(x):\n    import regard\n    return 2 * x\n"
        "torch.compile(f, backend='eager')(torch.ones(3))"
    ),
    "a mode that refuses": (
        "from torch.utils._python_dispatch import TorchDispatchMode\n"
        "class Refuse(TorchDispatchMode):\n"
        "    def __torch_dispatch__(self, *given): raise AssertionError('reached')\n"
        "with Refuse(): import regard"
    ),
    "in a forked child": (
        "import regard\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    torch.set_num_threads(1)\n"
        "    os._exit(0 if torch.rand(100_000).cos().isfinite().all() else 1)\n"
        "assert os.waitpid(child, 0)[1] == 0"
    ),
}


def calls_of(*callers: str, version: str = "2024.2") -> list[list[tuple[str, str, int]]]:
    code = WATCHED.format(names=sorted(NAMES), callers=callers, version=version)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(callers)
    assert all(isinstance(calls, list) for calls in found), found
    return [[tuple(call) for call in calls] for calls in found]


def test_importing_regard_calls_each_function_on_one_plain_number():
    wanted = {(name, dtype, 1) for name in NAMES for dtype in ("float32", "float64")}
    callers = dict(few(CALLERS.items(), 2))
    found = dict(zip(callers, calls_of(*callers.values()), strict=True))
    for caller, calls in found.items():
        assert wanted <= set(calls), caller
    assert len(found["plainly"]) == len(wanted)


def test_with_a_version_without_the_race_nothing_is_called():
    assert calls_of("import regard", version="2025.0") == [[]]


def test_importing_works_where_no_thread_can_be_started():
    caller = (
        'def refuse(self): raise RuntimeError("can\'t start new thread")\n'
        "threading.Thread.start = refuse\n"
        "import regard"
    )
    assert calls_of(caller) == [[]]


def test_versions_of_mkl_that_need_it():
    line = "  - Intel(R) oneAPI Math Kernel Library Version {}-Product Build 2024\n"
    assert is_needed(line.format("2024.2"), has_mkl=True)
    assert is_needed(line.format("2021.4"), has_mkl=True)
    assert not is_needed(line.format("2025.0"), has_mkl=True)
    assert not is_needed(line.format("2026.1"), has_mkl=True)
    assert is_needed("Math Kernel Library without a version", has_mkl=True)
    assert not is_needed("", has_mkl=False)
