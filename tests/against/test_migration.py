"""docs/migration.md: what its tables call equal is equal, for what is installed here.

Rows about flash-attn, xformers and torchtune are held against what their documents state.
"""

import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import (
    AuxRequest,
    and_masks,
    create_block_mask,
    create_mask,
    flex_attention,
    or_masks,
)

from pages import FENCE, read
from regard import (
    EVERYTHING,
    Alibi,
    Attention,
    Causal,
    Chunked,
    Dense,
    Documents,
    KVCache,
    MultiHeadAttention,
    Padding,
    Rotary,
    SlidingWindow,
    Span,
    StaticCache,
    Where,
    attend,
    attend_partial,
    explain,
    prepare,
    split_additive,
)
from regard.convert import LAYOUTS, split_state

B, H, G, L, S, D = 2, 6, 2, 5, 9, 7
E = H * D


def same(one, other):
    assert one.dtype == other.dtype
    assert (one - other).abs().max() <= 1e-12 * (1 + other.abs().max())


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def qkv(queries=L, keys=S, key_heads=G):
    return draw(B, H, queries, D), draw(B, key_heads, keys, D), draw(B, key_heads, keys, D)


def test_a_table_has_at_most_twelve_rows():
    text = FENCE.sub("", read("docs/migration.md"))
    tables = re.findall(r"^\|[- |]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert len(tables) == 7
    assert max(len(table.splitlines()) for table in tables) <= 12


def converted(peer, **options):
    """regard's layer with the weights of torch's."""
    layer = MultiHeadAttention(E, H, **options).double().eval()
    if peer.in_proj_weight is not None:
        state = split_state(peer.state_dict(), LAYOUTS["MultiheadAttention"], num_heads=H)
    else:
        state = dict(peer.state_dict())
        for name, part in zip("qkv", state.pop("in_proj_bias").chunk(3), strict=True):
            state[f"{name}_proj.bias"] = part
            state[f"{name}_proj.weight"] = state.pop(f"{name}_proj_weight")
    state = {name.replace("out_proj", "o_proj"): value for name, value in state.items()}
    layer.load_state_dict(state, strict=not options.get("sinks"))
    return layer


def theirs(**options):
    peer = nn.MultiheadAttention(E, H, dtype=torch.float64, **options).eval()
    if peer.in_proj_bias is not None:
        nn.init.normal_(peer.in_proj_bias)
    return peer


X, HIDDEN = draw(B, L, E), torch.arange(L) >= torch.tensor([[L], [3]])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_weights_and_layout_of_multihead_attention(bias, first):
    peer = theirs(bias=bias, batch_first=first)
    given = X if first else X.transpose(0, 1)
    out = peer(given, given, given)[0]
    same(converted(peer, bias=bias)(X), out if first else out.transpose(0, 1))


def test_another_sequence_of_multihead_attention():
    peer, context = theirs(batch_first=True, kdim=11, vdim=11), draw(B, S, 11)
    layer = converted(peer, bias=True, context_size=11)
    expected = peer(X, context, context)[0]
    same(layer(X, context=context), expected)
    same(layer(X, context=layer.remember(context)), expected)


def test_masks_of_multihead_attention():
    peer = theirs(batch_first=True)
    layer, x, future = converted(peer, bias=True), X, torch.ones(L, L).triu(1).bool()
    same(layer(x, mask=Padding(~HIDDEN)), peer(x, x, x, key_padding_mask=HIDDEN)[0])
    same(layer(x, mask=Dense(~future)), peer(x, x, x, attn_mask=future)[0])
    same(layer(x, mask=Causal()), peer(x, x, x, attn_mask=future, is_causal=True)[0])
    by_head = torch.rand(B * H, L, L) < 0.5
    by_head[..., 0] = False
    mask = Dense(~by_head.unflatten(0, (B, H)))
    same(layer(x, mask=mask), peer(x, x, x, attn_mask=by_head)[0])
    added = torch.zeros(L, L, dtype=torch.float64).masked_fill(future, -torch.inf)
    same(layer(x, mask=Dense.from_additive(added)), peer(x, x, x, attn_mask=added)[0])
    both = draw(L, L).masked_fill(future, -torch.inf)
    mask, bias = split_additive(both)
    biased = converted(peer, bias=True, score_bias=bias)
    same(biased(x, mask=mask), peer(x, x, x, attn_mask=both)[0])


def test_attention_weights_of_multihead_attention():
    peer, x = theirs(batch_first=True), X
    weights = converted(peer, bias=True).weights(x, mask=Padding(~HIDDEN))
    options = {"key_padding_mask": HIDDEN}
    same(weights, peer(x, x, x, average_attn_weights=False, **options)[1])
    same(weights.mean(dim=1), peer(x, x, x, **options)[1])


def test_add_zero_attn_is_a_sink_of_zero():
    peer, x = theirs(batch_first=True, add_zero_attn=True), X
    layer = converted(peer, bias=True, sinks=True)
    assert (layer.sinks == 0).all()
    same(layer(x), peer(x, x, x)[0])


def test_a_fully_masked_row_of_multihead_attention():
    peer, everything = theirs(batch_first=True), torch.ones(B, L, dtype=torch.bool)
    assert peer(X, X, X, key_padding_mask=everything)[0].isnan().all()
    layer = converted(peer, bias=True)
    same(layer(X, mask=Padding(~everything)), layer.o_proj.bias.expand(B, L, E))


def test_causal_of_sdpa():
    q, k, v = qkv()
    options = {"enable_gqa": True}
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, **options)
    same(attend(q, k, v, mask=Causal(), span=Span(0, L, 0, S)), expected)
    lower = causal_lower_right(L, S)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=lower, **options)
    same(attend(q, k, v, mask=Causal(), span=Span(S - L, S, 0, S)), expected)
    q = draw(B, H, S, D)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, **options)
    same(attend(q, k, v, mask=Causal()), expected)


