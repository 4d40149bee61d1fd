"""The texts of a comparison: calibration text is not measured on."""

import pytest

from regard.compare import documents_of, texts_for
from regard.convert.texts import many_kinds
from tiny import VOCABULARY


class Words:
    """A tokenizer of characters."""

    def __call__(self, text, **options):
        return {"input_ids": [3 + ord(letter) % (VOCABULARY - 3) for letter in text]}


def test_calibration_text_is_not_measured_on():
    default = texts_for(Words(), context=64)
    assert default.windows.shape == (1, 64)
    assert default.calibration.shape == (6, 512)
    passages = Words()(many_kinds())["input_ids"]
    assert default.calibration[-2:].flatten().tolist() == passages[:1024]
    more = [texts_for(Words(), context=64, windows=n).calibration.shape for n in (2, 3, 4)]
    assert more == [(12, 512), (18, 512), (18, 512)]
    own = texts_for(Words(), context=10, text="ab" * 5000, name="own")
    assert own.source == "own"
    assert own.calibration.shape == (6, 512)
    apart = texts_for(Words(), context=10, text="A" * 10 + "B" * 7000)
    assert not set(apart.windows.flatten().tolist()) & set(apart.calibration.flatten().tolist())
    short = texts_for(Words(), context=10, text="ab" * 20)
    assert short.calibration.equal(default.calibration)
    with pytest.raises(ValueError, match="at most 20"):
        texts_for(Words(), context=21, text="ab" * 10)


class WithBeginning(Words):
    """A tokenizer that puts a token before every text, as those of Gemma and Llama 3 do."""

    bos_token_id = 2

    def __call__(self, text, **options):
        ids = super().__call__(text)["input_ids"]
        return {"input_ids": ids if options.get("add_special_tokens") is False else [2, *ids]}


def test_windows_and_documents_begin_as_the_tokenizer_begins_a_text():
    text = "to measure on, then to calibrate. " * 300
    found, plain = (texts_for(each(), context=10, windows=2, text=text)
                    for each in (WithBeginning, Words))  # fmt: skip
    assert found.windows.shape == (2, 10)
    assert found.calibration.shape == plain.calibration.shape
    for windows in (found.windows, found.calibration):
        assert windows[:, 0].eq(2).all()
        assert not windows[:, 1:].eq(2).any()
    assert found.windows[:, 1:].flatten().tolist() == plain.windows.flatten().tolist()[:18]
    with pytest.raises(ValueError, match="need 20; give more, or a context of at most 11"):
        texts_for(WithBeginning(), context=21, text="ab" * 5)
    with pytest.raises(ValueError, match="2 tokens or more, the first of them special, got 1"):
        texts_for(WithBeginning(), context=1, text=text)
    document, other = documents_of(WithBeginning(), text, context=500, documents=2)
    assert len(document.tokens) == len(other.tokens) == 500
    assert int(document.tokens[0]) == int(other.tokens[0]) == 2
    assert not any(2 in question for question in document.questions)
