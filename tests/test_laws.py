"""What must be true of attention, in sentences. The names are the specification.

Sizes are small and odd; layers are in float64, so that a law broken by more than rounding shows.
"""

import copy
import random

import pytest
import torch
from cases import (
    BACKENDS,
    DTYPES,
    Case,
    bound,
    draw_case,
    draw_leaf,
    draw_mask,
    draw_sizes,
    is_objection,
)
from hypothesis import assume, given
from hypothesis import strategies as st
from layers import (
    CACHES,
    LAYERS,
    PAIRS,
    WIDTH,
    attention,
    inputs,
    latent,
    make,
    run_in_pieces,
    scattered,
)
from torch import Tensor

import regard
from regard import (
    EVERYTHING,
    NO_CACHE,
    Attention,
    Causal,
    Chunked,
    Documents,
    GroupedQueryAttention,
    KVCache,
    LinearScaling,
    Llama3,
    MultiHeadAttention,
    MultiQueryAttention,
    Padding,
    Partial,
    Prefix,
    QuantizedCache,
    Rotary,
    SlidingCache,
    SlidingWindow,
    Span,
    StaticCache,
    Where,
    Yarn,
    attend,
    merge,
)

SEEDS = st.integers(0, 10**9)
CUTS = st.lists(st.integers(1, 10), max_size=4)
TOKENS = 11


def assert_same(a: Tensor, b: Tensor, tolerance: float = 1e-11) -> None:
    """Equal to rounding in float64."""
    assert a.shape == b.shape
    assert torch.isfinite(a).all()
    assert torch.isfinite(b).all()
    scale = 1 + b.abs().max().item() if b.numel() else 1.0
    assert (a - b).abs().max().item() <= tolerance * scale if b.numel() else True


def run(case: Case, backend: str = "auto", **changed) -> Tensor | None:
    """The call, with some of it changed; None where a named backend objects in a sentence."""
    tensors = {name: changed.pop(name, getattr(case, name)) for name in "qkv"}
    try:
        return attend(**tensors, **{**case.given, **changed}, backend=backend)
    except ValueError as error:
        if not is_objection(error, backend):
            raise
        return None


def table(case: Case) -> Tensor:
    """Which cells the judge sees, [B, H, L, S]."""
    s = case.sizes
    cells = [
        [
            [
                [bool(case.sees(b, h, s.starts[b] + i, s.kv_start + j)) for j in range(s.keys)]
                for i in range(s.queries)
            ]
            for h in range(s.heads)
        ]
        for b in range(s.batch)
    ]
    return torch.tensor(cells).reshape(s.batch, s.heads, s.queries, s.keys)


def by_key_head(seen: Tensor, case: Case) -> Tensor:
    """[B, H, ...] to [B, G, ...]: whether any query head of the group sees."""
    return seen.unflatten(1, (case.sizes.kv_heads, -1)).any(2)


# -- layers and caches ------------------------------------------------------------------------


@pytest.mark.parametrize(("layer", "cache"), PAIRS)
def test_attending_in_chunks_is_attending_at_once(layer, cache):
    """For every layer, cache and cut. A cache that rounds agrees with itself, token by token."""
    layer, x, fresh = make(layer), inputs(2, TOKENS), CACHES[cache]

    @given(CUTS)
    def law(cuts):
        exact = cache not in ("int8", "int4")
        whole = layer(x) if exact else run_in_pieces(layer, x, fresh(), list(range(1, TOKENS)))
        assert_same(run_in_pieces(layer, x, fresh(), cuts), whole)

    with torch.no_grad():
        law()


@pytest.mark.parametrize("layer", LAYERS)
def test_a_rounding_cache_is_near_an_exact_one(layer):
    """8 bits a number, and not so near that nothing was rounded."""
    layer, x = make(layer), inputs(2, TOKENS)
    with torch.no_grad():
        rounded = run_in_pieces(layer, x, QuantizedCache(bits=8, group=4), [5, 6, 7])
        exact = layer(x)
    error = (rounded - exact).abs().max() / exact.abs().max()
    assert 1e-6 < error < 0.1


@pytest.mark.parametrize(("layer", "cache"), PAIRS)
def test_truncating_undoes_updating(layer, cache):
    """What was taken back leaves no trace."""
    layer, x = make(layer), inputs(2, TOKENS)
    held = CACHES[cache]() if cache != "sliding" else SlidingCache(3, rollback=4)
    with torch.no_grad():
        run_in_pieces(layer, x[:, :5], held, [2])
        twin = copy.deepcopy(held)
        run_in_pieces(layer, inputs(2, 3, seed=1), held, [1])
        held.truncate(5)
        assert held.length == twin.length == 5
        assert_same(layer(x[:, 5:], cache=held), layer(x[:, 5:], cache=twin))


