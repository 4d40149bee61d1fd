"""Text that a model writes itself, to train a conversion of it on.

A conversion that is trained on some kinds of text loses more on others, and few people have text of
all the kinds that a model has read. But the model can write them: every token is drawn from its
predictions (LLM-QAT, arXiv:2305.17888).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.cache.files import open_tensors, write_tensors
from regard.cache.paging.contexts import fingerprint
from regard.cache.streams import check_whole
from regard.convert.texts import beginning_of, many_kinds
from regard.hf.generating.cache_of_model import cache
from regard.hf.generating.text import with_attention
from regard.hf.generating.watching import argument_of
from regard.hf.running.probing import undisturbed

AT_ONCE = 64  # windows: the products of fewer take as long for each token as to read the weights
GIVEN = 24  # tokens of a passage that a window goes on from: it then stays with the passage's kind
TEMPERATURE = 0.9  # of the predictions from which tokens are drawn
LEAST = 0.02  # tokens less probable than this share of the most probable one are not drawn: a small
# model that draws them soon writes what no text is like
FILE = "own_text.safetensors"
Progress = Callable[[str, int, int], None]


def own_text(
    model: Any,
    tokenizer: Any,
    *,
    windows: int,
    length: int,
    seed: int = 0,
    progress: Progress = lambda what, done, total: None,
) -> Int[Tensor, "N L"]:
    """Windows of tokens `[windows, length]` that a model writes, of as many kinds as it knows.

    Every second window goes on from some words of regard's short passages of many kinds and
    languages, the others from a token drawn from the vocabulary. Each begins with the special token
    that the tokenizer puts before a text, if it does, and none ends early.

    Args:
        model: a transformers causal language model, which is restored afterwards.
        tokenizer: the model's.
        windows: the number of windows.
        length: tokens of a window.
        seed: of all that is drawn.
        progress: called with the stage, the windows done, and all of them.

    Raises:
        ValueError: if there are no windows, one is too short for its beginning and a token more, or
            the model predicts NaN.

    Examples:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from regard.convert import own_text
        >>> def tokenizer(text, **options):  # in place of a model's: a token for each character
        ...     return {"input_ids": [ord(each) % 99 for each in text]}
        >>> config = LlamaConfig(hidden_size=16, num_attention_heads=2, vocab_size=99,
        ...     num_hidden_layers=1, intermediate_size=16)
        >>> own_text(LlamaForCausalLM(config).eval(), tokenizer, windows=3, length=40).shape
        torch.Size([3, 40])
    """
    check_whole("windows", windows, least=1)
    first = beginning_of(tokenizer, length)
    if length <= (needed := len(first) + GIVEN):
        raise ValueError(f"windows have more than {needed} tokens, got length={length}")
    chance = torch.Generator().manual_seed(seed)
    special = torch.zeros(model.get_input_embeddings().num_embeddings, dtype=torch.bool)
    ids = getattr(tokenizer, "all_special_ids", ())  # some have no embedding
    special[[each for each in ids if each < len(special)]] = True
    begun = _beginnings(tokenizer, first, windows, special, chance)
    written = list[Tensor]()
    with undisturbed(model), with_attention(model, "regard"):
        for rows in begun:
            written.append(_continued(model, rows, length, special, chance))
            progress("writing text", sum(map(len, written)), windows)
    return torch.cat(written)


def _beginnings(
    tokenizer: Any, first: list[int], windows: int, special: Tensor, chance: torch.Generator
) -> list[Tensor]:
    """The tokens that windows begin with, those of at most `AT_ONCE` windows in each tensor."""
    of_passages = torch.tensor(tokenizer(many_kinds(), add_special_tokens=False)["input_ids"])
    tokens = (~special).float().multinomial(windows, True, generator=chance)[: windows // 2, None]
    at = torch.randint(len(of_passages) - GIVEN, (windows - windows // 2, 1), generator=chance)
    groups = *of_passages[at + torch.arange(GIVEN)].split(AT_ONCE), *tokens.split(AT_ONCE)
    before = torch.tensor(first, dtype=torch.int64)
    return [torch.cat([before.expand(len(each), -1), each], 1) for each in groups if len(each)]


def _continued(
    model: Any, rows: Tensor, length: int, special: Tensor, chance: torch.Generator
) -> Tensor:
    """The rows `[B, L]`, and tokens that the model writes after them up to `length`, none of them
    `special` `[V]`."""
    held = argument_of(model, cache(model, "static", max_length=length))
    new = rows
    while rows.shape[1] < length:
        out = model(input_ids=new.to(model.device), use_cache=True, logits_to_keep=1, **held)
        logits = out.logits[:, -1].float().cpu().masked_fill(special, -torch.inf)
        predicted = (logits / TEMPERATURE).softmax(-1)
        predicted *= predicted >= LEAST * predicted.amax(-1, keepdim=True)
        new = _drawn(predicted, chance)
        rows = torch.cat([rows, new], 1)
    return rows


def _drawn(weights: Float[Tensor, "N V"], chance: torch.Generator) -> Int[Tensor, "N 1"]:
    """For each row a token, with a probability in proportion to its weight, by one random number;
    `torch.multinomial` draws one for each token of the vocabulary."""
    sums = weights.cumsum(-1)
    whole = sums[:, -1:]
    if not bool((whole.isfinite() & (whole > 0)).all()):
        raise ValueError("the model predicts NaN, so it writes no text; load it in another dtype")
    shares = torch.rand(len(weights), 1, generator=chance, dtype=torch.float32, device="cpu")
    below = whole.nextafter(torch.zeros_like(whole))  # a share may round to 1
    return torch.searchsorted(sums, (shares.to(sums) * whole).minimum(below), right=True)


def stored_own_text(
    folder: Path, model: Any, tokenizer: Any, *, windows: int, length: int, progress: Progress
) -> Int[Tensor, "N L"]:
    """`own_text`, from a file in the folder if an earlier run of the same job wrote it there: a job
    that is interrupted goes on with the same text."""
    path, sizes = folder / FILE, {"windows": str(windows), "length": str(length)}
    wanted = sizes | {"model": fingerprint(model)}
    if path.exists():
        with open_tensors(path) as file:
            if dict(file.metadata) == wanted:
                return file.read("tokens")
    folder.mkdir(parents=True, exist_ok=True)  # first: a disk may be read-only
    tokens = own_text(model, tokenizer, windows=windows, length=length, progress=progress)
    write_tensors(path, wanted, {"tokens": tokens})
    return tokens
