"""`EvictingCache` against plain loops; its three numbers; what it refuses."""

import copy

import pytest
import torch

from evicted import Loop
from regard import (
    Attention,
    Causal,
    DifferentialAttention,
    KVCache,
    MultiHeadLatentAttention,
    Padding,
    Prefix,
    QuantizedCache,
    Rotary,
    SharedCache,
    SlidingWindow,
)
from regard.cache import load_all, save_all
from regard.sparse import (
    H2O,
    TOVA,
    EvictingCache,
    ExpectedAttention,
    KeyDiff,
    QuantizedEvicting,
    QueryMoments,
    SnapKV,
    Streaming,
)

HEADS, GROUPS, WIDTH = 4, 2, 6
SCORES = {
    "streaming": (Streaming(), ("streaming",)),
    "snapkv": (SnapKV(5, 3), ("snapkv", 5, 3)),
    "tova": (TOVA(), ("tova",)),
    "h2o": (H2O(), ("h2o",)),
    "expected": (ExpectedAttention(window=7), ("expected", 7)),
    "keydiff": (KeyDiff(), ("keydiff",)),
}
CHUNKS = [13, *[1] * 9, 6, 1, 11, 3]
LENGTH = 43  # their sum


def _layer(mask=Causal(), dtype=torch.float64, **options):  # noqa: B008
    torch.manual_seed(3)
    layer = Attention(
        24, HEADS, num_kv_heads=GROUPS, head_dim=WIDTH, rope=Rotary(WIDTH), mask=mask, **options
    )
    return layer.to(dtype).eval()


def _tokens(rows=2, length=LENGTH, dtype=torch.float64):
    torch.manual_seed(4)
    return torch.randn(rows, length, 24, dtype=dtype)


@torch.no_grad()
def _run(layer, x, cache, chunks=CHUNKS, mask=None):
    return torch.cat([layer(some, cache=cache, mask=mask) for some in x.split(chunks, 1)], 1)


@torch.no_grad()
def _run_loops(layer, x, loops, chunks=CHUNKS):
    """The output of the layer by a `Loop` for each row."""
    q, k, v = layer.project(x, None)
    q, k = layer.rope(q, k, torch.arange(x.shape[1]))
    rows = []
    for loop, *its in zip(loops, q, k, v, strict=True):
        pieces = zip(*(each.split(chunks, 1) for each in its), strict=True)
        heads = torch.cat([loop.call(*piece) for piece in pieces], 1)
        rows.append(heads.transpose(0, 1).flatten(1))
    return layer.o_proj(torch.stack(rows))


def _slots(loops):
    return torch.tensor([[[t[0] for t in head] for head in loop.tokens] for loop in loops])


@pytest.mark.parametrize("budget", [12, 0.5, 35])
@pytest.mark.parametrize("score", SCORES)
def test_every_score_keeps_the_tokens_of_a_plain_loop(score, budget):
    value, name = SCORES[score]
    layer, x = _layer(), _tokens()
    loops = [Loop(HEADS, GROUPS, name, budget, 2, 3) for _ in x]
    cache = EvictingCache(budget, value, sinks=2, recent=3)
    got, want = _run(layer, x, cache), _run_loops(layer, x, loops)
    assert torch.equal(cache.slots, _slots(loops))
    assert (got - want).abs().max() < 1e-12
    assert cache.length == LENGTH
    assert cache.rows <= cache.most < cache.length


@pytest.mark.parametrize("mask", [SlidingWindow(9), SlidingWindow(5) | Prefix(3)], ids=repr)
@pytest.mark.parametrize("score", ["streaming", "tova", "h2o"])
def test_masks_are_read_at_the_slots_of_the_rows(score, mask):
    value, name = SCORES[score]
    mask = Causal() & mask
    layer, x = _layer(mask), _tokens()

    def visible(query, key):
        return bool(mask(*(torch.tensor(i) for i in (0, 0, query, key))))

    loops = [Loop(HEADS, GROUPS, name, 20, 2, 3, visible) for _ in x]
    cache = EvictingCache(20, value, sinks=2, recent=3)
    got, want = _run(layer, x, cache), _run_loops(layer, x, loops)
    assert (got - want).abs().max() < 1e-12