@pytest.mark.parametrize(("layer", "cache"), PAIRS)
def test_reordering_rows_is_batching_them_anew(layer, cache):
    """Beams are dropped, repeated and exchanged."""
    layer, x, fresh = make(layer), inputs(3, TOKENS), CACHES[cache]

    @given(st.lists(st.integers(0, 2), min_size=1, max_size=5))
    def law(rows):
        rows = torch.tensor(rows)
        held, anew = fresh(), fresh()
        layer(x[:, :6], cache=held)
        held.reorder(rows)
        layer(x[rows, :6], cache=anew)
        assert_same(layer(x[rows, 6:], cache=held), layer(x[rows, 6:], cache=anew))

    with torch.no_grad():
        law()


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("layer", ["everything", "MLA window"])
def test_a_cache_shares_no_storage_with_the_caller(layer, cache):
    """What the caller does to his tensors afterwards changes nothing held."""
    held = CACHES[cache]()
    k, v = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4, 8)
    one = torch.randn(2, 3, 1, 8)
    held.update(k, v)
    before = [x.clone() for part in held.peek(one, one) for x in part.streams]
    k.fill_(torch.nan)
    v.fill_(torch.nan)
    after = [x for part in held.peek(one, one) for x in part.streams]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("layer", LAYERS)
def test_looking_leaves_the_cache_as_it_was(layer):
    """`layer.weights` and `layer.explain` ask what would be."""
    layer, x = make(layer), inputs(2, TOKENS)
    held = KVCache()
    with torch.no_grad():
        layer(x[:, :6], cache=held)
        weights = layer.weights(x[:, 6:], cache=held)
        assert layer.explain(x[:, 6:], cache=held)
        assert held.length == 6
        whole = layer.weights(x)
        assert_same(layer(x[:, 6:], cache=held), layer(x)[:, 6:])
    assert weights.shape[2:] == (TOKENS - 6, TOKENS)
    assert_same(weights, whole[:, :, 6:])
    assert (whole.sum(-1) <= 1 + 1e-12).all()
    assert (whole.triu(1) == 0).all()


REFUSED = {
    "a mask that looks ahead": lambda x: {"x": x, "mask": EVERYTHING},
    "a mask of another batch": lambda x: {"x": x, "mask": Padding(torch.ones(7, 20).bool())},
    "another batch": lambda x: {"x": torch.cat([x, x])},
    "another dtype": lambda x: {"x": x.half()},
    "a tensor for a mask": lambda x: {"x": x, "mask": torch.ones(3, 3).bool()},
    "positions of another length": lambda x: {"x": x, "positions": torch.arange(7)},
}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("refusal", REFUSED)
@pytest.mark.parametrize("layer", ["window", "everything", "MLA window", "latent KV"])
def test_a_refused_call_leaves_its_cache_as_it_was(layer, refusal, cache):
    if (layer, cache) == ("latent KV", "sliding"):
        return
    layer, x, held = make(layer), inputs(2, TOKENS), CACHES[cache]()
    wrong = REFUSED[refusal](inputs(2, 3, seed=1))
    if refusal == "a mask that looks ahead":
        layer.mask = EVERYTHING
    right = WINDOWED_MASK if cache == "sliding" else Causal()
    with torch.no_grad():
        layer(x[:, :4], cache=held, mask=right)
        twin = copy.deepcopy(held)
        with pytest.raises((ValueError, TypeError, RuntimeError)):
            layer(wrong.pop("x"), cache=held, **wrong)
        assert held.length == twin.length == 4
        same = {"mask": right}
        assert_same(layer(x[:, 4:], cache=held, **same), layer(x[:, 4:], cache=twin, **same))


WINDOWED_MASK = Causal() & SlidingWindow(3)


def test_a_full_static_cache_refuses_and_stays():
    layer, x, held = make("GQA"), inputs(2, TOKENS), StaticCache(6)
    with torch.no_grad():
        layer(x[:, :5], cache=held)
        with pytest.raises(ValueError, match="6"):
            layer(x[:, 5:7], cache=held)
        assert held.length == 5
        assert_same(layer(x[:, 5:6], cache=held), layer(x)[:, 5:6])


@pytest.mark.parametrize("mask", [EVERYTHING, Where(lambda b, h, q, kv: kv <= q + 1), ~Causal()])
@pytest.mark.parametrize("cache", ["growing", "static", "int8"])
def test_a_rule_that_looks_ahead_is_refused_with_a_cache(cache, mask):
    """Decoding would silently differ from the full forward."""
    layer = attention(mask=mask).double()
    with pytest.raises(ValueError, match=r"Causal\(\)"):
        layer(inputs(2, 4), cache=CACHES[cache]())


@pytest.mark.parametrize("mask", [Causal(), Causal() & SlidingWindow(5)])
def test_a_rule_that_asks_for_dropped_keys_is_refused(mask):
    """A window in the cache needs a window in the mask, and no wider one."""
    layer, held, x = attention(mask=mask).double(), SlidingCache(3), inputs(2, 30)
    with torch.no_grad(), pytest.raises(ValueError, match="SlidingWindow"):
        run_in_pieces(layer, x, held, list(range(1, 30)))
    assert held.length < 30


