"""A folder's name, tokens and masks that would control a terminal or a page: in every verb."""

import json
import re
import sys
import warnings

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from regard_cli.app import run
from regard_cli.options import VERBS

NAME = "a\x1b[31m\u202e\x9b\x07[bold]<script>\nb"
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model in a folder of that name, whose tokens and settings have such names, too."""
    path = tmp_path_factory.mktemp("models") / NAME
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=8, eos_token_id=None)
    LlamaForCausalLM(config).save_pretrained(path)
    known = {"@": 0} | {f"{at}\x1b[2J\u202e</script><img src=x>": at for at in range(1, 8)}
    words = Tokenizer(models.WordLevel(known, unk_token="@"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(path)
    return path


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
        "show mask": [[f"causal {NAME}"], ["causal", "--queries", "3", "--html", short + "/a"]],
        "verify": [[short], [short + ".py:x"], [f"{model}:x", "--html", page]],
        "convert": [[short, "--to", "mqa", "--out", model], [model, "--to", "mqa", "--out", model]],
        "compare": [[short]],
        "bench": [],  # no name of a file
        "tune": [],
    }


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_no_verb_prints_what_controls_a_terminal(verb, folder, tmp_path, monkeypatch, capfd):
    for arguments in calls(folder, tmp_path)[verb]:
        monkeypatch.setattr(sys, "argv", ["regard", *verb.split(), *arguments])
        run()
        printed = capfd.readouterr()
        for text in (printed.out, printed.err):
            found = CONTROLS.search(re.sub(r"\r?\x1b\[(\d*[A-Kml]|\?25[lh])", "", text))
            assert found is None, (arguments, text)
        assert printed.out or printed.err
    for page in tmp_path.glob("*.html"):
        text = page.read_text()
        body = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)  # Bokeh's
        assert CONTROLS.search(body) is None and "<img src=x" not in body
        for data in re.findall(r'<script type="application/json">(.*?)</script>', body, re.DOTALL):
            shown = json.dumps(json.loads(data), ensure_ascii=False)
            assert CONTROLS.search(shown) is None


def test_a_warning_that_quotes_a_file_is_printable(monkeypatch):
    from regard_cli import app

    shown, usual = [], warnings.formatwarning

    def warn(**given):
        shown.append(warnings.formatwarning(NAME, UserWarning, "file.py", 1, ""))

    monkeypatch.setattr(app, "app", warn)
    assert run() == 0 and warnings.formatwarning is usual
    assert "a\\x1b[31m\\u202e" in shown[0] and CONTROLS.search(shown[0]) is None