def test_masks_of_sdpa():
    q, k, v = qkv(key_heads=H)
    for shape in ((L, S), (B, 1, L, S), (B, H, L, S)):
        keep = torch.rand(shape) < 0.7
        keep[..., 0] = True
        same(attend(q, k, v, mask=Dense(keep)), F.scaled_dot_product_attention(q, k, v, keep))
    keep = torch.rand(H, L, S) < 0.7
    keep[..., 0] = True
    expected = F.scaled_dot_product_attention(q, k, v, keep)
    same(attend(q, k, v, mask=Dense(keep[None])), expected)
    added = draw(L, S).masked_fill(torch.rand(L, S) < 0.3, -torch.inf)
    added[:, 0] = 0.5
    mask, bias = split_additive(added)
    expected = F.scaled_dot_product_attention(q, k, v, added, scale=0.3)
    same(attend(q, k, v, mask=mask, score_bias=bias, scale=0.3), expected)


def test_three_axes_of_sdpa():
    q, k, v = (t[:, 0] for t in qkv())
    expected = F.scaled_dot_product_attention(q, k, v)
    same(attend(q[:, None], k[:, None], v[:, None])[:, 0], expected)


def test_dropout_is_up_to_the_caller():
    q, k, v = (t.float() for t in qkv(64, 64, H))
    for function in (
        lambda p: F.scaled_dot_product_attention(q, k, v, dropout_p=p),
        lambda p: attend(q, k, v, dropout=p),
    ):
        assert torch.equal(function(0.0), function(0.0))
        assert not torch.equal(function(0.5), function(0.5))


def test_a_named_backend_runs_or_raises():
    q, k, v = qkv()
    same(attend(q, k, v, backend="eager"), attend(q, k, v, backend="sdpa"))
    assert "sdpa" in explain(prepare(q, k, v))
    with pytest.raises(ValueError, match="fused"):
        attend(q, k, v, backend="fused", dropout=0.5)


def window(b, h, q, k):
    return k > q - 4


def causal(b, h, q, k):
    return k <= q


def dense(mask, queries=(0, S), heads=1):
    return mask.dense(Span(*queries, 0, S), batch=B, heads=heads).expand(B, heads, -1, -1)


def test_masks_of_flex_attention():
    for function, mask in (
        (window, SlidingWindow(4)),
        (and_masks(window, causal), Where(window) & Where(causal)),
        (or_masks(window, causal), Where(window) | Where(causal)),
    ):
        made = create_mask(function, B, 1, S, S, device="cpu")
        assert torch.equal(made, dense(Where(function)))
        assert torch.equal(made, dense(mask))
    assert torch.equal(dense(~Where(window)), ~dense(Where(window)))


