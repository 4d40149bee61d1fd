"""Text cut into windows of tokens."""

from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor


def windows_of(
    tokenizer: Any, texts: Iterable[str], *, length: int, most: int | None = None
) -> Int[Tensor, "N L"]:
    """Windows of `length` tokens out of the texts, one after the other, `most` of them at most.

    Texts are joined by an empty line; what is left at the end is dropped. No special tokens.

    Raises:
        ValueError: if the texts do not fill a window.
    """
    needed = None if most is None else most * length
    tokens: list[int] = []
    for text in texts:
        tokens += tokenizer(text + "\n\n", add_special_tokens=False, verbose=False)["input_ids"]
        if needed is not None and len(tokens) >= needed:
            tokens = tokens[:needed]
            break
    rows = len(tokens) // length
    if rows == 0:
        raise ValueError(
            f"the text has {len(tokens):,} tokens, one window needs {length:,}; give more text"
        )
    return torch.tensor(tokens[: rows * length], dtype=torch.int64).unflatten(0, (rows, length))
