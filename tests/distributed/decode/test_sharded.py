"""Decoding with a cache that is spread over ranks, against one forward of one process."""

import random
from copy import deepcopy
from itertools import pairwise

import jaxtyping
import pytest
import torch
from torch import nn

from covering import few
from layers import LAYERS, assert_same, inputs, make, run_in_pieces
from ranks import on_ranks
from regard import (
    EVERYTHING,
    Causal,
    Chunked,
    Dense,
    Documents,
    KVCache,
    Padding,
    Prefix,
    QuantizedCache,
    SlidingCache,
    SlidingWindow,
    StaticCache,
)
from regard.distributed.context.parallel import context_parallel
from regard.distributed.decode.sharded import ShardedCache, sharded_caches
from regard.distributed.ranks import counted
from regard.distributed.shards import Shards
from regard.distributed.tensor.parallel import tensor_parallel
from session import LONG

TOKENS = 13
CUTS = (range(1, TOKENS), (5, 6), (9,), ()) if LONG else (range(4, TOKENS), (6,))
PAGES = (1, 3, 64)
STORAGES = {
    "growing": KVCache,
    "static": lambda: StaticCache(40),
    "int8": lambda: QuantizedCache(8, 4),
    "int4": lambda: QuantizedCache(4, 4),
}


def same_on_every_rank(results):
    """What the first rank returned, which is what each returned, bit for bit."""
    for other in results[1:]:
        assert other.keys() == results[0].keys()
        for key, value in results[0].items():
            assert torch.equal(other[key], value), key
    return results[0]


def _in_pieces(mesh, cases, batch):
    out = {}
    with torch.no_grad():
        for name, page in cases:
            layer, x = make(name), inputs(batch, TOKENS)
            for cuts in CUTS:
                cache = ShardedCache(mesh, page)
                out[name, page, len(cuts)] = run_in_pieces(layer, x, cache, [*cuts])
                assert cache.length == sum(cache.counts) == TOKENS
    return out


@pytest.mark.parametrize(("number", "batch"), few([(2, 1), (4, 1), (3, 3)], 2))
def test_tokens_chunks_and_one_forward(number, batch):
    cases = [(name, page) for name in LAYERS for page in PAGES]
    if not LONG:
        cases = [(name, PAGES[(at + number) % 3]) for at, name in enumerate(LAYERS)]
    results = same_on_every_rank(on_ranks(number, _in_pieces, cases, batch))
    for (name, _, _), out in results.items():
        with torch.no_grad():
            assert_same(out, make(name)(inputs(batch, TOKENS)))


VALID = torch.arange(TOKENS) >= torch.tensor([0, 4, 9])[:, None]
IDS = (torch.arange(TOKENS) + torch.tensor([0, 2, 4])[:, None]) // 5
MASKS = {
    "window": SlidingWindow(4),
    "padding": Padding(VALID),
    "window and padding": SlidingWindow(4) & Padding(VALID),
    "documents": Documents(IDS),
    "chunked": Chunked(4),
    "prefix": Prefix([5, 2, 0]),
}
MASKED = ("MHA", "window", "everything", "MLA absorbed", "MLA expanded", "latent KV")
FIRST = 7  # tokens of the prompt


def _masked(mesh, names, masks):
    out = {}
    with torch.no_grad():
        for name in names:
            layer, x = make(name), inputs(3, TOKENS)
            own = layer.mask
            for which, mask in masks.items():
                if which == "prefix":
                    layer.mask, mask = EVERYTHING, Causal() | mask
                else:
                    layer.mask = own
                cache = ShardedCache(mesh, 3)
                edges = [0, FIRST, FIRST + 3, *range(FIRST + 4, TOKENS + 1)]
                pieces = [
                    layer(x[:, start:stop], mask=mask, cache=cache)
                    for start, stop in pairwise(edges)
                ]
                out[name, which] = torch.cat(pieces, 1)
    return out


@pytest.mark.parametrize("number", [2, 3])
def test_masks(number):
    names = MASKED if LONG else MASKED[number - 2 :: 2]
    for (name, which), out in same_on_every_rank(on_ranks(number, _masked, names, MASKS)).items():
        layer, mask = make(name), MASKS[which]
        if which == "prefix":
            layer.mask, mask = EVERYTHING, Causal() | mask
        with torch.no_grad():
            assert_same(out, layer(inputs(3, TOKENS), mask=mask))