@pytest.mark.parametrize("cache", [name for name in CACHES if name != "sliding"])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_ragged_batch_decodes_as_each_of_its_rows_alone(layer, cache):
    """Right-padded prefill, `truncate` to each row's length, then token by token."""
    layer, x, lengths = make(layer), inputs(3, TOKENS), [5, 2, 4]
    held = CACHES[cache]()
    valid = torch.arange(5) < torch.tensor(lengths)[:, None]
    with torch.no_grad():
        first = layer(x[:, :5], cache=held, mask=Padding(valid))
        held.truncate(torch.tensor(lengths))
        places = [torch.tensor([n + i for n in lengths]) for i in range(4)]
        steps = [layer(x[torch.arange(3), at].unsqueeze(1), cache=held) for at in places]
        for row, length in enumerate(lengths):
            alone, own = x[row : row + 1], CACHES[cache]()
            expected = run_in_pieces(layer, alone[:, : length + 4], own, list(range(length, 15)))
            assert_same(first[row : row + 1, :length], expected[:, :length])
            for i, step in enumerate(steps):
                assert_same(step[row : row + 1], expected[:, length + i : length + i + 1])


# -- one layer is another ---------------------------------------------------------------------


def test_gqa_is_mha_with_shared_keys():
    """Repeating the rows of k_proj and v_proj, head by head, changes nothing."""
    x = inputs(2, TOKENS)
    gqa = scattered(attention(6, num_kv_heads=2, bias=True)).double().eval()
    mha = attention(6, bias=True).double().eval()
    state = gqa.state_dict()
    for name in ("k_proj", "v_proj"):
        for kind in ("weight", "bias"):
            rows = state[f"{name}.{kind}"].unflatten(0, (2, 6))
            state[f"{name}.{kind}"] = rows.repeat_interleave(3, 0).flatten(0, 1)
    mha.load_state_dict(state)
    assert (gqa.kind, mha.kind) == ("GQA", "MHA")
    assert_same(gqa(x), mha(x))


@given(SEEDS)
def test_sharing_keys_is_repeating_them(seed):
    case = draw_case(seed, torch.float64)
    group = case.sizes.heads // case.sizes.kv_heads
    k, v = (side.repeat_interleave(group, 1) for side in (case.k, case.v))
    assert_same(run(case), run(case, k=k, v=v))


def test_mqa_is_gqa_with_one_head():
    x = inputs(2, TOKENS)
    mqa = MultiQueryAttention(WIDTH, 4).double().eval()
    gqa = GroupedQueryAttention(WIDTH, 4, 1).double().eval()
    gqa.load_state_dict(scattered(mqa).state_dict())
    assert mqa.kind == gqa.kind == "MQA"
    assert_same(mqa(x), gqa(x))


def test_gqa_with_as_many_key_heads_as_heads_is_mha():
    x = inputs(2, TOKENS)
    mha = MultiHeadAttention(WIDTH, 4).double().eval()
    gqa = GroupedQueryAttention(WIDTH, 4, 4).double().eval()
    gqa.load_state_dict(scattered(mha).state_dict())
    assert mha.kind == gqa.kind == "MHA"
    assert_same(mha(x), gqa(x))


@pytest.mark.parametrize("options", [{}, {"q_lora_rank": None}, {"latent_norm": False}])
def test_absorbed_is_expanded(options):
    """Forward and gradients, at positions past zero, with norms that do something."""
    layers = {}
    for form in ("expanded", "absorbed"):
        torch.manual_seed(1)
        layers[form] = scattered(latent(form=form, **options)).double()
    layers["absorbed"].load_state_dict(layers["expanded"].state_dict())
    found = {}
    for form, layer in layers.items():
        past, x = inputs(2, 5), inputs(2, 4, seed=1).requires_grad_()
        cache = KVCache()
        layer(past, cache=cache)
        out = layer(x, cache=cache)
        (out * torch.arange(out.numel()).view(out.shape)).sum().backward()
        gradients = {name: p.grad for name, p in layer.named_parameters()}
        assert all(grad is not None for grad in gradients.values())
        found[form] = {"out": out.detach(), "x": x.grad, **gradients}
    for name, value in found["expanded"].items():
        assert_same(found["absorbed"][name], value)


def test_the_two_forms_are_two():
    """The law above would hold of a switch that does nothing."""
    x = inputs(2, TOKENS)
    saw = {form: latent(form=form).double().explain(x) for form in ("expanded", "absorbed")}
    assert saw["expanded"] != saw["absorbed"]


