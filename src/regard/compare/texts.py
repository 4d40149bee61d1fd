"""The texts of a comparison: windows to measure on, and other text to calibrate on."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from regard.convert.texts import calibration, python_topics

NUM_WINDOWS = 2  # to measure on: one in each order of the candidates
CALIBRATION_WINDOWS = 6  # two of each kind of text; a third of `convert`'s, as ten rows are made
CALIBRATION_LENGTH = 1024  # tokens, as in `convert`
CHARACTERS = 16  # characters read per token needed: more than a token has on average in any text


@dataclass(frozen=True)
class Texts:
    """Windows `[N, context]` to measure perplexity on, and `[M, length]` to calibrate on."""

    windows: Int[Tensor, "N L"]
    calibration: Int[Tensor, "M K"]
    source: str


def texts_for(tokenizer: Any, *, context: int, text: str | None = None, name: str = "") -> Texts:
    """Two windows of `context` tokens, and calibration text that is not in them.

    The default is the language reference that every CPython carries (`pydoc_data.topics`): every
    second topic is measured on; the others, documentation and source of the standard library are
    calibrated on. With a given `text`, its start is measured on and what follows is calibrated on;
    if too little follows, the default texts are calibrated on.

    Raises:
        ValueError: if `text` is shorter than one token more than the windows.
    """
    if text is None:
        windows = _tokens(tokenizer, python_topics()[1], NUM_WINDOWS * context)
        return _cut(windows, _of_python(tokenizer), context, "pydoc_data.topics")
    needed = (NUM_WINDOWS * context, CALIBRATION_WINDOWS * CALIBRATION_LENGTH)
    tokens = _tokens(tokenizer, text, sum(needed))
    rest = tokens[needed[0] :]
    if len(rest) < needed[1]:
        rest = _of_python(tokenizer)
    return _cut(tokens[: needed[0]], rest, context, name or "text")


def _of_python(tokenizer: Any) -> Int[Tensor, " T"]:
    windows = calibration(tokenizer, windows=CALIBRATION_WINDOWS, length=CALIBRATION_LENGTH)
    return windows.flatten()


def _tokens(tokenizer: Any, text: str, count: int) -> Int[Tensor, " T"]:
    beginning = text[: CHARACTERS * count]
    ids = tokenizer(beginning, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor(ids[:count], dtype=torch.int64)


def _cut(measured: Tensor, calibration: Tensor, context: int, source: str) -> Texts:
    if len(measured) < NUM_WINDOWS * context:
        raise ValueError(
            f"{source} has {len(measured):,} tokens; {NUM_WINDOWS} windows of {context:,} need "
            f"{NUM_WINDOWS * context:,}; give more, or a context of at most "
            f"{len(measured) // NUM_WINDOWS:,}"
        )
    length = min(CALIBRATION_LENGTH, len(calibration))
    rows = len(calibration) // length
    windows = measured.unflatten(0, (NUM_WINDOWS, context))
    return Texts(windows, calibration[: rows * length].unflatten(0, (rows, length)), source)
