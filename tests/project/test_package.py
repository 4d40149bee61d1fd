"""The wheel and the source archive: what they hold, and what users of them see."""

import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

import regard

ROOT = Path(__file__).parents[2]
BUILD = """
import sys
from hatchling.builders.{kind} import {kind_title}Builder
(made,) = {kind_title}Builder(sys.argv[1]).build(directory=sys.argv[2], versions=["standard"])
print(made)
"""
FIRST_MINUTE = """
import torch, regard
from regard import Causal, GroupedQueryAttention, KVCache
layer = GroupedQueryAttention(32, 4, 2, mask=Causal())
layer(torch.zeros(1, 3, 32), cache=KVCache())
print(regard.__file__, regard.__version__)
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


def built(kind: str, folder: Path) -> Path:
    """The wheel or the source archive (`"sdist"`), built into a folder."""
    pytest.importorskip("hatchling")
    pytest.importorskip("hatch_fancy_pypi_readme")
    code = BUILD.format(kind=kind, kind_title=kind.title())
    command = [sys.executable, "-c", code, str(ROOT), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    with zipfile.ZipFile(built("wheel", tmp_path_factory.mktemp("wheel"))) as file:
        yield file


def tracked(*folders: str) -> set[str]:
    """The files that git has, or would add, in these folders or everywhere."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("this is no clone")
    done = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *folders],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return {name for name in done.stdout.splitlines() if (ROOT / name).exists()}


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


def test_the_wheel_has_the_packages_and_nothing_else(wheel):
    packages = {name.removeprefix("src/") for name in tracked("src")}
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == packages
    assert {"regard/py.typed", "regard/cli/app.py"} <= names
    assert {f"regard/page/{each}" for each in ("page.css", "page.js", "charts.js")} <= names
    extra = {name.partition(".dist-info/")[2] for name in wheel.namelist()} - {""}
    assert extra == {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}


@pytest.mark.long
def test_the_source_archive_has_what_git_has(tmp_path):
    with tarfile.open(built("sdist", tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names - tracked() == {"PKG-INFO"}
    assert {"pyproject.toml", "README.md", "LICENSE", "src/regard/py.typed"} <= names


def test_the_wheel_names_its_command_and_no_plugin_of_pytest(wheel):
    (entries,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    text = wheel.read(entries).decode()
    assert "regard = regard.cli:main" in text
    assert "pytest11" not in text
    assert not [name for name in wheel.namelist() if "verify/" in name]


def test_the_metadata_is_complete(wheel):
    (path,) = [name for name in wheel.namelist() if name.endswith("dist-info/METADATA")]
    metadata = message_from_string(wheel.read(path).decode())
    for field in ("Summary", "Author", "License-Expression", "Keywords", "Requires-Python"):
        assert metadata[field], field
    assert {"cli", "cpu", "hf", "docs"} <= set(metadata.get_all("Provides-Extra"))
    assert metadata["Version"] == regard.__version__
    needed = [each for each in metadata.get_all("Requires-Dist") if "extra ==" not in each]
    assert sorted(re.match(r"[\w-]+", each)[0] for each in needed) == ["jaxtyping", "torch"]


def test_a_build_has_no_address_that_is_a_placeholder(wheel):
    (path,) = [name for name in wheel.namelist() if name.endswith("dist-info/METADATA")]
    urls = message_from_string(wheel.read(path).decode()).get_all("Project-URL") or []
    assert not [url for url in urls if ".invalid" in url]
    pages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["regard"]["urls"]
    hook = runpy.run_path(str(ROOT / "scripts/project_urls.py"))
    decided = [url for url in pages.values() if not hook["is_placeholder"](url)]
    assert len(urls) == len(decided)


def test_the_citation_is_of_this_version():
    assert f"\nversion: {regard.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_workflows_run_the_scripts_of_the_repository():
    lines = [
        line.strip().removeprefix("- run: ")
        for path in (ROOT / ".github/workflows").iterdir()
        for line in path.read_text().splitlines()
        if "run:" in line
    ]
    assert {line.split()[0] for line in lines} == {"./scripts/test", "./scripts/docs"}
    for line in lines:
        assert (ROOT / line.split()[0]).exists()


def test_the_changelog_has_this_version():
    """Released versions have dates; the newest is that of the source."""
    released = re.findall(
        r"^## \[(\d+\.\d+\.\d+)\] - \d{4}-\d\d-\d\d$",
        (ROOT / "CHANGELOG.md").read_text(),
        re.MULTILINE,
    )
    assert released[0] == regard.__version__
    assert released == sorted(released, reverse=True)


@pytest.mark.long
def test_what_the_wheel_holds_runs_where_it_is_unpacked(wheel, tmp_path):
    wheel.extractall(tmp_path / "site")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    for command in (["-c", FIRST_MINUTE], ["-m", "regard", "--version"]):
        done = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert regard.__version__ in done.stdout
        assert "-c" not in command or str(tmp_path / "site") in done.stdout


@pytest.mark.long
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
        "regard.masks.mask.Mask",
        "int",
        "str",
    ], done.stdout
    (error,) = re.findall(r"error: .*", done.stdout)
    assert 'Argument "num_heads" to "GroupedQueryAttention"' in error