def test_the_masks_of_layer_and_call_intersect():
    x = inputs(2, TOKENS)
    rules = [Causal(), SlidingWindow(3), Padding(torch.rand(2, TOKENS) < 0.8), Chunked(4)]
    for own in rules:
        for call in rules:
            torch.manual_seed(3)
            alone = scattered(attention(mask=own)).double().eval()
            torch.manual_seed(3)
            joint = scattered(attention(mask=own & call)).double().eval()
            assert_same(alone(x, mask=call), joint(x))
            assert_same(alone.weights(x, mask=call), joint.weights(x))


@pytest.mark.parametrize("layer", LAYERS)
def test_left_padding_is_right_padding_is_no_padding(layer):
    """With the positions and the mask that say so. What stands in the padding is never read."""
    start = torch.tensor([2])
    layer, x, junk = make(layer), inputs(1, TOKENS), inputs(1, 2, seed=9) * 1e3
    left, right = torch.cat([junk, x], 1), torch.cat([x, junk], 1)
    valid = torch.ones(1, TOKENS + 2).bool()
    chunked = "Chunked" in repr(layer)
    with torch.no_grad():
        expected = layer(x)
        behind = layer(right, mask=Padding(valid.clone().index_fill(1, torch.tensor([11, 12]), 0)))
        assert_same(behind[:, :TOKENS], expected)
        if chunked:
            layer.mask = Causal() & Chunked(3, start=start)
        padding = Padding(valid.index_fill(1, torch.tensor([0, 1]), 0))
        assert padding.start.tolist() == [2]
        positions = (torch.arange(TOKENS + 2) - 2).clamp(min=0)
        assert_same(layer(left, mask=padding, positions=positions)[:, 2:], expected)


@pytest.mark.parametrize("layer", LAYERS)
def test_left_padded_rows_decode_as_each_alone(layer):
    """A batch whose rows start late, with a cache, token by token."""
    starts = [0, 2]
    layer, x = make(layer), inputs(1, TOKENS)
    batch = torch.cat([torch.cat([x, x[:, :2]], 1), torch.cat([x[:, :2] * 50, x], 1)])
    if "Chunked" in repr(layer):
        layer.mask = Causal() & Chunked(3, start=torch.tensor(starts))
    padding = Padding(torch.arange(TOKENS + 2) >= torch.tensor(starts)[:, None])
    positions = (torch.arange(TOKENS + 2) - torch.tensor(starts)[:, None]).clamp(min=0)
    held, steps = KVCache(), []
    with torch.no_grad():
        for a, b in [(0, 5), *((i, i + 1) for i in range(5, TOKENS + 2))]:
            at = positions[:, a:b]
            steps.append(layer(batch[:, a:b], cache=held, mask=padding, positions=at))
        out = torch.cat(steps, 1)
        if "Chunked" in repr(layer):
            layer.mask = Causal() & Chunked(3)
        expected = layer(x)
    assert_same(out[:1, :TOKENS], expected)
    assert_same(out[1:, 2:], expected)


@pytest.mark.parametrize("layer", LAYERS)
def test_rows_of_a_batch_are_independent(layer):
    """Alone, in another order, next to junk: the same."""
    layer, x = make(layer), inputs(4, TOKENS)
    order = torch.tensor([2, 0, 3, 1])
    with torch.no_grad():
        whole = layer(x)
        assert_same(layer(x[order]), whole[order])
        for row in range(4):
            assert_same(layer(x[row : row + 1]), whole[row : row + 1])
        x[1:] = 1e6
        assert torch.equal(layer(x)[0], whole[0])


@pytest.mark.parametrize("layer", LAYERS)
def test_the_future_never_changes_a_bit(layer):
    """Tokens after a query are replaced; the query does not notice."""
    layer, x = make(layer), inputs(2, TOKENS)
    other = x.clone()
    other[:, 7:] = inputs(2, TOKENS - 7, seed=5) * 100
    with torch.no_grad():
        assert torch.equal(layer(x)[:, :7], layer(other)[:, :7])
        assert not torch.equal(layer(x)[:, 7:], layer(other)[:, 7:])


@pytest.mark.parametrize("layer", LAYERS)
def test_eval_is_deterministic_and_training_without_dropout_is_eval(layer):
    layer, x = make(layer), inputs(2, TOKENS)
    first = layer(x)
    assert torch.equal(first, layer(x))
    with torch.no_grad():
        assert_same(layer(x), first)
    assert_same(layer.train()(x), first)
    assert_same(layer.eval()(x), first)


def test_dropout_is_for_training():
    x = inputs(2, TOKENS)
    layer = scattered(attention(dropout=0.5)).double()
    assert not torch.equal(layer(x), layer(x))
    torch.manual_seed(0)
    plain = attention().double().eval()
    plain.load_state_dict(layer.state_dict())
    assert torch.equal(layer.eval()(x), plain(x))
    assert torch.equal(layer.weights(x), plain.weights(x))
    assert not torch.equal(layer.train()(x), layer(x))


# -- masks ------------------------------------------------------------------------------------


