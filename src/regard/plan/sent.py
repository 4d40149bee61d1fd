"""Bytes that a rank sends for a layer of attention: with heads split, with tokens sharded, or both.

Of one layer, in all rows of the batch, as `regard.distributed` sends them and `counted` counts
them, but for linear attention. `rank` is the sender's number among those that share the tokens.

Tokens are sent to the ranks of which some query may attend to them, each once
(`regard.distributed.context`). The sequence is cut into pieces of nearly one length; a rank holds
one (`"contiguous"`), or, of twice as many, the pieces `rank` and `2 cp - 1 - rank` (`"zigzag"`,
`regard.distributed.Shards`). A token of piece p is needed by every rank that holds a later piece
within reach: all later pieces under a causal mask, those that begin at most `window - 1` tokens
after it under a window. Two pieces of one rank need a token once.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from regard.plan.cache_bytes import token_bytes
from regard.plan.shapes import STORAGES, LayerShape, Workload, replicas
from regard.plan.weights import check_known

Layout = Literal["zigzag", "contiguous"]
SINGLE = 4  # bytes of a float32: sums, partial outputs and log-sum-exps are sent in it at least
AGREED = 32  # bytes with which a rank tells another that it makes the same call


@dataclass(frozen=True)
class Sent:
    """Bytes and steps of the rank that sends most in a prefill, for all layers.

    A step is a message, or an exchange of messages at the same time, that waits for the one before.

    Attributes:
        rank: of those that share the tokens.
        prefill: bytes of the prefill of the context.
        training: bytes of a forward and a backward pass over it, without the sums of parameters'
            gradients over ranks that share the tokens (`sum_gradients`, FSDP2).
        decode: bytes of one more token of each row.
        prefill_steps: of the prefill: in a ring, one for each other rank, for a sum two, and one
            for agreeing on the call.
        training_steps: the same of a forward and a backward pass, which has a ring of keys and
            values and one of their gradients.
        decode_steps: the same of one more token.

    Examples:
        >>> from regard.plan import LayerShape, Sent, sent_of
        >>> mqa = LayerShape(hidden_size=64, num_heads=8, num_kv_heads=1, head_dim=8, v_head_dim=8)
        >>> sent_of([mqa], context=100) == Sent()  # one rank sends nothing
        True
    """

    rank: int = 0
    prefill: int = 0
    training: int = 0
    decode: int = 0
    prefill_steps: int = 0
    training_steps: int = 0
    decode_steps: int = 0


def sent_of(
    layers: Sequence[LayerShape],
    *,
    context: int,
    batch: int = 1,
    dtype: str = "float32",
    tp: int = 1,
    cp: int = 1,
) -> Sent:
    """Bytes and steps of all layers of a model, of the rank that sends most in a prefill.

    Counted as `regard.distributed` sends it; sums are those of a ring (Patarasuk and Yuan 2009,
    doi:10.1016/j.jpdc.2008.09.002).

    Args:
        layers: in order, or in any other; linear attention is not counted.
        context: tokens of the prefill and of a training step.
        batch: rows.
        dtype: of activations, as `"bfloat16"`.
        tp: ranks that the heads are divided among.
        cp: ranks that the tokens are divided among.

    Returns:
        Bytes and steps of a prefill, a training step and a decoded token.

    Examples:
        >>> from regard.plan import LayerShape, sent_of
        >>> gqa = LayerShape(hidden_size=64, num_heads=8, num_kv_heads=2, head_dim=8, v_head_dim=8)
        >>> sent_of([gqa, gqa], context=80, cp=2).prefill == 2 * (40 * 2 * (8 + 8) * 4 + 32)
        True
    """
    layout = layout_of(layers)
    counts = Counter(layer for layer in layers if layer.kind != "linear")
    work = Workload(context=context, batch=batch, dtype=dtype, tp=tp, cp=cp)

    def prefill(rank: int) -> int:
        return sum(prefill_sent(each, work, layout, rank) * n for each, n in counts.items())

    rank = max(counted_ranks(cp), key=prefill)
    ring, summing, total = cp - 1, 2 * (tp - 1), counts.total()
    agreeing = min(ring, 1)
    return Sent(
        rank=rank,
        prefill=prefill(rank),
        training=sum(training_sent(each, work, layout, rank) * n for each, n in counts.items()),
        decode=sum(decode_sent(each, work) * n for each, n in counts.items()),
        prefill_steps=total * (summing + ring + agreeing),
        training_steps=total * (2 * summing + 3 * ring + agreeing),
        decode_steps=total * (summing + agreeing),
    )


def prefill_sent(layer: LayerShape, work: Workload, layout: Layout, rank: int) -> int:
    """Bytes for the prefill of `context` tokens.

    With heads split: one sum of the outputs, which each rank has of its own heads (Shoeybi et al.
    2019, arXiv:1909.08053). With tokens sharded: keys and values of `sent_tokens`, as a plain cache
    holds them: of MLA the latent and the key with RoPE, of `LatentKVAttention` the latent and its
    position. Before that the ranks tell each other that they make the same call.

    Args:
        layout: of the tokens, from `layout_of`.
        rank: the sender.

    Raises:
        ValueError: for linear attention, or a mask that `sent_tokens` refuses.
    """
    check_known(layer)
    tokens = sent_tokens(layer, layout, work.context, work.cp, rank)
    streamed = work.batch * tokens * _token(layer, work)
    return forward_sums(layer, work, work.tokens) + streamed + (work.cp - 1) * AGREED


def training_sent(layer: LayerShape, work: Workload, layout: Layout, rank: int) -> int:
    """Bytes for a forward pass over `context` tokens and a backward pass.

    Forward: as `prefill_sent`. Backward, with heads split: `backward_sums`. With tokens sharded:
    keys and values are sent again, and the gradients of those that were received go back, in
    float32. A forward pass that is computed again for the backward pass, as by activation
    checkpointing, sends its bytes again.

    Args:
        layout: of the tokens.
        rank: the sender.

    Raises:
        ValueError: as `prefill_sent`.
    """
    check_known(layer)
    again = sent_tokens(layer, layout, work.context, work.cp, rank) * _token(layer, work)
    back = received_tokens(layer, layout, work.context, work.cp, rank) * _gradient(layer, work)
    forward = prefill_sent(layer, work, layout, rank)
    return forward + backward_sums(layer, work) + work.batch * (again + back)


def decode_sent(layer: LayerShape, work: Workload) -> int:
    """Bytes for one more token of each row.

    With heads split: the sum of the outputs. With a cache that is sharded over ranks: the output of
    each query head and its log-sum-exp, of the keys that the rank holds, in float32 to each other
    rank. Queries of MLA attend to the latents, so that their outputs are as wide as these.

    Raises:
        ValueError: for linear attention.
    """
    check_known(layer)
    partial = work.batch * work.query_heads(layer) * (_partial(layer) + 1) * _summed(work)
    return forward_sums(layer, work, 1) + (work.cp - 1) * partial


def sum_sent(elements: int, ranks: int, itemsize: int) -> int:
    """Bytes that a rank sends for the sum of a tensor over ranks.

    In a ring each rank sends each share of 1/ranks to all ranks but one, twice: once for adding up,
    once for handing out the result (Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002). Half
    precision is added up, and so sent, in float32.

    Args:
        elements: of the tensor.
        ranks: that have a term of the sum.
        itemsize: bytes of a number.
    """
    return sum_bytes(elements * max(itemsize, SINGLE), ranks)


def sum_bytes(nbytes: int, ranks: int) -> int:
    """Bytes that each rank sends for the sum of `nbytes` over ranks, which are sent as they are."""
    return 2 * (ranks - 1) * nbytes // ranks


def forward_sums(layer: LayerShape, work: Workload, tokens: int, keys: int | None = None) -> int:
    """Bytes of the sum of the outputs, and of the squares that a norm over all heads needs.

    Args:
        tokens: of each row.
        keys: that are projected; None for as many as tokens.
    """
    outputs = sum_sent(work.batch * tokens * layer.hidden_size, work.tp, work.itemsize)
    return outputs + _sums_of_squares(layer, work, tokens, keys)


def backward_sums(
    layer: LayerShape, work: Workload, keys: int | None = None, key_channels: int | None = None
) -> int:
    """Bytes of the all-reduces of a backward pass: the gradients of the hidden states or latents
    that every rank reads for its own heads, of the norms of heads, and of the weights of key heads
    that several ranks have.

    Args:
        keys: that are projected; None for as many as tokens.
        key_channels: of what keys and values are projected from; None for the hidden states'.
    """
    read = [work.batch * work.tokens * channels for channels in _read(layer)]
    if layer.qk_norm == "head":
        read += [layer.head_dim] * (1 if layer.keys_of is not None else 2)
    sums = sum(sum_sent(elements, work.tp, work.itemsize) for elements in read)
    same = replicas(layer.num_kv_heads, work.tp)
    shared = sum(
        sum_sent(each, same, work.itemsize) for each in _of_shared_heads(layer, key_channels)
    )
    return sums + shared + _sums_of_squares(layer, work, work.tokens, keys)


def _sums_of_squares(layer: LayerShape, work: Workload, tokens: int, keys: int | None) -> int:
    if layer.qk_norm != "width":
        return 0
    normed = [tokens, tokens if keys is None else keys]
    if layer.keys_of is not None:
        normed.pop()
    return sum(sum_sent(work.batch * each, work.tp, work.itemsize) for each in normed)


def _read(layer: LayerShape) -> list[int]:
    """The channels of each tensor that every rank reads for its own heads; the gradient of each is
    all-reduced."""
    hidden = layer.hidden_size
    gate = [] if layer.gate is None else [hidden]
    if layer.kind == "MLA":
        queries = hidden if layer.q_lora_rank is None else layer.q_lora_rank
        return [layer.latent + layer.qk_rope_head_dim, queries, *gate]
    if layer.kind == "LatentKV":
        return [layer.latent, hidden]
    return [hidden, *gate]


def _of_shared_heads(layer: LayerShape, key_channels: int | None) -> list[int]:
    """Elements of the weights, biases and norms of a key head, which several ranks may have."""
    if layer.kind == "MLA" or layer.keys_of is not None:
        return []
    rows = {"k_proj": layer.head_dim, "v_proj": layer.v_head_dim}
    inputs = layer.hidden_size if key_channels is None else key_channels
    if layer.kind == "LatentKV":
        rows, inputs = {"kv_b_proj": layer.head_dim + layer.v_head_dim}, layer.latent
    weights = [channels * inputs for channels in rows.values()]
    biases = [channels for name, channels in rows.items() if name in layer.bias]
    return weights + biases + ([layer.head_dim] if layer.qk_norm == "width" else [])


def _token(layer: LayerShape, work: Workload) -> int:
    """Bytes of one token that another rank attends to."""
    return token_bytes(layer, STORAGES["plain"], work)


def _gradient(layer: LayerShape, work: Workload) -> int:
    """Bytes of the gradients of one token's streams. A position has none."""
    elements = work.key_heads(layer) * (layer.head_dim + layer.v_head_dim)
    if layer.kv_lora_rank is not None:
        elements = layer.latent + (layer.qk_rope_head_dim if layer.kind == "MLA" else 0)
    return elements * _summed(work)


def _summed(work: Workload) -> int:
    """Bytes of one number in an all-reduce."""
    return max(work.itemsize, SINGLE)


def _partial(layer: LayerShape) -> int:
    """Channels of a head's output before it is merged."""
    return layer.latent if layer.kind == "MLA" else layer.v_head_dim


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
    """The number of earlier tokens that a query can see at most; None for all."""
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
