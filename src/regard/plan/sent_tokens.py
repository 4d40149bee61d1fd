"""Tokens whose keys and values a rank of context parallelism sends to others, and receives.

A rank is sent the tokens that some query of its own may attend to, each once
(`regard.distributed.context`). `rank` is a rank's number among those that share the tokens.

Derivation. The sequence is cut into pieces of nearly one length; a rank holds one
(`"contiguous"`), or, of twice as many, the pieces `rank` and `2 cp - 1 - rank` (`"zigzag"`,
`regard.distributed.Shards`). A token of piece p is needed by every rank that holds a later piece
within reach: all later pieces under a causal mask, those that begin at most `window - 1` tokens
after it under a window. Two pieces of one rank need a token once.
"""

from collections.abc import Iterable
from typing import Literal

from regard.plan.shapes import LayerShape

Layout = Literal["zigzag", "contiguous"]


def layout_of(layers: Iterable[LayerShape]) -> Layout:
    """The layout that `context_parallel` chooses for a model with these layers.

    Contiguous if no layer needs the work to be balanced: each has a window or chunks, so that its
    queries have about as many visible keys everywhere, or is not causal.

    Args:
        layers: of the model.
    """
    even = all(_reach(layer) is not None or not layer.causal for layer in layers)
    return "contiguous" if even else "zigzag"


def sent_tokens(layer: LayerShape, layout: Layout, context: int, ranks: int, rank: int) -> int:
    """Tokens of one row that a rank sends, those for several ranks as often, for a prefill.

    Exact from two tokens for each piece on; with a window or chunks if it is not longer than a
    piece, or pieces are of one length, otherwise to within a token for each rank. Of chunks it is
    the most, as of a window of their size: chunks that end where pieces end need nothing sent.

    Args:
        layout: of the tokens.
        context: tokens of the sequence.
        ranks: that share the tokens.
        rank: the sender.

    Raises:
        ValueError: for a window or chunks of a layer that is not causal.
    """
    _check_causal(layer)
    reach, later = _reach(layer), ranks - 1 - rank
    if not layer.causal:  # every other rank needs every token
        return (ranks - 1) * _held(layout, context, ranks, rank)
    if layout == "contiguous":
        if reach is None:
            return later * _held(layout, context, ranks, rank)
        return min(reach, _cut(later, ranks, context))
    pieces = 2 * ranks
    late = pieces - 1 - rank
    if reach is None:  # the early piece by every other rank, the late one by those before
        every = (ranks - 1) * _piece(rank, pieces, context)
        return every + rank * _piece(late, pieces, context)
    early = min(reach, _cut(later, pieces, context))  # by early pieces
    early += min(reach, _cut(late, pieces, context))  # by late pieces of the ranks before,
    early -= min(reach, _cut(late - rank, pieces, context))  # which lie beyond this rank's late one
    return early + min(reach, _cut(rank, pieces, context))


def received_tokens(layer: LayerShape, layout: Layout, context: int, ranks: int, rank: int) -> int:
    """Tokens of one row that a rank receives for a prefill, each once.

    Args:
        layout: of the tokens.
        context: tokens of the sequence.
        ranks: that share the tokens.
        rank: the receiver.

    Raises:
        ValueError: for a window or chunks of a layer that is not causal.
    """
    _check_causal(layer)
    reach = _reach(layer)
    if not layer.causal:
        return context - _held(layout, context, ranks, rank)
    if layout == "contiguous":  # the tokens before its own
        before = _cut(rank, ranks, context)
        return before if reach is None else min(reach, before)
    pieces = 2 * ranks
    late = pieces - 1 - rank
    if reach is None:  # the tokens before its late piece, but for its early one
        return _cut(late, pieces, context) - _piece(rank, pieces, context)
    between = late - rank - 1  # pieces, between its two
    return min(reach, _cut(rank, pieces, context)) + min(reach, _cut(between, pieces, context))


def counted_ranks(ranks: int) -> tuple[int, ...]:
    """The first two ranks, the middle and the last: one of them sends most, but for rounding.

    By `sent_tokens` what a rank sends grows with its number under a causal mask in a zig-zag, falls
    with it where tokens are contiguous, and is the same for all but the outer ranks under a window
    shorter than a piece.

    Args:
        ranks: that the tokens are divided among.
    """
    return tuple(sorted({0, min(1, ranks - 1), ranks // 2, ranks - 1}))


def _reach(layer: LayerShape) -> int | None:
    """Tokens before its own that a query can see at most; None for all."""
    limits = [each for each in (layer.window, layer.chunk) if each is not None]
    return min(limits) - 1 if limits else None


def _check_causal(layer: LayerShape) -> None:
    if not layer.causal and _reach(layer) is not None:
        raise ValueError(
            "what a window or chunks need sent is known of causal layers only; a layer that is not "
            "causal, without them, needs all tokens"
        )


def _cut(piece: int, pieces: int, context: int) -> int:
    """The slot at which a piece begins; the tokens of as many pieces."""
    return piece * context // pieces


def _piece(index: int, pieces: int, context: int) -> int:
    """The tokens of a piece."""
    return _cut(index + 1, pieces, context) - _cut(index, pieces, context)


def _held(layout: Layout, context: int, ranks: int, rank: int) -> int:
    """The tokens of the rank."""
    if layout == "contiguous":
        return _piece(rank, ranks, context)
    late = 2 * ranks - 1 - rank
    return _piece(rank, 2 * ranks, context) + _piece(late, 2 * ranks, context)
