"""Bytes that a rank sends for a layer of attention: with heads split, with tokens sharded, or both.

Of one layer, in all rows of the batch, as `regard.distributed` sends them and `counted` counts
them. `rank` is the sender's number among those that share the tokens. A ValueError is raised for
linear attention, and for a window or chunks of a layer that is not causal.

Tokens are sent to the ranks of which some query may attend to them, each once
(`regard.distributed.context`). The sequence is cut into `cp` pieces of nearly one length, one for
each rank; or, where the work must be balanced, into `2 cp` pieces, of which a rank holds the pieces
`rank` and `2 cp - 1 - rank` (`regard.distributed.Shards`).
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from regard.plan.cache_bytes import token_bytes
from regard.plan.shapes import STORAGES, LayerShape, Workload, replicas
from regard.plan.weights import check_known

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
    balanced = is_balanced(layers)
    counts = Counter(layer for layer in layers if layer.kind != "linear")
    work = Workload(context=context, batch=batch, dtype=dtype, tp=tp, cp=cp)

    def prefill(rank: int) -> int:
        return sum(prefill_sent(each, work, balanced, rank) * n for each, n in counts.items())

    rank = max(counted_ranks(cp), key=prefill)
    ring, summing, total = cp - 1, 2 * (tp - 1), counts.total()
    agreeing = min(ring, 1)
    return Sent(
        rank=rank,
        prefill=prefill(rank),
        training=sum(training_sent(each, work, balanced, rank) * n for each, n in counts.items()),
        decode=sum(decode_sent(each, work) * n for each, n in counts.items()),
        prefill_steps=total * (summing + ring + agreeing),
        training_steps=total * (2 * summing + 3 * ring + agreeing),
        decode_steps=total * (summing + agreeing),
    )


def prefill_sent(layer: LayerShape, work: Workload, balanced: bool, rank: int) -> int:
    """Bytes for the prefill of `context` tokens.

    With heads split: one sum of the outputs, which each rank has of its own heads (Shoeybi et al.
    2019, arXiv:1909.08053). With tokens sharded: the keys and values of tokens, as a plain cache
    holds them. Before that the ranks tell each other that they make the same call.
    """
    check_known(layer)
    tokens, _ = moved_tokens(layer, balanced, work.context, work.cp, rank)
    streamed = work.batch * tokens * token_bytes(layer, STORAGES["plain"], work)
    return forward_sums(layer, work, work.tokens) + streamed + (work.cp - 1) * AGREED


def training_sent(layer: LayerShape, work: Workload, balanced: bool, rank: int) -> int:
    """Bytes for a forward pass over `context` tokens and a backward pass.

    Forward: as `prefill_sent`. Backward, with heads split: `backward_sums`. With tokens sharded:
    keys and values are sent again, and the gradients of those that were received go back, in
    float32. Activation checkpointing sends the bytes of the forward pass again.
    """
    check_known(layer)
    sent, received = moved_tokens(layer, balanced, work.context, work.cp, rank)
    again = sent * token_bytes(layer, STORAGES["plain"], work)
    channels = work.key_heads(layer) * (layer.head_dim + layer.v_head_dim)
    if layer.kv_lora_rank is not None:  # a position has no gradient
        channels = layer.latent + (layer.qk_rope_head_dim if layer.kind == "MLA" else 0)
    back = received * channels * max(work.itemsize, SINGLE)
    forward = prefill_sent(layer, work, balanced, rank)
    return forward + backward_sums(layer, work) + work.batch * (again + back)


def decode_sent(layer: LayerShape, work: Workload) -> int:
    """Bytes for one more token of each row.

    With heads split: the sum of the outputs. With a cache that is sharded over ranks: the output of
    each query head and its log-sum-exp, of the keys that the rank holds, in float32 to each other
    rank. Queries of MLA attend to the latents, so that their outputs are as wide as these.
    """
    check_known(layer)
    channels = layer.latent if layer.kind == "MLA" else layer.v_head_dim
    partial = work.query_heads(layer) * (channels + 1) * max(work.itemsize, SINGLE)
    return forward_sums(layer, work, 1) + (work.cp - 1) * work.batch * partial


def sum_sent(elements: int, ranks: int, itemsize: int) -> int:
    """Bytes that a rank sends for the sum of a tensor over ranks.

    In a ring each rank sends each share of 1/ranks to all ranks but one, twice: once for adding up,
    once for handing out the result (Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002). Half
    precision is added up, and so sent, in float32.
    """
    return sum_bytes(elements * max(itemsize, SINGLE), ranks)


def sum_bytes(nbytes: int, ranks: int) -> int:
    """Bytes that each rank sends for the sum of `nbytes` over ranks, which are sent as they are."""
    return 2 * (ranks - 1) * nbytes // ranks


def forward_sums(layer: LayerShape, work: Workload, tokens: int) -> int:
    """Bytes of the sum of the outputs of so many tokens of each row, and of the squares that a norm
    over all heads needs."""
    outputs = sum_sent(work.batch * tokens * layer.hidden_size, work.tp, work.itemsize)
    return outputs + _sums_of_squares(layer, work, tokens)


def backward_sums(layer: LayerShape, work: Workload) -> int:
    """Bytes of the all-reduces of a backward pass: the gradients of the hidden states or latents
    that every rank reads for its own heads, of the norms of heads, and of the weights of key heads
    that several ranks have."""
    read = [work.batch * work.tokens * channels for channels in _read(layer)]
    if layer.qk_norm == "head":
        read += [layer.head_dim] * (1 if layer.keys_of is not None else 2)
    sums = sum(sum_sent(elements, work.tp, work.itemsize) for elements in read)
    same = replicas(layer.num_kv_heads, work.tp)
    shared = sum(sum_sent(each, same, work.itemsize) for each in _of_shared_heads(layer))
    return sums + shared + _sums_of_squares(layer, work, work.tokens)


def _sums_of_squares(layer: LayerShape, work: Workload, tokens: int) -> int:
    """Bytes of the sums of squares, added up over ranks, of queries and of a layer's own keys."""
    if layer.qk_norm != "width":
        return 0
    normed = 1 if layer.keys_of is not None else 2
    return normed * sum_sent(work.batch * tokens, work.tp, work.itemsize)


