"""What is refused, and that the refusal names the argument, what came, and the way out.

One table: a wrong call, the error, and what its message must say. Nothing is half done.
"""

import pytest
import torch
from torch import nn

from regard import (
    EVERYTHING,
    Alibi,
    Attention,
    Causal,
    Dense,
    GroupedQueryAttention,
    KVCache,
    LatentKVAttention,
    MultiHeadAttention,
    MultiHeadLatentAttention,
    Padding,
    Partial,
    QuantizedCache,
    RelativeBias,
    Rotary,
    SharedCache,
    SlidingCache,
    SlidingWindow,
    Span,
    StaticCache,
    Where,
    attend,
    attend_partial,
    attention_weights,
    merge,
    prepare,
)

pytestmark = [
    pytest.mark.usefixtures("unchecked"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.trace.*:DeprecationWarning"),
]

Q = torch.randn(2, 6, 3, 8)
K = torch.randn(2, 2, 3, 8)
X = torch.randn(2, 3, 48)
SHORT, LONG = torch.zeros(3, dtype=torch.int64), torch.zeros(6, dtype=torch.int64)


def mha(**options):
    return MultiHeadAttention(48, 6, **options)


def causal(**options):
    return Attention(48, 6, num_kv_heads=2, mask=Causal(), **options)


def mla(**options):
    sizes = {"kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
    return MultiHeadLatentAttention(48, 3, **{**sizes, "rope": Rotary(4), **options})


def latent(**options):
    sizes = {"num_kv_heads": 2, "head_dim": 8, "kv_lora_rank": 12}
    return LatentKVAttention(48, 6, **{**sizes, **options})


def wrapped():
    """MLA with an adapter around the projection that absorption reads."""
    layer = mla(form="absorbed")
    layer.kv_b_proj = nn.Sequential(layer.kv_b_proj)
    return layer


def hooked():
    layer = mla(form="absorbed")
    layer.kv_b_proj.register_forward_hook(lambda *_: None)
    return layer


OF_ATTEND = {
    "a tuple as a span": (
        lambda: attend(Q, K, K, span=(0, 3, 0, 3)),
        TypeError,
        ["span holds whole numbers", r"\(0, 3, 0, 3\)", "give Span"],
    ),
    "a span of fractions": (
        lambda: attend(Q, K, K, mask=Causal(), span=Span(0.5, 3.5, 0, 3)),
        TypeError,
        ["span holds whole numbers", "0.5"],
    ),
    "keys from a fraction on": (
        lambda: attend(Q[:, :, :1], K, K, mask=Causal(), span=Span(2, 3, 0.0, 3)),
        TypeError,
        ["span holds whole numbers", "kv_start=0.0"],
    ),
    "a span of other rows": (
        lambda: attend(Q, K, K, span=Span(SHORT, SHORT + 3, 0, 3)),
        ValueError,
        ["q has 2 rows", "slots of 3"],
    ),
    "a softcap in words": (
        lambda: attend(Q, K, K, softcap="20"),
        TypeError,
        ["softcap is a number", "'20'"],
    ),
    "numbers of 8 bits": (
        lambda: attend(*(x.to(torch.float8_e4m3fn) for x in (Q, K, K))),
        ValueError,
        ["16 bits a number", "float8_e4m3fn"],
    ),
    "a list to merge": (
        lambda: merge([Partial.nothing()]),
        ValueError,
        [r"merge\(\) takes Partials", r"\[Partial"],
    ),
    "a number of slopes": (lambda: Alibi(4), TypeError, ["slopes must be real numbers", "4"]),
    "tracing one call for all": (
        lambda: torch.jit.trace(lambda q: attend(q, K, K), Q),
        ValueError,
        ["torch.jit.trace keeps the lengths", r"dynamo=True"],
    ),
    "a softcap that is infinite": (
        lambda: attend(Q, K, K, softcap=float("inf")),
        ValueError,
        ["softcap is above 0 and finite", "got inf"],
    ),
    "a scale that is learned": (
        lambda: attend(Q, K, K, scale=torch.tensor(0.3)),
        TypeError,
        ["scale is a number", "multiply q"],
    ),
    "a sparse tensor": (
        lambda: attend(Q, K.to_sparse(), K),
        ValueError,
        ["k is a dense tensor", "torch.sparse_coo", r"k.to_dense\(\)"],
    ),
    "a bias on another device": (
        lambda: attend(Q, K, K, score_bias=torch.zeros(3, 3, device="meta")),
        ValueError,
        ["score_bias is on meta", "q is on cpu"],
    ),
    "a tensor as mask": (
        lambda: attend(Q, K, K, mask=torch.ones(3, 3).bool()),
        TypeError,
        [r"mask is a rule", r"torch\.bool", r"Dense\(keep\)", r"Padding\(valid\)", "hidden"],
    ),
    "a number as a mask": (lambda: attend(Q, K, K, mask=0), TypeError, ["int", "EVERYTHING"]),
    "three dimensions": (lambda: attend(Q[0], K, K), ValueError, ["q is", r"\(6, 3, 8\)"]),
    "a list": (lambda: attend(Q, [1], K), TypeError, ["k is a tensor", "list"]),
    "integers": (lambda: attend(Q, K, K.long()), ValueError, ["v is floating", "int64", "cast"]),
    "mixed dtypes": (
        lambda: attend(Q, K.bfloat16(), K),
        ValueError,
        ["one dtype", r"k torch\.bfloat16", "cast"],
    ),
    "mixed devices": (lambda: attend(Q, K.to("meta"), K), ValueError, ["one device", "meta"]),
    "batches that differ": (lambda: attend(Q, K[:1], K[:1]), ValueError, ["batch", "2, 1 and 1"]),
    "keys and values apart": (
        lambda: attend(Q, K, K[:, :, :2]),
        ValueError,
        [r"k and v", r"\(2, 3\)", r"\(2, 2\)"],
    ),
    "widths that differ": (lambda: attend(Q, K[..., :4], K), ValueError, ["head dim", "8 and 4"]),
    "heads that do not divide": (
        lambda: attend(Q, K.repeat(1, 2, 1, 1), K.repeat(1, 2, 1, 1)),
        ValueError,
        ["6 heads", "multiple of the 4", r"\[1, 2, 3, 6\]"],
    ),
    "top-left causal by accident": (
        lambda: attend(Q[:, :, :1], K, K, mask=Causal()),
        ValueError,
        [
            r"Causal\(\)",
            "1 queries",
            "3 keys",
            r"Span\(past, past \+ L, 0, S\)",
            r"Span\(2, 3, 0, 3",
        ],
    ),
    "a bias about places without a place": (
        lambda: attend(Q[:, :, :1], K, K, score_bias=Alibi.for_heads(6)),
        ValueError,
        ["score_bias", r"Span\(2, 3"],
    ),
    "a span of other queries": (
        lambda: attend(Q, K, K, span=Span(0, 2, 0, 3)),
        ValueError,
        ["q has 3 queries", "holds 2", "Span"],
    ),
    "a span of other keys": (
        lambda: attend(Q, K, K, span=Span(0, 3, 0, 5)),
        ValueError,
        ["k has 3 keys", "holds 5"],
    ),
    "dropout of one": (lambda: attend(Q, K, K, dropout=1.0), ValueError, ["dropout", r"1\.0"]),
    "a softcap of zero": (lambda: attend(Q, K, K, softcap=0.0), ValueError, ["softcap", "above 0"]),
    "an unknown precision": (
        lambda: attend(Q, K, K, precision="best"),
        ValueError,
        ["precision", "'strict'", "'best'"],
    ),
    "an infinite scale": (
        lambda: attend(Q, K, K, scale=float("inf")),
        ValueError,
        ["scale", "inf", r"head_dim \*\* -0\.5"],
    ),
    "an unknown backend": (
        lambda: attend(Q, K, K, backend="flash3"),
        ValueError,
        ["'flash3'", "'sdpa'", "'eager'"],
    ),
    "a backend that objects": (
        lambda: attend(Q, K, K, softcap=3.0, backend="sdpa"),
        ValueError,
        ["'sdpa' cannot run", r"softcap \(got 3\.0\)", "'auto'"],
    ),
    "sinks of another shape": (
        lambda: attend(Q, K, K, sinks=torch.zeros(2)),
        ValueError,
        ["sinks", "6 query heads", r"\(2,\)"],
    ),
    "sinks elsewhere": (
        lambda: attend(Q, K, K, sinks=torch.zeros(6, device="meta")),
        ValueError,
        ["sinks are on meta", "move"],
    ),
    "a bias that does not broadcast": (
        lambda: attend(Q, K, K, score_bias=torch.zeros(6, 3, 4)),
        ValueError,
        ["score_bias", r"\[2, 6, 3, 3\]", r"\[6, 3, 4\]"],
    ),
    "a mask as bias": (
        lambda: attend(Q, K, K, score_bias=torch.ones(3, 3).bool()),
        ValueError,
        ["score_bias", r"mask=Dense\(keep\)"],
    ),
    "a number as bias": (lambda: attend(Q, K, K, score_bias=1.0), TypeError, ["Alibi", "float"]),
    "a mask of another batch": (
        lambda: attend(Q, K, K, mask=Padding(torch.ones(3, 3).bool())),
        ValueError,
        ["batch of 3", "batch of 2"],
    ),
    "a mask of other heads": (
        lambda: attend(Q, K, K, mask=Dense(torch.ones(2, 4, 3, 3).bool())),
        ValueError,
        ["4 heads", "q has 6"],
    ),
    "a rectangle of another size": (
        lambda: attend(Q, K, K, mask=Dense(torch.ones(3, 4).bool())),
        ValueError,
        [r"\[3, 3\]", r"\[3, 4\]"],
    ),
    "a part of a backend without one": (
        lambda: attend_partial(Q.half(), K.half(), K.half(), backend="sdpa"),
        ValueError,
        ["log-sum-exp"],
    ),
    "weights of a head that is not there": (
        lambda: attention_weights(Q, K, heads=[6]),
        IndexError,
        ["heads=6", "6 heads"],
    ),
    "weights of a query that is not there": (
        lambda: attention_weights(Q, K, queries=[3]),
        IndexError,
        ["queries=3", "3 queries"],
    ),
}

OF_LAYERS = {
    "no context where one is read": (
        lambda: Attention(48, 6, context_size=20)(X),
        ValueError,
        [r"give context=\[B, S, 20\]"],
    ),
    "a context without channels": (
        lambda: Attention(48, 6, context_size=0),
        ValueError,
        ["context_size is a whole number", "0"],
    ),
    "no dropout": (lambda: mha(dropout=None), TypeError, ["dropout is a number", "None"]),
    "a shared number": (lambda: SharedCache(3), TypeError, ["cache is a Cache", "int"]),
    "tracing that keeps one call for all": (
        lambda: torch.jit.trace(mha(), X),
        ValueError,
        ["torch.jit.trace keeps the lengths", "torch.export.export"],
    ),
    "a tensor of another library's layout": (
        lambda: mha()(X.to_mkldnn()),
        ValueError,
        ["x is a dense tensor", "_mkldnn"],
    ),
    "a class as a mask": (
        lambda: mha()(X, mask=Causal),
        TypeError,
        ["got the class Causal", "call it"],
    ),
    "a class as a part of a mask": (
        lambda: Causal() & SlidingWindow,
        TypeError,
        ["got the class SlidingWindow", "call it"],
    ),
    "a class as a cache": (
        lambda: mha()(X, cache=KVCache),
        TypeError,
        ["got the class KVCache", "one for each layer"],
    ),
    "heads that do not divide the width": (
        lambda: MultiHeadAttention(50, 6),
        ValueError,
        ["hidden_size=50", "num_heads=6", r"\[1, 2, 5, 10, 25, 50\]", "head_dim"],
    ),
    "key heads that do not divide": (
        lambda: GroupedQueryAttention(48, 6, 4),
        ValueError,
        ["num_heads=6", "num_kv_heads=4", r"\[1, 2, 3, 6\]"],
    ),
    "no heads": (lambda: MultiHeadAttention(48, 0), ValueError, ["num_heads", "at least 1", "0"]),
    "no key heads": (lambda: GroupedQueryAttention(48, 6, 0), ValueError, ["num_kv_heads", "0"]),
    "a rope wider than a head": (lambda: mha(rope=Rotary(10)), ValueError, ["10", "head_dim=8"]),
    "dropout below zero": (lambda: mha(dropout=-0.1), ValueError, ["dropout", r"-0\.1"]),
    "an unknown norm": (lambda: mha(qk_norm="layer"), ValueError, ["qk_norm", "'head'", "'layer'"]),
    "an unknown gate": (lambda: mha(gate="token"), ValueError, ["gate", "'channel'", "'token'"]),
    "a bias of no projection": (
        lambda: mha(bias={"x_proj"}),
        ValueError,
        ["x_proj", "k_proj", "o_proj"],
    ),
    "a tensor as the layer's mask": (
        lambda: mha(mask=torch.ones(3, 3)),
        TypeError,
        [r"mask is a rule", r"Dense\(keep\)"],
    ),
    "an unknown form": (lambda: mla(form="fused"), ValueError, ["form", "'absorbed'", "'fused'"]),
    "a rope of another width": (
        lambda: mla(rope=Rotary(6)),
        ValueError,
        ["qk_rope_head_dim=4", r"Rotary\(4"],
    ),
    "a rank of zero": (lambda: mla(kv_lora_rank=0), ValueError, ["kv_lora_rank", "at least 1"]),
    "a latent rank of zero": (lambda: latent(kv_lora_rank=0), ValueError, ["kv_lora_rank", "1"]),
    "an unknown pairing": (lambda: Rotary(8, pairing="both"), ValueError, ["pairing", "'both'"]),
    "an odd rope": (lambda: Rotary(7), ValueError, ["even", "7"]),
    "x of another width": (lambda: mha()(X[..., :40]), ValueError, ["x is 48 wide", "40"]),
    "x of two dimensions": (lambda: mha()(X[0]), ValueError, ["x is", r"\(3, 48\)"]),
    "x of another dtype": (
        lambda: mha()(X.bfloat16()),
        ValueError,
        ["bfloat16", "float32", "autocast"],
    ),
    "x elsewhere": (lambda: mha()(X.to("meta")), ValueError, ["meta", "cpu", "move"]),
    "x as a list": (lambda: mla()(X.tolist()), TypeError, ["x is a tensor", "list"]),
    "positions of another length": (
        lambda: causal(rope=Rotary(8))(X, positions=torch.arange(4)),
        ValueError,
        ["positions", r"\[3\]", r"\(4,\)", "new tokens"],
    ),
    "positions as a range": (
        lambda: causal(rope=Rotary(8))(X, positions=range(3)),
        TypeError,
        ["positions", "range"],
    ),
    "a mask as a tensor": (
        lambda: mha()(X, mask=torch.ones(2, 3)),
        TypeError,
        [r"Padding\(valid\)", "MultiheadAttention"],
    ),
    "a cache that is none": (lambda: causal()(X, cache={}), TypeError, ["KVCache", "dict"]),
    "context with a rope": (
        lambda: mha(rope=Rotary(8))(X, context=X),
        ValueError,
        ["context", "rope", "NO_ROPE"],
    ),
    "context with a cache": (
        lambda: mha()(X, context=X, cache=KVCache()),
        ValueError,
        ["context=", "cache=", "remember"],
    ),
    "context of another width": (
        lambda: mha(context_size=20)(X, context=X),
        ValueError,
        ["context is 20 wide", "48"],
    ),
    "context of another batch": (
        lambda: mha()(X, context=X[:1]),
        ValueError,
        ["batch of 1", "2", "reorder"],
    ),
    "another layer's memory": (
        lambda: mha()(X, context=GroupedQueryAttention(48, 6, 2).remember(X)),
        ValueError,
        ["remember", r"\(2, 8\)", r"\(6, 8\)"],
    ),
    "context for MLA": (lambda: mla()(X, context=X), ValueError, ["context", "Attention"]),
    "an adapter in the way of absorbing": (
        lambda: wrapped()(X),
        ValueError,
        ["kv_b_proj", "Sequential", "form='auto'"],
    ),
    "a hook in the way of absorbing": (lambda: hooked()(X), ValueError, ["kv_b_proj", "hooks"]),
    "a relative bias of no buckets": (
        lambda: RelativeBias(6, num_buckets=0),
        ValueError,
        ["buckets"],
    ),
}


def peeking(b, h, q, kv):
    return kv <= q + 1


def prefilled(cache):
    cache.update(torch.randn(2, 2, 3, 8), torch.randn(2, 2, 3, 8))
    return cache


def slid():
    cache = SlidingCache(2)
    return prefilled(cache)


WITH_CACHES = {
    "a rule that looks ahead": (
        lambda c: Attention(48, 6, num_kv_heads=2)(X, cache=c),
        KVCache,
        [r"Everything\(\)", "does not hold yet", r"Causal\(\)"],
    ),
    "padding alone": (
        lambda c: Attention(48, 6, num_kv_heads=2)(
            X, mask=Padding(torch.ones(2, 6).bool()), cache=c
        ),
        KVCache,
        ["Padding", r"Causal\(\)"],
    ),
    "a window alone": (
        lambda c: Attention(48, 6, num_kv_heads=2, mask=SlidingWindow(2))(X, cache=c),
        KVCache,
        [r"SlidingWindow\(size=2\)", r"Causal\(\)"],
    ),
    "a function that looks ahead": (
        lambda c: Attention(48, 6, num_kv_heads=2, mask=Where(peeking))(X, cache=c),
        KVCache,
        ["Where", r"Causal\(\)"],
    ),
    "keys that were dropped": (
        lambda c: causal()(X[:, :1], cache=c),
        slid,
        [r"Causal\(\)", "dropped", "SlidingWindow", "KVCache"],
    ),
    "a window wider than the cache": (
        lambda c: Attention(48, 6, num_kv_heads=2, mask=Causal() & SlidingWindow(3))(
            X[:, :1], cache=c
        ),
        slid,
        ["dropped", "no wider"],
    ),
    "a full static cache": (
        lambda c: causal()(X, cache=c),
        lambda: StaticCache(5),
        ["3 tokens held and 3 new", "max_length=5", "truncate"],
    ),
    "a cache of another batch": (
        lambda c: causal()(X[:1], cache=c),
        KVCache,
        ["batch of 1", "cache one of 2", "reorder"],
    ),
    "a cache of another layer": (
        lambda c: mha(mask=Causal())(X, cache=c),
        KVCache,
        ["heads", r"\(6, 8\)", r"\(2, 8\)", "its own cache"],
    ),
    "a cache of another attention": (
        lambda c: mla(mask=Causal())(X, cache=c),
        KVCache,
        ["2 streams", "got 1"],
    ),
    "gradients through a quantised cache": (
        lambda c: causal()(X, cache=c),
        QuantizedCache,
        ["gradients", r"KVCache\(\)"],
    ),
    "a cache with a wrong mask": (
        lambda c: causal()(X, mask=torch.ones(3, 3), cache=c),
        KVCache,
        ["mask is a rule"],
    ),
    "a cache with wrong positions": (
        lambda c: causal(rope=Rotary(8))(X, positions=torch.arange(6), cache=c),
        KVCache,
        ["positions", "new tokens"],
    ),
    "a cache with a dense mask of this chunk only": (
        lambda c: causal()(X, mask=Dense(torch.ones(3, 3).bool()), cache=c),
        KVCache,
        [r"\[3, 6\]", "cached keys count"],
    ),
    "a cache with a backend that objects": (
        lambda c: causal(softcap=3.0, backend="sdpa")(X, cache=c),
        KVCache,
        ["softcap"],
    ),
    "data that ends before the cache": (
        lambda c: causal()(X[:, :1], cache=c, mask=Where(lambda b, h, q, k: SHORT[q] == SHORT[k])),
        KVCache,
        [r"Where\(<lambda>\) indexes data that does not cover", "all slots of the sequence"],
    ),
    "documents that go on": (
        lambda c: mha()(X[:, :1], cache=c, mask=Where(lambda b, h, q, k: LONG[q] == LONG[k])),
        KVCache,
        ["keys from slot 4 on", "visible to queries 3..3", r"Causal\(\)"],
    ),
    "a truncation to more": (lambda c: c.truncate(4), KVCache, ["length=4", r"0\.\.3"]),
    "a reorder of rows that are not there": (
        lambda c: c.reorder(torch.tensor([0, 2])),
        KVCache,
        [r"\[0, 2\]", r"0\.\.1", "rows"],
    ),
}


def test_there_are_enough_of_them():
    assert len(OF_ATTEND) + len(OF_LAYERS) + len(WITH_CACHES) >= 80


@pytest.mark.parametrize("case", [*OF_ATTEND, *OF_LAYERS])
def test_the_error_of_a_wrong_call_states_what_is_right(case):
    wrong, error, words = {**OF_ATTEND, **OF_LAYERS}[case]
    with pytest.raises(error) as caught:
        wrong()
    for word in words:
        caught.match(word)


@pytest.mark.parametrize("case", WITH_CACHES)
def test_a_refused_call_leaves_its_cache_as_it_was(case):
    wrong, make, words = WITH_CACHES[case]
    cache = make()
    with torch.no_grad():
        if cache.length == 0:
            prefilled(cache)
        nothing = torch.randn(2, 2, 0, 8)
        before = [s.clone() for s in cache.peek(nothing, nothing)[0].streams]
    with pytest.raises(ValueError if "wrong mask" not in case else TypeError) as caught:
        wrong(cache)
    for word in words:
        caught.match(word)
    with torch.no_grad():
        after = cache.peek(nothing, nothing)[0].streams
    assert cache.length == 3
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_a_wrong_option_is_found_before_anything_runs():
    """`prepare` refuses from shapes alone: no product has been computed."""
    huge = torch.empty(1, 1, 1, 8).expand(1, 1, 10**9, 8)
    with pytest.raises(ValueError, match="backend"):
        prepare(huge, huge, huge, mask=EVERYTHING, backend="nothing")
