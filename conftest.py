"""What every test shares: one thread, fixed seeds, the tier of each test, and what cannot run."""

import gc
import logging
import os
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import hypothesis
import jaxtyping
import pytest
import torch

from browser import chromium, open_page  # noqa: F401  (fixtures of every file of tests)
from covering import covering_items, unchecked_items
from durations import Measured
from regard.cache_folder import cache_folder
from session import LONG, worst

NEEDS = {  # modules that need an optional package
    "src/regard/hf/evaluating/harness.py": "lm_eval",
    "src/regard/ops/kernels/latents.py": "triton",
}
collect_ignore = [path for path, package in NEEDS.items() if not find_spec(package)]
pytest.register_assert_rewrite("contract", "kernel_checks", "layers", "plain")
# Without a handler, warnings that are logged go to stderr, where tests read what a command prints.
logging.getLogger().addHandler(logging.NullHandler())
# Without a GPU, `torch.manual_seed` notes for later from where it was called: that takes 2 ms.
SEED = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
# Collecting garbage takes a twelfth of the time: none while modules are imported, and a collection
# for 20 times as many new objects as Python's default after that.
gc.disable()
OBJECTS = (14_000, 10, 10)
os.environ["REGARD_SPEED"] = "default"  # a tuned machine chooses as any other, here
# A test that has a cache folder of its own finds compiled code nevertheless: a kernel takes 2 s.
with suppress(FileNotFoundError):  # the user has no home: kernels are compiled as they are needed
    os.environ.setdefault("NUMBA_CACHE_DIR", str(cache_folder().absolute() / "compiled"))

hypothesis.settings.register_profile(
    "normal", max_examples=12, deadline=None, derandomize=True, database=None
)
hypothesis.settings.register_profile("long", max_examples=250, deadline=None, print_blob=True)
hypothesis.settings.load_profile("long" if LONG else "normal")


def pytest_configure(config):
    if "REGARD_DURATIONS" in os.environ:
        config.pluginmanager.register(Measured(Path(os.environ["REGARD_DURATIONS"])))


def pytest_collection_modifyitems(config, items):
    """Leave out tests marked `long`, and most of large products, unless the run is long.

    With `--jaxtyping-packages`, annotations are checked in one of four cases of tests that have
    many: checking makes them several times as slow.
    """
    if not LONG:
        kept = covering_items([item for item in items if not item.get_closest_marker("long")])
        config.hook.pytest_deselected(items=list({*items} - {*kept}))
        items[:] = kept
    for item in unchecked_items(items):
        if "unchecked" not in item.fixturenames:
            item.fixturenames.append("unchecked")


def pytest_collection_finish():
    """Leave modules and tests out of later garbage collections, which take a second with them."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(*OBJECTS)


@pytest.fixture(autouse=True)
def _same_start_for_every_test():
    """One thread, so that sums have one order; one seed, so that a failure can be repeated."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    SEED(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def unchecked():
    """Without the checks of annotations, which raise before the library's own errors.

    Only the second part of `./scripts/test` has such checks; users have none.
    """
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


def pytest_sessionfinish(session):
    """Send the largest errors of a worker to the main process."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["worst"] = worst


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """Collect the largest errors of all workers."""
    for kind, share in getattr(node, "workeroutput", {}).get("worst", {}).items():
        worst[kind] = max(worst.get(kind, 0.0), share)


def pytest_terminal_summary(terminalreporter):
    """Print the largest errors, as shares of what the numeric contract allows."""
    if worst:
        terminalreporter.section("worst error, as a share of the bound")
        for kind, share in sorted(worst.items()):
            terminalreporter.line(f"{kind:<28} {share:.2f}")
