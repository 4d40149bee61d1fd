"""The command line before a verb runs: help, version and errors need no torch."""

import inspect
import os
import re
import shlex
import subprocess
import sys
from importlib import metadata

import pytest

import regard.cli.app as app
import regard.cli.options as options
from covering import few
from regard.cli import compare
from regard.compare import CANDIDATES
from regard.hf import SMOLLM2

VERBS = list(options.VERBS)
SPELLED = {"as_json": "json", "listed": "list", "every_law": "all", "every": "all"}
PROMPT = ["generate", "--prompt", "a"]
RUN = """
import sys
from regard.cli import main
sys.argv = ["regard", *sys.argv[1:]]
try:
    main()
finally:
    sys.stderr.write("<torch>" * ("torch" in sys.modules))
"""


def start(*arguments, entry=("-c", RUN)):
    command = [sys.executable, *entry, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--version"], 0),
        (["--help"], 0),
        ([], 2),
        (["nonsense"], 2),
        (["compare", "--what"], 2),
        (["compare", "--memory", "0"], 2),
        (["convert", "--to", "mqa"], 2),
        (["generate"], 2),
        (["bench", "--num-kv-heads", "3"], 2),
        (["verify"], 2),
        (["show", "mask"], 2),
        (["show", "attention"], 2),
        (["explain", "--num-heads", "3"], 2),
        *(([*verb.split(), "--help"], 0) for verb in few(VERBS, 4)),
    ],
)
def test_what_needs_no_torch_does_not_import_it(arguments, code):
    done = start(*arguments)
    assert done.returncode == code
    assert "<torch>" not in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout if code == 0 else done.stderr


def test_the_package_is_a_command_too():
    done = start("--version", entry=("-m", "regard"))
    assert done.stdout == f"regard {metadata.version('regard')}\n", done.stderr


@pytest.mark.parametrize("typed", ["--version", "--help", "show mask 'Causal()' --json"])
@pytest.mark.parametrize(("closed", "code"), [(">&-", 0), (">&- 2>&-", 0), ("| true", 141)])
def test_an_output_that_is_closed_ends_it_quietly(typed, closed, code):
    script = f"{shlex.quote(sys.executable)} -m regard {typed} {closed}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


def test_the_installed_version_is_that_of_the_source():
    import regard

    assert metadata.version("regard") == regard.__version__, "./scripts/setup installs it anew"


def test_what_the_options_list_is_what_there_is():
    assert compare.ROWS.split(", ") == [each.key for each in CANDIDATES]
    assert options.DEFAULT_MODEL == SMOLLM2


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (
            ["plan", "--storage", "k8v5"],
            "'k8v5' is none of plain, int8, int4, K8V8, K8V4, K6V4, K4V4",
        ),
        (["generate", "--prompt", "a", "--format", "plane"], "did you mean 'plain'?"),
        (["cache", "--clear", "compared"], "did you mean 'compare'?"),
        ([*PROMPT, "--threads", "99999999"], "'--threads'.* less than or equal to 4096"),
        ([*PROMPT, "--seed", str(-(10**20))], "'--seed'.* greater than or equal to -9223"),
        ([*PROMPT, "--seed", str(2**64)], "'--seed'.* less than or equal to 18446744073709551615"),
        ([*PROMPT, "--temperature", "1e-39"], "1e-39 is above 0 and below 1e-06; 0 takes the most"),
        (["generate", "--prompt", "hi \udcff"], "'--prompt': character 3 of .* is not UTF-8"),
        (["show", "attention", "--text", "\udcff"], "'--text': character 0 of .* is not UTF-8"),
        ([*PROMPT, "b\udcffd"], "'model': character 1 of .* is not UTF-8"),
    ],
)
def test_names_that_are_spelt_wrong_are_refused_before_torch(typed, said):
    done = start(*typed)
    assert done.returncode == 2 and "<torch>" not in done.stderr
    assert re.search(said, re.sub(r"[\s│╭╮╰╯─]+", " ", done.stderr))


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize("verb", VERBS)
def test_help_breaks_no_option(verb, width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERMINAL_WIDTH", str(width))
    monkeypatch.setattr("sys.argv", ["regard", *verb.split(), "--help"])
    assert app.run() == 0
    text = capsys.readouterr().out
    words = text.replace(",", " ").split()  # an option with two names: "--num-heads, --heads"
    for name in inspect.signature(options.VERBS[verb]).parameters:
        option = SPELLED.get(name, name).replace("_", "-")
        assert option in words or f"--{option}" in words
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text


def test_a_mistake_in_the_work_is_a_sentence(monkeypatch, capsys):
    sentence = "the work says that this cannot be, in more words than one line of a terminal holds"
    monkeypatch.setattr("regard.cache_folder.check_can_store", lambda what: _raise(sentence))
    monkeypatch.setattr("sys.argv", ["regard", "tune"])
    assert app.run() == 2
    assert capsys.readouterr().err == f"regard: {sentence} [x]\n"


def _raise(sentence):
    raise ValueError(f"{sentence} [x]")


def test_waiting_threads_sleep_soon_unless_the_user_decides(monkeypatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # undone afterwards, also if the verb sets it
        monkeypatch.delenv(name)
    seen = []
    monkeypatch.setattr(options, "import_module", lambda name: seen.append(dict(os.environ)))

    def environment_of(**given):
        options.start("regard.bench", **given)
        return seen[-1].get("GOMP_SPINCOUNT")

    assert environment_of(timed=True) is None
    assert environment_of() == "10000"
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert environment_of() == "7"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert environment_of() is None
