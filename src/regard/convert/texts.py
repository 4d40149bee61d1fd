"""Windows of tokens to calibrate and measure on, from the user's texts or those that are installed.

Shipped with Python: half of the language reference, the docstrings of the standard library, and
its source. The other half of the reference is held out to measure on. Shipped with regard: short
passages of many kinds, in English and 26 other languages, of prose, programs and data. A fit
loses most on kinds of text that it has not seen, and less where it has seen a few sentences.
"""

import importlib
import inspect
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

LENGTH = 1024  # tokens of a window
WINDOWS = 18  # windows to calibrate on; `benchmarks/converting.py --windows` measures other numbers
CHARACTERS = 8  # characters read per token needed: more than a token has on average in any text
DOCUMENTED = (
    "argparse asyncio collections contextlib csv datetime decimal difflib email.message fractions "
    "functools http.client inspect json logging os pathlib random shutil socket sqlite3 statistics "
    "string subprocess tarfile tempfile textwrap threading typing unittest urllib.request zipfile"
)
SOURCES = "heapq textwrap statistics bisect calendar fractions"
MANY_KINDS = Path(__file__).with_name("many_kinds.txt")  # 12,000 tokens of SmolLM2's
LONGEST = 2**26  # characters of a file: some devices, such as /dev/zero, never end
SHORTEST = 200  # characters: shorter docstrings are mostly boilerplate


def windows_of(
    tokenizer: Any, texts: Iterable[str], *, length: int, most: int | None = None
) -> Int[Tensor, "N L"]:
    """Consecutive windows of `length` tokens from the texts, `most` of them at most.

    Texts are joined by an empty line; an incomplete last window is dropped. Each window begins with
    the special token that the tokenizer puts before a text, if it does (Gemma, Llama 3); a model
    that was trained so predicts badly without it.

    Args:
        tokenizer: the model's, as transformers loads it.
        texts: any number.
        length: tokens of a window.
        most: the largest number of windows.

    Raises:
        ValueError: if the texts do not fill a window.

    Examples:
        >>> from regard.convert import windows_of
        >>> def tokenizer(text, **options):  # in place of a model's: a token for each character
        ...     return {"input_ids": [ord(each) for each in text]}
        >>> windows_of(tokenizer, ["abcd"], length=3)
        tensor([[ 97,  98,  99],
                [100,  10,  10]])
    """
    first = beginning_of(tokenizer, length)
    own, tokens = length - len(first), list[int]()
    needed = None if most is None else most * own
    for text in texts:
        tokens += tokenizer(text + "\n\n", add_special_tokens=False, verbose=False)["input_ids"]
        if needed is not None and len(tokens) >= needed:
            tokens = tokens[:needed]
            break
    if len(tokens) < own:
        raise ValueError(
            f"the text has {len(tokens):,} tokens, one window needs {own:,}; give more text"
        )
    return windows_after(first, tokens[: len(tokens) // own * own], length)


def beginning_of(tokenizer: Any, length: int) -> list[int]:
    """The special token that begins windows of `length` tokens, as a list; [] if there is none."""
    special = getattr(tokenizer, "bos_token_id", None)
    found: list[int] = [] if special is None else tokenizer("a", verbose=False)["input_ids"][:1]
    if found == [special] and length < 2:
        raise ValueError(f"a window has 2 tokens or more, the first of them special, got {length}")
    return found if found == [special] else []


def windows_after(first: list[int], tokens: list[int], length: int) -> Int[Tensor, "N L"]:
    """Windows of `length` tokens, each of which begins with the tokens `first`."""
    rows = torch.tensor(tokens, dtype=torch.int64).view(-1, length - len(first))
    return torch.cat([torch.tensor(first, dtype=torch.int64).expand(len(rows), -1), rows], 1)


def python_topics() -> tuple[str, str]:
    """The topics of Python's help system in two halves: every second topic, and the others."""
    from pydoc_data.topics import topics

    names = sorted(topics)
    even, odd = ("\n\n".join(topics[name] for name in names[first::2]) for first in (0, 1))
    return even, odd


def python_texts() -> tuple[str, str, str]:
    """Three kinds of text to calibrate on: half of the reference, docstrings, source."""
    return python_topics()[0], _documentation(), _source()


def many_kinds() -> str:
    """Short passages of many kinds and languages; none is of a kind with those beside it."""
    return MANY_KINDS.read_text(encoding="utf-8")


def calibration(
    tokenizer: Any, texts: Sequence[str] = (), *, windows: int = WINDOWS, length: int = LENGTH
) -> Int[Tensor, "N L"]:
    """Equally many windows from the start of each text, or as many as it has. If none are given,
    half of the windows are of Python's texts, and all passages of many kinds are added.

    Raises:
        ValueError: if they do not fill a window of that length.
    """
    given = texts or python_texts()
    each = -(-(windows if texts else windows // 2) // len(given))
    found = []
    for text in given:
        start = text[: CHARACTERS * each * length]
        found.append(windows_of(tokenizer, [start], length=length, most=each))
    if not texts:
        found.append(windows_of(tokenizer, [many_kinds()], length=length))
    return torch.cat(found)[:windows] if len(found) == 1 else torch.cat(found)


def read_texts(files: Iterable[Path]) -> list[str]:
    """The text of each file, with the lines of a paragraph joined.

    Raises:
        FileNotFoundError: as `Path.read_text` raises it.
        ValueError: if a file is no text in UTF-8.
    """
    return [unwrapped(read_text(file)) for file in files]


def read_text(file: Path) -> str:
    """The text of a file. Raises a ValueError that names the file if it is no text in UTF-8, or
    longer than `LONGEST` characters."""
    try:
        with file.open(encoding="utf-8") as opened:
            text = opened.read(LONGEST + 1)
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is no text in UTF-8: {error}; convert it first") from error
    if len(text) > LONGEST:
        raise ValueError(f"{file} has more than {LONGEST:,} characters; give a part of it")
    return text


def check_tokens(tokens: Tensor, model: Any) -> None:
    """Raise a ValueError if the model has no embedding for some token."""
    last, low, high = len(model.get_input_embeddings().weight) - 1, tokens.min(), tokens.max()
    if low < 0 or high > last:
        got = f"{low} to {high}; use the model's own tokenizer"
        raise ValueError(f"tokens are in 0..{last}, as the model has them, got {got}")


def unwrapped(text: str) -> str:
    """The text with each paragraph on one line.

    Examples:
        >>> unwrapped("One\\nparagraph.\\n\\nAnother.")
        'One paragraph.\\n\\nAnother.'
    """
    return re.sub(r"(?<=\S)\n[ \t]*(?=\S)", " ", text)


def _documentation() -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # reading some attributes warns that they are deprecated
        texts = [inspect.getdoc(thing) or "" for thing in _documented()]
    return "\n\n".join(dict.fromkeys(text for text in texts if len(text) >= SHORTEST))


def _documented() -> Iterator[Any]:
    for name in DOCUMENTED.split():
        module = importlib.import_module(name)
        yield module
        for _, thing in sorted(inspect.getmembers(module)):
            if inspect.isclass(thing) or inspect.isfunction(thing):
                yield thing


def _source() -> str:
    return "\n\n".join(inspect.getsource(importlib.import_module(name)) for name in SOURCES.split())
