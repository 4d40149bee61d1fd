"""`CondensingCache` against attention spelled out; what it refuses."""

import math

import pytest
import torch

from regard import (
    Attention,
    Causal,
    Dense,
    KVCache,
    MultiHeadLatentAttention,
    Padding,
    QuantizedCache,
    Rotary,
    SlidingWindow,
)
from regard.cache import load_all, save_all
from regard.cache.saving import Record
from regard.sparse import CondensingCache, condense

HEADS, GROUPS, WIDTH, LENGTH, SINKS, RECENT = 6, 3, 8, 37, 2, 5
ENDS = {"sinks": SINKS, "recent": RECENT}


def _layer(seed=3, mask=Causal(), dtype=torch.float64, **options):  # noqa: B008
    torch.manual_seed(seed)
    layer = Attention(
        24, HEADS, num_kv_heads=GROUPS, head_dim=WIDTH, rope=Rotary(WIDTH), mask=mask, **options
    )
    with torch.no_grad():
        layer.q_proj.weight *= 6  # heads look at few tokens, each at others
        if layer.sinks is not None:
            layer.sinks.copy_(torch.randn(HEADS))
    return layer.to(dtype).eval()


def _tokens(rows=1, length=LENGTH, dtype=torch.float64):
    torch.manual_seed(4)
    return torch.randn(rows, length, 24, dtype=dtype)


@torch.no_grad()
def _condensed(layers, x, budget, caches=None, mask=None, pads=0):
    """Caches of layers that have read x, and are condensed while they read it once more. The first
    `pads` tokens, which the mask hides, have no position of their own."""
    caches = caches or [CondensingCache() for _ in layers]
    own = x.shape[1] - pads
    first = torch.arange(-pads, own).clamp(min=0)

    def repeat():
        for layer, cache in zip(layers, caches, strict=True):
            before = cache.snapshot()
            start = cache.length - x.shape[1] + own
            for some, at in zip(x.split(20, 1), (start + first).split(20), strict=True):
                padding = _twice(mask, cache.length + some.shape[1])
                layer(some, cache=cache, mask=padding, positions=at)
            cache.restore(before)

    for layer, cache in zip(layers, caches, strict=True):
        layer(x, cache=cache, mask=mask, positions=cache.length + first)
    condense(caches, repeat, budget, **ENDS)
    return caches


def _twice(padding, length):
    """The padding of the first tokens of a text that is read twice."""
    if padding is None:
        return None
    return Padding(torch.cat([padding.valid, padding.valid], 1)[:, :length])