def _dense(mesh, keep):
    layer, x, cache = make("GQA"), inputs(3, TOKENS), ShardedCache(mesh, 2)
    with torch.no_grad():
        layer(x[:, :FIRST], cache=cache)
        out = layer(x[:, FIRST:], mask=Dense(keep), cache=cache)
    return {"out": out}


def test_a_dense_mask_of_each_head():
    keep = torch.rand(3, 6, TOKENS, TOKENS) < 0.5
    out = same_on_every_rank(on_ranks(3, _dense, keep[:, :, FIRST:]))["out"]
    with torch.no_grad():
        assert_same(out, make("GQA")(inputs(3, TOKENS), mask=Dense(keep))[:, FIRST:])


def _stored(mesh, names):
    out, nbytes = {}, {}
    with torch.no_grad():
        for name in names:
            for which, storage in STORAGES.items():
                cache = ShardedCache(mesh, 3, storage)
                out[name, which] = run_in_pieces(
                    make(name), inputs(2, TOKENS), cache, [7, 8, 9, 10]
                )
                nbytes[name, which] = cache.nbytes
                assert cache.allocated_bytes >= cache.nbytes
    return out, nbytes


@pytest.mark.parametrize("number", [2, 4] if LONG else [3])
def test_storages_and_each_token_once(number):
    """A storage quantises each token by itself: the values are those of one cache."""
    outs, nbytes = zip(*on_ranks(number, _stored, ["GQA", "MLA", "latent KV"]), strict=True)
    for (name, which), out in same_on_every_rank(outs).items():
        alone = STORAGES[which]()
        with torch.no_grad():
            assert_same(out, run_in_pieces(make(name), inputs(2, TOKENS), alone, [7, 8, 9, 10]))
        assert sum(each[name, which] for each in nbytes) == alone.nbytes


def _few(mesh):
    layer, x = make("GQA"), inputs(1, 3)
    with torch.no_grad():
        cache = ShardedCache(mesh, 64)
        out = run_in_pieces(layer, x, cache, [2])
    return {"out": out}, cache.nbytes


def test_ranks_without_tokens():
    results = on_ranks(4, _few)
    with torch.no_grad():
        assert_same(
            same_on_every_rank([out for out, _ in results])["out"], make("GQA")(inputs(1, 3))
        )
    assert [nbytes > 0 for _, nbytes in results] == [True, False, False, False]


def _low(mesh, dtype):
    out = {}
    with torch.no_grad():
        for name in ("GQA", "window", "MLA", "latent KV"):
            cache = ShardedCache(mesh, 3)
            x = inputs(2, TOKENS).to(dtype)
            out[name] = run_in_pieces(make(name, dtype), x, cache, [7, 8, 9])
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision(dtype):
    """At most twice the error of the same layer in one process."""
    for name, out in same_on_every_rank(on_ranks(3, _low, dtype)).items():
        low = make(name, dtype)
        exact = make(name)
        exact.load_state_dict(low.state_dict())
        x = inputs(2, TOKENS).to(dtype)
        with torch.no_grad():
            expected, plain = exact(x.double()), low(x)
        assert out.dtype == dtype
        allowed = 2 * (plain - expected).abs().max()
        assert (out - expected).abs().max() <= allowed + torch.finfo(
            dtype
        ).eps * expected.abs().max()


def _changed(mesh, seed):
    """A random course of appended, removed and chosen tokens, with an ordinary cache beside it."""
    generator, rows = random.Random(seed), 2
    layer = make(generator.choice(["GQA", "window", "MLA"]))
    cache, alone = ShardedCache(mesh, generator.choice([1, 2, 5])), KVCache()
    out = {}
    with torch.no_grad():
        for step in range(14):
            what = generator.choice(["append", "append", "truncate", "reorder", "copy"])
            if what == "append" or not cache.length:
                x = inputs(rows, generator.choice([1, 1, 4]), seed=step)
                out[step] = layer(x, cache=cache)
                assert_same(out[step], layer(x, cache=alone))
            elif what == "truncate":
                length = generator.randint(0, cache.length)
                cache.truncate(length)
                alone.truncate(length)
            elif what == "reorder":
                chosen = torch.tensor([generator.randrange(rows) for _ in range(3)])
                rows = 3
                cache.reorder(chosen)
                alone.reorder(chosen)
            else:
                former, cache = cache, deepcopy(cache)
                former.truncate(0)
            assert cache.length == alone.length == sum(cache.counts)
    return out, cache.nbytes, alone.nbytes