@pytest.mark.parametrize("score", SCORES)
def test_padding_takes_no_room(score):
    """A row with padding on its left keeps the tokens that it keeps alone."""
    value, name = SCORES[score]
    layer, x = _layer(), _tokens()
    valid = torch.ones(2, x.shape[1], dtype=torch.bool)
    valid[1, :7] = False

    def visible(row):
        return lambda query, key: key <= query and bool(valid[row, key])

    loops = [Loop(HEADS, GROUPS, name, 12, 2, 3, visible(row)) for row in range(2)]
    cache = EvictingCache(12, value, sinks=2, recent=3)
    got = _run(layer, x, cache, mask=Padding(valid))
    want = _run_loops(layer, x, loops)
    assert (got - want)[valid].abs().max() < 1e-12
    assert torch.equal(cache.slots, _slots(loops))
    assert int(cache.slots[1].min()) == 7, "the first real token is a sink"


@pytest.mark.parametrize("score", SCORES)
def test_a_layer_may_attend_twice_to_the_same_keys(score):
    """As two softmaxes do: both read every row, and then the rows beyond the budget go."""
    torch.manual_seed(3)
    layer = DifferentialAttention(24, 4, num_kv_heads=4, rope=Rotary(6), mask=Causal()).eval()
    x, cache = _tokens(dtype=torch.float32)[:, :15], EvictingCache(10, SCORES[score][0], 2, 3)
    got = _run(layer, x, cache, [9, 6])
    assert torch.equal(got, _run(layer, x, KVCache(), [9, 6]))
    assert cache.rows == 10


@pytest.mark.parametrize(("budget", "sinks", "recent"), [(128, 4, 120), (0.25, 2, 100)])
def test_the_first_and_the_last_stay_however_small_the_rest_of_the_budget(budget, sinks, recent):
    cache = EvictingCache(budget, KeyDiff(), sinks, recent)
    _run(_layer(), _tokens(1, 210), cache, [200, *[1] * 10])
    for slots in cache.slots[0].tolist():
        assert {*range(sinks), *range(210 - recent, 210)} <= {*slots}


def test_queries_at_padding_do_not_count():
    """Padding on the right sees all tokens, and is read by nobody."""
    layer, x, pads = _layer(), _tokens(1, 30), 7
    padded = torch.cat([x, torch.full((1, pads, 24), 9.0, dtype=x.dtype)], 1)
    valid = torch.arange(30 + pads)[None] < 30
    alone, cache = (EvictingCache(14, H2O(), sinks=2, recent=1) for _ in range(2))
    _run(layer, x, alone, [30])
    _run(layer, padded, cache, [30 + pads], Padding(valid))
    for own, kept in zip(alone.slots[0].tolist(), cache.slots[0].tolist(), strict=True):
        assert {*own} - {29} <= {*kept}, "29 is recent alone, and no longer before the padding"


def test_a_score_that_is_no_number_keeps_nothing_else_out():
    class Broken(Streaming):
        def __call__(self, rows):
            return super().__call__(rows).masked_fill(rows.slots == 5, torch.nan)

    cache = EvictingCache(10, Broken(), sinks=2, recent=3)
    _run(_layer(), _tokens(1, 15), cache, [15])
    assert 5 not in cache.slots[0, 0]


def test_moments_of_any_dtype_under_any_default():
    kinds = (torch.float32, torch.float64, torch.bfloat16)
    moments = QueryMoments(torch.ones(HEADS, WIDTH), torch.eye(WIDTH).repeat(HEADS, 1, 1))
    layer, slots = _layer(dtype=torch.float32), []
    for default in kinds:
        for dtype in kinds:
            its = QueryMoments(moments.mean.to(dtype), moments.covariance.to(dtype))
            cache = EvictingCache(12, ExpectedAttention(its), sinks=2, recent=3)
            torch.set_default_dtype(default)
            try:
                _run(layer, _tokens(dtype=torch.float32), cache)
            finally:
                torch.set_default_dtype(torch.float32)
            slots.append(cache.slots)
    assert all(torch.equal(each, slots[0]) for each in slots)


