"""regard show attention: options as numbers, tables and maps that fit, JSON and files."""

import json
import re

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from regard.cli.show_attention import Asked, _numbers, _pairs, asked_for, kept
from regard.cli.show_attention import show_attention as verb
from regard.see import AttentionMaps, attention

TEXT = "the capital of France is Paris and the capital of Spain is Madrid"
LEFT_OUT = dict.fromkeys(
    ("model", "text", "text_file", "layers", "heads", "queries", "find", "out", "svg")
) | {"png": None, "html": None, "threads": None, "as_json": False}


@pytest.fixture(autouse=True)
def loaded(monkeypatch):
    """A tiny random model whose tokens are words."""
    known = {word: at for at, word in enumerate(["?", *dict.fromkeys(TEXT.split())])}
    words = Tokenizer(models.WordLevel(known, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=3, vocab_size=len(known)))
    monkeypatch.setattr("regard.hf.load", lambda path: (model.eval(), tokenizer))
    monkeypatch.setattr("regard.hf.fetch_smollm2", lambda: "nowhere")
    return model, tokenizer


def shown(capsys, **options):
    verb(**LEFT_OUT | {"text": TEXT} | options)
    return capsys.readouterr().out


def test_layers_and_heads_that_stand_out(capsys):
    text = shown(capsys)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "3 layers of 4 heads over 13 tokens; no map chosen" in " ".join(text.split())
    rows = [line.split() for line in text.splitlines() if re.match(r"[0-2]  ", line)]
    assert [row[0] for row in rows] == ["0", "1", "2"]
    assert all(row[-1] in ("sdpa", "fused", "eager", "tiled") for row in rows)
    assert "on the previous token" in text
    assert "learned" not in text


def test_chosen_maps_are_drawn_with_their_last_query(capsys):
    text = shown(capsys, heads="2.1,0.3")
    assert text.index("\n2.1: rows are queries") < text.index("\n0.3: rows are queries")
    assert text.count("12 Madrid") == 2, "a row of each map"
    assert text.count('Query 12, "Madrid", reads "') == 2, "and a sentence"
    assert "2.3: rows" not in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_two_heads_of_two_layers_are_two_maps(capsys, tmp_path):
    page = tmp_path / "heads.html"
    text = shown(capsys, heads="2.1,0.3", html=page)
    assert "; 2 maps of 13 queries" in " ".join(text.split())
    assert text.count("rows are queries") == 2
    assert "2 maps of which can be opened" in page.read_text()
    data = json.loads(shown(capsys, heads="2.1,0.3", as_json=True))
    assert {(each["layer"], each["head"]) for each in data["top"]} == {(2, 1), (0, 3)}


def test_more_maps_than_are_printed_are_counted(capsys):
    text = shown(capsys, layers="0-1")
    assert text.count("rows are queries") == 4
    assert "4 more maps: choose with --heads LAYER.HEAD" in text


def test_a_word_is_found_and_the_tokens_around_it_shown(capsys):
    text = shown(capsys, find="capital")
    assert "'capital' is in the tokens 1, 8." in text
    assert text.count("rows are queries") == 4
    with pytest.raises(ValueError, match="--find 'Rome' is not in the text"):
        shown(capsys, find="Rome")


def test_json_holds_every_head_and_nothing_else(capsys, loaded):
    data = json.loads(shown(capsys, heads="1.2", queries="12", as_json=True))
    assert data["tokens"] == TEXT.split()
    model, tokenizer = loaded
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    maps = attention(model, ids, layers=[1], names=TEXT.split())
    assert [len(layer["entropy"]) for layer in data["layers"]] == [4, 4, 4]
    assert data["layers"][2]["sink_share"] == maps.sink_share[2].tolist()
    (top,) = data["top"]
    assert (top["layer"], top["head"], top["query"]) == (1, 2, 12)
    assert [tuple(each) for each in top["keys"]] == maps.top(1, 2, 12)