def test_an_offset_is_a_span():
    def shifted(b, h, q, k):
        return causal(b, h, q + S - L, k)

    made = create_mask(shifted, B, 1, L, S, device="cpu")
    assert torch.equal(made, dense(Where(causal), (S - L, S)))


def flex(*tensors, **options):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without")
        return flex_attention(*tensors, **options)


def test_outputs_of_flex_attention():
    q, k, v = qkv(S)
    block_mask = create_block_mask(causal, B, None, S, S, device="cpu")
    with torch.no_grad():
        out, aux = flex(
            q, k, v, block_mask=block_mask, enable_gqa=True, scale=0.3,
            return_aux=AuxRequest(lse=True),
        )  # fmt: skip
    same(attend(q, k, v, mask=Where(causal), scale=0.3), out)
    same(attend(q, k, v, mask=Causal(), scale=0.3), out)
    same(attend_partial(q, k, v, mask=Causal(), scale=0.3).lse, aux.lse)


def test_scores_of_flex_attention():
    q, k, v = qkv(S)
    slopes, bias = torch.rand(H, dtype=torch.float64), draw(H, S, S)
    for score_mod, options in (
        (lambda s, b, h, i, j: 2.0 * torch.tanh(s / 2.0), {"softcap": 2.0}),
        (lambda s, b, h, i, j: s - slopes[h] * (i - j).abs(), {"score_bias": Alibi(slopes)}),
        (lambda s, b, h, i, j: s + bias[h, i, j], {"score_bias": bias}),
    ):
        with torch.no_grad():
            expected = flex(q, k, v, score_mod=score_mod, enable_gqa=True)
        same(attend(q, k, v, **options), expected)


def test_a_function_as_a_rule_trains():
    q, k, v = (t.requires_grad_() for t in qkv(S))
    expected = torch.autograd.grad(attend(q, k, v, mask=Causal()).sum(), (q, k, v))
    ours = torch.autograd.grad(attend(q, k, v, mask=Where(causal)).sum(), (q, k, v))
    for one, other in zip(ours, expected, strict=True):
        same(one, other)


@pytest.mark.parametrize("left", [0, 1, 3])
@pytest.mark.parametrize("right", [0, 2])
def test_windows_of_flash_attn_and_xformers(left, right):
    """Keys from i + S - L - left to i + S - L + right, inclusive."""
    keep = torch.zeros(L, S, dtype=torch.bool)
    for i in range(L):
        keep[i, max(0, i + S - L - left) : i + S - L + right + 1] = True
    rule = SlidingWindow(left + 1) & Where(lambda b, h, q, k: k <= q + right)
    assert torch.equal(dense(rule, (S - L, S))[0, 0], keep)
    if right == 0:
        assert torch.equal(dense(Causal() & SlidingWindow(left + 1), (S - L, S))[0, 0], keep)


def test_packed_sequences_of_flash_attn_and_xformers():
    lengths = [3, 1, 4]
    packed, cu_seqlens = [draw(8, H, D) for _ in range(3)], torch.tensor([0, 3, 4, 8])
    q, k, v = (t.transpose(0, 1)[None] for t in packed)
    mask = Documents.from_cu_seqlens(cu_seqlens) & Causal()
    out = attend(q, k, v, mask=mask)[0].transpose(0, 1)
    for start, length in zip(cu_seqlens, lengths, strict=False):
        one = [t[start : start + length].transpose(0, 1)[None] for t in packed]
        expected = F.scaled_dot_product_attention(*one, is_causal=True)
        same(out[start : start + length], expected[0].transpose(0, 1))


def test_a_packed_qkv_of_flash_attn():
    joined = draw(B, L, 3, H, D)
    expected = attend(*(joined[:, :, i].transpose(1, 2) for i in range(3)))
    same(attend(*joined.permute(2, 0, 3, 1, 4)), expected)


