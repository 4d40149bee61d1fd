"""The log-probability of a continuation, decoded token by token from a cache."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from regard.hf.generating.watching import argument_of


class Score(NamedTuple):
    """The score of a continuation."""

    log_probability: float  # the sum over its tokens, in nats
    is_greedy: bool  # whether each token is the most probable one


@torch.no_grad()
def score(
    model: Any,
    cache: Callable[[], Any],
    context: Sequence[int],
    continuation: Sequence[int],
    *,
    max_length: int,
) -> Score:
    """Prefill the context into a new cache, then decode the continuation, one token a call.

    A full forward never reads a cache, so it cannot tell what codes or dropped keys cost; this
    does. The first token of the continuation is scored by the prefill. `max_length` are the
    positions of the model, which is in eval mode; tokens before that many are left out. A
    ValueError is raised if there is no context or continuation, or the continuation alone is longer
    than `max_length`.
    """
    if not context or not continuation:
        raise ValueError(
            f"a score needs a token of context and one that follows, got {len(context)} and "
            f"{len(continuation)}; begin with the tokenizer's first special token"
        )
    if len(continuation) > max_length:
        raise ValueError(
            f"the continuation has {len(continuation)} tokens, the model {max_length} positions; "
            "split it"
        )
    prompt = list(context)[-(max_length + 1 - len(continuation)) :]
    takes = inspect.signature(model.forward).parameters
    last = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
    last |= argument_of(model, cache())
    total, greedy, new = 0.0, True, prompt
    for target in continuation:
        tokens = torch.tensor([new], device=model.device)
        logits = model(tokens, use_cache=True, **last).logits[0, -1].float()
        total += float(logits.log_softmax(-1)[target])
        greedy = greedy and int(logits.argmax()) == target
        new = [target]
    return Score(total, greedy)
