"""Layers on shards of a sequence: outputs and all gradients are those of one device."""

import collections
import copy
import itertools
import random

import jaxtyping
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from covering import few
from layers import LAYERS, WIDTH, assert_same, attention, inputs, latent, make, scattered
from ranks import on_ranks
from regard import (
    NTK,
    Causal,
    Chunked,
    Dense,
    Documents,
    KVCache,
    Padding,
    Prefix,
    RelativeBias,
    Rotary,
    SelfAttention,
    SlidingWindow,
    Where,
)
from regard.distributed.context.parallel import context_parallel
from regard.distributed.decode.sharded import ShardedCache
from regard.distributed.ranks import counted
from regard.masks import EVERYTHING, NOTHING
from session import LONG
from token_shards import assert_as_on_one_device, gradients, on_one_device, on_ranks_of, seed_of

TOKENS = 11
generator = torch.Generator().manual_seed(3)
VALID = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0]])
IDS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2], [5, 5, 5, 5, 5, 5, 5, 5, 5, 1, 1]])


def _every_other(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx) % 2 == 0


MASKS = {
    "everything": EVERYTHING,
    "causal": Causal(),
    "window": Causal() & SlidingWindow(3),
    "both sides": SlidingWindow(4) & ~SlidingWindow(1),
    "chunks": Chunked(4),
    "chunks from the first real token": Chunked(4, Padding(VALID).start) & Padding(VALID),
    "prefix": Causal() | Prefix([3, 5]),
    "documents": Documents(IDS),
    "padding": Padding(VALID),
    "documents and padding": Causal() & Documents(IDS) & Padding(VALID),
    "dense": Dense(torch.rand(TOKENS, TOKENS, generator=generator) < 0.4),
    "dense of rows": Dense(torch.rand(2, 1, TOKENS, TOKENS, generator=generator) < 0.4),
    "function": Where(_every_other),
    "nothing": NOTHING,
    "keys of the first rank alone": Prefix(2),
}
PLANS = [
    {"exchange": exchange, "layout": layout}
    for exchange in ("ring", "gather")
    for layout in ("zigzag", "contiguous")
]


def chosen_cases(number):
    """Each layer with one mask or two, in any order; every combination in a long run."""
    every = list(itertools.product(LAYERS, MASKS, PLANS))
    if LONG:
        return every
    rng = random.Random(number)
    masks, plans = itertools.cycle(rng.sample([*MASKS], len(MASKS))), itertools.cycle(PLANS)
    return [(layer, next(masks), next(plans)) for layer in LAYERS for _ in range(1 + (number == 3))]


def _cases(mesh, cases):
    for layer, mask, plan in cases:
        try:
            assert_as_on_one_device(mesh, make(layer), tokens=TOKENS, plan=plan, mask=MASKS[mask])
        except AssertionError as error:
            raise AssertionError((layer, mask, plan)) from error


@pytest.mark.parametrize("number", few([2, 4, 3], 2))
def test_every_layer_under_every_mask(number):
    cases = chosen_cases(number)
    for start in range(0, len(cases), 10):
        on_ranks(number, _cases, cases[start : start + 10])


def _lengths(mesh, layers, lengths):
    for layer, tokens, plan in zip(
        itertools.cycle(layers), lengths, itertools.cycle(PLANS), strict=False
    ):
        assert_as_on_one_device(mesh, make(layer), tokens=tokens, batch=1, plan=plan)


def test_lengths_that_do_not_divide_and_ranks_without_tokens():
    on_ranks(4, _lengths, ["GQA", "MLA", "latent KV, normed", "everything"], [1, 2, 3, 5, 6, 9, 13])
    on_ranks(3, _lengths, ["MLA absorbed", "MLA expanded", "MQA"], [1, 2, 4, 5, 7])


