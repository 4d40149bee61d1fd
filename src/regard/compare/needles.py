"""Questions after compression: facts among other text, asked for when the cache is filled.

A cache that evicts by the queries of a question may know what to keep; one that is shared by later
questions cannot. So documents are read first, without a question. An answer is right if the model
gives its first token the highest likelihood of all answers.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from regard.compare.runner import Runner
from regard.convert.texts import beginning_of
from regard.hf.generating.predicting import logits_of

NAMES = (
    "Anna", "Boris", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Irene", "Jack",
    "Karen", "Louis", "Maria", "Nathan", "Olga", "Peter",
)  # fmt: skip
WORDS = (
    "orange", "river", "table", "silver", "garden", "winter", "music", "doctor", "bridge",
    "coffee", "window", "castle", "rabbit", "ocean", "pencil", "mountain",
)  # fmt: skip
FACT = "\n\nThe password of {name} is {word}.\n\n"
QUESTION = "\n\nWhat is the password of {name}? The password of {name} is"
FACTS = 8  # in a document
DOCUMENTS = 4  # so 32 questions: one more or fewer is 3 %


@dataclass(frozen=True)
class Document:
    """A text with facts in it, and the questions about them, as tokens.

    Attributes:
        tokens: of the text.
        questions: of each fact, to be read after the text.
        answers: for each question, which of `options` follows.
        options: the first tokens of all answers.

    Examples:
        >>> import torch
        >>> from regard.compare import Document
        >>> question = torch.tensor([7, 8])
        >>> len(Document(torch.arange(9), (question,), (0,), torch.tensor([3, 4])).questions)
        1
    """

    tokens: Int[Tensor, " L"]
    questions: tuple[Tensor, ...]
    answers: tuple[int, ...]
    options: Int[Tensor, " W"]


def documents_of(
    tokenizer: Any, text: str, *, context: int, documents: int = DOCUMENTS, facts: int = FACTS
) -> tuple[Document, ...]:
    """Documents of `context` tokens: consecutive pieces of a text, with facts at equal distances.

    Args:
        tokenizer: the model's, as transformers loads it.
        text: that the facts lie in.
        context: tokens of a document.
        documents: their number.
        facts: in each.

    Raises:
        ValueError: if the text is too short, or the context for the facts.

    Examples:
        >>> from regard.compare import documents_of
        >>> def tokenizer(text, **options):  # in place of a model's: a token for each character
        ...     return {"input_ids": [ord(each) for each in text]}
        >>> (document,) = documents_of(tokenizer, "filler. " * 99, context=500, documents=1)
        >>> len(document.tokens), len(document.questions)
        (500, 8)
    """

    def encode(words: str) -> list[int]:
        found: list[int] = tokenizer(words, add_special_tokens=False, verbose=False)["input_ids"]
        return found

    chance = random.Random(0)
    options = [encode(f" {word}")[0] for word in WORDS]
    first = beginning_of(tokenizer, context)
    made, rest = [], encode(text[: 16 * documents * context])
    for _ in range(documents):
        names, words = chance.sample(NAMES, facts), chance.sample(range(len(WORDS)), facts)
        needles = [
            encode(FACT.format(name=name, word=WORDS[word]))
            for name, word in zip(names, words, strict=True)
        ]
        room = context - len(first) - sum(map(len, needles))
        if room < facts + 1:
            raise ValueError(
                f"{facts} facts take {context - room} tokens, and a document has text between "
                f"them, got context={context}; give {context - room + facts + 1} or more"
            )
        if len(rest) < room:
            raise ValueError(
                f"documents of {context} tokens with {facts} facts need {room} tokens of text "
                f"between them, got {len(rest)}; give a longer text, or a shorter context"
            )
        tokens, rest = [*first, *_with_needles(rest[:room], needles)], rest[room:]
        questions = tuple(torch.tensor(encode(QUESTION.format(name=name))) for name in names)
        made.append(Document(torch.tensor(tokens), questions, tuple(words), torch.tensor(options)))
    return tuple(made)


def _with_needles(tokens: list[int], needles: Sequence[list[int]]) -> list[int]:
    """The tokens with a needle after each of equal pieces, the last piece excepted."""
    step, found = len(tokens) // (len(needles) + 1), list[int]()
    for at, needle in enumerate(needles):
        found += [*tokens[at * step : (at + 1) * step], *needle]
    return found + tokens[len(needles) * step :]


def answered(runner: Runner, documents: Sequence[Document]) -> Bool[Tensor, "documents facts"]:
    """True for each question that the model answers rightly, from caches that hold the document."""
    rows = []
    for document in documents:
        runner.reset()
        runner.read(document.tokens[None])
        rows.append([_is_right(runner, document, at) for at in range(len(document.questions))])
    return torch.tensor(rows)


def _is_right(runner: Runner, document: Document, at: int) -> bool:
    """Whether the answer to one question is right; the caches are as before then."""
    caches: list[Any] = list(runner.caches)
    before = [cache.snapshot() for cache in caches]
    hidden = runner.hidden(document.questions[at][None])
    for cache, snapshot in zip(caches, before, strict=True):
        cache.restore(snapshot)
    logits = logits_of(runner.model, hidden[:, -1:])[0, 0]
    return int(logits[document.options].argmax()) == document.answers[at]
