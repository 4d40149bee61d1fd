"""regard explain: a call of given sizes, or those of a model's layers."""

import json
import shlex
import sys
from types import ModuleType

import pytest
import torch

import regard.cli.explain as cli
from pages import shown_commands, without_figures
from regard import Causal, Chunked, SlidingWindow, Span, explain
from regard.cli.app import run
from regard.cli.explaining import mask_of
from regard.ops.backends import BACKENDS
from regard.plan.shapes import LayerShape, ModelShape

SIZES = ("--num-heads", 4, "--num-kv-heads", 2, "--head-dim", 16)
GQA = {"hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "v_head_dim": 16}
MLA = {
    "hidden_size": 64, "num_heads": 4, "num_kv_heads": 4, "head_dim": 24, "v_head_dim": 16,
    "kv_lora_rank": 32, "qk_rope_head_dim": 8,
}  # fmt: skip


def said(monkeypatch, capsys, *arguments):
    """The exit code, stdout and stderr."""
    monkeypatch.setattr("sys.argv", ["regard", "explain", *map(str, arguments)])
    code = run()
    return code, *capsys.readouterr()


@pytest.fixture
def model(monkeypatch):
    """Sets the layers that `describe` finds."""
    pretended = ModuleType("regard.plan.describing")

    def layers(*shapes, dtype="float32"):
        found = ModelShape(name="m", architecture="x", layers=shapes, hidden_size=64, dtype=dtype)
        pretended.describe = lambda path: found

    monkeypatch.setitem(sys.modules, "regard.plan.describing", pretended)
    return layers


def joined(text):
    """Wrapped lines as one."""
    return text.replace("\n" + " " * cli.NAME, " ")


def test_it_says_what_explain_says(monkeypatch, capsys):
    given = ("--queries", 2, "--keys", 40, "--batch", 3, "--mask", "Causal() & SlidingWindow(9)")
    code, out, _ = said(monkeypatch, capsys, *SIZES, *given, "--dtype", "bfloat16")
    q, k = torch.zeros(3, 4, 2, 16).bfloat16(), torch.zeros(3, 2, 40, 16).bfloat16()
    mask = Causal() & SlidingWindow(9)
    assert code == 0
    assert joined(out) == explain(q, k, k, mask=mask, span=Span(38, 40, 0, 40)) + "\n"
    assert max(map(len, out.splitlines())) <= 80


def test_what_is_left_out_is_a_causal_decoding_step(monkeypatch, capsys):
    _, out, _ = said(monkeypatch, capsys, "--num-heads", 4, "--head-dim", 16)
    assert out.startswith("1 query x 4,096 keys, 4 heads on 4, head dim 16, float32, cpu\n")
    assert "Causal()  ->  Everything() here" in out


def test_values_may_be_narrower(monkeypatch, capsys):
    _, out, _ = said(monkeypatch, capsys, *SIZES, "--v-head-dim", 8)
    assert "head dim 16 (values 8)" in out


def test_a_long_prefill_takes_no_memory(monkeypatch, capsys):
    given = ("--queries", 10**7, "--keys", 10**7, "--num-heads", 128, "--head-dim", 512)
    code, out, _ = said(monkeypatch, capsys, *given)  # its queries alone would be 2.6 TB
    assert code == 0
    assert out.startswith("10,000,000 queries x 10,000,000 keys")


def test_json_and_lines_are_of_one_source(monkeypatch, capsys):
    given = (*SIZES, "--keys", 77, "--mask", "Causal() & SlidingWindow(9)")
    lines = joined(said(monkeypatch, capsys, *given)[1]).splitlines()
    _, out, err = said(monkeypatch, capsys, *given, "--json")
    (found,) = json.loads(out)["calls"]
    call = found["call"]
    assert err == ""
    assert [each["name"] for each in call["backends"]] == list(BACKENDS)
    assert (call["queries"], call["keys"], call["kv_start"], call["kv_stop"]) == (1, 77, 68, 77)
    assert f"mask     {call['asked']}  ->  {call['mask']} here" in lines
    (running,) = [line.split()[0] for line in lines if " runs, " in line]
    assert call["runs"] == running
    for each in call["backends"]:
        (line,) = [line for line in lines if line.split()[0] == each["name"]]
        if each["seconds"] is None:
            assert each["objection"] in line
        else:
            assert f"about {1e3 * each['seconds']:.3g} ms" in line


def test_layers_that_are_alike_are_explained_once(model, monkeypatch, capsys):
    plain, nope = LayerShape(**GQA, rope="Rotary(16)"), LayerShape(**GQA)
    window = LayerShape(**GQA, window=100)
    model(window, plain, nope, plain, window)
    code, out, _ = said(monkeypatch, capsys, "a-model", "--context", 300, "--why")
    assert code == 0
    headings = [line for line in out.splitlines() if " in layer" in line]
    assert headings == [
        "Prefill of 300 tokens, GQA in layers 0, 4",
        "Prefill of 300 tokens, GQA in layers 1-3",
        "Decoding a token at 300, GQA in layers 0, 4",
        "Decoding a token at 300, GQA in layers 1-3",
    ]
    assert out.count("mask     Causal() & SlidingWindow(size=100)") == 2
    assert "100 are read: slots 200..299" in out


def test_a_model_has_a_line_for_each_call(model, monkeypatch, capsys):
    model(LayerShape(**GQA, window=100), LayerShape(**GQA), LayerShape(**MLA))
    code, out, _ = said(monkeypatch, capsys, "a-model", "--context", 300)
    assert code == 0 and len(out.splitlines()) <= 24
    assert out.startswith("m: 3 layers, computed in float32; 300 tokens, 1 row\n")
    rows = [line.split() for line in out.splitlines()]
    assert [row[-6:-3] for row in rows if row[:1] == ["Decoding"]] == [["0", "GQA", "100"]]
    assert "MLA, absorbed" in out and "--why" in out
    whole = said(monkeypatch, capsys, "a-model", "--context", 300, "--why")[1]
    (line,) = [line for line in whole.splitlines() if line.startswith("m: ")]
    assert out.startswith(line) and len(whole) > 2 * len(out)


def test_a_model_computes_in_the_dtype_that_it_is_loaded_in(model, monkeypatch, capsys):
    model(LayerShape(**GQA), dtype="float16")
    assert "computed in float32;" in said(monkeypatch, capsys, "a-model")[1]
    assert "computed in float16;" in said(monkeypatch, capsys, "a-model", "--dtype", "float16")[1]


def test_a_model_decodes_as_many_tokens_as_asked_for(model, monkeypatch, capsys):
    model(LayerShape(**GQA))
    _, out, _ = said(monkeypatch, capsys, "a-model", "--queries", 5, "--dtype", "bfloat16", "--why")
    assert "Decoding 5 tokens at 4,096, GQA in layer 0" in out
    assert "5 queries x 4,096 keys, 4 heads on 2, head dim 16, bfloat16, cpu" in out
    assert "4,096 queries x 4,096 keys" in out


def test_mla_is_expanded_for_a_prefill_and_absorbed_for_a_step(model, monkeypatch, capsys):
    model(LayerShape(**MLA))
    _, out, _ = said(monkeypatch, capsys, "a-model", "--why")
    prefill, step = joined(out).split("Decoding")
    assert "form     expanded: for so many queries" in prefill
    assert "4 heads on 4, head dim 24 (values 16)" in prefill
    assert "form     absorbed: for so few queries" in step
    assert "4 heads on 1, head dim 40 (values 32)" in step  # 32 of the latent, 8 with RoPE


def test_layers_that_are_not_computed_are_said(model, monkeypatch, capsys):
    model(
        LayerShape(**GQA, unsupported="its scores have a bias by distance."),
        LayerShape(**GQA),
        LayerShape(**GQA, state_elements=256),
        LayerShape(**GQA, state_elements=256),
    )
    _, out, _ = said(monkeypatch, capsys, "a-model", "--why")
    assert "regard does not compute layer 0: its scores have a bias by distance.\n" in out
    assert "regard does not compute layers 2-3: their state is no cache of keys" in out
    assert "in layer 1\n" in out
    listed = json.loads(said(monkeypatch, capsys, "a-model", "--json")[1])
    assert list(listed["refused"].values()) == [[0], [2, 3]]
    assert [each["layers"] for each in listed["calls"]] == [[1], [1]]


def test_a_model_of_no_known_layer_has_no_table(model, monkeypatch, capsys):
    model(LayerShape(**GQA, state_elements=256))
    code, out, _ = said(monkeypatch, capsys, "a-model")
    assert code == 0 and "regard does not compute layer 0: their state" in out
    assert "backend" not in out


def test_sinks_and_softcap_reach_the_backends(model, monkeypatch, capsys):
    model(LayerShape(**GQA, softcap=50.0))
    assert "sdpa     objects: " in joined(said(monkeypatch, capsys, "a-model", "--why")[1])
    model(LayerShape(**GQA, sinks=True))
    assert "sdpa     objects: " in joined(said(monkeypatch, capsys, "a-model", "--why")[1])


def test_the_mask_of_a_layer():
    assert mask_of(LayerShape(**GQA)) == Causal()
    assert mask_of(LayerShape(**GQA, window=3, chunk=4)) == (
        Causal() & SlidingWindow(3) & Chunked(4)
    )
    assert repr(mask_of(LayerShape(**GQA, causal=False))) == "Everything()"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ((*SIZES, "--queries", 9, "--keys", 8), "at most as many; got 9 queries and 8 keys"),
        ((*SIZES, "--device", "nonsense"), "'nonsense' is no device of torch"),
        ((*SIZES, "--device", "meta"), "computes nothing"),
        ((*SIZES, "--mask", "Causal"), "Causal is called: Causal()"),
        ((*SIZES, "--mask", "Padding([[1], [1]])"), "is for a batch of 2, q of a batch of 1"),
        ((*SIZES, "--keys", 10**12, "--batch", 10**6), "a tensor has at most 4.6e+18 numbers"),
        (("no-such-folder",), "no-such-folder"),
    ],
)
def test_what_cannot_be_explained_is_a_sentence(given, reason, monkeypatch, capsys):
    code, out, err = said(monkeypatch, capsys, *given)
    assert (code, out) == (2, "")
    assert err.startswith("regard: ")
    assert reason in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_device_that_is_not_there_is_a_sentence(monkeypatch, capsys):
    code, out, err = said(monkeypatch, capsys, *SIZES, "--device", "cuda")
    assert (code, out) == (2, "")
    assert err.startswith("regard: --device cuda cannot be used by torch here: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ((), "give a MODEL, or --num-heads and --head-dim"),
        (("--num-heads", 4), "give a MODEL, or --num-heads and --head-dim"),
        ((*SIZES, "--context", 9), "goes with a MODEL"),
        (("a-model", "--keys", 9), "a MODEL has its own sizes"),
        ((*SIZES, "--keys", 10**30), "is above 1,000,000,000,000"),
        ((*SIZES, "--batch", 10**30), "is above 1,000,000,000,000"),
        (("a-model", "--context", 10**30), "is above 1,000,000,000,000"),
        (("--num-heads", 4, "--num-kv-heads", 3, "--head-dim", 8), "3 does not divide the 4"),
    ],
)
def test_options_that_do_not_go_together(given, reason, monkeypatch, capsys):
    code, out, err = said(monkeypatch, capsys, *given)
    assert (code, out) == (2, "")
    assert reason in err


@pytest.mark.parametrize("page", ["docs/guides/backends.md", "docs/zh/guides/backends.md"])
def test_the_guide_shows_what_is_printed(page, monkeypatch, capsys):
    shown = shown_commands(page, "explain")
    assert shown
    for command, prints in shown:
        _, out, _ = said(monkeypatch, capsys, *shlex.split(command)[1:])
        assert [without_choice(line) for line in out.splitlines()] == [
            without_choice(line) for line in prints.code.splitlines()
        ]


def without_choice(line):
    """A line without its figures, and without what another machine would choose."""
    return without_figures(line.replace("runs, about", "about"))
