"""One cache, one layer: shared, copied, differentiated, left half way, checkpointed."""

import copy
import gc
import pickle

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from layers import CACHES, LAYERS, PAIRS, assert_same, attention, inputs, make, run_in_pieces
from regard import (
    Attention,
    Causal,
    KVCache,
    LatentKVAttention,
    MultiHeadLatentAttention,
    Padding,
    Partial,
    QuantizedCache,
    Rotary,
    SlidingCache,
    SlidingWindow,
    merge,
    prepare,
)
from regard.cache import NO_CACHE, PagedCache, PagePool
from regard.cache.codes import QuantizedStream
from regard.cache.parts import TENSORS, Storage
from regard.layers.attending import Attending
from regard.layers.cache_use import _USES, requiring_grad
from regard.masks import EVERYTHING
from regard.ops.observed import calls_run

KINDS = [*LAYERS]
POOLED = ("pages", "pages, window")  # whose memory is their pool's
EXACT = [(layer, cache) for layer, cache in PAIRS if not cache.startswith("int")]


class Foreign:
    """A user-defined cache that can neither be copied nor restored."""

    def __init__(self):
        self.inner = KVCache()

    def __getattr__(self, name):
        if name in ("snapshot", "restore", "inner"):
            raise AttributeError(name)
        return getattr(self.inner, name)


class Equal(Foreign):
    """One that compares equal to every other, and so has no hash."""

    __hash__ = None

    def __eq__(self, other):
        return True


# ---- one cache a layer


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_of_another_layer_is_refused(kind):
    one, other, cache = make(kind), make(kind), KVCache()
    x = inputs(2, 4)
    one(x, cache=cache)
    for call in (other, other.weights, other.explain):
        with pytest.raises(ValueError, match="holds 4 tokens of another layer; one cache a layer"):
            call(x[:, :1], cache=cache)
    assert cache.length == 4
    assert_same(one(x[:, :1], cache=cache), make(kind)(torch.cat([x, x[:, :1]], 1))[:, 4:])


def test_an_empty_cache_belongs_to_no_layer():
    one, other, cache = make("MHA"), make("MHA"), KVCache()
    x = inputs(1, 4)
    one(x, cache=cache)
    cache.truncate(0)
    other(x, cache=cache)
    refused = KVCache()
    with pytest.raises(ValueError, match="12 wide"):
        one(x[..., :5], cache=refused)
    other(x, cache=refused)


def test_caches_that_compare_equal_are_distinguished():
    layer, x, others = make("MHA"), inputs(1, 4), (Equal(), Equal())
    for cache in others:
        assert_same(run_in_pieces(layer, x, cache, [2, 3]), layer(x))
    with pytest.raises(ValueError, match="tokens of another layer"):
        make("MHA")(x, cache=others[1])


def test_a_cache_outlives_its_layer():
    cache, x = KVCache(), inputs(1, 4)
    make("MHA")(x, cache=cache)
    make("MHA")(x, cache=cache)
    assert cache.length == 8


COPIES = [copy.copy, copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))]


@pytest.mark.parametrize(
    ("name", "how"),
    [(name, how) for name in CACHES for how in COPIES if name not in POOLED or how != COPIES[2]],
)
def test_a_copy_is_independent(name, how):
    layer, x = make("window"), inputs(2, 9)
    with torch.no_grad():
        cache = CACHES[name]()
        layer(x[:, :4], cache=cache)
        fork = how(cache)
        alone = copy.deepcopy(cache)
        expected = layer(x[:, 4:7], cache=alone)
        layer(x[:, 6:9], cache=fork)  # must not write where the first will
        assert_same(layer(x[:, 4:7], cache=cache), expected)


@pytest.mark.parametrize("name", POOLED)
def test_pages_are_saved_and_not_pickled(name):
    for thing in (CACHES[name](), CACHES[name]().pool):
        with pytest.raises(TypeError, match=r"cannot be pickled.*save"):
            pickle.dumps(thing)