def test_rows_of_different_lengths():
    """The prompt padded on the right, then the cache truncated to each row's length."""
    layer = MultiHeadAttention(E, H, mask=Causal(), rope=Rotary(6)).double().eval()
    x, token, lengths = draw(B, L, E), draw(B, 1, E), torch.tensor([5, 3])
    cache = StaticCache(8)
    with torch.no_grad():
        layer(x, cache=cache)
        cache.truncate(lengths)
        out = layer(token, cache=cache)
        for row, length in enumerate(lengths):
            alone = torch.cat([x[row, :length], token[row]])[None]
            same(out[row, 0], layer(alone)[0, -1])


def agrees(function, rule):
    made = create_mask(function, B, 1, S, S, device="cpu")
    assert torch.equal(made, dense(rule))
    assert torch.equal(made, dense(Where(function)))


def test_mask_functions_of_transformers():
    utils = pytest.importorskip("transformers.masking_utils")
    start, ids = torch.tensor([0, 2]), torch.arange(S).expand(B, S) // 4
    agrees(utils.causal_mask_function, Causal())
    agrees(utils.sliding_window_causal_mask_function(3), Causal() & SlidingWindow(3))
    chunked = utils.chunked_causal_mask_function(3, start)
    agrees(chunked, Causal() & Chunked(3, start=start))
    agrees(utils.packed_sequence_mask_function(ids), Documents(ids))

    def image(b, h, q, k):
        return (q < 3) & (k < 3)

    either = utils.or_masks(utils.causal_mask_function, image)
    agrees(either, Causal() | Where(image))


@pytest.mark.parametrize("kind", ["sdpa_mask", "eager_mask"])
def test_masks_of_four_axes_of_transformers(kind):
    valid = torch.ones(B, S, dtype=torch.bool)
    valid[1, :2] = False
    utils = pytest.importorskip("transformers.masking_utils")
    made = getattr(utils, kind)(
        batch_size=B, q_length=S, kv_length=S, attention_mask=valid, dtype=torch.float32,
        allow_is_causal_skip=False,
    )  # fmt: skip
    rule = Dense(made) if kind == "sdpa_mask" else Dense.from_additive(made)
    real = valid[:, None, :, None]  # rows of padded queries are theirs to fill
    both = (Causal() & Padding(valid.long())).dense(Span(0, S, 0, S), batch=B)
    assert torch.equal(dense(rule) & real, both & real)


def test_caches_of_transformers():
    caches = pytest.importorskip("transformers.cache_utils")
    peer, cache, (_, k, v) = caches.DynamicCache(), KVCache(), qkv()
    peer.update(k, v, 0)
    cache.update(k, v)
    rows = torch.tensor([1, 0])
    peer.reorder_cache(rows)
    cache.reorder(rows)
    peer.crop(-3)
    cache.truncate(cache.length - 3)
    peer.batch_repeat_interleave(2)
    cache.reorder(torch.arange(B).repeat_interleave(2))
    new = draw(2 * B, G, 1, D), draw(2 * B, G, 1, D)
    (part,) = cache.update(*new)
    for ours, held in zip(part.streams, peer.update(*new, 0), strict=True):
        assert torch.equal(ours, held)
    with pytest.raises(ValueError, match="length=-1"):
        cache.truncate(-1)


def test_a_norm_after_rotation_as_in_torchtune():
    """Equal to one before it, if both channels of each pair have the same weight."""
    rope, x, slots = Rotary(6, pairing="pairs"), draw(B, H, L, 6), torch.arange(L)
    weights = torch.rand(3, dtype=torch.float64)
    for weight, equal in (
        (weights.repeat_interleave(2), True),
        (torch.rand(6, dtype=torch.float64), False),
    ):
        after = F.rms_norm(rope.rotate(x, slots), [6], weight)
        before = rope.rotate(F.rms_norm(x, [6], weight), slots)
        assert ((after - before).abs().max() < 1e-12) == equal


def test_masks_and_names_of_torchtune():
    layer = Attention(E, H, num_kv_heads=G, head_dim=D, qk_norm="head").double().eval()
    assert {"q_proj.weight", "o_proj.weight", "q_norm.weight"} <= layer.state_dict().keys()
    assert layer.mask is EVERYTHING
    x, keep = draw(B, L, E), torch.ones(B, L, L).tril().bool()
    same(layer(x, mask=Dense(keep)), layer(x, mask=Causal()))
