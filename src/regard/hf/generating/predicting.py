"""A causal model in two halves: its last hidden states, and the logits of its head.

Hidden states are small, logits over a large vocabulary are not: the head runs on a few tokens at a
time.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from regard.hf.running.binding import bound

AT_ONCE = 256  # tokens whose logits are computed at a time


def hidden_states(model: Any, tokens: Int[Tensor, "B L"]) -> Float[Tensor, "B L E"]:
    """The hidden states that the head reads."""
    return model.base_model(input_ids=tokens, use_cache=False).last_hidden_state


def logits_of(model: Any, hidden: Float[Tensor, "*batch E"]) -> Float[Tensor, "*batch V"]:
    """The logits of hidden states: the model's own forward without its blocks.

    A head alone is not enough: some models scale or cap its logits.
    """
    from transformers.modeling_outputs import MoeModelOutputWithPast  # has what most heads read

    states = hidden.flatten(0, -2)[None]
    whole = MoeModelOutputWithPast(last_hidden_state=states)
    whole.cross_attentions = None  # GPT-2 reads it
    with bound(model.base_model, lambda module, *args, **given: whole):
        logits = model(inputs_embeds=states, use_cache=False).logits
    return logits[0].unflatten(0, hidden.shape[:-1])


def pieces(length: int) -> Iterator[tuple[int, int]]:
    """Start and stop of each run of tokens whose logits are computed at a time."""
    for start in range(0, length, AT_ONCE):
        yield start, min(start + AT_ONCE, length)


def losses_of(
    model: Any, hidden: Float[Tensor, "L E"], tokens: Int[Tensor, " L"]
) -> Float[Tensor, " T"]:
    """The loss of every token but the first, in nats."""
    losses = []
    for start, stop in pieces(len(tokens) - 1):
        logits = logits_of(model, hidden[start:stop]).float()
        losses.append(F.cross_entropy(logits, tokens[start + 1 : stop + 1], reduction="none"))
    return torch.cat(losses)