def test_a_copy_keeps_the_graph():
    layer, x = make("MHA"), inputs(1, 5)
    cache = KVCache()
    layer(x[:, :3], cache=cache)
    out = layer(x[:, 3:], cache=copy.deepcopy(cache))
    out.square().sum().backward()
    found = layer.k_proj.weight.grad.clone()
    layer.zero_grad()
    layer(x)[:, 3:].square().sum().backward()
    assert_same(found, layer.k_proj.weight.grad)


# ---- gradients of the queries alone


@pytest.mark.parametrize(("kind", "name"), EXACT)
def test_every_single_parameter_trains_over_chunks(kind, name):
    layer, x = make(kind), inputs(2, 7)
    for trained in dict(layer.named_parameters()):
        for each, parameter in layer.named_parameters():
            parameter.requires_grad_(each == trained)
        layer.zero_grad()
        layer(x).square().sum().backward()
        parameter = layer.get_parameter(trained)
        expected = parameter.grad.clone()
        layer.zero_grad()
        cache = CACHES[name]()
        if name in IN_PLACE and trained not in AFTER_ATTENTION:
            with pytest.raises(ValueError, match="Cache writes in place, so that gradients"):
                layer(x[:, :3], cache=cache)
            assert cache.length == 0
            continue
        run_in_pieces(layer, x, cache, [3, 5]).square().sum().backward()
        assert_same(parameter.grad, expected)


IN_PLACE = ("static", "pages", "pages, window")
AFTER_ATTENTION = ("o_proj.weight", "o_proj.bias", "gate_proj.weight")