def test_streaming_is_a_window_and_a_prefix():
    """Token by token, `sinks` and the last tokens are what this mask shows."""
    sinks, budget = 3, 11
    layer, x = _layer(), _tokens()
    cache = EvictingCache(budget, Streaming(), sinks=sinks, recent=1)
    got = _run(layer, x, cache, chunks=[1] * x.shape[1])
    # a query attends before the eviction: to its own token, and to the `budget` held before
    oracle = _layer(Causal() & (SlidingWindow(budget - sinks + 1) | Prefix(sinks)))
    assert (got - oracle(x)).abs().max() < 1e-12


@pytest.mark.parametrize("score", ["streaming", "h2o", "tova"])
def test_a_budget_that_holds_all_is_a_plain_cache_bit_for_bit(score):
    layer, x = _layer(dtype=torch.float32), _tokens(dtype=torch.float32)
    for budget in (1.0, 500):
        plain, cache = KVCache(), EvictingCache(budget, SCORES[score][0], sinks=2, recent=3)
        assert torch.equal(_run(layer, x, cache), _run(layer, x, plain))
        assert cache.nbytes == plain.nbytes


def test_chunks_are_tokens_one_by_one_where_nothing_is_evicted_between():
    layer, x = _layer(), _tokens()
    caches = [EvictingCache(30, SnapKV(5, 3), sinks=2, recent=3) for _ in range(2)]
    for cache, chunks in zip(caches, ([31], [1] * 31), strict=True):
        _run(layer, x[:, :31], cache, chunks)
    assert torch.equal(caches[0].slots, caches[1].slots)
    whole, ones = (_run(layer, x[:, 31:], cache, [1] * 12) for cache in caches)
    assert (whole - ones).abs().max() < 1e-12


@pytest.mark.parametrize("form", ["absorbed", "expanded", "auto"])
@pytest.mark.parametrize("score", ["streaming", "snapkv", "h2o", "expected"])
def test_latents(form, score):
    """One latent of all heads: its score is the mean of the heads'."""
    torch.manual_seed(5)
    layer = MultiHeadLatentAttention(
        24, 4, kv_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5,
        rope=Rotary(4), mask=Causal(), form=form,
    ).double().eval()  # fmt: skip
    x = _tokens()
    whole = EvictingCache(1.0, SCORES[score][0], sinks=2, recent=3)
    assert (_run(layer, x, whole) - layer(x)).abs().max() < 1e-10
    cache = EvictingCache(12, SCORES[score][0], sinks=2, recent=3)
    out = _run(layer, x, cache)
    assert cache.rows == 12
    assert cache.slots.shape == (2, 1, 12)
    assert out.isfinite().all()
    if score == "h2o" and form != "auto":  # weights are those of the heads, in either form
        other = EvictingCache(12, H2O(), sinks=2, recent=3)
        layer.form = {"absorbed": "expanded", "expanded": "absorbed"}[form]
        _run(layer, x, other)
        assert torch.equal(cache.slots, other.slots)


@pytest.mark.parametrize("options", [{"bits": 8}, {"format": "K8V4"}, {"format": "K4V4"}], ids=str)
def test_codes_compose(options):
    layer, x = _layer(dtype=torch.float32), _tokens(dtype=torch.float32)
    group = {"group": 2}
    codes = QuantizedEvicting(12, Streaming(), sinks=2, recent=3, **options, **group)
    plain = EvictingCache(12, Streaming(), sinks=2, recent=3)
    got, want = _run(layer, x, codes), _run(layer, x, plain)
    assert torch.equal(codes.slots, plain.slots)
    assert codes.nbytes < plain.nbytes
    full = QuantizedCache(**options, **group)
    assert torch.equal(
        _run(layer, x[:, :13], full, [13]), _run(layer, x[:, :13], _fresh(codes), [13])
    )
    assert 0 < (got - want).abs().max() < 0.2


def _fresh(cache):
    new = copy.copy(cache)
    new.truncate(0)
    return new


def test_three_numbers():
    layer, x = _layer(), _tokens()
    cache = EvictingCache(12, sinks=2, recent=3)
    _run(layer, x, cache)
    assert (cache.length, cache.rows, cache.nbytes) == (43, 12, 2 * 2 * 2 * 12 * WIDTH * 8)
    span = cache.span(2)
    assert (span.q_start, span.kv_start, span.kv_stop) == (43, 0, 45)
    assert cache.slots.max() == 42
    assert "43 tokens" in cache.describe()
    assert cache.describe().endswith("12 rows held for each key head")