def test_files_hold_all_maps_if_none_are_chosen(capsys, tmp_path):
    shown(capsys, out=tmp_path / "maps.npz", svg=tmp_path / "some.svg", heads="0.1")
    assert AttentionMaps.load(tmp_path / "maps.npz").weights.shape == (1, 1, 13, 13)
    assert "layer 0, head 1" in (tmp_path / "some.svg").read_text(encoding="utf-8")
    shown(capsys, out=tmp_path / "maps.npz", svg=tmp_path / "all.svg")
    assert AttentionMaps.load(tmp_path / "maps.npz").weights.shape == (3, 4, 13, 13)
    assert "<!-- layer -->" in (tmp_path / "all.svg").read_text(encoding="utf-8")
    shown(capsys, out=tmp_path / "maps.npz", png=tmp_path / "all.png", queries="0-4")
    assert AttentionMaps.load(tmp_path / "maps.npz").weights.shape == (3, 4, 5, 13)


def test_a_prompt_from_a_file(capsys, tmp_path):
    (tmp_path / "prompt.txt").write_text("Paris is\nParis", encoding="utf-8")
    assert "over 3 tokens" in shown(capsys, text=None, text_file=tmp_path / "prompt.txt")


def test_lists_of_numbers():
    assert _numbers("--layers", None) is None
    assert _numbers("--layers", "7, 0,3-5,4") == (7, 0, 3, 4, 5)
    for wrong in ("", "a", "3-", "-3", "1.5", "²", "1" * 30):
        with pytest.raises(ValueError, match="--layers is a list of numbers such as 0,3-5"):
            _numbers("--layers", wrong)
    for wrong in ("5-3", "0-99999999"):
        with pytest.raises(ValueError, match="--layers has ranges from few to many"):
            _numbers("--layers", wrong)


def test_options_as_numbers():
    nothing = asked_for(None, (), None, (), 50)
    assert nothing == Asked(None, None, (), None, None)
    assert not nothing.anything
    pairs = asked_for(None, _pairs("3.1,3.0,4.1"), (5,), (), 50)
    assert pairs == Asked((3, 4), (1, 0), ((3, 1), (3, 0), (4, 1)), (5,), None)
    around = asked_for(None, (), None, (45, 44), 50)
    assert (around.keys, around.queries) == ((29, 50), tuple(range(29, 50)))
    around = asked_for(None, (), (49,), (20, 44), 50)
    assert (around.keys, around.queries) == ((4, 37), (49,))


def test_options_that_are_refused():
    with pytest.raises(ValueError, match="leave out --layers"):
        asked_for((1,), ((3, 1),), None, (), 50)
    assert _pairs(None) == ()
    for wrong in ("3.x", "3.1,2", "0-3", "", "9" * 5000 + ".1"):
        with pytest.raises(ValueError, match=r"--heads is a list of LAYER\.HEAD as 3\.1,4\.0"):
            _pairs(wrong)


def test_maps_that_are_too_large_are_refused_before_the_model_runs():
    config = LlamaConfig(num_hidden_layers=30, num_attention_heads=9, hidden_size=576)
    nothing = asked_for(None, (), None, (), 4096)
    assert kept(config, nothing, 256, most=2**25) == {"layers": range(30)}
    assert kept(config, nothing, 4096, most=2**25) == {}
    assert kept(config, nothing, 256, most=0) == {}
    layers = asked_for(tuple(range(30)), (), None, (), 4096)
    with pytest.raises(ValueError, match=r"270 maps of 4,096 x 4,096 take 16.9 GiB; choose fewer"):
        kept(config, layers, 4096, most=0)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"layers": "3"}, "layers=3 is not among 0 to 2"),
        ({"heads": "0.4"}, "heads=4 is not among 0 to 3"),
        ({"queries": "13"}, "queries=13 is not among 0 to 12"),
    ],
)
def test_layers_heads_and_queries_that_are_not_there(capsys, option, message):
    with pytest.raises(ValueError, match=message):
        shown(capsys, **option)


def test_an_empty_prompt_is_refused(capsys):
    with pytest.raises(ValueError, match="the prompt is empty"):
        shown(capsys, text="")


def test_threads_are_set(capsys):
    shown(capsys, threads=1)
    assert torch.get_num_threads() == 1
