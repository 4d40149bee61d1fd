"""The texts of a comparison: calibration text is not measured on."""

import pytest

from regard.compare import texts_for
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