def test_truncation_is_refused_for_evicted_tokens_and_changes_nothing():
    layer, x = _layer(), _tokens()
    cache = EvictingCache(40, SnapKV(5, 3), sinks=2, recent=3)
    _run(layer, x[:, :41], cache, chunks=[41])
    assert cache.rows == 39  # two of forty are evicted at once
    before = cache.slots.clone()
    again = [copy.copy(cache) for _ in range(2)]
    want = _run(layer, x[:, 41:42], again[0], chunks=[1])
    _run(layer, x[:, 42:43], cache, chunks=[1])
    cache.truncate(41)
    assert torch.equal(cache.slots, before)
    assert torch.equal(_run(layer, x[:, 41:42], cache, chunks=[1]), want)
    with pytest.raises(ValueError, match="rows were evicted when 41 tokens"):
        cache.truncate(40)
    assert not cache.can_truncate(40)
    assert cache.length == 42
    with pytest.raises(ValueError, match="rows of one length"):
        cache.truncate(torch.tensor([41, 41]))
    cache.truncate(0)
    assert (cache.length, cache.rows) == (0, 0)
    assert torch.equal(_run(layer, x[:, :9], cache, [9]), _run(layer, x[:, :9], KVCache(), [9]))


def test_sums_of_attention_cannot_be_taken_back():
    layer, x = _layer(), _tokens()
    cache = EvictingCache(40, H2O(), sinks=2, recent=3)
    _run(layer, x[:, :20], cache, chunks=[20])
    with pytest.raises(ValueError, match="cannot take it back"):
        cache.truncate(19)
    assert cache.can_truncate(20)


@pytest.mark.parametrize("score", SCORES)
def test_reorder_and_fork(score):
    layer, x = _layer(), _tokens()
    cache = EvictingCache(12, SCORES[score][0], sinks=2, recent=3)
    _run(layer, x[:, :30], cache, chunks=[20, 10])
    other, turned = cache.fork(), x.flip(0)
    other.reorder(torch.tensor([1, 0]))
    got = _run(layer, turned[:, 30:], other, chunks=[1] * 13)
    want = _run(layer, x[:, 30:], cache, chunks=[1] * 13)
    assert (got.flip(0) - want).abs().max() < 1e-12
    assert torch.equal(other.slots.flip(0), cache.slots)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("codes", [False, True])
def test_a_file_holds_all_that_the_next_step_reads(score, codes, tmp_path):
    def make():
        own = 12, SCORES[score][0], 2, 3
        return QuantizedEvicting(*own, group=2) if codes else EvictingCache(*own)

    layer, x = _layer(dtype=torch.float32), _tokens(dtype=torch.float32)
    cache, again = make(), make()
    _run(layer, x[:, :30], cache, chunks=[20, 10])
    save_all([cache], tmp_path / "cache", weights="these")
    load_all([again], tmp_path / "cache", weights="these")
    got, want = (_run(layer, x[:, 30:], each, chunks=[1] * 13) for each in (again, cache))
    assert (got - want).abs().max() < 1e-6  # its buffers have other strides
    assert torch.equal(again.slots, cache.slots)
    with pytest.raises(ValueError, match="layer 0 is"):
        load_all([EvictingCache(14, sinks=2, recent=3)], tmp_path / "cache", weights="these")


def test_a_file_of_a_prompt_padded_on_the_right(tmp_path):
    """Its last slot is padding, which was evicted first."""
    layer, x, valid = _layer(), _tokens(1, 20), torch.arange(20)[None] < 12
    cache, again = (EvictingCache(8, Streaming(), 1, 2) for _ in range(2))
    _run(layer, x, cache, [20], Causal() & Padding(valid))
    cache.save(tmp_path / "one.safetensors", weights="these")
    again.load(tmp_path / "one.safetensors", weights="these")
    assert torch.equal(again.slots, cache.slots)
    assert again.length == 20


def test_a_file_of_a_score_of_ones_own(tmp_path):
    class Own(Streaming):
        __repr__ = object.__repr__

    caches = [EvictingCache(8, Own(), 1, 2) for _ in range(2)]
    _run(_layer(), _tokens(1, 20), caches[0], [20])
    caches[0].save(tmp_path / "one.safetensors", weights="these")
    caches[1].load(tmp_path / "one.safetensors", weights="these")
    assert torch.equal(caches[1].slots, caches[0].slots)


