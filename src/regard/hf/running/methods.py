"""Modules that hand their heads to a method of their own, `_attn(query, key, value, mask)`.

GPT-J, CodeGen and the Japanese GPT-NeoX have it: their own forward projects, rotates and caches.
The method alone is replaced, by attention that was found to compute the same.
"""

from typing import Any

import torch
from torch import Tensor, nn

from regard.hf.running.calls import attended, described, one_part, precision_of
from regard.hf.running.masks import visible
from regard.hf.running.probing import undisturbed
from regard.layers.attending import Keys

NAME = "_attn"
DIVISORS = ("scale_attn", "norm_factor")  # attributes by which modules divide their scores


def can_attend(module: Any) -> bool:
    """Whether a module has such a method and `attend` computes the same; it does not where the
    method hides keys itself (GPT-Neo). Tried on random heads, one of two rows padded."""
    own = getattr(type(module), NAME, None)
    if own is None or not any(hasattr(module, each) for each in DIVISORS):
        return False
    made = torch.Generator("cpu").manual_seed(0)
    plain: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}  # whatever the defaults are
    q, k, v = (torch.randn(2, 2, tokens, 4, generator=made, **plain) for tokens in (3, 5, 5))
    mask = torch.zeros(2, 1, 3, 5, **plain)
    mask[0, ..., :2] = torch.finfo(mask.dtype).min
    heads = [each.to(next(module.parameters()).device) for each in (q, k, v, mask)]
    with undisturbed(module):
        try:
            return torch.allclose(own(module, *heads)[0], attend(module, *heads)[0], atol=1e-4)
        except (RuntimeError, TypeError, ValueError):
            return False


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None
) -> tuple[Tensor, Tensor | None]:
    """The method by `regard.attend`: the heads' outputs, and weights if the caller wants them."""
    query, key = query.to(value.dtype), key.to(value.dtype)
    at = visible(module, attention_mask, query.shape[2], key.shape[2])
    divisor = next(getattr(module, each) for each in DIVISORS if hasattr(module, each))
    rate = next(each.p for each in module.children() if isinstance(each, nn.Dropout))
    rate, precision = rate if module.training else 0.0, precision_of(module)
    keys, scale = Keys.of(one_part(key, value)), 1 / float(divisor)
    call = described(query, keys, at, scale=scale, dropout=rate, precision=precision)
    return attended(call, query, keys, {})