def grid_of(mask, span: Span, batch: int, heads: int) -> Tensor:
    """The rule on every cell, spread out to [B, H, L, S]."""
    dense = mask.dense(span, batch=batch, heads=heads)
    assert dense.dtype == torch.bool
    return dense.expand(batch, heads, span.num_queries, span.num_keys)


def draw_rule(seed: int):
    """Sizes, a mask and its twin as a table."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    sizes = draw_sizes(rng)
    mask, sees = draw_mask(rng, sizes)
    case = Case(seed, sizes, *(torch.empty(0),) * 3, sees=sees)
    return rng, sizes, mask, sees, table(case)


@given(SEEDS)
def test_a_mask_simplifies_to_its_equal(seed):
    """On its span, and again on any span inside it. Simplifying twice simplifies no further."""
    rng, s, mask, _, expected = draw_rule(seed)
    placed = mask.within(s.span())
    assert torch.equal(grid_of(placed, s.span(), s.batch, s.heads), expected)
    first = rng.randint(0, s.keys)
    last = rng.randint(first, s.keys)
    fields = vars(s.span()) | {"kv_start": s.kv_start + first, "kv_stop": s.kv_start + last}
    inner = Span(**fields)
    cut = placed.within(inner)
    assert torch.equal(grid_of(cut, inner, s.batch, s.heads), expected[..., first:last])
    assert repr(cut.within(inner)) == repr(cut)


@given(SEEDS)
def test_a_mask_reaches_as_far_as_it_says(seed):
    """`reach` is never narrower than the truth, also outside the span's own keys."""
    _, s, mask, sees, _ = draw_rule(seed)
    assume("Dense" not in repr(mask))
    low, high = mask.reach(s.span())
    for b in range(s.batch):
        for h in range(s.heads):
            for i in range(s.queries):
                for kv in range(30):
                    if sees(b, h, s.starts[b] + i, kv):
                        assert low is None or low <= kv
                        assert high is None or kv <= high


@given(SEEDS)
def test_a_mask_explains_what_it_does(seed):
    """Cell by cell, in words that name the cell's fate; and calling it is asking it."""
    rng, s, mask, sees, _ = draw_rule(seed)
    assume("Dense" not in repr(mask))
    b, h = rng.randrange(s.batch), rng.randrange(s.heads)
    q, kv = rng.randint(0, s.last_slot), rng.randint(0, s.last_slot)
    assert isinstance(mask.explain(b, h, q, kv), str)
    asked = mask(*(torch.tensor(index) for index in (b, h, q, kv)))
    assert bool(asked) == bool(sees(b, h, q, kv))


@given(SEEDS)
def test_and_can_only_hide_or_can_only_show_and_not_is_the_rest(seed):
    _, s, a, _, _ = draw_rule(seed)
    b, _ = draw_leaf(random.Random(seed + 1), s)
    span = s.span()
    seen = lambda mask: grid_of(mask.within(span), span, s.batch, s.heads)  # noqa: E731
    assert torch.equal(seen(a & b), seen(a) & seen(b))
    assert torch.equal(seen(a | b), seen(a) | seen(b))
    assert torch.equal(seen(~a), ~seen(a))
    assert torch.equal(seen(~~a), seen(a))
    assert torch.equal(seen(~(a & b)), seen(~a | ~b))


STRUCTURED = {
    "causal decode": (Causal(), Span(9, 10, 0, 10), "EVERYTHING"),
    "window decode inside": (WINDOWED_MASK, Span(9, 10, 7, 10), "EVERYTHING"),
    "window long enough": (Causal() & SlidingWindow(99), Span(0, 9, 0, 9), "Causal()"),
    "causal before": (Causal(), Span(0, 3, 5, 9), "NOTHING"),
    "window behind": (SlidingWindow(2), Span(9, 10, 0, 5), "NOTHING"),
    "one chunk": (Chunked(8), Span(8, 12, 8, 16), "EVERYTHING"),
    "two chunks": (Chunked(8), Span(8, 12, 0, 8), "NOTHING"),
    "prefix": (Prefix(4), Span(0, 9, 0, 4), "EVERYTHING"),
    "causal or everything": (Causal() | EVERYTHING, Span(0, 3, 0, 3), "EVERYTHING"),
    "static buffer": (Causal(), Span(0, 4, 0, 9), "Causal()"),
}


@pytest.mark.parametrize("name", STRUCTURED)
def test_structured_masks_become_as_simple_as_they_can(name):
    """This is what lets a kernel run without a mask."""
    mask, span, expected = STRUCTURED[name]
    neutral = {"EVERYTHING": EVERYTHING, "NOTHING": regard.NOTHING, "Causal()": Causal()}
    assert mask.within(span) == neutral[expected]