def test_a_failed_call_leaves_the_cache_as_it_was():
    layer, x = _layer(), _tokens()
    cache = EvictingCache(12, SnapKV(5, 3), sinks=2, recent=3)
    _run(layer, x[:, :30], cache, chunks=[20, 10])
    twin, proj = cache.fork(), layer.o_proj
    layer.o_proj = torch.nn.Linear(3, 3).double()
    with pytest.raises(RuntimeError):
        _run(layer, x[:, 30:37], cache, chunks=[7])
    layer.o_proj = proj
    assert (cache.length, cache.rows) == (30, 12)
    assert torch.equal(
        _run(layer, x[:, 30:], cache, chunks=[7, 6]), _run(layer, x[:, 30:], twin, chunks=[7, 6])
    )


def test_refusals():
    with pytest.raises(ValueError, match="no room beside sinks=4"):
        EvictingCache(20)
    with pytest.raises(ValueError, match="share in"):
        EvictingCache(1.5)
    with pytest.raises(ValueError, match="whole number"):
        EvictingCache("half")
    with pytest.raises(TypeError, match="score is one such as"):
        EvictingCache(0.5, score="snapkv")
    layer, x = _layer(), _tokens()
    with pytest.raises(ValueError, match="for inference"):
        layer(x, cache=EvictingCache(0.5))
    cache, k = EvictingCache(0.5), torch.zeros(1, 2, 60, 4)
    cache.update(k, k)
    with pytest.raises(ValueError, match="60 rows are held for a budget of 30"):
        cache.update(k, k)
    with pytest.raises(ValueError, match="does not have them all"), torch.no_grad():
        layer.weights(x, cache=EvictingCache(0.5))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: EvictingCache(40, SnapKV), TypeError, "such as Streaming"),
        (lambda: SnapKV(window=0), ValueError, "window is at least 1"),
        (lambda: SnapKV(kernel=4), ValueError, "odd number"),
        (lambda: ExpectedAttention(window=-1), ValueError, "window is at least 1"),
        (lambda: ExpectedAttention(horizon=0), ValueError, "horizon is at least 1"),
        (lambda: ExpectedAttention("x"), TypeError, "a QueryMoments"),
        (lambda: SharedCache(EvictingCache(40)), ValueError, "does not return all"),
        (lambda: _of_other_moments(2, WIDTH), ValueError, "4 query heads of 6 channels"),
        (lambda: _of_other_moments(HEADS, 16), ValueError, "4 query heads of 6 channels"),
    ],
)
def test_wrong_arguments_of_scores(make, error, message):
    with pytest.raises(error, match=message):
        make()


def _of_other_moments(heads, width):
    moments = QueryMoments(torch.ones(heads, width), torch.zeros(heads, width, width))
    cache = EvictingCache(8, ExpectedAttention(moments), 1, 2)
    _run(_layer(), _tokens(1, 20), cache, [20])


def test_explain_and_sinks_of_attention():
    layer, x = _layer(dtype=torch.float32, sinks=True), _tokens(dtype=torch.float32)
    with torch.no_grad():
        layer.sinks.copy_(torch.randn(HEADS))
        oracle = _layer(Causal() & (SlidingWindow(9) | Prefix(3)), dtype=torch.float32, sinks=True)
        oracle.load_state_dict(layer.state_dict())
        cache = EvictingCache(11, Streaming(), sinks=3, recent=1)
        got = _run(layer, x, cache, chunks=[1] * 43)
        assert (got - oracle(x)).abs().max() < 1e-5
        assert "3 queries x 46 keys" in layer.explain(x[:, :3], cache=cache)


@torch.no_grad()
def test_sums_of_attention_are_held_where_the_keys_are():
    layer, x = Attention(32, 4, rope=Rotary(8), mask=Causal()).eval(), torch.randn(1, 40, 32)
    outputs = []
    for device in ("cpu", "meta"):
        with torch.device(device):  # the default device, which is not that of the layer
            outputs.append(layer(x, cache=EvictingCache(24, score=H2O(), sinks=2, recent=4)))
    assert torch.equal(*outputs)
