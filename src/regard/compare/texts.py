"""The texts of a comparison: windows to measure on, and other text to calibrate on."""

from dataclasses import dataclass
from typing import Any

from jaxtyping import Int
from torch import Tensor

from regard.convert.texts import (
    beginning_of,
    calibration,
    many_kinds,
    python_texts,
    python_topics,
    windows_after,
)

NUM_WINDOWS = 1  # to measure on, if no other number is given
CALIBRATION_WINDOWS = 6  # for each window to measure on, a third of them of many kinds of text
CALIBRATION_LENGTH = 512  # tokens
CHARACTERS = 16  # characters read per token needed: more than a token has on average in any text


@dataclass(frozen=True)
class Texts:
    """The texts of a comparison, as tokens.

    Attributes:
        windows: `[N, context]`, to measure perplexity on.
        calibration: `[M, length]`, to calibrate conversions on.
        source: where the text is from.

    Examples:
        >>> import torch
        >>> from regard.compare import Texts
        >>> texts = Texts(torch.zeros(2, 8).long(), torch.zeros(6, 16).long(), "my text")
        >>> len(texts.windows)
        2
    """

    windows: Int[Tensor, "N L"]
    calibration: Int[Tensor, "M K"]
    source: str


def texts_for(
    tokenizer: Any,
    *,
    context: int,
    text: str | None = None,
    name: str = "",
    windows: int = NUM_WINDOWS,
) -> Texts:
    """Windows of `context` tokens, and calibration text that is not in them.

    The default is the language reference that every CPython carries (`pydoc_data.topics`): every
    second topic is measured on; the others, documentation of the standard library and passages of
    many kinds, equally many tokens of each, are calibrated on. With a given `text`, its start is
    measured on and what follows is calibrated on; if too little follows, the default texts are.

    Args:
        tokenizer: the model's, as transformers loads it.
        context: tokens of a window.
        text: the text to use instead of the default.
        name: its name in the result.
        windows: to measure on; 3,072 tokens are calibrated on for each, up to three.

    Raises:
        ValueError: if `text` has fewer tokens than the windows.

    Examples:
        >>> from regard.compare import texts_for
        >>> def tokenizer(text, **options):  # in place of a model's: a token for each character
        ...     return {"input_ids": [ord(each) % 20 for each in text]}
        >>> texts = texts_for(tokenizer, context=8, text="to measure on, then calibrate. " * 300)
        >>> texts.windows.shape, texts.calibration.shape
        (torch.Size([1, 8]), torch.Size([6, 512]))
    """
    count = CALIBRATION_WINDOWS * min(windows, 3)
    first = beginning_of(tokenizer, context)  # of each window
    own, of_calibration = context - len(first), CALIBRATION_LENGTH - len(first)
    measured, following = windows * own, count * of_calibration
    if text is None:
        text, name, following = python_topics()[1], "pydoc_data.topics", 0
    beginning = text[: CHARACTERS * (measured + following)]
    tokens = tokenizer(beginning, add_special_tokens=False, verbose=False)["input_ids"]
    if len(tokens) < measured:
        raise ValueError(
            f"{name or 'text'} has {len(tokens):,} tokens; {windows} windows of {context:,} "
            f"need {measured:,}; give more, or a context of at most "
            f"{len(tokens) // windows + len(first):,}"
        )
    measuring = windows_after(first, tokens[:measured], context)
    rest = tokens[measured : measured + following]
    if 0 < following == len(rest):
        calibrating = windows_after(first, rest, CALIBRATION_LENGTH)
    else:
        given = (*python_texts()[:2], many_kinds())
        calibrating = calibration(tokenizer, given, windows=count, length=CALIBRATION_LENGTH)
    return Texts(measuring, calibrating, name or "text")