def test_documents_attend_as_if_alone():
    """Packed documents, each with its own positions, are the documents one by one."""
    x, lengths = inputs(1, TOKENS), [4, 1, 6]
    ids = torch.tensor([[0] * 4 + [1] + [2] * 6])
    positions = torch.tensor([*range(4), 0, *range(6)])
    layer = make("GQA")
    with torch.no_grad():
        packed = layer(x, mask=Documents(ids), positions=positions)
        alone = torch.cat([layer(piece) for piece in x.split(lengths, 1)], 1)
    assert_same(packed, alone)


# -- attend -----------------------------------------------------------------------------------


@given(SEEDS)
def test_every_backend_agrees_or_objects(seed):
    case = draw_case(seed)
    judged = case.judge()
    expected = torch.tensor(judged.out, dtype=torch.float64).reshape(run(case).shape)
    allowed = bound(case.q.dtype, case.v.double().abs().max().item(), judged.largest)
    for backend in BACKENDS:
        out = run(case, backend)
        if out is not None:
            assert (out.double() - expected).abs().max().item() <= allowed, backend


def draw_partial(seed: int) -> Partial:
    """Any output, any log-sum-exp; a fifth of the rows saw nothing."""
    torch.manual_seed(seed)
    blind = torch.rand(2, 3, 4) < 0.2
    out = torch.randn(2, 3, 4, 5).double().masked_fill(blind.unsqueeze(-1), 0.0)
    return Partial(out, (torch.randn(2, 3, 4) * 20).double().masked_fill(blind, -torch.inf))


def as_tensor(partial: Partial) -> Tensor:
    """The two halves side by side; blind rows have no output and a log-sum-exp of -inf."""
    blind = partial.lse == -torch.inf
    assert (partial.out[blind] == 0).all()
    return torch.cat([partial.out, partial.lse.masked_fill(blind, -1e3).unsqueeze(-1)], -1)


@given(SEEDS)
def test_merge_is_associative_and_commutative_with_a_neutral_element(seed):
    a, b, c = (draw_partial(seed + i) for i in range(3))
    together = as_tensor(merge(a, b, c))
    assert_same(as_tensor(merge(merge(a, b), c)), together)
    assert_same(as_tensor(merge(a, merge(b, c))), together)
    assert_same(as_tensor(merge(c, a, b)), together)
    assert_same(as_tensor(merge(a, b, c, Partial.nothing())), together)
    assert_same(as_tensor(merge(Partial.nothing(), merge(a))), as_tensor(merge(a)))
    nothing = merge(Partial.nothing(), Partial.nothing())
    assert (nothing.lse == -torch.inf).all()
    assert (nothing.out == 0).all()


@given(SEEDS)
def test_sinks_are_one_more_key_with_no_value(seed):
    torch.manual_seed(seed)
    q, k, v = torch.randn(2, 6, 4, 3), torch.randn(2, 2, 4, 3), torch.randn(2, 2, 4, 5)
    q, k, v, sinks = (x.double() for x in (q, k, v, torch.randn(6)))
    none = torch.zeros(2, 2, 1, 1, dtype=torch.float64)
    more_k, more_v = (torch.cat([none.expand(-1, -1, -1, x.shape[-1]), x], 2) for x in (k, v))
    bias = torch.zeros(6, 4, 5, dtype=torch.float64)
    bias[:, :, 0] = sinks[:, None]
    causal = Where(lambda b, h, q, kv: (kv <= q) | (kv == 0))
    spelled = attend(
        q, more_k, more_v, score_bias=bias, softcap=2.0, mask=causal, span=Span(1, 5, 0, 5)
    )
    assert_same(attend(q, k, v, sinks=sinks, softcap=2.0, mask=Causal()), spelled)


@given(SEEDS, st.floats(-50, 50))
def test_adding_a_constant_to_all_scores_changes_nothing(seed, constant):
    case = draw_case(seed, torch.float64)
    given_, free = dict(case.given), Case(**{**vars(case), "given": dict(case.given)})
    for name in ("score_bias", "sinks"):
        free.given.pop(name, None)
        given_.pop(name, None)
    shifted = run(free, score_bias=torch.full((1, 1, 1, 1), constant, dtype=torch.float64))
    assert_same(shifted, run(free))


@given(SEEDS, st.floats(-3, 3), st.floats(-3, 3))
def test_values_are_linear(seed, a, b):
    case = draw_case(seed, torch.float64)
    other = torch.randn_like(case.v)
    assert_same(run(case, v=a * case.v + b * other), a * run(case) + b * run(case, v=other), 1e-10)


