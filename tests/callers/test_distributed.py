"""Two processes are one: outputs and gradients under DDP and FSDP2."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from callers.process import SOURCES, TESTS, USUAL

HERE = Path(__file__).parent


@pytest.mark.long
def test_layers_train_on_two_processes_as_on_one():
    paths = os.pathsep.join(map(str, (SOURCES, TESTS, TESTS / "support")))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", HERE / "two_processes.py"],
        env={**os.environ, **USUAL, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
