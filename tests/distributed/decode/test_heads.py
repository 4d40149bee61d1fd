"""Tokens and heads both over ranks: the output of one process, each token stored once."""

import pytest
import torch

from covering import few
from layers import LAYERS, assert_same, attention, inputs, make, run_in_pieces, scattered
from ranks import on_ranks
from regard import Alibi, Causal, Dense, KVCache, Padding, QuantizedCache, Rotary, Where
from regard.distributed.decode.heads import merge_over_ranks
from regard.distributed.decode.sharded import ShardedCache, sharded_caches
from regard.distributed.ranks import Ranks, counted
from regard.distributed.tensor.parallel import tensor_parallel
from regard.ops.partial import Partial
from session import LONG

TOKENS = 11
SPLIT = {
    **{name: LAYERS[name] for name in LAYERS if not name.startswith("latent")},
    "nine on three": lambda: attention(9, num_kv_heads=3, rope=Rotary(4), sinks=True),
    "six on one": lambda: attention(6, num_kv_heads=1, score_bias=Alibi.for_heads(6)),
}
del SPLIT["MLA expanded"]
SOME = ("GQA", "MQA", "everything", "MLA", "nine on three", "six on one")
CUTS = [6, 7, 8, 9]


def layer_of(name):
    torch.manual_seed(len(name))
    return scattered(SPLIT[name]()).double().eval()


def _in_pieces(mesh, names):
    outs, nbytes = {}, {}
    with torch.no_grad():
        for name in names:
            layer = tensor_parallel(layer_of(name), mesh)
            (cache,) = sharded_caches(layer, mesh, 2).values()
            outs[name] = run_in_pieces(layer, inputs(2, TOKENS), cache, CUTS)
            nbytes[name] = cache.nbytes
    return outs, nbytes


@pytest.mark.parametrize("number", few([2, 4, 3], 2))
def test_layers_whose_heads_are_split(number):
    names = list(SPLIT) if LONG else SOME
    results = on_ranks(number, _in_pieces, names)
    for name in names:
        layer, alone = layer_of(name), KVCache()
        with torch.no_grad():
            expected = layer(inputs(2, TOKENS))
            run_in_pieces(layer, inputs(2, TOKENS), alone, CUTS)
        for outs, _ in results:
            assert_same(outs[name], expected)
        assert sum(nbytes[name] for _, nbytes in results) == alone.nbytes, name


KEEP = torch.rand(2, 6, 5, TOKENS, generator=torch.Generator().manual_seed(0)) < 0.5
MASKS = {
    "padding": Padding(torch.arange(TOKENS) >= torch.tensor([0, 4])[:, None]),
    "of each head": Dense(KEEP),
    "mod": Where(lambda b, h, q, k: (q - k) % (h + 1) != 1),
}


def _masked(mesh):
    layer, x, outs = tensor_parallel(layer_of("GQA"), mesh), inputs(2, TOKENS), {}
    with torch.no_grad():
        for which, mask in MASKS.items():
            (cache,) = sharded_caches(layer, mesh, 2, lambda: QuantizedCache(8)).values()
            layer(x[:, :6], cache=cache)
            outs[which] = layer(x[:, 6:], mask=mask, cache=cache)
            cache.truncate(7)
            cache.reorder(torch.tensor([1, 0, 1]))
            outs[which, "again"] = layer(x[[1, 0, 1], 7:8], cache=cache)
    return outs


def test_masks_of_heads_codes_truncate_and_reorder():
    results = on_ranks(3, _masked)
    layer, x = layer_of("GQA"), inputs(2, TOKENS)
    with torch.no_grad():
        for which, mask in MASKS.items():
            cache = QuantizedCache(8)
            layer(x[:, :6], cache=cache)
            out = layer(x[:, 6:], mask=mask, cache=cache)
            cache.truncate(7)
            cache.reorder(torch.tensor([1, 0, 1]))
            again = layer(x[[1, 0, 1], 7:8], cache=cache)
            for each in results:
                assert_same(each[which], out)
                assert_same(each[which, "again"], again)


def _two_dimensions(mesh):
    """Heads over one dimension, tokens over the other."""
    outs, nbytes = {}, {}
    with torch.no_grad():
        for name in ("everything", "MLA", "MLA expanded", "latent KV"):
            layer = tensor_parallel(make(name), mesh["b"])
            (cache,) = sharded_caches(layer, mesh["a"], 2).values()
            outs[name] = run_in_pieces(layer, inputs(2, TOKENS), cache, CUTS)
            nbytes[name] = cache.nbytes
    return outs, nbytes


