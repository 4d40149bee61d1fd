"""Windows of tokens from texts: consecutive, in equal parts, and refused if a text is too short."""

from pathlib import Path

import pytest

from regard.convert import texts, windows_of
from regard.convert.texts import calibration, many_kinds, python_texts, read_texts, unwrapped
from tiny import VOCABULARY


class Letters:
    """A tokenizer of letters."""

    def __call__(self, text, **options):
        assert options["add_special_tokens"] is False
        return {"input_ids": [ord(letter) % VOCABULARY for letter in text]}


def test_calibration_has_the_same_share_of_every_text():
    found = calibration(Letters(), ["a" * 100, "b" * 100, "c" * 100], windows=6, length=20)
    assert found.shape == (6, 20)
    assert found[:, 0].unique().numel() == 3
    assert unwrapped("a\n  b\n\nc") == "a b\n\nc"


def test_without_texts_the_installed_ones_and_passages_of_many_kinds_are_calibrated_on():
    found = calibration(Letters(), windows=6, length=30)
    starts = [[ord(letter) % VOCABULARY for letter in text[:30]] for text in python_texts()]
    assert found[:3].tolist() == starts
    passages = [ord(letter) % VOCABULARY for letter in many_kinds() + "\n\n"]
    assert found[3:].flatten().tolist() == passages[: len(passages) // 30 * 30]


def test_the_first_part_of_many_kinds_has_most_kinds_and_its_passages_are_short():
    text = many_kinds()
    first = text[: len(text) // 9]
    prose = ("marché", "Verspätung", "noche", "não", "huis", "dzieci", "Вчера", "昨天", "早く")
    programs = ("#include", "function", "public class", "#!/bin/sh", "pub fn", "CREATE TABLE")
    assert all(word in first for word in (*prose, *programs, "<html", '{"name": '))
    assert max(map(len, text.split("\n\n"))) < 400


def test_a_file_that_is_no_text_is_named(tmp_path):
    file = tmp_path / "latin.txt"
    file.write_bytes("été".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.txt is no text in UTF-8"):
        read_texts([file])


def test_a_file_that_never_ends_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "LONGEST", 9)
    file = tmp_path / "long.txt"
    file.write_text("é" * 9, encoding="utf-8")
    assert texts.read_text(file) == "é" * 9
    file.write_text("é" * 10, encoding="utf-8")
    endless = Path("/dev/zero")  # of Linux and macOS
    for longer in (file, endless) if endless.exists() else (file,):
        with pytest.raises(ValueError, match="has more than 9 characters; give a part of it"):
            texts.read_text(longer)


def test_windows_of_texts():
    windows = windows_of(Letters(), ["abcd", "efg"], length=4)
    joined = [ord(letter) % VOCABULARY for letter in "abcd\n\nefg\n\n"]
    assert windows.flatten().tolist() == joined[:8]
    assert len(windows_of(Letters(), iter(["abcd"] * 9), length=4, most=3)) == 3
    with pytest.raises(ValueError, match="3 tokens, one window needs 4"):
        windows_of(Letters(), ["a"], length=4)


class WithBeginning(Letters):
    """A tokenizer that puts a token before every text, as those of Gemma and Llama 3 do."""

    bos_token_id = 1

    def __call__(self, text, **options):
        ids = super().__call__(text, add_special_tokens=False)["input_ids"]
        return {"input_ids": ids if options.get("add_special_tokens") is False else [1, *ids]}


def test_each_window_begins_as_the_tokenizer_begins_a_text():
    found = windows_of(WithBeginning(), ["abcdefgh"], length=5)
    assert found[:, 0].tolist() == [1, 1]
    assert found[:, 1:].equal(windows_of(Letters(), ["abcdefgh"], length=4)[:2])
    assert (
        windows_of(WithBeginning(), ["abcdefgh"], length=5, most=1).tolist() == found[:1].tolist()
    )
    with pytest.raises(ValueError, match="the text has 3 tokens, one window needs 4"):
        windows_of(WithBeginning(), ["a"], length=5)
    with pytest.raises(ValueError, match="2 tokens or more, the first of them special, got 1"):
        windows_of(WithBeginning(), ["abc"], length=1)


class Silent:
    """A tokenizer whose beginning is for chats alone, as SmolLM2's."""

    bos_token_id = 1

    def __call__(self, text, **options):
        return {"input_ids": [ord(letter) % VOCABULARY for letter in text]}


def test_a_token_that_is_not_put_before_a_text_begins_no_window():
    expected = windows_of(Letters(), ["abc"], length=5)
    assert windows_of(Silent(), ["abc"], length=5).equal(expected)