def _own_options(mesh):
    """Options of single layers: a learned bias of the whole sequence, positions, a long rope."""
    torch.manual_seed(1)
    biased = attention(score_bias=nn.Parameter(torch.zeros(4, TOKENS, TOKENS)))
    biased = scattered(biased).double()
    assert "score_bias" in dict(biased.named_parameters())
    assert_as_on_one_device(mesh, biased, tokens=TOKENS)
    ruled = scattered(latent(score_bias=RelativeBias(3))).double()
    assert_as_on_one_device(mesh, ruled, tokens=TOKENS)
    alone = scattered(SelfAttention(WIDTH, rope=Rotary(4))).double()
    assert_as_on_one_device(mesh, alone, tokens=TOKENS)
    positions = torch.randint(0, 50, (2, TOKENS))
    for name in ("GQA", "MLA", "latent KV"):
        assert_as_on_one_device(mesh, make(name), tokens=TOKENS, positions=positions)
        assert_as_on_one_device(mesh, make(name), tokens=TOKENS, positions=positions[0])
    rope = Rotary(4, scaling=NTK(2.0, 4))  # frequencies depend on the largest position
    assert rope.scaling.uses_length
    for layer in (attention(rope=rope), latent(rope=rope)):
        layer = scattered(layer).double()
        assert_as_on_one_device(mesh, layer, tokens=TOKENS)
        assert_as_on_one_device(mesh, layer, tokens=TOKENS, positions=positions)


def test_biases_positions_and_ropes():
    on_ranks(3, _own_options)


class Stack(nn.Module):
    """Two layers with norms in between, as in a model."""

    def __init__(self, first, second, *, checkpointed=False):
        super().__init__()
        self.layers = nn.ModuleList([first, second])
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.checkpointed = checkpointed

    def forward(self, x, **call):
        for norm, layer in zip(self.norms, self.layers, strict=True):
            if self.checkpointed:
                x = x + checkpoint(
                    lambda x, n=norm, f=layer: f(n(x), **call), x, use_reentrant=False
                )
            else:
                x = x + layer(norm(x), **call)
        return x


def _normed(norm, layer, x, call):
    return layer(norm(x), **call)


def _stacks(mesh):
    mask = MASKS["documents and padding"]
    for first, second, checkpointed, exchange in (
        ("GQA", "MLA", True, "ring"),
        ("latent KV", "everything", True, "gather"),
        ("MLA absorbed", "latent KV, normed", False, "ring"),
    ):
        stack = Stack(make(first), make(second), checkpointed=checkpointed).double()
        plan = {"exchange": exchange}
        assert_as_on_one_device(mesh, stack, tokens=TOKENS, plan=plan, mask=mask)


@pytest.mark.parametrize("number", [2, 3] if LONG else [2])
def test_stacks_and_recomputed_activations(number):
    on_ranks(number, _stacks)


def _errors(mesh, layer, dtype, cast):
    """The largest errors in `dtype` against float64, of one device and of the ranks, over three
    inputs: a gradient of few elements can be nearly exact for one of them."""
    rounded = make(layer, dtype)
    exact = copy.deepcopy(rounded).double()
    usual, found = collections.defaultdict(float), collections.defaultdict(float)
    for seed in range(3):
        x = inputs(2, 19, seed).to(dtype)
        out, truth = on_one_device(exact, x.double())
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            one = on_one_device(rounded, x)
            many = on_ranks_of(mesh, rounded, x)
        for errors, (output, grads) in ((usual, one), (found, many)):
            for name, value in {"out": output, **grads}.items():
                true = truth.get(name, out)
                errors[name] = max(errors[name], (value.double() - true).abs().max().item())
    return usual, found


@pytest.mark.parametrize("layer", ["GQA", "everything", "MLA", "MLA absorbed", "latent KV, normed"])
@pytest.mark.parametrize(
    ("dtype", "cast"), [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)]
)
def test_rounding_is_that_of_one_device(layer, dtype, cast):
    """At most 3 times the error of one device in half precision, 5 times in float32: the numeric
    contract of gradients; sums over ranks add a rounding."""
    usual, found = on_ranks(2, _errors, layer, dtype, cast)[0]
    allowed = 5 if dtype == torch.float32 and not cast else 3
    for name in usual:
        assert found[name] <= allowed * usual[name], (name, found[name] / usual[name])


def _frozen(mesh):
    """Parameters trained one by one, and inputs without gradients."""
    for name in ("GQA", "MLA", "MLA absorbed", "latent KV, normed"):
        whole, x = make(name), inputs(2, 5)
        _, truth = on_one_device(whole, x)
        for only, _ in whole.named_parameters():
            layer = copy.deepcopy(whole).requires_grad_(False)
            layer.get_parameter(only).requires_grad_(True)
            plan = context_parallel(layer, mesh)
            out = layer(plan.shard(x))
            seed = plan.shard(seed_of(x))
            (out * seed).sum().backward()
            total = plan.ranks.all_reduce(layer.get_parameter(only).grad, "test")
            assert_same(total, truth[only])
        layer.requires_grad_(False)
        own = plan.shard(x).requires_grad_()
        (layer(own) * seed).sum().backward()
        assert_same(plan.gathered(own.grad), truth["x"])
        assert all(each is None for each in gradients(layer).values())


