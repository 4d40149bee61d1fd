"""The examples run from anywhere, in seconds, and print what they claim to show."""

import ast
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from pages import ROOT, without_figures

EXAMPLES = ROOT / "examples"
PROGRAMS = {path.stem: path for path in sorted(EXAMPLES.glob("*.py"))}
NOTEBOOKS = {path.stem: path for path in sorted(EXAMPLES.glob("*.ipynb"))}
LONGEST, WIDEST = 99, 80  # lines of a program, and columns of what it prints
LONGER = {"train_on_several_ranks": 160}  # with what every run of several ranks needs
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
LARGEST = 200_000  # bytes of a notebook with its pictures
OTHERS_WARN = {"finetune_converted"}  # peft calls what transformers deprecates
MACHINE = re.compile(r"/(home|root|tmp|usr|work|opt|var|Users)/")
EXECUTE = """
import sys, nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], 4)
NotebookClient(notebook, timeout=120).execute()
nbformat.write(notebook, sys.argv[2])
"""


def started(arguments, folder):
    """A process of Python, in a folder that is not the repository."""
    paths = {"JUPYTER_RUNTIME_DIR": "jupyter", "IPYTHONDIR": "ipython", "MPLCONFIGDIR": "mpl"}
    settings = {name: str(folder / path) for name, path in paths.items()}
    settings |= {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, cwd=folder, env=os.environ | settings,
    )  # fmt: skip


def run(arguments, folder):
    """What Python prints."""
    process = started(arguments, folder)
    shown, errors = process.communicate()
    assert process.returncode == 0, errors
    return shown


def printed(name, folder, *arguments, by=()):
    """The lines that a program prints, run by Python or by a module of it."""
    ignored = ["-W", "ignore::FutureWarning"] if name in OTHERS_WARN else []
    lines = run(["-W", "error", *ignored, *by, PROGRAMS[name], *arguments], folder).splitlines()
    assert lines
    assert max(map(len, lines)) <= WIDEST
    return lines


def rows(lines, *names):
    """The numbers in the line of each name."""
    found = []
    for name in names:
        (line,) = [line for line in lines if line.startswith(f"{name} ")]
        numbers = re.findall(r"(?<![\w+])\d[\d,.]*(?:e[+-]\d+)?%?", line.removeprefix(name))
        found.append([float(each.rstrip("%").replace(",", "")) for each in numbers])
    return found


@pytest.mark.long
def test_both_models_learn_and_mla_caches_less(tmp_path):
    lines = printed("train_small_lm", tmp_path)
    first = {name: float(loss) for name, loss in re.findall(r"(GQA|MLA) ([\d.]+)", lines[0])}
    gqa, mla = rows(lines, "GQA", "MLA")
    for (_, training, held_out, _), start in ((gqa, first["GQA"]), (mla, first["MLA"])):
        assert max(training, held_out) < start / 2
    assert gqa[0] == pytest.approx(mla[0], rel=0.01), "the models are of one size"
    assert (gqa[3], mla[3]) == (2 * 2 * 2 * 16 * 4, 2 * (16 + 8) * 4)
    assert sum("writes b" in line for line in lines) == 2


@pytest.mark.long
def test_the_encoder_decoder_reverses_and_decodes_as_it_was_trained(tmp_path):
    lines = printed("encoder_decoder", tmp_path)
    right, gap = (next(line for line in lines if word in line) for word in ("%", "differs"))
    assert float(right.split("%")[0]) > 80
    assert float(re.search(r"\de-\d+", gap)[0]) < 1e-4
    start = next(index for index, line in enumerate(lines) if line.startswith("beams for"))
    assert lines[start + 1].split()[1:] == lines[start].split()[:1:-1]
    scores = [float(line.split()[0]) for line in lines[start + 1 :]]
    assert scores == sorted(scores, reverse=True)
    assert len(scores) == 3


@pytest.mark.long
def test_every_cache_holds_less_or_the_same_text(tmp_path):
    lines = printed("generate_with_every_cache", tmp_path)
    names = ["KVCache()", "StaticCache(160)", "SlidingCache(32)"]
    coded = ["QuantizedCache(bits=8)", "QuantizedCache(bits=4)"]
    size = rows(lines, "KVCache()")[0][0]
    for stored, share, error, same, length in rows(lines, *names):
        assert share == pytest.approx(stored / size, abs=0.01)
        assert error < 1e-4
        assert same == length == 160
    assert rows(lines, "SlidingCache(32)")[0][1] < 0.3
    (eight, share, small, _, _), (four, _, large, _, _) = rows(lines, *coded)
    assert (four < eight) and (1e-4 < small < large) and share < 0.3
    for kind in ("growing", "static", "sliding", "quantized"):
        (line,) = [line for line in lines if line.startswith(kind)]
        assert line.endswith("True")


def test_a_model_of_litgpt_decodes_as_its_full_forward(tmp_path):
    pytest.importorskip("litgpt", reason="tried with litgpt 0.5.13")
    _, *lines = printed("litgpt_attention", tmp_path)
    assert len(lines) == 4
    for line in lines:
        assert float(line.split()[1]) < 1e-5
        assert line.endswith("True")


@pytest.mark.long
def test_packed_documents_train_as_separate_ones(tmp_path):
    lines = printed("packed_documents", tmp_path)
    names = ["separate", "padded batch", "packed, blocked", "packed, sdpa"]
    tokens, losses, apart, _ = zip(*rows(lines, *names), strict=True)
    assert tokens[0] == tokens[2] == tokens[3] < 0.7 * tokens[1]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-5)
    assert max(apart) < 1e-5
    visible, scores = (int(each.replace(",", "")) for each in re.findall(r"[\d,]+", lines[-1]))
    assert visible < 0.15 * scores == 0.15 * tokens[0] ** 2


