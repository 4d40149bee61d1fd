"""The masks of transformers as rules: a window or padding without a mask of L x S cells.

transformers describes a mask as a function of indices, which factories of
`transformers.masking_utils` make. A rule of regard takes the place of each factory that is known
here. Each is compared with the factory once in a process, cell by cell on a small case: where a
release of transformers means something else by it, the mask of cells is used, as it is for the
functions of other authors.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial, reduce
from operator import and_, or_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._pytree import tree_map

from regard.masks import (
    EVERYTHING,
    Causal,
    Chunked,
    Documents,
    Mask,
    Padding,
    Shown,
    SlidingWindow,
    Span,
)
from regard.masks.runs import NEAR
from regard.tracing import is_immediate


class RuleMask(Tensor):
    """A mask `[B, 1, L, S]` of booleans, or of numbers to add, that knows its rule.

    Attention reads the rule. Every other use of the tensor, such as a slice, makes its cells, which
    attention reads from then on: code of a model may have written to them.
    """

    rule: Mask  # which keys are visible, over the slots of `span`
    span: Span  # slots of the queries and keys; keys begin with slot 0
    cells: Tensor | None  # the mask without a rule, once something other than attention has used it
    make: Callable[[], Tensor]

    @staticmethod
    def __new__(
        cls,
        rule: Mask,
        span: Span,
        batch: int,
        make: Callable[[], Tensor],
        device: Any,
        dtype: torch.dtype = torch.bool,
    ) -> "RuleMask":
        shape = batch, 1, span.num_queries, span.num_keys
        self: RuleMask = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        self.rule, self.span, self.cells, self.make = rule, span, None, make
        return self

    def made(self) -> Tensor:
        """The cells, made once."""
        if self.cells is None:
            self.cells = self.make()
        return self.cells

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"RuleMask({self.rule}, {list(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def made(each: Any) -> Any:
            return each.made() if isinstance(each, RuleMask) else each

        return func(*tree_map(made, args), **tree_map(made, kwargs or {}))


@dataclass(frozen=True)
class Ahead(Mask):
    """Keys up to `size` after the query: the later half of a window to both sides."""

    size: int
    relative = True

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx <= q_idx + self.size

    def runs(self, first: int, last: int) -> Shown:
        return Shown([(NEAR, last + self.size + 1)], [(NEAR, first + self.size + 1)])


def mask_of(
    make: Callable[..., Any] | None = None,
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    device: Any = "cpu",
    **given: Any,
) -> Tensor | None:
    """The mask of a call, for transformers' `AttentionMaskInterface`, whose arguments these are.

    It is a `RuleMask` where the function of indices is known. It is the mask of cells, which `make`
    computes, where the function is not known, while a call is compiled or traced, and with static
    caches, whose steps are compiled and whose `q_offset` is a tensor. By default `make` is
    transformers' `sdpa_mask`, which makes booleans; others make numbers of `dtype=` to be added to
    scores. `attention_mask` is `[B, S]` booleans, True for tokens that are not padding.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    function = mask_function or causal_mask_function
    cells = partial(
        make or sdpa_mask, batch_size=batch_size, q_length=q_length, kv_length=kv_length,
        q_offset=q_offset, kv_offset=kv_offset, mask_function=function,
        attention_mask=attention_mask, device=device, **given,
    )  # fmt: skip
    read = () if attention_mask is None else (attention_mask,)
    if isinstance(q_offset, Tensor) or not is_immediate(*read):
        return cells()
    held = Held(kv_offset, kv_offset + kv_length)
    rule = rule_of(function, held)
    if rule is None:
        return cells()
    valid = None if attention_mask is None else held.part(attention_mask.bool(), False)
    if valid is not None and not bool(valid.all()):
        rule = rule & Padding(valid)
    first = q_offset - kv_offset
    span = Span(first, first + q_length, 0, kv_length)
    optional = q_length == 1 and given.get("allow_is_causal_skip", True)
    if optional and rule.within(span) is EVERYTHING:
        return None
    always = given | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    dtype = torch.bool if make is None else given.get("dtype", torch.float32)
    return RuleMask(rule, span, batch_size, partial(cells, **always), device, dtype)


class Held(NamedTuple):
    """The positions of the keys of a call; slot 0 of a rule is the position `first`."""

    first: int
    stop: int

    def part(self, of_tokens: Tensor, beyond: bool | int) -> Tensor:
        """The columns of `[B, S]` values of tokens that belong to these keys; `beyond` are values
        of slots after the last token."""
        missing = max(0, self.stop - of_tokens.shape[-1])
        return pad(of_tokens, (0, missing), value=beyond)[..., self.first : self.stop]


