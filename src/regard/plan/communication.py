"""Bytes that a rank sends for a layer of attention: with heads split, with tokens sharded, or both.

Of one layer, in all rows of the batch, as `regard.distributed` sends them and `counted` counts
them. The size `rank` is this rank's number among those that share the tokens.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields

from regard.plan.cache_bytes import token_bytes
from regard.plan.formula import Formula, floor_div, maximum, minimum, number, size
from regard.plan.sent_tokens import Layout, counted_ranks, layout_of, received_tokens, sent_tokens
from regard.plan.shapes import STORAGES, LayerShape
from regard.plan.sizes import (
    BATCH,
    HEAD,
    HIDDEN,
    ITEMSIZE,
    KEY_HEADS,
    LATENT,
    QUERY_HEADS,
    QUERY_LATENT,
    ROTARY,
    TOKENS,
    VALUE,
    sizes,
)
from regard.plan.weights import check_known, total

HEADS_RANKS, TOKENS_RANKS = size("tp"), size("cp")
SINGLE = 4  # bytes of a float32: sums, partial outputs and log-sum-exps are sent in it at least
AGREED = 32  # bytes with which a rank tells another that it makes the same call
SUMMED = maximum(ITEMSIZE, SINGLE)  # bytes of a number of a sum


def sum_sent(elements: Formula, ranks: Formula = HEADS_RANKS) -> Formula:
    """Bytes that a rank sends for the sum of a tensor over ranks, those that share the heads.

    In a ring each rank sends each share of 1/tp to all ranks but one, twice: once for adding up,
    once for handing out the result (Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002). Half
    precision is added up, and so sent, in float32.

    Args:
        elements: of the tensor.
        ranks: that have a term of the sum.

    Examples:
        >>> from regard.plan.communication import sum_sent
        >>> from regard.plan.formula import size
        >>> sum_sent(size("hidden_size")).evaluate(hidden_size=4096, tp=4, itemsize=2)
        24576
    """
    return floor_div(2 * (ranks - 1) * elements * SUMMED, ranks)


def prefill_sent(layer: LayerShape, layout: Layout) -> Formula:
    """Bytes for the prefill of `context` tokens.

    With heads split: one sum of the outputs, which each rank has of its own heads (Shoeybi et al.
    2019, arXiv:1909.08053). With tokens sharded: keys and values of `sent_tokens`, as a plain cache
    holds them: of MLA the latent and the key with RoPE, of `LatentKVAttention` the latent and its
    position. Before that the ranks tell each other that they make the same call.

    Args:
        layer: of any kind but linear attention.
        layout: of the tokens, from `layout_of`.

    Raises:
        ValueError: for linear attention, or a mask that `sent_tokens` refuses.

    Examples:
        >>> from regard.plan.communication import prefill_sent
        >>> from regard.plan.shapes import STORAGES, LayerShape
        >>> from regard.plan.sizes import sizes
        >>> gqa = LayerShape(hidden_size=64, num_heads=8, num_kv_heads=2, head_dim=8, v_head_dim=8)
        >>> numbers = sizes(gqa, STORAGES["plain"], context=80, dtype="bfloat16", cp=2)
        >>> prefill_sent(gqa, "zigzag").evaluate(**numbers) == 40 * 2 * (8 + 8) * 2 + 32
        True
    """
    check_known(layer)
    streamed = BATCH * sent_tokens(layer, layout) * _token(layer)
    return _forward_sums(layer, TOKENS) + streamed + _agreement()


def training_sent(layer: LayerShape, layout: Layout) -> Formula:
    """Bytes for a forward pass over `context` tokens and a backward pass.

    Forward: as `prefill_sent`. Backward, with heads split: sums of the gradients of what every rank
    reads for its own heads: the input, or the latents; norms of heads; and of key heads that
    several ranks have, their weights. With tokens sharded: keys and values are sent again, and the
    gradients of those that were received go back, in float32. A forward pass that is computed again
    for the backward pass, as by activation checkpointing, sends its bytes again.

    Args:
        layer: as for `prefill_sent`.
        layout: of the tokens.

    Raises:
        ValueError: as `prefill_sent`.
    """
    check_known(layer)
    sums = _forward_sums(layer, TOKENS) + _backward_sums(layer)
    both = 2 * sent_tokens(layer, layout) * _token(layer)
    back = received_tokens(layer, layout) * _gradient(layer)
    return sums + BATCH * (both + back) + _agreement()


def decode_sent(layer: LayerShape) -> Formula:
    """Bytes for one more token of each row.

    With heads split: the sum of the outputs. With a cache that is sharded over ranks: the output of
    each query head and its log-sum-exp, of the keys that the rank holds, in float32 to each other
    rank. Queries of MLA attend to the latents, so that their outputs are as wide as these.

    Args:
        layer: of any kind but linear attention.

    Raises:
        ValueError: for linear attention.

    Examples:
        >>> from regard.plan.communication import decode_sent
        >>> from regard.plan.shapes import STORAGES, LayerShape
        >>> from regard.plan.sizes import sizes
        >>> gqa = LayerShape(hidden_size=64, num_heads=8, num_kv_heads=2, head_dim=8, v_head_dim=8)
        >>> numbers = sizes(gqa, STORAGES["plain"], context=80, cp=3)
        >>> decode_sent(gqa).evaluate(**numbers) == (3 - 1) * 8 * (8 + 1) * 4
        True
    """
    check_known(layer)
    partial = BATCH * QUERY_HEADS * (_partial(layer) + 1) * SUMMED
    return _forward_sums(layer, number(1)) + (TOKENS_RANKS - 1) * partial


def sharded_decode_sent(layer: LayerShape) -> Formula:
    """Bytes for one more token of each row, where the ranks that share the heads share the tokens,
    too (Helix parallelism: Bhatia et al. 2025, arXiv:2507.07120).

    Each rank attends to its tokens for the heads of all ranks: it sends its queries, and its key
    heads' new keys and values, to each other rank, and gets the outputs and log-sum-exps of its own
    heads from each; then the sum of the outputs. Exact where the heads divide.

    Args:
        layer: of any kind but linear attention and `LatentKVAttention`, which has no such plan.

    Raises:
        ValueError: for linear attention.

    Examples:
        >>> from regard.plan.communication import sharded_decode_sent
        >>> from regard.plan.shapes import STORAGES, LayerShape
        >>> from regard.plan.sizes import sizes
        >>> gqa = LayerShape(hidden_size=64, num_heads=8, num_kv_heads=2, head_dim=8, v_head_dim=8)
        >>> numbers = sizes(gqa, STORAGES["plain"], context=80, tp=2)
        >>> gathered, outputs, summed = (4 + 1 + 1) * 8 * 4, 4 * (8 + 1) * 4, 64 * 4
        >>> sharded_decode_sent(gqa).evaluate(**numbers) == gathered + outputs + summed
        True
    """
    check_known(layer)
    if layer.kind == "MLA":
        gathered = QUERY_HEADS * (LATENT + ROTARY)
    else:
        gathered = QUERY_HEADS * HEAD + KEY_HEADS * (HEAD + VALUE)
    outputs = (size("num_heads") - QUERY_HEADS) * (_partial(layer) + 1) * SUMMED
    exchanged = (HEADS_RANKS - 1) * BATCH * gathered * ITEMSIZE + BATCH * outputs
    return exchanged + _forward_sums(layer, number(1))


@dataclass(frozen=True)
class Sent:
    """What the rank sends that sends most in a prefill, for all layers.

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


