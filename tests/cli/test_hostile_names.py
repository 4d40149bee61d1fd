"""A folder's name, tokens and masks that would control a terminal or a page: in every verb."""

import json
import re
import shutil
import sys
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

from gguf_headers import plain_block, write_header
from lettered import write_lettered
from regard.cache_folder import FOLDER
from regard.cli.app import run
from regard.cli.options import VERBS
from regard.rates import typical, write_speed
from session import LONG

NAME = "a\x1b[31m\u202e\x9b\x07\x7f[bold]<script>\nb"
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model in a folder of that name, whose tokens have such names, too."""
    words = {"@": 0} | {f"{at}\x1b[2J\u202e</script><img src=x>": at for at in range(1, 8)}
    return write_lettered(tmp_path_factory.mktemp("models") / NAME, words, layers=2)


def calls(folder, tmp_path):
    """The arguments of each verb, and of wrong ones. Those without a model take a file's name."""
    model, page, short = str(folder), str(tmp_path / "page.html"), str(tmp_path / NAME)
    return {
        "describe": [[model], [model, "--json"], [short]],
        "plan": [[model, "--formula", "--html", page], [model, "--json"], [short]],
        "explain": [[model], [model, "--json"], [short]],
        "generate": [
            [model, "--prompt", "abc", "--max-new-tokens", "3"],
            [model, "--prompt", "abc", "--max-new-tokens", "3", "--json"],
            [short, "--prompt", "abc"],
        ],
        "show attention": [
            [model, "--text", "abc", "--heads", "0.0", "--html", page],
            [short, "--text", "abc"],
        ],
        "show mask": [[f"causal {NAME}"], ["Causal()", "--queries", "3", "--html", short + "/a"]],
        "verify": [[short], [short + ".py:x"], [f"{model}:x", "--html", page]],
        "convert": [[short, "--to", "mqa", "--out", model], [model, "--to", "mqa", "--out", model]],
        "compare": [[short]],
        "bench": [["--dtype", NAME]],
        "cache": [[], ["--clear", NAME]],
        "tune": [["--forget"], ["--threads", NAME]],
    }


KEYS = {  # of a GGUF whose block is sound but for what a case changes
    "context_length": 32, "embedding_length": 16, "feed_forward_length": 16,
    "attention.head_count": 2, "attention.head_count_kv": 1,
    "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 1e4, "vocab_size": 40,
}  # fmt: skip
HEADERS = {  # the architecture, keys, names of tensors
    "architecture": (NAME, {}, ()),
    "rotation": ("llama", {"rope.scaling.type": NAME}, ()),
    "value": ("llama", {"attention.head_count": NAME}, ()),
    "key": ("llama", {NAME: 1}, ()),
    "tensor": ("llama", {}, (f"blk.0.{NAME}", f"blk.{NAME}.attn_q.weight")),
}


def gguf(path, case):
    architecture, keys, tensors = HEADERS[case]
    return write_header(path, architecture, KEYS | keys, [plain_block(16, 2, 1, 8)], tensors)


SETTINGS = (  # of config.json
    {"model_type": NAME},
    {"architectures": [NAME]},
    {"layer_types": [NAME, NAME]},
    {"dtype": NAME},
    {"hidden_act": NAME},
    {"rope_parameters": {"rope_type": NAME, "rope_theta": 1e4}},
    {"quantization_config": {"quant_method": NAME}},
    {NAME: NAME},
)


def checkpoints(folder, tmp_path):
    """Checkpoints with such names in each place that a file has for a name."""
    for number, case in enumerate(HEADERS):
        yield gguf(tmp_path / f"{number}.gguf", case)
    for number, settings in enumerate(SETTINGS):
        copy = shutil.copytree(folder, tmp_path / f"settings {number}")
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps(config | settings))
        yield copy
    copy = shutil.copytree(folder, tmp_path / "tensors")
    weights = load_file(copy / "model.safetensors")
    weights |= {f"model.layers.0.{NAME}": torch.zeros(1), NAME: torch.zeros(1)}
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt", NAME: NAME})
    yield copy


def of_a_checkpoint(verb, model, tmp_path):
    """The arguments of a verb that reads a checkpoint, as a text and as JSON."""
    out, text = tmp_path / "out", tmp_path / "text"
    shutil.rmtree(out, ignore_errors=True)
    text.write_text("abcdefgh" * 400)
    more = {
        "compare": ["--context", "8", "--attention", "mqa", "--html", str(tmp_path / "page.html")],
        "convert": ["--to", "mqa", "--out", str(out), "--calibrate", str(text)],
        "generate": ["--prompt", "abc", "--max-new-tokens", "2"],
        "plan": ["--html", str(tmp_path / "page.html")],
    }.get(verb, [])
    return [[str(model), *more], [str(model), *more, "--json"]]


@pytest.fixture
def check(tmp_path, monkeypatch, capfd):
    """Runs a verb and checks what it prints, and then the pages that it wrote."""

    def checked(verb, arguments):
        monkeypatch.setattr(sys, "argv", ["regard", *verb.split(), *arguments])
        run()
        printed = capfd.readouterr()
        for text in (printed.out, printed.err):
            found = CONTROLS.search(re.sub(r"\r?\x1b\[(\d*[A-Kml]|\?25[lh])", "", text))
            assert found is None, (arguments, text)
        assert printed.out or printed.err
        assert "Traceback" not in printed.err

    yield checked
    for page in tmp_path.glob("*.html"):
        text = page.read_text()
        body = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)  # Bokeh's
        assert CONTROLS.search(body) is None and "<img src=x" not in body
        for data in re.findall(r'<script type="application/json">(.*?)</script>', body, re.DOTALL):
            shown = json.dumps(json.loads(data), ensure_ascii=False)
            assert CONTROLS.search(shown) is None


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_no_verb_prints_what_controls_a_terminal(verb, folder, tmp_path, monkeypatch, check):
    monkeypatch.setenv(FOLDER, str(tmp_path / NAME))
    for arguments in calls(folder, tmp_path)[verb]:
        check(verb, arguments)


@pytest.mark.parametrize("verb", ["describe", "plan", "explain", "generate", "convert", "compare"])
def test_nor_any_name_that_a_checkpoint_holds(verb, folder, tmp_path, check):
    some = 1 if LONG or verb in ("describe", "plan") else 2  # the others load or convert a model
    for at, model in enumerate(list(checkpoints(folder, tmp_path))[::some]):
        both = of_a_checkpoint(verb, model, tmp_path)
        for arguments in both if LONG else [both[at % 2]]:
            check(verb, arguments)


def test_a_removed_file_is_named_without_them(tmp_path, monkeypatch, check):
    monkeypatch.setenv(FOLDER, str(tmp_path / NAME))
    path = write_speed(typical(torch.get_num_threads()))
    check("tune", ["--forget"])
    assert not path.exists()


def test_a_warning_that_quotes_a_file_is_printable(monkeypatch):
    from regard.cli import app

    shown, usual = [], warnings.formatwarning

    def warn(**given):
        shown.append(warnings.formatwarning(NAME, UserWarning, "file.py", 1, ""))

    monkeypatch.setattr(app, "app", warn)
    assert run() == 0 and warnings.formatwarning is usual
    assert "a\\x1b[31m\\u202e" in shown[0] and CONTROLS.search(shown[0]) is None
