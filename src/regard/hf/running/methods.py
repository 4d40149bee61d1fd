"""Modules that hand their heads to a method of their own, `_attn(query, key, value, mask)`.

GPT-J, CodeGen and the Japanese GPT-NeoX have it: their own forward projects, rotates and caches.
The method alone is replaced, by attention that was found to compute the same.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.hf.running.calls import attended, described, one_part, precision_of
from regard.hf.running.masks import visible
from regard.hf.running.probing import undisturbed
from regard.layers.attending import Keys

NAME = "_attn"
DIVISORS = ("scale_attn", "norm_factor")  # attributes by which modules divide their scores
SIZES = ("head_dim", "head_size")
DROPOUTS = ("attn_dropout", "attention_dropout")


def attending_method(module: Any) -> Callable[..., Any] | None:
    """A function of such a module, and of the arguments of its method, that computes the same by
    `attend`; None for other modules, as those that hide keys in the method (GPT-Neo)."""
    own = getattr(type(module), NAME, None)
    if own is None:
        return None
    divisors = [float(getattr(module, each)) for each in DIVISORS if hasattr(module, each)]
    tried = [partial(_attend, scale=scale) for scale in (*(1 / each for each in divisors), 1, None)]
    return next((each for each in tried if _agrees(module, own, each)), None)


def _agrees(module: Any, own: Callable[..., Any], ours: Callable[..., Any]) -> bool:
    """Whether both compute the same on a few random heads, one of two rows padded."""
    made = torch.Generator().manual_seed(0)
    size = next(getattr(module, each) for each in SIZES if hasattr(module, each))
    q, k, v = (torch.randn(2, 2, tokens, size, generator=made) for tokens in (3, 5, 5))
    mask = torch.zeros(2, 1, 3, 5)
    mask[0, ..., :2] = torch.finfo(mask.dtype).min
    heads = [each.to(next(module.parameters()).device) for each in (q, k, v, mask)]
    with undisturbed(module):
        try:
            return bool(torch.allclose(own(module, *heads)[0], ours(module, *heads)[0], atol=1e-4))
        except (RuntimeError, TypeError, ValueError):
            return False


def _attend(
    module: nn.Module,
    query: Float[Tensor, "B H L D"],
    key: Float[Tensor, "B H S D"],
    value: Float[Tensor, "B H S D"],
    attention_mask: Tensor | None = None,
    *,
    scale: float | None,
) -> tuple[Tensor, Tensor | None]:
    """The method by `attend`."""
    query, key = query.to(value.dtype), key.to(value.dtype)
    at = visible(module, attention_mask, query.shape[2], key.shape[2])
    dropout: Any = next(getattr(module, each) for each in DROPOUTS if hasattr(module, each))
    parts = Keys.of(one_part(key, value))
    options = {"dropout": dropout.p if module.training else 0.0, "precision": precision_of(module)}
    call = described(query, parts, at, scale=scale, **options)
    return attended(call, query, parts, {})