@pytest.mark.parametrize("number", [2, 3])
def test_truncate_reorder_and_copies(number):
    for seed in range(40 if LONG else 6):
        outs, nbytes, alone = zip(*on_ranks(number, _changed, seed), strict=True)
        same_on_every_rank(outs)
        assert sum(nbytes) == alone[0]


def _after_prefill(mesh, layout):
    """The streams of each rank's shard, stored where they are; then tokens, and some removed."""
    rank, out = mesh.get_local_rank(), {}
    layer, x = make("GQA"), inputs(2, TOKENS + 6)
    shards, cache, whole = Shards(TOKENS, mesh.size(), layout), ShardedCache(mesh, 2), KVCache()
    with torch.no_grad():
        layer(x[:, :TOKENS], cache=whole)
        (part,) = whole.peek(*(held[:, :, :0] for held in whole.buffers))
        cache.store(shards, *(shards.take(each, rank, 2) for each in part.streams))
        assert cache.counts == shards.lengths
        out["after"] = run_in_pieces(layer, x[:, TOKENS:], cache, [1, 2, 3])
        cache.truncate(TOKENS // 2)
        assert cache.length == TOKENS // 2
        out["again"] = run_in_pieces(layer, x[:, TOKENS // 2 :], cache, [1, 5])
    return out, cache.counts


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("number", [2, 3, 4])
def test_tokens_of_a_context_parallel_prefill(number, layout):
    outs, counts = zip(*on_ranks(number, _after_prefill, layout), strict=True)
    out = same_on_every_rank(outs)
    with torch.no_grad():
        expected = make("GQA")(inputs(2, TOKENS + 6))
    assert_same(out["after"], expected[:, TOKENS:])
    assert_same(out["again"], expected[:, TOKENS // 2 :])
    assert max(counts[0]) - min(counts[0]) <= 2 * (layout == "zigzag") + 4


def _prefilled(mesh, names):
    outs = {}
    with torch.no_grad():
        for name in names:
            layer, x, cache = make(name), inputs(2, TOKENS + 3), ShardedCache(mesh, 2)
            plan = context_parallel(layer, mesh)
            pieces = [plan.gathered(layer(plan.shard(x[:, :TOKENS]), cache=cache))]
            assert cache.counts == plan.shards(TOKENS).lengths
            pieces += [
                layer(x[:, slot : slot + 1], cache=cache) for slot in range(TOKENS, TOKENS + 3)
            ]
            outs[name] = torch.cat(pieces, 1)
    return outs


@pytest.mark.parametrize("number", [2, 3])
def test_a_context_parallel_prefill_fills_the_cache(number):
    names = list(LAYERS) if LONG else ("GQA", "everything", "MLA", "latent KV")
    for name, out in same_on_every_rank(on_ranks(number, _prefilled, names)).items():
        with torch.no_grad():
            assert_same(out, make(name)(inputs(2, TOKENS + 3)))


def _fails(mesh):
    layer, x = make("GQA"), inputs(2, TOKENS)
    messages = []
    with torch.no_grad():
        cache = ShardedCache(mesh, 3, lambda: StaticCache(6))
        layer(x[:, :10], cache=cache)
        held, before = cache.length, cache.nbytes
        # On a mesh of two, the first rank has 6 of 10 tokens and is full; every rank refuses.
        with pytest.raises(ValueError, match=r"a rank would store 7 of 13 tokens") as refused:
            layer(x[:, 10:], cache=cache)
        messages.append(str(refused.value))
        layer.o_proj.register_forward_pre_hook(_broken)
        with pytest.raises(ArithmeticError):
            layer(x[:, 10:11], cache=cache)
        assert (cache.length, cache.nbytes) == (held, before)
        layer.o_proj._forward_pre_hooks.clear()
        with pytest.raises(ValueError, match="a batch of 1"):
            layer(x[:1, 10:11], cache=cache)
        out = layer(x[:, 10:11], cache=cache)
    return {"out": out}, messages


def _broken(module, args):
    raise ArithmeticError


def test_a_failed_call_leaves_the_cache_as_it_was():
    outs, messages = zip(*on_ranks(2, _fails), strict=True)
    assert "max_length=6" in messages[1][0]
    with torch.no_grad():
        assert_same(same_on_every_rank(outs)["out"], make("GQA")(inputs(2, TOKENS))[:, 10:11])


def _sent(mesh):
    layer, x, cache = make("GQA"), inputs(3, TOKENS), ShardedCache(mesh, 3)
    sizes = []
    with torch.no_grad():
        for start, stop in ((0, 7), (7, 8), (8, 13)):
            with counted() as sent:
                layer(x[:, start:stop], cache=cache)
            sizes.append(sent.bytes)
    return sizes


def test_bytes_sent_do_not_depend_on_the_tokens_held():
    """To two ranks: of 3 rows and 6 heads, 6 numbers and a log-sum-exp, of 8 bytes."""
    expected = [2 * 3 * 6 * queries * 7 * 8 for queries in (7, 1, 5)]
    assert on_ranks(3, _sent) == [expected] * 3


def _refused(mesh):
    checked = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)  # their errors would come before these
    try:
        _refusals(mesh)
    finally:
        jaxtyping.config.update("jaxtyping_disable", checked)


def _refusals(mesh):
    layer, x, cache = make("GQA"), inputs(1, 3), ShardedCache(mesh)
    other = make("everything").train()
    other.dropout = 0.5
    with pytest.raises(ValueError, match="gradients do not flow"):
        layer(x, cache=cache)
    with torch.no_grad():
        with pytest.raises(ValueError, match=r"got dropout=0.5"):
            other(x, cache=cache)
        assert cache.length == 0
        layer(x, cache=cache)
        for wrong in (torch.tensor([1]), 4, -1, 1.0):
            with pytest.raises(ValueError, match=r"whole number|is not in 0..3"):
                cache.truncate(wrong)
        with pytest.raises(ValueError, match=r"rows=.* are not all in"):
            cache.reorder(torch.tensor([1]))
        with pytest.raises(ValueError, match=r"weights\(\) reads all keys"):
            layer.weights(x, cache=cache)
        with pytest.raises(ValueError, match=r"this rank's shard has 2 tokens, the streams 3"):
            cache.store(Shards(4, 2), *(torch.zeros(1, 2, 3, 6, dtype=torch.float64),) * 2)
        with pytest.raises(ValueError, match="shards are of 3 ranks"):
            cache.store(Shards(4, 3), torch.zeros(1, 2, 3, 6))
        half = make("GQA").bfloat16()
        half.backend = "sdpa"
        with pytest.raises(ValueError, match="sdpa gives no log-sum-exp"):
            half(x.bfloat16(), cache=ShardedCache(mesh))
    assert cache.length == 3
    with pytest.raises(ValueError, match="page_size is at least 1"):
        ShardedCache(mesh, 0)
    for wrong in (KVCache(), None, dict, lambda: ShardedCache(mesh)):
        with pytest.raises(TypeError, match="storage is a function that makes a cache"):
            ShardedCache(mesh, storage=wrong)
    with pytest.raises(ValueError, match="drops tokens by their number"):
        ShardedCache(mesh, storage=lambda: SlidingCache(4))
    assert repr(cache) == "ShardedCache(2 ranks, page_size=64, storage=KVCache())"
    layer.backend = "auto"
    with torch.no_grad():
        assert "queries x 6 keys" in layer.explain(x, cache=cache)


def test_refusals():
    on_ranks(2, _refused)


class Model(nn.Module):
    """Two layers, one inside another module."""

    def __init__(self):
        super().__init__()
        self.first, self.rest = make("GQA"), nn.Sequential(nn.Identity(), make("MLA"))

    def forward(self, x, caches=None):
        given = [{}, {}] if caches is None else [{"cache": each} for each in caches.values()]
        return self.rest[1](self.first(x, **given[0]), **given[1])


def _decoded(mesh, split):
    model, x = Model(), inputs(2, 6)
    if split:
        tensor_parallel(model, mesh)
    caches = sharded_caches(model, mesh, page_size=2, storage=lambda: StaticCache(5))
    assert list(caches) == ["first", "rest.1"]
    assert "page_size=2, storage=StaticCache(5)" in repr(caches["first"])
    with torch.no_grad():
        return torch.cat([model(x[:, at : at + 2], caches) for at in (0, 2, 4)], 1)


def test_a_cache_for_every_layer():
    with torch.no_grad():
        expected = Model()(inputs(2, 6))
    for split in (False, True):
        for out in on_ranks(3, _decoded, split):
            assert_same(out, expected)


def test_modules_without_layers_are_refused():
    with pytest.raises(ValueError, match="Linear contains no attention layer of regard"):
        sharded_caches(nn.Linear(2, 2), mesh=None)