@pytest.mark.long
def test_a_conversion_loses_little_and_lora_wins_it_back(tmp_path):
    lines = printed("finetune_converted", tmp_path)
    ours = next(line for line in lines if re.match(r"mla:\d+\+\d+ deepseek ", line))
    tuned = next(line for line in lines if re.match(r"mla:\d+\+\d+ deepseek, then LoRA", line))
    (control,) = rows(lines, "original, then LoRA")
    original = [*map(float, lines[1].replace(",", "").split()[1:])]
    (converted, small), (healed, _) = (map(float, each.split()[-2:]) for each in (ours, tuned))
    assert original[0] < converted < 1.1 * original[0]
    assert healed < converted
    assert control[0] < original[0]
    assert small == original[1] / 4


@pytest.mark.long
def test_a_compiled_layer_gives_the_same(tmp_path):
    lines = printed("compile_layer", tmp_path)
    for eager, compiled, seconds, apart in rows(lines, "a decoding step", "a training step"):
        assert 0 < min(eager, compiled) < max(eager, compiled) < 1000 * seconds
        assert apart < 1e-5


def steps(lines):
    """The loss and the norm of the gradients of each step that was printed."""
    pattern = re.compile(r"^step +(\d+)  loss ([\d.]+)  norm ([\d.]+)", re.MULTILINE)
    shown = pattern.findall("\n".join(lines))
    return {int(step): (float(loss), float(norm)) for step, loss, norm in shown}


def process_of(rank, parent):
    """The process that torchrun started as a rank."""
    tasks = Path(f"/proc/{parent}/task").glob("*/children")
    children = " ".join(each.read_text() for each in tasks).split()
    named = f"\0RANK={rank}\0".encode()
    (found,) = [
        int(child) for child in children if named in Path(f"/proc/{child}/environ").read_bytes()
    ]
    return found


def killed_after(step, arguments, folder):
    """The lines of a run on two ranks, the second of which is killed after a step."""
    program = PROGRAMS["train_on_several_ranks"]
    with started([*TORCHRUN, program, *arguments], folder) as process:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if steps([line]).keys() == {step}:
                os.kill(process_of(1, process.pid), signal.SIGKILL)
        errors = process.stderr.read()
    assert process.returncode != 0
    assert "SIGKILL" in errors
    return lines


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds a rank's process in /proc")
@pytest.mark.parametrize("attention", ["gqa", "mla"])
def test_training_is_resumed_after_a_rank_was_killed(attention, tmp_path):
    given = ["--attention", attention, "--steps", 12, "--every", 4, "--folder"]
    alone = started(["-W", "error", PROGRAMS["train_on_several_ranks"], *given, "alone"], tmp_path)
    before = steps(killed_after(6, [*given, "shared"], tmp_path))
    reference = steps(alone.communicate()[0].splitlines())
    assert 12 not in before
    assert [path.name for path in (tmp_path / "shared").glob("step-??????")] == ["step-000004"]
    (tmp_path / "shared/step-000009.unfinished").mkdir()  # as of a rank that is killed while saving
    lines = printed("train_on_several_ranks", tmp_path, *given, "shared", "--resume", by=TORCHRUN)
    after = steps(lines)
    assert [*after] == [*range(5, 13)]
    for found in (before, after):
        for step, (loss, norm) in found.items():
            assert loss == pytest.approx(reference[step][0], rel=1e-5)  # of float32
            assert norm == pytest.approx(reference[step][1], abs=2e-4)  # of four digits
    assert reference[12][0] < reference[1][0] - 1
    for line in lines:
        sent, count = re.findall(r"[\d,]+(?= of )|(?<= of )[\d,]+", line)
        assert sent == count != "0"


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_short_and_says_how_it_is_run(name):
    text = PROGRAMS[name].read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LONGER.get(name, LONGEST)
    assert f"    python examples/{name}.py" in ast.get_docstring(ast.parse(text))
    assert f'printed("{name}"' in Path(__file__).read_text(), "no test reads what it prints"


def shown(notebook):
    """What each cell printed, without figures, and how many pictures it drew."""
    found = []
    for cell in notebook.cells:
        outputs = cell.get("outputs", [])
        text = "".join(each.text for each in outputs if each.output_type == "stream")
        drawn = sum("image/png" in each.get("data", ()) for each in outputs)
        found.append((without_figures(text), drawn))
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_shows_what_it_computes(name, tmp_path):
    stored, executed = NOTEBOOKS[name], tmp_path / "executed.ipynb"
    run(["-c", EXECUTE, stored, executed], tmp_path)
    new, old = (nbformat.read(each, 4) for each in (executed, stored))
    assert shown(new) == shown(old)
    assert sum(pictures for _, pictures in shown(old)) == 3


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_stored_executed_and_small(name):
    text = NOTEBOOKS[name].read_text(encoding="utf-8")
    notebook = nbformat.reads(text, 4)
    nbformat.validate(notebook)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == [*range(1, len(counts) + 1)]
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert {each.output_type for each in outputs} == {"stream", "display_data"}
    assert {each.get("name", "stdout") for each in outputs} == {"stdout"}
    assert len(text) < LARGEST
    assert MACHINE.search(text) is None


def test_the_table_names_every_example():
    table = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| \[`([\w.]+)`\]\(\1\)", table, re.MULTILINE)
    assert sorted(named) == sorted(path.name for path in [*PROGRAMS.values(), *NOTEBOOKS.values()])
