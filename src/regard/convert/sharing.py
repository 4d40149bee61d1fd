"""A layer built anew with another option, sharing its parameters with the old one."""

from typing import Any, TypeVar

import torch
from torch import nn

Layer = TypeVar("Layer", bound=nn.Module)


def shared_copy(layer: Layer, **changes: Any) -> Layer:
    """The same kind of layer with the same children, not copied, and some options changed.

    >>> from regard import GroupedQueryAttention, Rotary
    >>> gqa = GroupedQueryAttention(16, 4, 2, rope=Rotary(4))
    >>> other = shared_copy(gqa, rope=Rotary(4, pairing="pairs"))
    >>> other, other.q_proj is gqa.q_proj
    (GroupedQueryAttention(16, 4, 2, rope=Rotary(4, pairing='pairs')), True)
    """
    given: Any = layer.arguments
    with torch.device("meta"):  # all of it is replaced
        made = type(layer)(**{**given, **changes})
    for name, child in layer.named_children():
        setattr(made, name, child)
    for name, parameter in layer.named_parameters(recurse=False):
        setattr(made, name, parameter)
    return made.train(layer.training)