def test_heads_and_tokens_over_two_dimensions_of_a_mesh():
    results = on_ranks(4, _two_dimensions, mesh=(2, 2))
    for name in results[0][0]:
        with torch.no_grad():
            expected = make(name)(inputs(2, TOKENS))
        for outs, nbytes in results:
            assert_same(outs[name], expected)
            assert nbytes[name] > 0


def _sent(mesh):
    sizes = {}
    with torch.no_grad():
        for name in ("GQA", "MLA"):
            layer = tensor_parallel(layer_of(name), mesh)
            (cache,) = sharded_caches(layer, mesh).values()
            layer(inputs(2, 4), cache=cache)
            with counted() as sent:
                layer(inputs(2, 1), cache=cache)
            sizes[name] = {step: n for step, n in sent.steps.items() if "sharded" in step}
    return sizes


def test_bytes_of_a_decoded_token():
    """Two rows of 8 bytes. GQA: 3 of 6 heads of 6 and 1 of 2 key heads on each of two ranks. MLA: 3
    heads, padded to 2 on each rank; queries of 7 + 4, latents of 7."""
    for rank, sizes in enumerate(on_ranks(2, _sent)):
        assert list(sizes["GQA"].values()) == [2 * 8 * 12, 2 * 8 * 3 * 6, 2 * 8 * 3 * 7]
        others = (1, 2)[rank]
        assert list(sizes["MLA"].values()) == [2 * 8 * 2 * 11, 2 * 8 * others * 8]


def _refused(mesh):
    layer, x = tensor_parallel(make("GQA"), mesh), inputs(1, 3)
    with torch.no_grad(), counted() as sent:
        with pytest.raises(ValueError, match=r"split over ranks .0, 1., which would store other"):
            layer(x, cache=ShardedCache(mesh))
        (cache,) = sharded_caches(layer, mesh).values()
        with pytest.raises(ValueError, match="a layer whose heads are split otherwise"):
            make("GQA")(x, cache=cache)
        with pytest.raises(ValueError, match="LatentKVAttention with split heads rebuilds keys"):
            sharded_caches(tensor_parallel(make("latent KV"), mesh), mesh)
        expanded = tensor_parallel(make("MLA expanded"), mesh)
        (cache,) = sharded_caches(expanded, mesh).values()
        with pytest.raises(ValueError, match="form='expanded' rebuilds the keys of this rank"):
            expanded(x, cache=cache)
    assert cache.length == 0
    assert not [step for step in sent.steps if "sharded" in step]


def test_refusals():
    on_ranks(2, _refused)


def _other_mesh(mesh):
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    layer = tensor_parallel(attention(num_kv_heads=2, mask=Causal()), mesh)
    pair = DeviceMesh("cpu", torch.arange(2))
    if dist.get_rank() < 2:
        with pytest.raises(ValueError, match=r"over ranks .0, 1, 2., its tokens would be"):
            sharded_caches(layer, pair)


def test_some_of_the_ranks_that_heads_are_split_over():
    on_ranks(3, _other_mesh)


# ---- merging ----


def _merged(mesh, scores, values, sinks):
    ranks = Ranks(mesh)
    mine, v = scores[ranks.rank], values[ranks.rank]
    found = Partial(mine.softmax(-1).nan_to_num() @ v, mine.logsumexp(-1))
    with counted() as sent:
        out = merge_over_ranks(ranks, found, sinks)
    return out, sent.bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("number", [2, 3, 4])
def test_one_softmax_over_all_ranks(number, dtype):
    scores = torch.randn(number, 2, 3, 4, 5, dtype=dtype) * 4
    scores[0] = -torch.inf  # a rank whose keys are all hidden
    scores[:, 1, 2, 3] = -torch.inf  # a fully masked row
    values, sinks = torch.randn(number, 2, 3, 5, 6, dtype=dtype), torch.randn(3, dtype=dtype)
    joined = torch.cat([*scores, sinks[None, :, None, None].expand(2, 3, 4, 1)], -1).double()
    rows = torch.cat([*values, torch.zeros(2, 3, 1, 6)], 2).double()
    expected = joined.softmax(-1) @ rows
    results = on_ranks(number, _merged, scores, values, sinks)
    for out, sent in results:
        assert torch.equal(out, results[0][0])
        assert (out - expected).abs().max() < 20 * torch.finfo(dtype).eps
        assert sent == (number - 1) * 2 * 3 * 4 * 7 * dtype.itemsize


def test_no_visible_key_at_all():
    scores, values = torch.full((2, 1, 1, 2, 3), -torch.inf), torch.randn(2, 1, 1, 3, 4)
    for out, _ in on_ranks(2, _merged, scores, values, None):
        assert out.tolist() == torch.zeros(1, 1, 2, 4).tolist()
