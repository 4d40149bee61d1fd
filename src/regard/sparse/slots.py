"""A mask over the rows of a cache that holds some of the tokens, each at a slot of its own."""

from dataclasses import dataclass

from jaxtyping import Bool, Int
from torch import Tensor

from regard.masks import Mask, Span
from regard.ops.prepared import Prepared


@dataclass(frozen=True, eq=False, repr=False)
class AtSlots(Mask):
    """A rule for keys that lie at any slots: row `j` of a key head is the token of its slot `j`.

    Args:
        rule: over the slots of the sequence.
        slots: `[B, G, n]` integers, for each key head the slot of each row.
        group: query heads that share a key head.
        start: the number that masks and spans give to the first row.
        folded: key heads that are rows of the batch, `[B x folded, G, n]`, because each of them has
            a table of pages of its own.

    Examples:
        >>> import torch
        >>> from regard import Padding, Span
        >>> from regard.sparse import AtSlots
        >>> padding = Padding(torch.tensor([[0, 0, 1, 1, 1]]))
        >>> rows = AtSlots(padding, torch.tensor([[[1, 2, 4]]]))
        >>> rows.dense(Span(5, 6, 0, 3)).tolist()
        [[[[False, True, True]]]]
    """

    rule: Mask
    slots: Int[Tensor, "B G n"]
    group: int = 1
    start: int = 0
    folded: int = 1
    opaque = True

    @property
    def batch(self) -> int | None:
        return self.slots.shape[0]

    @property
    def heads(self) -> int:
        return self.slots.shape[1] * self.group

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        last = self.slots.shape[2] - 1
        slots = self.slots[b, h // self.group, (kv_idx - self.start).clamp(0, last)]
        if self.folded > 1:
            b, h = b // self.folded, b % self.folded * self.heads + h
        return self.rule(b, h, q_idx, slots.to(q_idx.dtype))

    def __repr__(self) -> str:
        return f"AtSlots({self.rule!r}, slots=<{list(self.slots.shape)}>)"


def visible_rows(
    prepared: Prepared, slots: Int[Tensor, "B G n"], span: Span, key_heads: int
) -> Bool[Tensor, "B K L n"]:
    """Which rows at these slots the queries of a span may attend to, by a call over the slots of
    all tokens seen. `key_heads` are those stored, or more that are rebuilt of each."""
    call, (batch, stored, _) = prepared.call, slots.shape
    rule = call.given_mask.within(call.given_span)
    heads = key_heads if (rule.heads or 1) == 1 else call.num_heads
    at = AtSlots(rule, slots, heads // stored)
    dense = at.dense(span, batch=batch, heads=heads, device=slots.device)
    dense = dense.expand(batch, heads, span.num_queries, span.num_keys)
    return dense if heads == key_heads else dense.unflatten(1, (key_heads, -1)).any(2)