@given(SEEDS)
def test_outputs_lie_among_the_values(seed):
    case = draw_case(seed, torch.float64)
    case.given.pop("sinks", None)
    out, seen = run(case), table(case)
    v = case.v.repeat_interleave(case.sizes.heads // case.sizes.kv_heads, 1).unsqueeze(2)
    hidden = ~seen.unsqueeze(-1)
    low, high = (
        v.expand(-1, -1, seen.shape[2], -1, -1).masked_fill(hidden, far) for far in (1e9, -1e9)
    )
    sighted = seen.any(-1)
    assert (out >= low.amin(3) - 1e-12)[sighted].all()
    assert (out <= high.amax(3) + 1e-12)[sighted].all()
    ones = run(case, v=torch.ones_like(case.v))
    assert_same(ones, sighted.unsqueeze(-1).double().expand_as(ones))


@given(SEEDS)
def test_keys_have_no_order_but_their_mask(seed):
    """Keys, values and the columns of mask and bias, permuted together."""
    case = draw_case(seed, torch.float64)
    for name in ("mask", "score_bias", "span"):
        case.given.pop(name, None)
    order = torch.randperm(case.sizes.keys)
    assert_same(run(case, k=case.k[:, :, order], v=case.v[:, :, order]), run(case))


@given(SEEDS)
def test_query_heads_are_interchangeable_within_their_group(seed):
    case = draw_case(seed, torch.float64)
    order = torch.randperm(case.sizes.heads // case.sizes.kv_heads)
    heads = torch.arange(case.sizes.heads).view(case.sizes.kv_heads, -1)[:, order].flatten()
    case.given = {"softcap": case.given.get("softcap")}
    assert_same(run(case, q=case.q[:, heads]), run(case)[:, heads])


POISON = {"large": 1e4, "largest": None}


@pytest.mark.parametrize("gradients", [False, True], ids=["no gradients", "gradients"])
@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("backend", BACKENDS)
def test_hidden_finite_content_never_changes_a_bit(backend, poison, gradients):
    """Keys and values are replaced cell by cell of the mask: a query is compared with itself when
    everything hidden from it holds other finite numbers, in every dtype."""

    @given(SEEDS)
    def law(seed):
        case = draw_case(seed)
        k, v = case.k.detach().contiguous(), case.v.detach().contiguous()
        plain = run(case, backend, k=k, v=v)
        assume(plain is not None)
        huge = POISON[poison] or torch.finfo(k.dtype).max
        seen = by_key_head(table(case), case)
        for i in range(min(case.sizes.queries, 3)):
            hidden = ~seen[:, :, i].unsqueeze(-1)
            junk = (torch.rand(k.shape[:3]) < 0.5).unsqueeze(-1).to(k.dtype) * 2 - 1
            other_k = torch.where(hidden, junk * huge, k).contiguous()
            other_v = torch.where(hidden, junk * huge, v).contiguous()
            poisoned = run(case, backend, k=other_k, v=other_v)
            assert torch.equal(poisoned[:, :, i], plain[:, :, i]), case

    with torch.set_grad_enabled(gradients):
        law()


@pytest.mark.parametrize("junk", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("gradients", [False, True], ids=["no gradients", "gradients"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_non_finite_content_that_nobody_sees_never_changes_a_bit(backend, gradients, junk):
    """Padding and stale slots may hold anything, and no gradient comes from them."""

    @given(SEEDS)
    def law(seed):
        case = draw_case(seed)
        q, k, v = (x.detach().contiguous() for x in (case.q, case.k, case.v))
        q, k, v = (x.clone().requires_grad_(gradients) for x in (q, k, v))
        plain = run(case, backend, q=q, k=k, v=v)
        assume(plain is not None)
        nobody = ~by_key_head(table(case), case).any(2).unsqueeze(-1)
        bad_k, bad_v = (
            x.detach().masked_fill(nobody, junk).contiguous().requires_grad_(gradients)
            for x in (k, v)
        )
        poisoned = run(case, backend, q=q, k=bad_k, v=bad_v)
        assert torch.equal(poisoned, plain), case
        if gradients:
            found = torch.autograd.grad(poisoned.sum(), (q, bad_k, bad_v))
            assert all(torch.isfinite(x).all() for x in found), case
            expected = torch.autograd.grad(plain.sum(), (q, k, v))
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), case

    law()


@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_query_that_may_see_nothing_gives_zeros_and_zero_gradients(backend, dtype, sinks):
    blind = Causal() & Where(lambda b, h, q, kv: (q != 2) & ((q != 3) | (b == 0)))
    for options in ({}, {"softcap": 2.0}, {"score_bias": torch.randn(4, 5, 5).to(dtype)}):
        q, k, v = (torch.randn(2, g, 5, 8).to(dtype).requires_grad_() for g in (4, 2, 2))
        if sinks:
            options = {**options, "sinks": torch.randn(4).to(dtype)}
        try:
            out = attend(q, k, v, mask=blind, backend=backend, **options)
        except ValueError as error:
            if not is_objection(error, backend):
                raise
            continue
        assert (out[:, :, 2] == 0).all()
        assert (out[1, :, 3] == 0).all()
        assert (out[0, :, 3] != 0).any()
        assert (out[:, :, 4] != 0).any()
        out.sum().backward()
        assert (q.grad[:, :, 2] == 0).all()
        assert (q.grad[1, :, 3] == 0).all()
        assert all(torch.isfinite(x.grad).all() for x in (q, k, v))


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_input_is_mutated(backend):
    @given(SEEDS)
    def law(seed):
        case = draw_case(seed)
        names = [name for name, x in case.given.items() if isinstance(x, Tensor)]
        tensors = [case.q, case.k, case.v, *(case.given[name] for name in names)]
        before = [(x.clone(), x._version) for x in tensors]
        assume(run(case, backend) is not None)
        for x, (copied, version) in zip(tensors, before, strict=True):
            assert torch.equal(x, copied)
            assert x._version == version

    law()


@pytest.mark.parametrize("layer", LAYERS)
def test_no_layer_mutates_its_input(layer):
    layer, x = make(layer), inputs(2, TOKENS)
    copied, state = x.clone(), copy.deepcopy(layer.state_dict())
    with torch.no_grad():
        run_in_pieces(layer, x, KVCache(), [3, 4])
    assert torch.equal(x, copied)
    assert all(torch.equal(value, state[name]) for name, value in layer.state_dict().items())
    assert NO_CACHE.length == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout_drops_its_share_and_scales_the_rest(rate, backend):
    """One-hot values give the weights: kept ones are scaled by 1 / (1 - p), and few are dropped."""
    q, k = torch.randn(4, 8, 40, 8), torch.randn(4, 4, 40, 8)
    v = torch.eye(40).expand(4, 4, 40, 40)
    try:
        dropped = attend(q, k, v, dropout=rate, mask=Causal(), backend=backend)
    except ValueError as error:
        if not is_objection(error, backend):
            raise
        return
    weights = attend(q, k, v, mask=Causal())
    sighted = torch.ones(40, 40).tril().bool().expand_as(weights)
    kept = dropped[sighted] != 0
    expected = weights[sighted][kept] / (1 - rate)
    torch.testing.assert_close(dropped[sighted][kept], expected, rtol=1e-4, atol=1e-6)
    deviation = (rate * (1 - rate) / kept.numel()) ** 0.5
    assert abs(kept.double().mean().item() - (1 - rate)) < 5 * deviation
    assert (dropped[~sighted] == 0).all()


# -- rotation ---------------------------------------------------------------------------------

ROTARIES = {
    "halves": Rotary(8),
    "pairs": Rotary(8, pairing="pairs"),
    "partial": Rotary(4),
    "linear": Rotary(8, scaling=LinearScaling(4.0)),
    "yarn": Rotary(8, scaling=Yarn(4.0, original_max_position=64)),
    "llama3": Rotary(8, scaling=Llama3(8.0, original_max_position=64), theta=500_000.0),
}


@pytest.mark.parametrize("rope", ROTARIES)
@pytest.mark.parametrize("shift", [1, 1_000, 100_000])
def test_rotation_depends_on_distance_alone(rope, shift):
    """Scores, and not the rotated vectors, are what a shift leaves alone."""
    rope = ROTARIES[rope]
    q, k = torch.randn(2, 3, 9, 8).double(), torch.randn(2, 3, 9, 8).double()
    here, there = torch.arange(9), torch.arange(9) + shift
    turned = rope(q, k, here)
    moved = rope(q, k, there)
    assert not torch.allclose(turned[0], moved[0])
    assert_same(moved[0] @ moved[1].mT, turned[0] @ turned[1].mT, 1e-9)


@pytest.mark.parametrize("rope", ROTARIES)
def test_rotation_keeps_lengths_and_leaves_the_rest_alone(rope):
    """Up to the one factor that some scalings put on cosines and sines."""
    rope = ROTARIES[rope]
    x = torch.randn(2, 3, 9, 8).double()
    turned = rope.rotate(x, torch.arange(9))
    before = x[..., : rope.dim] * rope.attention_factor
    assert_same(turned[..., : rope.dim].norm(dim=-1), before.norm(dim=-1))
    assert_same(turned[:, :, 0, : rope.dim], before[:, :, 0])
    assert torch.equal(turned[..., rope.dim :], x[..., rope.dim :])
    by_row = rope.rotate(x, torch.arange(9).expand(2, 9))
    assert torch.equal(by_row, turned)


def test_shifted_positions_change_no_layer():
    """What holds of a rotation holds of a whole layer."""
    x = inputs(2, TOKENS)
    for name in ("MHA", "GQA", "MLA", "latent KV"):
        layer = make(name)
        moved = layer(x, positions=torch.arange(TOKENS) + 1_000)
        assert_same(moved, layer(x), 1e-9)


def test_without_rotation_and_mask_tokens_have_no_order():
    x, order = inputs(2, TOKENS), torch.randperm(TOKENS)
    layer = Attention(WIDTH, 4, num_kv_heads=2).double()
    assert_same(layer(x[:, order]), layer(x)[:, order])
