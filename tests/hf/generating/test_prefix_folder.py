"""Prefixes in a folder: found by the next process, refused by another model."""

import pytest
import torch

import regard.hf
from regard.hf.generating import pool_of_model
from regard.hf.generating.pool_of_model import FILE, prefixes_in
from zoo import ZOO, tokens


def model_of(name="mistral"):
    model = ZOO[name].build()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def found(model, folder, ids, **options):
    """The text that is written with the folder, and the number of tokens found in it."""
    with prefixes_in(folder, model, **options) as pool:
        cache = regard.hf.cache(model, "paged", pool=pool)
        text = model.generate(ids, past_key_values=cache, max_new_tokens=3, do_sample=False)
        number = cache.found
        del cache
    return text, number


@pytest.mark.parametrize("name", ["mistral", "deepseek-v3"])
def test_the_next_process_finds_them(name, tmp_path):
    ids = tokens(1, 150)
    text, number = found(model_of(name), tmp_path / "a" / "b", ids)
    assert number == 0
    again, number = found(model_of(name), tmp_path / "a" / "b", ids)
    assert number == 128
    assert again.equal(text)


def test_low_bits_are_found_too(tmp_path):
    ids = tokens(1, 150)
    numbers = [found(model_of(), tmp_path, ids, format="K8V4")[1] for _ in range(2)]
    assert numbers == [0, 128]


def test_a_folder_of_another_model_or_format_is_refused(tmp_path):
    found(model_of(), tmp_path, tokens(1, 70))
    before = (tmp_path / FILE).read_bytes()
    other = model_of()
    with torch.no_grad():
        other.lm_head.weight[0] += 1
    for model, options in [(other, {}), (model_of(), {"format": "K8V4"})]:
        with (
            pytest.raises(ValueError, match="or give another folder for prefixes"),
            prefixes_in(tmp_path, model, **options),
        ):
            raise AssertionError("not reached")
    assert (tmp_path / FILE).read_bytes() == before
    with (
        pytest.raises(ValueError, match="T5ForConditionalGeneration has an encoder"),
        prefixes_in(tmp_path, model_of("t5")),
    ):
        raise AssertionError("not reached")


def test_the_file_has_a_greatest_size(tmp_path, monkeypatch):
    monkeypatch.setattr(pool_of_model, "TOKENS", 128)
    model, sizes = model_of("llama"), []
    for seed in range(4):
        found(model, tmp_path, (tokens(1, 140) + seed) % 50 + 3)
        sizes.append((tmp_path / FILE).stat().st_size)
    assert len(set(sizes)) == 1
    assert found(model, tmp_path, (tokens(1, 140) + 3) % 50 + 3)[1] == 128


def test_after_an_error_the_file_is_as_before(tmp_path):
    found(model_of(), tmp_path, tokens(1, 70))
    before = (tmp_path / FILE).read_bytes()
    with pytest.raises(ZeroDivisionError), prefixes_in(tmp_path, model_of()):
        _ = 1 / 0
    assert (tmp_path / FILE).read_bytes() == before


@pytest.mark.parametrize("name", ["file", "broken link"])
def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_computed(tmp_path, name):
    (tmp_path / "file").touch()
    (tmp_path / "broken link").symlink_to(tmp_path / "none")
    with (
        pytest.raises(NotADirectoryError, match="is a file or a broken link; give a folder"),
        prefixes_in(tmp_path / name, model_of()),
    ):
        raise AssertionError("not reached")
    assert not (tmp_path / "none").exists()
