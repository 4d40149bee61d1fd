"""regard describe: its table, its JSON, and files that could harm a terminal."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from interpreters import run_python
from published_configs import PUBLISHED
from regard.cli.describe import as_data, cache_of, shortened, show
from regard.cli.describe import describe as verb
from regard.cli.terminal import printable
from regard.plan.building import describe_config
from regard.plan.cost import cost_of
from regard.plan.shapes import STORAGES, ModelShape
from regard.words import ranges


def described(name: str, shown: str = "") -> ModelShape:
    return describe_config(PUBLISHED[name], Path("config.json"), shown or name, 5 << 30)


def printed(model: ModelShape, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    show(model, console)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_lines_fit() -> None:
    faults = []
    for name in PUBLISHED:
        model = described(name)
        for width in (60, 80, 120):
            longest = max(map(cell_len, printed(model, width).splitlines()))
            if longest > width:
                faults.append((name, width, longest))
    assert faults == []


def test_a_description_fits_a_screen() -> None:
    """24 lines of 80 columns."""
    lines = {name: len(printed(described(name)).splitlines()) for name in PUBLISHED}
    assert {name: count for name, count in lines.items() if count > 24} == {}


def test_what_is_said_of_gemma_3() -> None:
    text = " ".join(printed(described("gemma-3-4b")).split())
    assert text.startswith("gemma-3-4b: 34 layers of gemma3, hidden size 2,560, bfloat16, made for")
    assert "0-4, 6-10, 12-16, ..., GQA; window" in text and "5, 11, 17, 23, 29 GQA" in text
    assert "window of 1,024 8 on 4 256 15,729,152 4,096" in text
    assert text.count("queries and keys normalised by head") == 1
    assert "Layers 5, 11, 17, 23, 29: Rotary(256, theta=1000000.0, scaling=LinearScal" in text
    assert "A token takes 139,264 bytes of cache, and 20,480 once 29 layers hold as many" in text
    assert "regard.hf.install runs it: Gemma3Attention" in text
    assert "5 GiB of weights" in text


def test_what_is_said_of_other_kinds() -> None:
    assert "MLA; latent of 512; 64 with RoPE; query latent of 1,536" in " ".join(
        printed(described("DeepSeek-V3"), 120).split()
    )
    text = " ".join(printed(described("Qwen3-Next-80B-A3B"), 200).split())
    assert "linear; state of 557,056 numbers" in text and "gated by channel" in text
    assert "No layer of regard computes" in text and "regard has no linear attention" in text
    assert "States take" in text and "Attention has" not in text  # its parameters are not known
    text = " ".join(printed(described("bert-base")).split())
    assert "not causal" in text and "there is no cache" in text
    text = " ".join(printed(described("Phi-3-mini-128k")).split())
    assert "LongRope((1.0, 1.01, ... 48 numbers), (1.0, 1.5, ... 48 numbers)" in text
    text = " ".join(printed(described("SmolLM3-3B")).split())
    assert "3, 7, 11, ..., 35 GQA; no RoPE" in text


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_json_agrees_with_the_costs(name: str) -> None:
    model = described(name)
    data = json.loads(json.dumps(as_data(model), allow_nan=False))
    indices = sorted(index for layer in data["layers"] for index in layer["indices"])
    assert indices == list(range(data["num_layers"])) and data["name"] == name
    assert data["cache_bytes"] == cache_of(model, model.max_positions)
    if all(layer.causal and layer.kind != "linear" for layer in model.layers):
        context = model.max_positions or 1
        cost = cost_of(model, STORAGES["plain"], context=context)
        assert data["attention_parameters"] == cost.parameters
        assert data["cache_bytes"] == cost.cache_bytes
        once = sum(each["cache_bytes_per_token"] * len(each["indices"]) for each in data["layers"])
        assert once == cost_of(model, STORAGES["plain"], context=1).cache_bytes


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["Llama-3.1-8B"]))
    verb(model=tmp_path, as_json=True)
    assert json.loads(capsys.readouterr().out)["attention_parameters"] == 32 * 41_943_040
    verb(model=tmp_path, as_json=False)
    assert "scaling=Llama3(8.0)" in capsys.readouterr().out


def test_errors_are_one_sentence(tmp_path: Path) -> None:
    folder = tmp_path / "a\x1b[31mb"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "\\u001b[31mred"}')
    ran = run_python("-m", "regard", "describe", folder)
    assert ran.returncode == 2 and ran.stdout == ""
    start = f"regard: {printable(str(folder))}/config.json: 'model_type' cannot be described"
    assert ran.stderr.startswith(start)
    assert "\x1b" not in ran.stderr and ran.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["a\x1b[31mb", "<b>\x07", "[bold]x[/bold]", "\u202egnp"])
def test_names_are_printed_as_they_are_and_cannot_control_a_terminal(name: Any) -> None:
    text = printed(described("gpt2", name))
    assert not any(each in text for each in "\x1b\x07\u202e")
    assert printable(name) in text


def test_words() -> None:
    assert ranges(()) == "" and ranges((3,)) == "3" and ranges((0, 1, 3)) == "0-1, 3"
    assert shortened("Rotary(8)") == "Rotary(8)"