def _read(layer: LayerShape) -> list[int]:
    """The channels of each tensor that every rank reads for its own heads; the gradient of each is
    all-reduced."""
    hidden = layer.hidden_size
    gate = [] if layer.gate is None else [hidden]
    if layer.kind == "MLA":
        queries = hidden if layer.q_lora_rank is None else layer.q_lora_rank
        return [layer.latent + layer.qk_rope_head_dim, queries, *gate]
    return [layer.latent, hidden] if layer.kind == "LatentKV" else [hidden, *gate]


def _of_shared_heads(layer: LayerShape) -> list[int]:
    """Elements of the weights, biases and norms of a key head, which several ranks may have."""
    if layer.kind == "MLA" or layer.keys_of is not None:
        return []
    rows, inputs = {"k_proj": layer.head_dim, "v_proj": layer.v_head_dim}, layer.hidden_size
    if layer.kind == "LatentKV":
        rows, inputs = {"kv_b_proj": layer.head_dim + layer.v_head_dim}, layer.latent
    weights = [channels * inputs for channels in rows.values()]
    biases = [channels for name, channels in rows.items() if name in layer.bias]
    return weights + biases + ([layer.head_dim] if layer.qk_norm == "width" else [])


def is_balanced(layers: Iterable[LayerShape]) -> bool:
    """Whether `context_parallel` gives each rank an early and a late piece: unless the queries of
    each layer have about as many visible keys everywhere, by a window, by chunks or in both
    directions."""
    return any(_reach(layer) is None and layer.causal for layer in layers)


def moved_tokens(
    layer: LayerShape, balanced: bool, context: int, ranks: int, rank: int
) -> tuple[int, int]:
    """Tokens of one row that a rank sends for a prefill, to each receiver, and those it receives.

    Of chunks it is the most, as of a window of their size: chunks that end where pieces end need
    nothing sent.
    """
    reach = _reach(layer)
    if layer.causal:
        return _moved(context if reach is None else reach, balanced, context, ranks, rank)
    if reach is not None:
        raise ValueError(
            "the tokens that a window or chunks need are known of causal layers only; a layer that "
            "is not causal, without them, needs all tokens"
        )
    held = sum(map(len, pieces(balanced, context, ranks, rank)))
    return (ranks - 1) * held, context - held


@lru_cache(4096)
def _moved(reach: int, balanced: bool, context: int, ranks: int, rank: int) -> tuple[int, int]:
    """Tokens sent and received under a causal mask that shows `reach` earlier tokens."""
    own = pieces(balanced, context, ranks, rank)
    others = [pieces(balanced, context, ranks, each) for each in range(ranks) if each != rank]
    sent = sum(_common(own, _needed(its, reach)) for its in others)
    needed = _needed(own, reach)
    return sent, sum(map(len, needed)) - _common(own, needed)


def pieces(balanced: bool, context: int, ranks: int, rank: int) -> list[range]:
    """The slots that a rank holds: one piece of the sequence, or two of twice as many."""
    count = 2 * ranks if balanced else ranks
    held = (rank, count - 1 - rank) if balanced else (rank,)
    return [range(at * context // count, (at + 1) * context // count) for at in held]


def _needed(held: list[range], reach: int) -> list[range]:
    """The slots that the queries of pieces may attend to, without overlaps."""
    needed: list[range] = []
    for piece in held:
        start = max(0, piece.start - reach)
        if needed and start <= needed[-1].stop:
            start = needed.pop().start
        needed.append(range(start, piece.stop))
    return needed


def _common(some: list[range], others: list[range]) -> int:
    """The number of slots that two lists of ranges share."""
    return sum(len(range(max(a.start, b.start), min(a.stop, b.stop))) for a in some for b in others)


def counted_ranks(ranks: int) -> tuple[int, ...]:
    """The first two ranks, the middle and the last: one of them sends most, but for rounding.

    A rank sends more, the higher its number, under a causal mask in balanced pieces, less in
    pieces that are not balanced, and all but the outer ranks as much under a short window.
    """
    return tuple(sorted({0, min(1, ranks - 1), ranks // 2, ranks - 1}))


def _reach(layer: LayerShape) -> int | None:
    """The number of earlier tokens that a query can see at most; None for all."""
    limits = [each for each in (layer.window, layer.chunk) if each is not None]
    return min(limits) - 1 if limits else None
