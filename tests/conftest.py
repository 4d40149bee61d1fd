"""What every test shares: one thread, fixed seeds, and whether annotations are checked.

Checking the shape and type of every argument makes most tests several times as slow. So a normal
run checks them in one case of eight of each test, and at least in one; the other cases run the
library as its users do. A long run checks them everywhere.
"""

import os
import random

import hypothesis
import jaxtyping
import pytest
import torch

from browser import chromium, open_page  # noqa: F401  (fixtures of every file of tests)
from session import LONG, worst

pytest.register_assert_rewrite("contract", "kernel_checks", "layers", "plain")
os.environ["REGARD_SPEED"] = "default"  # a tuned machine chooses as any other, here

hypothesis.settings.register_profile(
    "normal", max_examples=12, deadline=None, derandomize=True, database=None
)
hypothesis.settings.register_profile("long", max_examples=250, deadline=None, print_blob=True)
hypothesis.settings.load_profile("long" if LONG else "normal")


CHECKED = pytest.StashKey[bool]()


def pytest_collection_modifyitems(items):
    """Choose the cases that check annotations: the same ones in every run and every worker."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, cases in tests.items():
        chosen = cases if LONG else random.Random(name).sample(cases, -(-len(cases) // 8))
        for case in chosen:
            case.stash[CHECKED] = True


@pytest.fixture(autouse=True)
def _annotations_are_checked_in_some_cases(request):
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", not request.node.stash.get(CHECKED, False))
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


@pytest.fixture(autouse=True)
def _same_start_for_every_test():
    """One thread, so that sums have one order; one seed, so that a failure can be repeated."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def unchecked():
    """Without the checks of annotations, which raise before the library's own errors."""
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
