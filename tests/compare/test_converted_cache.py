"""Converted layers are cached on disk: found again if all is equal, converted again if not."""

import pytest
import torch

import regard.compare.runner as runner
from full_disk import files_of_at_most
from regard import GroupedQueryAttention
from regard.compare import Texts, chosen, compare, converted_cache
from regard.convert import convert, target_of
from regard.hf import attention_modules, attention_of
from tiny import tiny, tokens

RESULTS = {  # the norms of outputs, layer by layer
    "mqa": [0.879, 1.958],
    "latent-50": [1.195, 1.959],
    "deepseek-50": [1.151, 1.943],
    "portable-50": [1.153, 1.961],
}


def name(texts):
    """The name of the file for one conversion."""
    shipped = [attention_of(module) for module in attention_modules(tiny("llama")).values()]
    return converted_cache.name_of(target_of("mqa", shipped), shipped, texts.calibration)


@torch.no_grad()
def test_other_results_of_conversions_need_another_version():
    """Outputs of converted layers, as version 5 computes them. If they change on purpose, raise
    `VERSION`, so that layers that were stored before are not used, and write the new ones here."""
    model = tiny("llama")
    shipped = [attention_of(module) for module in attention_modules(model).values()]
    x = torch.randn(1, 6, shipped[0].hidden_size, generator=torch.Generator().manual_seed(0))
    found = {}
    for key, candidate in {each.key: each for each in chosen(list(RESULTS))[1:]}.items():
        (made,) = convert(model, [candidate.choose(shipped, torch.float32)], tokens(21, 50))
        found[key] = [float(layer(x).norm()) for layer in made.layers]
    assert converted_cache.VERSION == 5
    for key, norms in RESULTS.items():
        assert found[key] == pytest.approx(norms, rel=2e-3), key


def test_a_version_has_its_own_names(texts, monkeypatch):
    before = name(texts)
    assert name(texts) == before
    monkeypatch.setattr(converted_cache, "VERSION", converted_cache.VERSION + 1)
    assert name(texts) != before


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
