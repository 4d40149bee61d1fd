"""Tokens whose keys and values a rank of context parallelism sends to others, and receives.

A rank is sent the tokens that some query of its own may attend to, each once
(`regard.distributed.context`). The size `rank` is the number of the rank that is counted, from 0.

Derivation. The sequence is cut into pieces of nearly one length; a rank holds one (`"contiguous"`),
or, of twice as many, the pieces `rank` and `2 cp - 1 - rank` (`"zigzag"`,
`regard.distributed.Shards`). A token of piece p is needed by every rank that holds a later piece
within reach: all later pieces under a causal mask, those that begin at most `window - 1` tokens
after it under a window. Two pieces of one rank need a token once.
"""

from collections.abc import Iterable
from typing import Literal

from regard.plan.formula import Formula, floor_div, minimum, size
from regard.plan.shapes import LayerShape
from regard.plan.sizes import CHUNK, CONTEXT, WINDOW

Layout = Literal["zigzag", "contiguous"]
RANKS, RANK = size("cp"), size("rank")


def layout_of(layers: Iterable[LayerShape]) -> Layout:
    """The layout that `context_parallel` chooses for a model with these layers.

    Contiguous if no layer needs the work to be balanced: each has a window or chunks, so that its
    queries have about as many visible keys everywhere, or is not causal.

    Args:
        layers: of the model.

    Examples:
        >>> from regard.plan.sent_tokens import layout_of
        >>> from regard.plan.shapes import LayerShape
        >>> sizes = {"hidden_size": 8, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4}
        >>> full, windowed = [LayerShape(**sizes, v_head_dim=4, window=w) for w in (None, 9)]
        >>> layout_of([full, windowed]), layout_of([windowed])
        ('zigzag', 'contiguous')
    """
    even = all(_reach(layer) is not None or not layer.causal for layer in layers)
    return "contiguous" if even else "zigzag"


def sent_tokens(layer: LayerShape, layout: Layout) -> Formula:
    """Tokens of one row that the rank sends, those for several ranks as often, for a prefill.

    Exact from two tokens for each piece on; with a window or chunks if it is not longer than a
    piece, or pieces are of one length, otherwise to within a token for each rank. Of chunks it is
    the most, as of a window of their size: chunks that end where pieces end need nothing sent.

    Args:
        layer: causal, or without a window and chunks.
        layout: of the tokens.

    Raises:
        ValueError: for a window or chunks of a layer that is not causal.

    Examples:
        >>> from regard.plan.sent_tokens import sent_tokens
        >>> from regard.plan.shapes import LayerShape
        >>> layer = LayerShape(hidden_size=8, num_heads=2, num_kv_heads=1, head_dim=4, v_head_dim=4)
        >>> count = sent_tokens(layer, "zigzag")
        >>> [count.evaluate(context=8000, cp=4, rank=rank) for rank in range(4)]
        [3000, 4000, 5000, 6000]
    """
    _check_causal(layer)
    reach = _reach(layer)
    if not layer.causal:  # every other rank needs every token
        return (RANKS - 1) * _held(layout)
    if layout == "contiguous":
        if reach is None:
            return (RANKS - 1 - RANK) * _held(layout)
        return _within(reach, RANKS - 1 - RANK, RANKS)
    pieces = 2 * RANKS
    if reach is None:  # the early piece by every other rank, the late one by those before
        return (RANKS - 1) * _piece(RANK, pieces) + RANK * _piece(pieces - 1 - RANK, pieces)
    early = _within(reach, RANKS - 1 - RANK, pieces)  # by early pieces
    early += _within(reach, pieces - 1 - RANK, pieces) - _within(
        reach, pieces - 1 - 2 * RANK, pieces
    )  # by late pieces of the ranks before, which lie beyond the late piece of this rank
    return early + _within(reach, RANK, pieces)


def received_tokens(layer: LayerShape, layout: Layout) -> Formula:
    """Tokens of one row that the rank receives for a prefill, each once.

    Args:
        layer: as for `sent_tokens`.
        layout: of the tokens.

    Raises:
        ValueError: for a window or chunks of a layer that is not causal.

    Examples:
        >>> from regard.plan.sent_tokens import received_tokens
        >>> from regard.plan.shapes import LayerShape
        >>> layer = LayerShape(hidden_size=8, num_heads=2, num_kv_heads=1, head_dim=4, v_head_dim=4)
        >>> count = received_tokens(layer, "zigzag")
        >>> [count.evaluate(context=8000, cp=4, rank=rank) for rank in range(4)]
        [6000, 5000, 4000, 3000]
    """
    _check_causal(layer)
    reach = _reach(layer)
    if not layer.causal:
        return CONTEXT - _held(layout)
    if layout == "contiguous":  # the tokens before its own
        before = _cut(RANK, RANKS)
        return before if reach is None else minimum(reach, before)
    pieces = 2 * RANKS
    if reach is None:  # the tokens before its late piece, but for its early one
        return _cut(pieces - 1 - RANK, pieces) - _piece(RANK, pieces)
    between = pieces - 2 - 2 * RANK  # pieces, between its two
    return _within(reach, RANK, pieces) + _within(reach, between, pieces)


def counted_ranks(ranks: int) -> tuple[int, ...]:
    """The first two ranks, the middle and the last: one of them sends most, but for rounding.

    By the formulas of `sent_tokens` what a rank sends grows with its number under a causal mask in
    a zig-zag, falls with it where tokens are contiguous, and is the same for all but the outer
    ranks under a window shorter than a piece.

    Args:
        ranks: that the tokens are divided among.

    Examples:
        >>> from regard.plan.sent_tokens import counted_ranks
        >>> counted_ranks(1), counted_ranks(8)
        ((0,), (0, 1, 4, 7))
    """
    return tuple(sorted({0, min(1, ranks - 1), ranks // 2, ranks - 1}))


def _reach(layer: LayerShape) -> Formula | None:
    """Tokens before its own that a query can see at most; None for all."""
    limits = [WINDOW] if layer.window is not None else []
    limits += [CHUNK] if layer.chunk is not None else []
    return minimum(*limits) - 1 if limits else None


def _check_causal(layer: LayerShape) -> None:
    if not layer.causal and _reach(layer) is not None:
        raise ValueError(
            "what a window or chunks need sent is known of causal layers only; a layer that is not "
            "causal, without them, needs all tokens"
        )


def _cut(piece: Formula, pieces: Formula) -> Formula:
    """The slot at which a piece begins."""
    return floor_div(piece * CONTEXT, pieces)


def _piece(index: Formula, pieces: Formula) -> Formula:
    """The tokens of a piece."""
    return _cut(index + 1, pieces) - _cut(index, pieces)


def _held(layout: Layout) -> Formula:
    """The tokens of the rank."""
    if layout == "contiguous":
        return _piece(RANK, RANKS)
    return _piece(RANK, 2 * RANKS) + _piece(2 * RANKS - 1 - RANK, 2 * RANKS)


def _within(reach: Formula, count: Formula, pieces: Formula) -> Formula:
    """The tokens of as many pieces, or those in reach if they are fewer.

    The sum over d = 1, ..., count of what the piece at distance d needs, which is what the reach
    has left beyond d - 1 pieces, and one piece at most.
    """
    return minimum(reach, floor_div(count * CONTEXT, pieces))
