"""What the documents show is run."""

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

import regard.hf
from interpreters import run_python
from regard.cli.generate import show
from regard.cli.terminal import PIPED
from regard.hf import Written
from regard.turns import Ratio

ROOT = Path(__file__).parents[2]
SLOW = pytest.mark.long
PAGES = ["README.md", "README.zh-CN.md"]
GENERATE = ["docs/guides/transformers.md", "docs/zh/guides/transformers.md"]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def test_the_first_layer_decodes_without_gradients(capsys):
    exec(compile(blocks("README.md", "python")[1], "README.md", "exec"), {})
    explained = capsys.readouterr().out
    assert "fused" in explained and "gradient" not in explained


@pytest.mark.parametrize("page", PAGES)
def test_every_command_is_there(page):
    commands = [line.split()[0] for b in blocks(page, "bash") for line in b.splitlines() if line]
    assert {"./scripts/demo", "./scripts/test"} <= set(commands)
    for command in commands:
        assert (ROOT / command).exists(), command


def sample(page: str) -> str:
    """What `regard generate` prints, as a page shows it; the text first."""
    shown = (ROOT / page).read_text().partition("--chat --against transformers")[2]
    return shown.split("```")[1].strip()


def shape(sentences: str) -> str:
    """The sentences on one line, without figures, units and the names of backends."""
    line = " ".join(sentences.split())
    for found, said in ((r"\d[\d,.]*", "N"), ("[KMG]iB", "B"), (r" on \w+( and \w+)*", " on X")):
        line = re.sub(found, said, line)
    return line


@pytest.mark.parametrize("page", GENERATE)
def test_the_sample_of_generate_is_what_the_command_prints(page):
    runs = [
        Written(name, cache, "text", (1, 2), 3, 4.0, 5.0, 6 << 20, 7 << 30, "sdpa", "fused", 0, 8.0)
        for name, cache in (("regard", "auto"), ("transformers", "transformers"))
    ]
    alike, quicker = Ratio(1.0, 0.94, 1.08, 12), Ratio(3.0, 2.8, 3.3, 12)
    runs[0] = replace(runs[0], prefill_speed=alike, decode_speed=quicker)
    console = Console(file=io.StringIO(), width=PIPED, highlight=False)
    show(runs, console)
    printed = sample(page).partition("\n\n")[2]
    assert shape(printed) == shape(console.file.getvalue())
    assert max(map(len, printed.splitlines())) <= PIPED


def test_the_sample_of_generate_is_of_the_default_model():
    try:
        model, tokenizer = regard.hf.smollm2()
    except OSError as reason:
        pytest.skip(str(reason))
    shown = sample(GENERATE[0])
    (prompt,) = set(
        re.findall(r'regard generate --prompt "(.*?)"', (ROOT / GENERATE[0]).read_text())
    )
    written = regard.hf.write(model, tokenizer, prompt, chat=True, max_new_tokens=8)
    assert shown.startswith(written.text)
    assert f"{written.prompt_tokens} tokens of prompt" in shown


@pytest.mark.parametrize("script", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda p: p.stem)
def test_every_benchmark_has_its_question_and_command(script):
    text = script.read_text()
    assert text.startswith('"""')
    if '__name__ == "__main__"' in text:  # else it is a part of others
        assert f"python benchmarks/{script.name}" in text


@pytest.mark.parametrize(
    "command",
    [
        pytest.param("absorbing.py --rounds 1 --tokens 2 --keys 4", marks=SLOW),
        pytest.param("decode_gqa.py --rounds 1 --keys 64", marks=SLOW),
        pytest.param("decode_low_bit.py --rounds 1 --keys 64 --threads 1", marks=SLOW),
        pytest.param("decode_low_bit.py --rounds 1 --keys 64 --threads 1 --warm", marks=SLOW),
        pytest.param("decode_mla.py --rounds 1 --past 16", marks=SLOW),
        pytest.param("distributed.py --small --rounds 1 --bytes 4096", marks=SLOW),
        pytest.param("masks.py --rounds 1 --length 300", marks=SLOW),
        pytest.param("engine_caches.py --engines regard --length 140 --windows 1", marks=SLOW),
        pytest.param("joint_latent.py --rounds 1 --contexts 16", marks=SLOW),
        pytest.param("linear_layers.py --rounds 1 --tokens 1 32 --dtypes bfloat16", marks=SLOW),
        pytest.param("memory.py --length 64 --kinds causal", marks=SLOW),
        pytest.param("padded_rows.py --rounds 1 --context 16", marks=SLOW),
        pytest.param("prefill.py --rounds 1 --lengths 33", marks=SLOW),
        "small_calls.py --rounds 1 --sizes 64 --length 3",
        pytest.param("other_kernels.py --rounds 1 --keys 64 --tokens 32", marks=SLOW),
        pytest.param("step_costs.py --rounds 3", marks=SLOW),
        pytest.param("step_shares.py --rounds 1 --context 16", marks=SLOW),
        pytest.param("huge_pages.py --rounds 1 --context 16", marks=SLOW),
        pytest.param("full_pages.py --rounds 1 --context 16 --tokens 60", marks=SLOW),
        "scattered_reads.py --mib 4 --rounds 1",
        pytest.param("training_window.py --rounds 1 --length 64 --heads 4 2", marks=SLOW),
    ],
    ids=lambda command: command.split(".")[0],
)
def test_a_benchmark_ends_in_one_line_of_json(command):
    script, *arguments = command.split()
    done = run_python(f"benchmarks/{script}", *arguments, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    last = json.loads(done.stdout.strip().splitlines()[-1])
    assert {"benchmark", "machine", "results"} <= set(last)


def test_the_picture_of_a_comparison_is_drawn_from_its_json(tmp_path):
    rows = json.loads((ROOT / "docs/compare.json").read_text())["rows"]
    target = tmp_path / "compare.svg"
    done = run_python("benchmarks/compare_picture.py", "docs/compare.json", str(target), cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    drawn = target.read_text().count("<use ")
    assert drawn > 4 * len(rows), "for each row a point and the letters of a label, three or more"