Cells = dict[str, Any]  # the variables that a function of a factory has kept, by name


def rule_of(function: Callable[..., Any], held: Held) -> Mask | None:
    """The rule of a mask function of transformers; None for functions that are not known."""
    from transformers import masking_utils

    name = getattr(function, "__qualname__", "").partition(".")[0]
    if getattr(function, "__module__", "") != masking_utils.__name__ or not _is_as_known(name):
        return None
    return _read(name, function, held)


def _read(name: str, function: Any, held: Held) -> Mask | None:
    kept = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return KNOWN[name].read({variable: each.cell_contents for variable, each in kept}, held)


def _joined(join: Callable[[Mask, Mask], Mask], cells: Cells, held: Held) -> Mask | None:
    rules = [rule_of(each, held) for each in cells["mask_functions"]]
    known = [each for each in rules if each is not None]
    return reduce(join, known) if len(known) == len(rules) else None


def _blocks(cells: Cells, held: Held) -> Mask:
    """Tokens of one block see each other; -1 is no block."""
    blocks = held.part(cells["block_sequence_ids"], -1)
    return Documents(blocks) & Padding(blocks >= 0)


def _by_position(cells: Cells, held: Held) -> Mask | None:
    """The rule of a mask function that reads positions, which restart with each document.

    A rule of differences of positions is the same in slots, since the mask of documents, which
    is combined with it, hides other documents; None for a rule of another kind.
    """
    rule = rule_of(cells["mask_function"], held)
    return rule if rule is not None and rule.relative else None


class Known(NamedTuple):
    """How a mask function is read."""

    # the rule, from the variables that the function has kept
    read: Callable[[Cells, Held], Mask | None]
    # arguments of the factory for the comparison; None if the function has no factory
    sample: Callable[[], tuple[Any, ...]] | None


def _ids() -> tuple[Tensor]:
    return (torch.tensor([[0, 0, 1, 1, -1, -1], [-1, 0, 0, 0, 1, 1]]),)


def _two() -> tuple[Any, ...]:
    from transformers.masking_utils import causal_mask_function, sliding_window_overlay

    return causal_mask_function, sliding_window_overlay(3)


KNOWN = {
    "causal_mask_function": Known(lambda cells, held: Causal(), None),
    "bidirectional_mask_function": Known(lambda cells, held: EVERYTHING, None),
    "sliding_window_overlay": Known(
        lambda cells, held: SlidingWindow(cells["sliding_window"]), lambda: (3,)
    ),
    "sliding_window_bidirectional_overlay": Known(
        lambda cells, held: (
            SlidingWindow(cells["sliding_window"] + 1) & Ahead(cells["sliding_window"])
        ),
        lambda: (2,),
    ),
    "chunked_overlay": Known(
        lambda cells, held: Chunked(cells["chunk_size"], cells["left_padding"] - held.first),
        lambda: (3, torch.tensor([0, 2])),
    ),
    "blockwise_overlay": Known(_blocks, _ids),
    "packed_sequence_mask_function": Known(
        lambda cells, held: Documents(held.part(cells["packed_sequence_mask"], 0)), _ids
    ),
    "remap_positions_for_packed_sequence": Known(
        _by_position, lambda: (_two()[0], torch.arange(6).expand(2, 6))
    ),
    "and_masks": Known(partial(_joined, and_), _two),
    "or_masks": Known(partial(_joined, or_), _two),
}


@lru_cache(maxsize=len(KNOWN))
def _is_as_known(name: str) -> bool:
    """Whether the rule has the cells of the function, for two rows of six tokens."""
    from transformers import masking_utils

    if name not in KNOWN:
        return False
    function, sample = getattr(masking_utils, name), KNOWN[name].sample
    if sample is not None:
        function = function(*sample())
    try:
        rule = _read(name, function, Held(0, 6))
    except KeyError:  # the function keeps variables of other names
        return False
    b, q, k = torch.arange(2)[:, None, None], torch.arange(6)[:, None], torch.arange(6)
    cells = function(b, torch.tensor(0), q, k).expand(2, 6, 6)
    if rule is None:
        return False
    return rule.dense(Span(0, 6, 0, 6), batch=2).expand(2, 1, 6, 6)[:, 0].equal(cells)