FIGURES = tuple(each.name for each in fields(Sent) if each.name != "rank")


def sent_formulas(layer: LayerShape, layout: Layout) -> dict[str, Formula]:
    """The formula of each number of `Sent`; none of linear attention, which has no plan.

    Args:
        layer: of any kind.
        layout: of the tokens.
    """
    if layer.kind == "linear":
        return {}
    ring, summing = TOKENS_RANKS - 1, 2 * (HEADS_RANKS - 1)
    return {
        "prefill": prefill_sent(layer, layout),
        "training": training_sent(layer, layout),
        "decode": decode_sent(layer),
        "prefill_steps": summing + ring + minimum(ring, 1),
        "training_steps": 2 * summing + 3 * ring + minimum(ring, 1),
        "decode_steps": summing + minimum(ring, 1),
    }


def sent_of(
    layers: Sequence[LayerShape],
    *,
    context: int,
    batch: int = 1,
    dtype: str = "float32",
    tp: int = 1,
    cp: int = 1,
) -> Sent:
    """What the layers of a model send together, of the rank that sends most in a prefill.

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
    found = {layer: sent_formulas(layer, layout) for layer in counts}
    numbers = {
        layer: sizes(
            layer, STORAGES["plain"], context=context, batch=batch, dtype=dtype, tp=tp, cp=cp
        )
        for layer in counts
    }

    def bytes_of(name: str, rank: int) -> int:
        return sum(
            count * int(found[layer][name].evaluate(**(numbers[layer] | {"rank": rank})))
            for layer, count in counts.items()
        )

    busiest = max(counted_ranks(cp), key=lambda rank: bytes_of("prefill", rank))
    return Sent(rank=busiest, **{name: bytes_of(name, busiest) for name in FIGURES})


def _agreement() -> Formula:
    return (TOKENS_RANKS - 1) * AGREED


def _token(layer: LayerShape) -> Formula:
    """Bytes of one token that another rank attends to."""
    return token_bytes(layer, STORAGES["plain"])


def _gradient(layer: LayerShape) -> Formula:
    """Bytes of the gradients of one token's streams. A position has none."""
    if layer.kind == "MLA":
        return (LATENT + ROTARY) * SUMMED
    return (LATENT if layer.kind == "LatentKV" else KEY_HEADS * (HEAD + VALUE)) * SUMMED


