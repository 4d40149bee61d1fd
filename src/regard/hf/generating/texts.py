"""The tokens that a cache has been fed: what a stored prefix is found and stored by."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.hf.packages import CACHES

_OF_TOKENS = {  # arguments of a call besides which keys and values depend on tokens alone
    *("input_ids", "attention_mask", "position_ids", "cache_position", *CACHES),
    *("use_cache", "return_dict", "logits_to_keep"),
}
# what a call may return of each of its tokens, not of the last ones alone
_OF_ALL_TOKENS = ("output_attentions", "output_hidden_states", "output_router_logits")


class Text(NamedTuple):
    """The tokens of a cache, in pieces `[B, n]`, and the rows whose keys and values depend on them
    alone: no token of theirs is padding, positions count from 0."""

    pieces: tuple[Tensor, ...] = ()
    whole: Tensor | None = None

    @property
    def length(self) -> int:
        return sum(each.shape[1] for each in self.pieces)

    def followed_by(self, more: "Text") -> "Text":
        if self.whole is None or more.whole is None or len(self.whole) != len(more.whole):
            return more  # other rows: the first layer refuses them
        return Text((*self.pieces, *more.pieces), self.whole & more.whole)

    def joined(self) -> "Text":
        """The same text in one piece."""
        return Text((torch.cat(self.pieces, 1),), self.whole) if len(self.pieces) > 1 else self

    def cut(self, length: int) -> "Text":
        """The first tokens."""
        pieces, whole = self.joined()
        return Text(tuple(each[:, :length] for each in pieces), whole)

    def rows(self, rows: Tensor) -> "Text":
        """Some rows, in this order."""
        pieces, whole = self.joined()
        if whole is None:
            return self
        rows = rows.to(whole.device)
        return Text(tuple(each[rows] for each in pieces), whole[rows])

    def numbers(self) -> tuple[list[list[int]], list[bool]]:
        """The tokens of each row, and whether it is whole."""
        pieces, whole = self.joined()
        if whole is None:
            return [], []
        return pieces[0].tolist(), whole.tolist()


def text_of(model: nn.Module, given: Mapping[str, Any], past: int) -> Text | None:
    """The tokens of a call; None if keys and values depend on something else (images, embeddings,
    dropout)."""
    tokens = given.get("input_ids")
    if model.training or not isinstance(tokens, Tensor) or tokens.dim() != 2:
        return None
    if any(isinstance(given[name], Tensor) for name in given.keys() - _OF_TOKENS):
        return None
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    batch, new = tokens.shape
    whole = torch.ones(batch, dtype=torch.bool, device=tokens.device)
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.shape != (batch, past + new):
            return None
        whole &= (mask != 0).all(1)
    if positions is not None:
        if not isinstance(positions, Tensor) or positions.dim() != 2:
            return None
        counted = torch.arange(past, past + new, device=positions.device)
        whole &= (positions == counted).all(1)
    return Text((tokens.detach().clone(),), whole)


def tokens_wanted(model: Any, given: Mapping[str, Any]) -> int | None:
    """The number of last tokens whose logits a call returns; None if it returns something of all
    its tokens."""
    number = given.get("logits_to_keep")
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        return None
    unknown = given.keys() - _OF_TOKENS - set(_OF_ALL_TOKENS)
    if any(given[name] is not None and given[name] is not False for name in unknown):
        return None
    for name in _OF_ALL_TOKENS:
        asked = given.get(name)
        if getattr(model.config, name, False) if asked is None else asked:
            return None
    return number


def without_first(given: Mapping[str, Any], count: int) -> dict[str, Any]:
    """The arguments of a call without its first tokens, which a cache holds. A mask is about the
    tokens of the cache too."""
    cut = {"input_ids", "position_ids", "cache_position"}
    return {
        name: value[..., count:] if name in cut and isinstance(value, Tensor) else value
        for name, value in given.items()
    }