def test_a_parameter_trained_alone():
    on_ranks(2, _frozen)


def _without_gradients(mesh):
    layer, x = make("MLA"), inputs(2, 7)
    wanted = layer(x).detach()
    plan = context_parallel(layer, mesh)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert_same(plan.gathered(layer(plan.shard(x))), wanted)


def test_without_gradients():
    on_ranks(2, _without_gradients)


def _same_error(mesh, calls):
    """Each call of (layer's name, arguments by rank): its error on this rank, and a right call
    afterwards. Without the checks of annotations, which raise before the library's own errors."""
    jaxtyping.config.update("jaxtyping_disable", True)
    found = []
    for name, arguments in calls:
        layer = make(name)
        plan = context_parallel(layer, mesh)
        x = inputs(2, 7)
        given = arguments[plan.ranks.rank]
        own = given.pop("x", plan.shard(x))
        if given.pop("train", False):
            layer.train()
        layer.dropout = given.pop("dropout", 0.0)
        with torch.set_grad_enabled(given.pop("gradients", True)), counted() as sent:
            try:
                layer(own, **given)
                found.append(None)
            except (TypeError, ValueError) as error:
                found.append((type(error).__name__, str(error)))
        assert not any("keys" in step for step in sent.steps)
        layer.eval()
        layer.dropout = 0.0
        plan.remove()
        wanted = layer(x)
        plan = context_parallel(layer, mesh)
        assert_same(plan.gathered(layer(plan.shard(x))), wanted)
    return found


X = inputs(2, 4)
VALID7 = torch.ones(2, 7).bool()
OTHER7 = VALID7.clone()
OTHER7[0, 3] = False
DIFFERENT = [  # (layer, arguments of two ranks, what the error says)
    ("GQA", [{}, {"mask": Causal() & SlidingWindow(2)}], "differ in mask: rank 0 Causal()"),
    ("GQA", [{"mask": Padding(VALID7)}, {"mask": Padding(OTHER7)}], "differ in mask"),
    ("MLA", [{}, {"x": X[:, :1]}], "here [2, 2] of 4 in layout='zigzag', got [3, 1]"),
    ("MLA", [{}, {"gradients": False}], "differ in gradients: rank 0 of 7 parameters, rank 1 none"),
    ("GQA", [{}, {"x": inputs(2, 4).requires_grad_()}], "differ in gradients: rank 0 of 6 para"),
    ("GQA", [{}, {"x": X.float()}], "rank 1: x is torch.float32, the layer's weights are"),
    ("GQA", [{}, {"x": X[..., :5]}], "rank 1: x is 12 wide, got 5"),
    ("GQA", [{"x": X[:1]}, {}], "differ in batch: rank 0 1, rank 1 2"),
    ("GQA", [{"mask": VALID7}, {}], "rank 0: mask is a rule, got a tensor"),
    ("latent KV", [{}, {"positions": torch.rand(4)}], "rank 1: positions of a layer that caches"),
    ("GQA", [{}, {"train": True}], "differ in mode: rank 0 eval(), rank 1 train()"),
]
ALIKE = [  # the same mistake on every rank
    ("GQA", {"cache": KVCache()}, "every rank: cache=KVCache holds all tokens of a sequence"),
    ("GQA", {"context": X}, "every rank: context is another sequence"),
    ("GQA", {"train": True, "dropout": 0.1}, "every rank: dropout=0.1 drops weights"),
    ("GQA", {"mask": Padding(VALID7[:, :4])}, "is about 4 tokens, but the ranks have 7"),
    ("GQA", {"mask": Padding(VALID7[:1].expand(3, -1))}, "is for a batch of 3"),
    ("GQA", {"mask": Dense(torch.ones(4, 4).bool())}, "[7, 7]"),
    ("GQA", {"positions": torch.arange(7)}, "every rank: positions is [L]"),
]


