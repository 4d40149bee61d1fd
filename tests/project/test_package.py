"""The wheel: what its description shows leads somewhere, and other people's mypy sees its types."""

import os
import re
import subprocess
import sys
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = """
import sys
from hatchling.builders.wheel import WheelBuilder
(made,) = WheelBuilder(sys.argv[1]).build(directory=sys.argv[2], versions=["standard"])
print(made)
"""
CONSUMER = """
import torch
from regard import Causal, GroupedQueryAttention, KVCache, Rotary, SlidingWindow, attend

q = torch.zeros(1, 2, 3, 16)
attend(q, q, q, mask=Causal())
reveal_type(Causal() & SlidingWindow(3))
reveal_type(KVCache().length)
reveal_type(GroupedQueryAttention(64, num_heads=4, num_kv_heads=2, rope=Rotary(16)).kind)
GroupedQueryAttention(64, num_heads="4", num_kv_heads=2)
"""
SETTINGS = "[mypy]\n[mypy-torch.*,jaxtyping.*]\nfollow_imports = skip\n"  # theirs take a minute


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("hatchling")
    pytest.importorskip("hatch_fancy_pypi_readme")
    command = [sys.executable, "-c", BUILD, str(ROOT), str(tmp_path_factory.mktemp("wheel"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(done.stdout.strip()) as file:
        yield file


@pytest.fixture(scope="module")
def description(wheel):
    (path,) = [name for name in wheel.namelist() if name.endswith("dist-info/METADATA")]
    metadata = message_from_string(wheel.read(path).decode())
    assert metadata["Description-Content-Type"] == "text/markdown"
    return metadata.get_payload()


def test_no_link_of_the_description_is_relative(description):
    targets = re.findall(r"\]\(\s*([^)\s]+)", description) + re.findall(
        r"(?:src|href)=[\"']?([^\"'\s>]+)", description
    )
    assert [target for target in targets if not re.match(r"https?://|#", target)] == []


def test_the_text_of_links_stays(description):
    readme = (ROOT / "README.md").read_text()
    links = re.findall(r"\[([^\]]+)\]\(([^)\s]+)\)", readme)
    assert len(links) > 5
    for text, target in links:
        assert text in description and target in description
    untouched = [line for line in readme.splitlines() if "](" not in line]
    assert set(untouched) <= set(description.splitlines())


def test_the_wheel_is_typed_and_has_its_command(wheel):
    names = set(wheel.namelist())
    assert {
        "regard/py.typed",
        "regard/__main__.py",
        "regard_cli/app.py",
        "pytest_regard.py",
    } <= names
    (entries,) = [name for name in names if name.endswith("entry_points.txt")]
    assert "regard = regard_cli:main" in wheel.read(entries).decode()


def test_a_consumers_mypy_sees_types(tmp_path):
    (tmp_path / "consumer.py").write_text(CONSUMER)
    (tmp_path / "mypy.ini").write_text(SETTINGS)
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "consumer.py"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},  # a place of installed packages
    )
    assert re.findall(r'Revealed type is "(.*)"', done.stdout) == [
        "regard.masks.algebra.Mask",
        "int",
        "str",
    ], done.stdout
    (error,) = re.findall(r"error: .*", done.stdout)
    assert 'Argument "num_heads" to "GroupedQueryAttention"' in error