@torch.no_grad()
def _scores(layer, x):
    """For each key head and token, the most attention of one query of the repeated text."""
    length = x.shape[1]
    q, k, _ = layer.project(torch.cat([x, x], 1), None)
    q, k = layer.rope(q, k, torch.arange(2 * length))
    k = k.repeat_interleave(HEADS // GROUPS, 1)
    scores = q @ k.mT / math.sqrt(WIDTH)
    scores = scores.masked_fill(torch.ones(2 * length, 2 * length).triu(1) > 0, -math.inf)
    weights = scores.softmax(-1)[:, :, length:, :length]
    return weights.unflatten(1, (GROUPS, -1)).mean(2).amax(2)[0]


def _kept(scores, count):
    """Of each layer and key head, the slots that are kept, by one sorted list."""
    ranked = [
        (-math.inf if at < SINKS or at >= LENGTH - RECENT else -float(score), layer, head, at)
        for layer, heads in enumerate(scores)
        for head, tokens in enumerate(heads)
        for at, score in enumerate(tokens)
    ]
    found = [[[] for _ in heads] for heads in scores]
    for _, layer, head, at in sorted(ranked)[:count]:
        found[layer][head].append(at)
    return [[sorted(slots) for slots in heads] for heads in found]


def _lists(cache):
    return [slots[0].tolist() for slots in cache.slots]


@torch.no_grad()
def _attended(layer, x, kept, new):
    """The output for the last tokens, where each key head sees the tokens kept and later ones."""
    length = x.shape[1]
    q, k, v = layer.project(torch.cat([x, new], 1), None)
    q, k = layer.rope(q, k, torch.arange(length + new.shape[1]))
    total, out = k.shape[2], []
    for head in range(HEADS):
        group = head // (HEADS // GROUPS)
        seen = torch.zeros(total, dtype=torch.bool)
        seen[kept[group]] = True
        seen[length:] = True
        scores = q[0, head, length:] @ k[0, group].mT / math.sqrt(WIDTH)
        hidden = torch.arange(total) > torch.arange(length, total)[:, None]
        scores = scores.masked_fill(hidden | ~seen, -math.inf)
        if layer.sinks is not None:
            scores = torch.cat([scores, layer.sinks[head].expand(len(scores), 1)], 1)
        out.append(scores.softmax(-1)[:, :total] @ v[0, group])
    return layer.o_proj(torch.cat(out, -1))[None]


@pytest.mark.parametrize("budget", [0.3, 0.6, 12])
def test_heads_of_all_layers_share_a_budget(budget):
    layers, x = [_layer(3), _layer(5)], _tokens()
    caches = _condensed(layers, x, budget)
    each = budget if isinstance(budget, int) else budget * LENGTH
    want = _kept([_scores(layer, x) for layer in layers], round(each * 2 * GROUPS))
    assert [_lists(cache) for cache in caches] == want
    rows = [count for cache in caches for count in cache.rows]
    assert sum(rows) == round(each * 2 * GROUPS)
    assert len({*rows}) > 1, "heads keep different numbers of tokens"
    assert all(cache.length == LENGTH for cache in caches)
    held = 2 * sum(caches[0].rows) * WIDTH * 8
    assert caches[0].nbytes == held


@pytest.mark.parametrize("chunks", [[9], [1, 1, 4, 3]])
@pytest.mark.parametrize("sinks", [False, True])
def test_later_tokens_attend_to_the_tokens_kept(chunks, sinks):
    layer, x, new = _layer(sinks=sinks), _tokens(), _tokens(length=9).flip(1)
    (cache,) = _condensed([layer], x, 0.4)
    slots = _lists(cache)
    with torch.no_grad():
        got = torch.cat([layer(some, cache=cache) for some in new.split(chunks, 1)], 1)
    assert (got - _attended(layer, x, slots, new)).abs().max() < 1e-12
    assert [each[-9:] for each in _lists(cache)] == GROUPS * [[*range(LENGTH, LENGTH + 9)]]
    assert "rows held for each key head" in cache.describe()


@pytest.mark.parametrize("format", [None, "K8V4"])
@pytest.mark.parametrize("mask", [Causal(), Causal() & SlidingWindow(9)], ids=repr)
def test_before_it_is_condensed_it_is_a_plain_cache(format, mask):
    layer, x = _layer(mask=mask, dtype=torch.float32), _tokens(2, dtype=torch.float32)
    plain = KVCache() if format is None else QuantizedCache(format=format)
    caches = CondensingCache(format), plain
    with torch.no_grad():
        got, want = (
            torch.cat([layer(some, cache=each) for some in x.split([20, 1, 9, 7], 1)], 1)
            for each in caches
        )
    assert (got - want).abs().max() < 1e-5
    assert caches[0].nbytes == caches[1].nbytes


def test_codes_keep_the_tokens_that_values_keep_and_take_fewer_bytes():
    layer, x = _layer(dtype=torch.float32), _tokens(dtype=torch.float32)
    (plain,) = _condensed([layer], x, 0.4)
    (codes,) = _condensed([layer], x, 0.4, [CondensingCache("K8V8")])
    same = [len({*a} & {*b}) for a, b in zip(_lists(plain), _lists(codes), strict=True)]
    assert sum(same) >= 0.9 * sum(plain.rows)
    assert codes.nbytes < plain.nbytes / 2


def test_a_window_evicts_what_no_query_of_the_repeated_text_sees():
    layer, x = _layer(mask=Causal() & SlidingWindow(9)), _tokens()
    (cache,) = _condensed([layer], x, 0.3)
    with torch.no_grad():
        got = layer(x[:, :3], cache=cache)
        want = layer(torch.cat([x, x[:, :3]], 1))[:, -3:]
    assert (got - want).abs().max() < 1e-12


def test_a_row_with_padding_keeps_the_tokens_that_it_keeps_alone():
    layer, x, pads = _layer(), _tokens(), 6
    padded = torch.cat([torch.full((1, pads, 24), 50.0, dtype=x.dtype), x], 1)
    valid = torch.arange(LENGTH + pads)[None] >= pads
    (alone,) = _condensed([layer], x, 12)
    (cache,) = _condensed([layer], padded, 12, mask=Padding(valid), pads=pads)
    assert [[at - pads for at in slots] for slots in _lists(cache)] == _lists(alone)


def test_padding_on_the_right_takes_no_room():
    layer, x, pads = _layer(), _tokens(), 6
    padded = torch.cat([x, torch.full((1, pads, 24), 50.0, dtype=x.dtype)], 1)
    valid = torch.arange(LENGTH + pads)[None] < LENGTH
    (cache,) = _condensed([layer], padded, 12, mask=Padding(valid))
    assert max(max(slots) for slots in _lists(cache)) < LENGTH


def test_rows_of_a_batch_keep_their_own_tokens():
    layer, x = _layer(), _tokens(3)
    (cache,) = _condensed([layer], x, 0.5)
    for row in range(3):
        scores = _scores(layer, x[row : row + 1])
        scores[:, :SINKS] = scores[:, LENGTH - RECENT :] = math.inf
        for head, slots in enumerate(cache.slots):
            best = scores[head].topk(cache.rows[head]).indices.sort().values
            assert slots[row].tolist() == best.tolist()
    assert abs(sum(cache.rows) - 0.5 * LENGTH * GROUPS) <= GROUPS / 2
    other = cache.fork()
    other.reorder(torch.tensor([2, 0]))
    with torch.no_grad():
        got, want = layer(x[[2, 0], :4], cache=other), layer(x[:, :4], cache=cache)
    assert (got - want[[2, 0]]).abs().max() < 1e-12


def test_one_latent_of_all_heads():
    torch.manual_seed(5)
    layer = MultiHeadLatentAttention(
        24, 4, kv_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5,
        rope=Rotary(4), mask=Causal(),
    ).double().eval()  # fmt: skip
    x = _tokens()
    (whole,) = _condensed([layer], x, 1.0)
    (cache,) = _condensed([layer], x, 0.5)
    assert cache.rows == (round(0.5 * LENGTH),)
    assert _lists(cache)[0][:SINKS] == [*range(SINKS)]
    with torch.no_grad():
        got, want = layer(x[:, :3], cache=whole), layer(torch.cat([x, x[:, :3]], 1))[:, -3:]
        assert layer(x[:, :3], cache=cache).isfinite().all()
    assert (got - want).abs().max() < 1e-10


def test_it_may_be_condensed_again():
    layer, x = _layer(), _tokens()
    (cache,) = _condensed([layer], x, 0.5)
    _condensed([layer], x, 0.25, [cache])
    assert cache.length == 2 * LENGTH
    assert sum(cache.rows) == round(0.25 * 2 * LENGTH * GROUPS)


def test_truncation_is_refused_for_evicted_tokens_and_changes_nothing():
    layer, x = _layer(), _tokens()
    (cache,) = _condensed([layer], x, 0.4)
    rows = cache.rows
    with torch.no_grad():
        want = layer(x[:, :4], cache=cache)
    cache.truncate(LENGTH)
    assert cache.rows == rows
    with pytest.raises(ValueError, match=f"rows were evicted when {LENGTH} tokens"):
        cache.truncate(LENGTH - 1)
    assert not cache.can_truncate(LENGTH - 1)
    with torch.no_grad():
        assert torch.equal(layer(x[:, :4], cache=cache), want)
        cache.truncate(0)
        assert (cache.length, cache.rows, cache.nbytes) == (0, (), 0)
        assert (layer(x, cache=cache) - layer(x)).abs().max() < 1e-12


@pytest.mark.parametrize("format", [None, "K8V8"])
def test_a_file_holds_all_that_the_next_step_reads(format, tmp_path):
    layer, x = _layer(dtype=torch.float32), _tokens(2, dtype=torch.float32)
    (cache,) = _condensed([layer], x, 0.4, [CondensingCache(format)])
    again = CondensingCache(format)
    save_all([cache], tmp_path / "cache", weights="these")
    load_all([again], tmp_path / "cache", weights="these")
    assert (again.length, again.rows) == (LENGTH, cache.rows)
    with torch.no_grad():
        got, want = (layer(x[:, :5], cache=each) for each in (again, cache))
    assert (got - want).abs().max() < 1e-5
    with pytest.raises(ValueError, match="layer 0 is"):
        load_all([KVCache()], tmp_path / "cache", weights="these")


@pytest.mark.parametrize(
    "heads",
    [None, 3, [{"state": {}}], [{"state": {}, "streams": -1}], [{"state": [], "streams": 0}]],
)
def test_a_file_of_something_else_is_refused(heads):
    with pytest.raises(ValueError, match="each key head has a state"):
        CondensingCache().fill(Record({"heads": heads}, []))


def test_heads_of_a_file_agree():
    layer, x = _layer(), _tokens()
    records = [_condensed([layer], some, 0.9)[0].record() for some in (x, x[:, :30])]
    mixed = [records[0].state["heads"][0], records[1].state["heads"][0]]
    count = mixed[0]["streams"]
    streams = [*records[0].streams[:count], *records[1].streams[:count]]
    with pytest.raises(ValueError, match="as many tokens"):
        CondensingCache().fill(Record({"heads": mixed}, streams))
    with pytest.raises(ValueError, match="1 streams more"):
        CondensingCache().fill(Record({"heads": mixed[:1]}, streams[: count + 1]))


def test_a_text_that_is_not_repeated_as_it_should_be_evicts_nothing():
    layer, x, cache = _layer(), _tokens(), CondensingCache()
    with torch.no_grad():
        layer(x, cache=cache)
        with pytest.raises(ValueError, match=r"of \[37\] tokens as they are, got \[74\]"):
            condense([cache], lambda: layer(x, cache=cache), 0.5)
        with pytest.raises(ValueError, match="no layer attended"):
            condense([cache], lambda: None, 0.5)
        with pytest.raises(ZeroDivisionError):
            condense([cache], lambda: 1 / 0, 0.5)
        assert cache.rows == GROUPS * (2 * LENGTH,)
        want = layer(torch.cat([x, x, x[:, :2]], 1))[:, -2:]
        assert (layer(x[:, :2], cache=cache) - want).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 0.0}, "a share in"),
        ({"budget": 0}, "budget is at least 1"),
        ({"budget": "half"}, "whole number"),
        ({"budget": 0.5, "recent": 0}, "recent is at least 1"),
        ({"budget": 0.5, "sinks": -1}, "sinks is at least 0"),
    ],
)
def test_wrong_numbers(options, message):
    (cache,) = _condensed([_layer()], _tokens(), 1.0)
    with pytest.raises(ValueError, match=message):
        condense([cache], lambda: None, **options)
    assert cache.rows == GROUPS * (LENGTH,)


@torch.no_grad()
def test_refusals():
    with pytest.raises(ValueError, match="format"):
        CondensingCache("K9V9")
    with pytest.raises(ValueError, match="no cache is a CondensingCache that holds"):
        condense([CondensingCache()], lambda: None, 0.5)
    cache, k = CondensingCache(), torch.zeros(1, 2, 5, 4)
    with pytest.raises(ValueError, match=r"streams of \[2, 1\] heads"):
        cache.update(k, k[:, :1])
    x, seen = _tokens(), torch.ones(1, HEADS, LENGTH, LENGTH, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match="one mask for all heads"):
        _layer(mask=Dense(seen))(x, cache=CondensingCache())
    with pytest.raises(ValueError, match="for inference"), torch.enable_grad():
        _layer()(x, cache=CondensingCache())
    with pytest.raises(ValueError, match="does not have them all"):
        _layer().weights(x, cache=CondensingCache())
    assert "37 queries x 37 keys" in _layer().explain(x, cache=CondensingCache())
