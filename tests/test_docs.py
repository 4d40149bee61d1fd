"""What the documents show is run."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "README.zh-CN.md"]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


@pytest.mark.parametrize(
    ("page", "least"),
    [*((page, 3) for page in PAGES), ("docs/convert.md", 1), ("docs/callers.md", 1)],
)
def test_every_snippet_runs(page, least):
    snippets = blocks(page, "python")
    assert len(snippets) >= least
    for code in snippets:
        exec(compile(code, page, "exec"), {})


@pytest.mark.parametrize("page", PAGES)
def test_every_command_is_there(page):
    commands = [line.split()[0] for b in blocks(page, "bash") for line in b.splitlines() if line]
    assert {"./scripts/demo", "./scripts/test"} <= set(commands)
    for command in commands:
        assert (ROOT / command).exists(), command


def test_both_languages_show_the_same_code():
    first, second = (
        [re.sub(r"\s*#.*", "", code) for code in blocks(page, "python")] for page in PAGES
    )
    assert first == second


def test_every_file_of_the_tree_is_there():
    tree = (ROOT / "README.md").read_text().split("## What is where")[1].split("```")[1]
    inside = re.findall(r"^  ([\w./ ]+?)\s{2,}", tree, re.MULTILINE)
    assert len(inside) > 10
    for names in inside:
        for name in names.split():
            assert (ROOT / "src/regard" / name).exists(), name


@pytest.mark.parametrize("script", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda p: p.stem)
def test_every_benchmark_says_what_it_asks(script):
    head = script.read_text()
    assert head.startswith('"""')
    if script.stem not in ("common", "cases", "peers", "peer_layers"):
        assert f"python benchmarks/{script.name}" in head


@pytest.mark.parametrize(
    "command",
    [
        "decode_gqa.py --rounds 1 --keys 64",
        "decode_mla.py --rounds 1 --past 16",
        "masks.py --rounds 1 --length 300",
        "memory.py --length 64 --kinds causal",
        "prefill.py --rounds 1 --lengths 33",
    ],
    ids=lambda command: command.split(".")[0],
)
def test_a_benchmark_ends_in_one_line_of_json(command):
    script, *arguments = command.split()
    command = [sys.executable, f"benchmarks/{script}", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    last = json.loads(done.stdout.strip().splitlines()[-1])
    assert {"benchmark", "machine", "results"} <= set(last)