def test_calls_that_differ_raise_the_same_error_on_every_rank():
    calls = [(name, given) for name, given, _ in DIFFERENT]
    calls += [(name, [{**given}, {**given}]) for name, given, _ in ALIKE]
    says = [text for _, _, text in (*DIFFERENT, *ALIKE)]
    first, second = on_ranks(2, _same_error, calls)
    for one, other, text in zip(first, second, says, strict=True):
        if text.startswith("every rank: positions"):  # of shards of different lengths
            assert text.partition(": ")[2] in one[1], one
            continue
        assert one == other
        assert one is not None, text
        assert text in one[1], one


def _whole_calls(mesh):
    layer, x = make("window"), inputs(1, 8)
    plan = context_parallel(layer, mesh)
    for method in (layer.weights, layer.explain):
        with pytest.raises(ValueError, match=r"plan.remove\(\), or of another Attention with the"):
            method(plan.shard(x))


def test_weights_and_explain_are_refused():
    on_ranks(2, _whole_calls)


@torch.no_grad()
def _generated(mesh, names):
    """A prefill of shards fills a cache; then every rank gives the same tokens, one by one."""
    counts = []
    for name in names:
        layer, x = make(name), inputs(2, 10)
        wanted = layer(x)
        plan = context_parallel(layer, mesh)
        cache = ShardedCache(mesh, page_size=2)
        assert_same(plan.gathered(layer(plan.shard(x[:, :7]), cache=cache)), wanted[:, :7])
        assert cache.length == 7
        for slot in (7, 8):
            assert_same(layer(x[:, slot : slot + 1], cache=cache), wanted[:, slot : slot + 1])
        cache.truncate(8)
        assert_same(layer(x[:, 8:], cache=cache), wanted[:, 8:])
        counts.append(cache.counts)
    return counts


@pytest.mark.parametrize("number", [2, 3])
def test_a_prefill_fills_a_sharded_cache(number):
    for counts in on_ranks(number, _generated, ["everything", "MLA", "latent KV, normed"])[0]:
        assert sum(counts) == 10
        assert min(counts) > 1


def _unfit_caches(mesh):
    layer, x = make("GQA"), inputs(2, 7)
    plan = context_parallel(layer, mesh)
    with pytest.raises(ValueError, match="every rank: cache=KVCache holds all tokens"):
        layer(plan.shard(x), cache=KVCache())
    cache = ShardedCache(mesh)
    with pytest.raises(ValueError, match="is for inference"):
        layer(plan.shard(x), cache=cache)
    assert cache.length == 0
    filled = KVCache()
    filled.update(torch.ones(2, 2, 3, 6), torch.ones(2, 2, 3, 6))
    with pytest.raises(ValueError, match="cache=KVCache holds all tokens"):
        layer(plan.shard(x), cache=filled)


def test_caches_that_do_not_fit():
    on_ranks(2, _unfit_caches)


def _wrapped(mesh):
    """FSDP2 on the same mesh: it averages what sum_gradients adds up."""
    for first, second in (("GQA", "MLA expanded"), ("latent KV, normed", "MLA absorbed")):
        stack = Stack(make(first), make(second), checkpointed=first == "GQA").double()
        x = inputs(2, 7)
        out, truth = on_one_device(stack, x)
        for layer in stack.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(stack, mesh=mesh)
        plan = context_parallel(stack, mesh)
        own = plan.shard(x).requires_grad_()
        found = stack(own)
        (found * plan.shard(seed_of(out))).sum().backward()
        assert_same(plan.gathered(found.detach()), out)
        assert_same(plan.gathered(own.grad), truth["x"])
        for name, each in stack.named_parameters():
            assert_same(each.grad.full_tensor() * mesh.size(), truth[name])


def test_layers_in_fsdp():
    on_ranks(2, _wrapped)


def _copies(mesh):
    layer, x = make("GQA"), inputs(2, 5)
    wanted = layer(x)
    calls = []
    layer.register_forward_hook(lambda module, args, out: calls.append(out.shape[1]))
    plan = context_parallel(layer, mesh)
    twin = copy.deepcopy(layer)
    twin.q_proj.weight.data.zero_()
    assert_same(plan.gathered(layer(plan.shard(x))), wanted)
    assert not torch.allclose(plan.gathered(twin(plan.shard(x))), wanted)
    assert len(calls) == 2  # the hook of the copy is the same function
    plan.remove()
    assert_same(layer(x), wanted)
    assert not {"forward", "weights", "explain", "context_parallel"} & set(vars(layer))


def test_hooks_and_copies():
    on_ranks(2, _copies)