def _forward_sums(layer: LayerShape, tokens: Formula) -> Formula:
    """The sum of the outputs, and those of the squares that a norm over all heads needs."""
    return sum_sent(BATCH * tokens * HIDDEN) + _sums_of_squares(layer, tokens)


def _sums_of_squares(layer: LayerShape, tokens: Formula) -> Formula:
    if layer.qk_norm != "width":
        return number(0)
    norms = 1 if layer.keys_of is not None else 2
    return norms * sum_sent(BATCH * tokens)


def _backward_sums(layer: LayerShape) -> Formula:
    """Gradients of activations that every rank reads, of squares, and of parameters on several."""
    terms = [sum_sent(BATCH * TOKENS * each) for each in _read(layer)]
    if layer.qk_norm == "head":
        terms += [sum_sent(HEAD)] * (1 if layer.keys_of is not None else 2)
    terms += [sum_sent(each, size("replicas")) for each in _of_shared_heads(layer)]
    return total([*terms, _sums_of_squares(layer, TOKENS)])


def _read(layer: LayerShape) -> list[Formula]:
    """Channels of what every rank reads for its own heads, each with a sum of its own."""
    if layer.kind == "MLA":
        return [LATENT + ROTARY, HIDDEN if layer.q_lora_rank is None else QUERY_LATENT]
    if layer.kind == "LatentKV":
        return [LATENT, HIDDEN]
    return [HIDDEN] if layer.gate is None else [HIDDEN, HIDDEN]


def _of_shared_heads(layer: LayerShape) -> list[Formula]:
    """Elements of the weights, biases and norms of a key head, which several ranks may have."""
    if layer.kind == "MLA" or layer.keys_of is not None:
        return []
    rows = {"k_proj": HEAD, "v_proj": VALUE}
    if layer.kind == "LatentKV":
        rows = {"kv_b_proj": HEAD + VALUE}
    inputs = LATENT if layer.kind == "LatentKV" else HIDDEN
    weights = [channels * inputs for channels in rows.values()]
    biases = [channels for name, channels in rows.items() if name in layer.bias]
    return weights + biases + ([HEAD] if layer.qk_norm == "width" else [])


def _partial(layer: LayerShape) -> Formula:
    """Channels of a head's output before it is merged."""
    return LATENT if layer.kind == "MLA" else VALUE