WIDE = {  # sizes that the compiled kernel takes, which has no gradient
    "GQA": lambda: Attention(32, 4, num_kv_heads=2, head_dim=16, qk_norm="head", mask=Causal()),
    "MLA": lambda: MultiHeadLatentAttention(
        32, 2, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16,
        rope=Rotary(16), mask=Causal(), form="expanded",
    ),
    "latent KV": lambda: LatentKVAttention(
        32, 4, num_kv_heads=2, head_dim=16, kv_lora_rank=16, qk_norm="head", mask=Causal()
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", WIDE)
def test_every_single_parameter_trains_while_the_kernel_could_decode(kind):
    torch.manual_seed(0)
    layer, x = WIDE[kind](), torch.randn(1, 300, 32)
    slopes = {}
    for trained in dict(layer.named_parameters()):
        for each, parameter in layer.named_parameters():
            parameter.requires_grad_(each == trained)
        for layer.backend in ("auto", "eager"):
            layer.zero_grad()
            cache = KVCache()
            with torch.no_grad():
                layer(x[:, :-1], cache=cache)
            layer(x[:, -1:], cache=cache).square().sum().backward()
            slopes[layer.backend] = layer.get_parameter(trained).grad.clone()
        assert slopes["eager"].any()
        assert torch.allclose(slopes["auto"], slopes["eager"], rtol=1e-3, atol=1e-5), trained
        layer.backend = "fused"
        if trained not in AFTER_ATTENTION:
            with pytest.raises(ValueError, match=r"fused has no gradient; call it"):
                layer(x[:, -1:], cache=cache)


def test_streams_are_tracked_only_for_gradients():
    k, q = torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2).requires_grad_()
    assert requiring_grad((k, None), k, k)[0] is k
    for other in (q, torch.nn.Linear(2, 2)):
        first, second = requiring_grad((None, other), k, k)
        assert first.requires_grad
        assert second is k
    own = k.clone().requires_grad_()
    assert requiring_grad((q,), k, own)[0] is k
    with torch.no_grad():
        assert requiring_grad((q,), k, k)[0] is k


# ---- calls that fail


class Stop(KeyboardInterrupt):
    pass


@pytest.mark.parametrize(("kind", "name"), PAIRS)
@pytest.mark.parametrize("held", [0, 4])
def test_a_call_that_fails_leaves_the_cache_as_it_was(kind, name, held):
    layer, x, cache = make(kind), inputs(3, 9), CACHES[name]()
    with torch.no_grad():
        if held:
            layer(x[:, :held], cache=cache)
        untouched = copy.deepcopy(cache)
        handle = layer.o_proj.register_forward_hook(interrupt)
        with pytest.raises(Stop):
            layer(x[:, held : held + 3] * 2, cache=cache)
        handle.remove()
        assert cache.length == held
        assert cache.nbytes == untouched.nbytes
        assert_same(
            run_in_pieces(layer, x[:, held:], cache, [1]),
            run_in_pieces(layer, x[:, held:], untouched, [1]),
        )


def test_after_a_failed_prefill_a_smaller_batch_fits():
    layer, x, cache = make("MHA"), inputs(3, 4), KVCache()
    handle = layer.o_proj.register_forward_hook(interrupt)
    with pytest.raises(Stop):
        layer(x, cache=cache)
    handle.remove()
    assert_same(layer(x[:1], cache=cache), layer(x[:1]))


class Stubborn(Foreign):
    """One that cannot be truncated either."""

    def truncate(self, length):
        raise ValueError(f"no way back to {length}")


def test_a_cache_without_snapshots_is_truncated():
    layer, x, cache = make("MHA"), inputs(1, 4), Foreign()
    layer(x[:, :3], cache=cache)
    layer.backend = "nothing"
    with pytest.raises(ValueError, match="is not one of 'auto'"):
        layer(x[:, 3:], cache=cache)
    assert cache.length == 3
    layer.backend = "auto"
    assert_same(layer(x[:, 3:], cache=cache), layer(x)[:, 3:])


def test_the_error_says_if_a_cache_cannot_go_back():
    layer, x, cache = make("MHA"), inputs(1, 4), Stubborn()
    handle = layer.o_proj.register_forward_hook(interrupt)
    with pytest.raises(Stop) as caught:
        layer(x, cache=cache)
    handle.remove()
    assert "cache=Stubborn may hold the tokens of this call already" in caught.value.__notes__[0]
    assert "no way back to 0" in caught.value.__notes__[0]
    assert cache.length == 4


def interrupt(module, given, out):
    raise Stop


# ---- recomputation


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", ["MHA", "MLA", "latent KV"])
def test_checkpointed_activations_are_not_appended_twice(reentrant, kind):
    layer, x, cache = make(kind), inputs(1, 4).requires_grad_(), KVCache()
    out = checkpoint(lambda x: layer(x, cache=cache), x, use_reentrant=reentrant)
    with pytest.raises(
        ValueError, match=r"runs in a backward pass.*appended twice; leave the cache"
    ):
        out.sum().backward()
    assert cache.length == 4
    checkpoint(layer, x, use_reentrant=reentrant).sum().backward()


# ---- padding that speaks of other slots


def test_padding_of_the_new_tokens_alone_is_refused():
    layer, x, cache = make("MHA"), inputs(2, 9), KVCache()
    layer(x[:, :5], cache=cache)
    new = torch.tensor([[0, 1, 1], [1, 1, 1]])
    with pytest.raises(ValueError, match=r"slots count from the first token.*give \[B, 8\]"):
        layer(x[:, 5:8], cache=cache, mask=Padding(new))
    assert cache.length == 5
    whole = torch.cat([torch.ones(2, 5, dtype=torch.int64), new], 1)
    out = layer(x[:, 5:8], cache=cache, mask=Padding(whole))
    assert_same(out, layer(x[:, :8], mask=Padding(whole))[:, 5:])


@pytest.mark.parametrize("again", [lambda mask: mask, lambda mask: Padding(mask.valid.clone())])
def test_padding_of_the_prompt_may_be_given_again(again):
    layer, x, cache = make("MHA"), inputs(2, 9), KVCache()
    prompt = Padding(torch.tensor([[0, 1, 1], [1, 1, 1]]))
    pieces = [layer(x[:, :3], cache=cache, mask=prompt)]
    pieces += [layer(x[:, i : i + 3], cache=cache, mask=again(prompt)) for i in (3, 6)]
    assert_same(torch.cat(pieces, 1), layer(x, mask=prompt))


def test_padding_on_the_right_is_refused_once_rows_are_cut():
    layer, x, cache = make("MHA"), inputs(2, 9), KVCache()
    valid = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    layer(x[:, :4], cache=cache, mask=Padding(valid))
    cache.truncate(valid.sum(1))
    longer = torch.cat([valid, torch.ones(2, 1, dtype=torch.int64)], 1)
    with pytest.raises(ValueError, match=r"hides slots that truncate\(\[B\]\) has given"):
        layer(x[:, 4:5], cache=cache, mask=Padding(longer))
    out = layer(x[:, 4:5], cache=cache)
    alone = layer(torch.cat([x[:1, :2], x[:1, 4:5]], 1))[:, 2:]
    assert_same(out[:1], alone)
    cache.truncate(valid.sum(1))
    of_no_slot = Padding(torch.ones(2, 0, dtype=torch.bool))
    assert_same(layer(x[:, 4:5], cache=cache, mask=of_no_slot), out)


# ---- a cache that attends itself


class Itself(KVCache, Attending):
    """It computes the attention to what it holds, with the sinks that the call lacks."""

    def prepare(self, layer, q, keys, at):
        options = layer.options(at) | {"sinks": None}
        return prepare(q, *keys.outlines, span=at.span, partial=True, **options)

    def attend(self, prepared, q, parts, sinks):
        out, lse = prepared.partial(q, parts)
        pieces = [Partial(out, lse)] + ([] if sinks is None else [Partial.of_sinks(sinks)])
        return merge(*pieces).out


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_a_cache_that_attends_itself(name):
    layer, x = make(name), inputs(2, 6)
    assert_same(run_in_pieces(layer, x, Itself(), [3, 4]), layer(x))


@torch.no_grad()
def test_no_weights_of_a_cache_that_has_not_all_keys():
    layer, x = make("MHA"), inputs(1, 3)
    assert "3 queries x 3 keys" in layer.explain(x, cache=Itself())
    with pytest.raises(ValueError, match=r"weights\(\) reads all keys, and Itself"):
        layer.weights(x, cache=Itself())


@torch.no_grad()
def test_calls_of_a_cache_that_attends_itself_have_a_log_sum_exp():
    layer = make("MHA").bfloat16()
    layer.backend = "sdpa"
    with pytest.raises(ValueError, match="sdpa gives no log-sum-exp"):
        layer(inputs(1, 3).bfloat16(), cache=Itself())


# ---- caches in pages


def kinds_in_pages():
    """Layers, each with the options of its cache."""
    for name in KINDS:
        window = getattr(make(name).mask, "parts", ())
        sizes = [each.size for each in window if isinstance(each, SlidingWindow)]
        yield name, {"window": sizes[0]} if sizes else {}


@pytest.mark.parametrize(("name", "options"), list(kinds_in_pages()))
@torch.no_grad()
def test_every_layer_decodes_over_pages(name, options):
    """In several parts: pages that rows share, their own, scattered ones, and new tokens."""
    layer, x = make(name), inputs(3, 40)
    x[:, :9] = x[:1, :9]
    pool = PagePool(num_pages=200, page_size=4)
    beams, others = PagedCache(pool, **options), PagedCache(pool)
    out = [layer(x[:1, :9], cache=beams).expand(3, -1, -1)]
    beams.reorder(torch.tensor([0, 0, 0]))
    for start, stop in [(9, 12), *((at, at + 1) for at in range(12, 25)), (25, 31), (31, 40)]:
        others.update(torch.zeros(1, 1, 4, 1))  # their pages lie between those of `beams`
        out.append(layer(x[:, start:stop], cache=beams))
    assert_same(torch.cat(out, 1), layer(x))


@torch.no_grad()
def test_weights_are_those_without_a_cache():
    for name in ("GQA", "MLA", "latent KV"):
        layer, x = make(name), inputs(2, 11)
        cache = PagedCache(PagePool(num_pages=20, page_size=2))
        layer(x[:, :10], cache=cache)
        cache.reorder(torch.tensor([1, 0]))
        assert_same(layer.weights(x[[1, 0], 10:], cache=cache), layer.weights(x)[[1, 0], :, 10:])


def test_calls_say_how_the_keys_of_their_cache_are_stored():
    x, seen = inputs(1, 3), []
    pool = PagePool(num_pages=8, page_size=2)
    apart, codes = PagedCache(pool), QuantizedCache(bits=4)
    with torch.no_grad(), calls_run(lambda call, q, parts: seen.append(call.call.storage)):
        for cache in (NO_CACHE, KVCache(), codes, apart):
            make("GQA")(x, cache=cache)
        make("GQA")(x, cache=PagedCache(pool))  # between the pages of `apart`
        make("GQA")(inputs(1, 4), cache=apart)
    assert seen[:4] == [TENSORS, TENSORS, Storage((QuantizedStream,), 4), TENSORS]
    assert seen[-1].several


def test_a_layer_announces_the_pieces_of_its_stream():
    layer, told = make("MLA"), KVCache()
    layer(inputs(1, 3), cache=told)
    assert told.pieces == (layer.kv_lora_rank, layer.qk_rope_head_dim)
    told = KVCache()
    layer.weights(inputs(1, 3), cache=told)
    assert told.pieces == (layer.kv_lora_rank, layer.qk_rope_head_dim)


# ---- memories


@pytest.mark.parametrize(
    "cache", [SlidingCache(3), PagedCache(PagePool(9, page_size=2), window=3)], ids=type
)
@torch.no_grad()
def test_a_window_that_the_mask_does_not_have_is_refused_at_the_first_call(cache):
    x = inputs(1, 2)
    with pytest.raises(ValueError, match=r"keeps the last 3: .* SlidingWindow\(size\)"):
        make("MHA")(x, cache=cache)
    for mask in (Causal() & Padding.from_lengths([2]), EVERYTHING):
        with pytest.raises(ValueError, match="more than 3 tokens"):
            make("MHA")(x, cache=cache, mask=mask)
    with pytest.raises(ValueError, match="more than 3 tokens"):
        attention(mask=Causal() & SlidingWindow(4)).double()(x, cache=cache)
    assert cache.length == 0
    attention(mask=Causal() & SlidingWindow(3)).double()(x, cache=cache)
    assert cache.length == 2


def test_a_copy_belongs_to_no_layer_after_a_refused_call():
    first, other = attention().double(), attention().double()
    other.load_state_dict(first.state_dict())
    x = inputs(2, 5)
    cache, whole = KVCache(), first(x)
    first(x[:, :3], cache=cache)
    copied = copy.deepcopy(cache)
    with pytest.raises(ValueError, match="batch"):
        other(x[:1, 3:4], cache=copied)
    out = first(x[:, 3:4], cache=copied)
    assert_same(out, whole[:, 3:4])
    with pytest.raises(ValueError, match="another layer"):  # now it belongs to that layer
        other(x[:, 4:], cache=copied)


def test_nothing_stays_of_a_cache_that_is_gone():
    layer, cache = Attention(8, 2, mask=Causal()), KVCache()
    layer(torch.randn(1, 2, 8), cache=cache)
    number = id(cache)
    assert number in _USES
    del cache
    gc.collect()
    assert number not in _USES
