"""Converted layers are cached on disk: found again if all is equal, converted again if not."""

import shutil

import pytest

import regard.compare.runner as runner
from full_disk import files_of_at_most
from regard import GroupedQueryAttention
from regard.compare import Texts, chosen, compare, converted_cache
from regard.convert import target_of
from regard.hf import attention_modules, attention_of
from tiny import tiny, tokens


def name(texts):
    """The name of the file for one conversion."""
    shipped = [attention_of(module) for module in attention_modules(tiny("llama")).values()]
    return converted_cache.name_of(target_of("mqa", shipped), shipped, texts.calibration)


@pytest.fixture
def code(tmp_path, monkeypatch):
    """A copy of the source of `regard.convert`, which names are made from."""
    copy = tmp_path / "convert"
    shutil.copytree(converted_cache.CODE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(converted_cache, "CODE", copy)
    return copy


@pytest.mark.parametrize(
    "file", ["converting.py", "exact/expand.py", "lossy/regroup.py", "lossy/new/file.py"]
)
def test_a_change_of_the_code_in_any_folder_makes_stored_layers_stale(file, texts, code):
    before = name(texts)
    assert name(texts) == before
    (code / file).parent.mkdir(exist_ok=True)
    with (code / file).open("a") as source:
        source.write("CHANGED = True\n")
    assert name(texts) != before


def test_without_source_no_name_is_made(texts, tmp_path, monkeypatch):
    monkeypatch.setattr(converted_cache, "CODE", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"holds no \.py file.*install regard with its"):
        name(texts)


def test_converted_layers_are_stored_and_found_again(texts, monkeypatch):
    calls = []
    convert = runner.convert
    monkeypatch.setattr(
        runner, "convert", lambda *given, **named: calls.append(1) or convert(*given, **named)
    )
    rows = chosen(["mqa", "latent-50", "deepseek-75"])
    first, second = (compare(tiny("llama"), texts, candidates=rows) for _ in range(2))
    assert len(calls) == 1
    for one, other in zip(first.rows, second.rows, strict=True):
        assert one.perplexity == pytest.approx(other.perplexity, rel=1e-6)
    for file in converted_cache.folder().glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:100])
    third = compare(tiny("llama"), texts, candidates=rows[:2])  # an incomplete file is not used
    assert len(calls) == 2 and third.rows[1].perplexity == pytest.approx(first.rows[1].perplexity)
    other = Texts(texts.windows, tokens(21, 50).flip(0), "")
    compare(tiny("llama"), other, candidates=rows[:2])
    assert len(calls) == 3


def test_a_folder_that_cannot_be_written_is_a_warning_and_the_comparison_goes_on(
    tmp_path, monkeypatch, texts
):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv(converted_cache.FOLDER, str(tmp_path / "file"))
    candidates = chosen(["mqa"])
    with pytest.warns(UserWarning, match=r"are not stored for the next comparison: .*REGARD_CACHE"):
        found = compare(tiny("llama"), texts, candidates=candidates)
    assert all(row.perplexity is not None for row in found.rows)


def test_a_full_disk_leaves_no_half_file(tmp_path, monkeypatch):
    monkeypatch.setenv(converted_cache.FOLDER, str(tmp_path))
    layers = [GroupedQueryAttention(64, 4, 2)]
    with files_of_at_most(4096), pytest.warns(UserWarning, match="are not stored for the next"):
        converted_cache.store("a", layers)
    assert [each for each in tmp_path.rglob("*") if each.is_file()] == []
