"""Every mistake that docs/tutorials.md names: what the page says of it is so."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from regard import (
    Causal,
    KVCache,
    MultiHeadAttention,
    MultiHeadLatentAttention,
    MultiQueryAttention,
    Padding,
    Rotary,
    Span,
    Yarn,
    attend,
)
from regard.convert import with_pairing
from tutorial_blocks import (
    CACHED,
    EDITS,
    GQA,
    HEAD,
    INFERENCE,
    MASKS,
    MHA,
    MLA,
    MQA,
    OWN,
    ROPE,
    SDPA,
    V3,
    difference,
    mistakes,
    run,
    sections,
    shows,
)


@shows(SDPA, "Scale by the width of the model")
def test_scale_by_the_width():
    edit = ("q.size(-1) ** 0.5", "(H * D) ** 0.5")
    assert difference(run(SDPA, edit)) > 1e-3
    real = ("[L - 2]", "[L]")  # no padding: one key, and none of it hidden
    assert difference(run(SDPA, edit, real, L=2)) > 1e-3
    assert difference(run(SDPA, edit, real, L=1)) < 1e-12


@shows(SDPA, "Causal from the top left")
def test_causal_from_the_top_left():
    names = run(SDPA, ("[L - 2]", "[L]"))
    q, k, v = (names[name] for name in "qkv")
    theirs = names["scaled_dot_product"](q[:, :, -1:], k, v, names["valid"])
    assert torch.allclose(theirs, v[:, :, :1])  # only the oldest key
    with pytest.raises(ValueError, match=r"Span\(past, past \+ L, 0, S\)"):
        attend(q[:, :, -1:], k, v, mask=Causal())
    ours = attend(q[:, :, -1:], k, v, mask=Causal(), span=Span(4, 5, 0, 5))
    assert torch.allclose(ours, names["expected"][:, :, -1:])


@shows(SDPA, "NaN in a fully masked row")
def test_nan_in_a_fully_masked_row():
    names = run(SDPA)
    q, k, v = (names[name].requires_grad_() for name in "qkv")
    left = torch.arange(5) >= torch.tensor([[0], [2]])
    theirs = names["scaled_dot_product"](q, k, v, left)
    assert theirs[1, :, :2].isnan().all()
    (gradient,) = torch.autograd.grad(theirs.nansum(), v)
    assert gradient.isnan().any()
    ours = attend(q, k, v, mask=Causal() & Padding(left))
    assert (ours[1, :, :2] == 0).all()
    assert torch.allclose(ours[1, :, 2:], theirs[1, :, 2:])
    (gradient,) = torch.autograd.grad(ours.sum(), q)
    assert (gradient[1, :, :2] == 0).all()


@shows(SDPA, "A finite number for hidden scores")
def test_a_finite_number_for_hidden_scores():
    with pytest.raises(RuntimeError, match="overflow"):
        torch.zeros(2, 2).half().masked_fill(torch.eye(2).bool(), -1e9)
    finite = ('float("-inf")', "-1e9")
    names = run(SDPA, finite, dtype=torch.float32)
    q, k, v = (names[name] for name in "qkv")
    left = torch.arange(5) >= torch.tensor([[0], [2]])
    theirs = names["scaled_dot_product"](q, k, v, left)
    assert torch.allclose(theirs[1, :, 0], v[1].mean(dim=1), atol=1e-6)


@shows(MASKS, "Inverted polarity")
def test_inverted_polarity():
    torch.manual_seed(0)
    peer, x = nn.MultiheadAttention(12, 3, batch_first=True).eval(), torch.randn(2, 5, 12)
    valid = torch.arange(5) < torch.tensor([[5], [3]])
    changed = x.clone()
    changed[1, 3:] = 9.0  # padding
    for mask, hides in ((~valid, True), (valid, False)):
        one, other = (peer(x, t, t, key_padding_mask=mask)[0] for t in (x, changed))
        assert torch.equal(one, other) == hides
    q, k, v = (t.unsqueeze(1) for t in (x, changed, x))
    kept = F.scaled_dot_product_attention(q, k, v, attn_mask=valid[:, None, None])
    assert torch.equal(
        kept, F.scaled_dot_product_attention(q, q, v, attn_mask=valid[:, None, None])
    )
    with pytest.raises(TypeError, match="mask"):
        MultiHeadAttention(12, 3)(x, mask=valid)


@shows(MASKS, "Padding on the axis of queries")
def test_padding_on_the_axis_of_queries():
    names = run(MASKS)
    valid, S = names["valid"], names["S"]
    theirs = valid[:, None, :, None].expand(2, 1, S, S)
    padded, real = ~valid[1], valid[1]
    assert not theirs[1, 0, padded].any()
    assert theirs[1, 0, real][:, padded].all()
    assert not names["out"][0].expand(2, 1, S, S)[1, 0][:, padded].any()


@shows(MASKS, "Masks repeated in the wrong order")
def test_masks_repeated_in_the_wrong_order():
    for batch, right in ((2, False), (1, True)):
        keep = torch.rand(batch, 3, 3) < 0.5
        keep[-1, 0], keep[0, 0] = False, batch == 2
        right_one = keep[:, None].expand(batch, 4, 3, 3).reshape(batch * 4, 3, 3)
        assert torch.equal(keep.repeat_interleave(4, 0), right_one)
        assert torch.equal(keep.repeat(4, 1, 1), right_one) == right


@shows(MASKS, "The queries' padding in cross-attention")
def test_the_queries_padding_in_cross_attention():
    names = run(MASKS, L=6)
    layer, x, context, valid = (names[name] for name in ("layer", "x", "context", "valid"))
    of_queries = torch.arange(6) < torch.tensor([[2], [6]])
    changed = context.clone()
    changed[1, 3:] = 2.0  # padding
    for mask, leaks in ((of_queries, True), (of_queries[:, :3], True), (valid, False)):
        one, other = (layer(x, context=c, mask=Padding(mask)) for c in (context, changed))
        assert ((one - other).abs().max() > 1e-3) == leaks


@shows(HEAD, "A bias dropped by `strict=False`")
def test_a_bias_dropped():
    old = nn.Linear(8, 24)
    new = nn.Linear(8, 24, bias=False)
    new.load_state_dict(old.state_dict(), strict=False)
    x = torch.randn(2, 8)
    assert (new(x) - old(x)).abs().max() > 1e-3
    with pytest.raises(RuntimeError, match="Unexpected key"):
        new.load_state_dict(old.state_dict())


@shows(HEAD, "The mask in the checkpoint")
def test_the_mask_in_the_checkpoint():
    names = run(HEAD)
    assert "tril" in names["old"].state_dict()
    short = names["Head"](16, longest=3)
    with pytest.raises(RuntimeError, match="must match the size"):
        short(torch.randn(1, 5, 16))


@shows(MHA, "Heads split without a transpose")
def test_heads_split_without_a_transpose():
    edit = (".view(B, L, self.heads, -1).transpose(1, 2)", ".reshape(B, self.heads, L, -1)")
    assert difference(run(MHA, edit, H=1)) < 1e-12
    for edits, leaks in (((edit,), True), ((), False)):
        names = run(MHA, *edits)
        assert (difference(names) > 1e-3) == leaks
        changed = names["x"].clone()
        changed[1, -1] = 5.0  # padding
        after = names["old"](changed, names["valid"].long())
        assert ((after - names["expected"])[1, :3].abs().max() > 1e-3) == leaks


@shows(MHA, "A mask after the softmax")
def test_a_mask_after_the_softmax():
    scores, valid = torch.randn(2, 4, 5, 5), torch.arange(5) < torch.tensor([[5], [3]])
    weights = scores.softmax(-1) * valid[:, None, None, :]
    assert (weights[1].sum(-1) < 1 - 1e-3).all()
    names = run(MHA)
    weights = names["layer"].weights(names["x"], mask=Padding(names["valid"]))
    assert torch.allclose(weights.sum(-1), torch.ones_like(weights.sum(-1)))


@shows(MHA, "Dropout in evaluation")
def test_dropout_in_evaluation():
    q = torch.randn(1, 2, 16, 4)
    one, other = (F.scaled_dot_product_attention(q, q, q, dropout_p=0.5) for _ in range(2))
    assert not torch.equal(one, other)
    layer, x = MultiHeadAttention(16, 2, dropout=0.5).eval(), torch.randn(1, 9, 16)
    assert torch.equal(layer(x), layer(x))


@shows(CACHED, "A padding mask of the new token only")
def test_a_padding_mask_of_the_new_token_only():
    valid, step = torch.tensor([[False, False, True, True]]), torch.tensor([[True]])
    scores = torch.randn(1, 2, 1, 4)
    hidden = scores.masked_fill(~step[:, None, None], -math.inf)
    assert hidden.isfinite().all()  # the padding is visible
    layer, x = MultiHeadAttention(16, 2, mask=Causal()).eval(), torch.randn(1, 6, 16)
    cache = KVCache()
    with torch.no_grad():
        whole = layer(x, mask=Padding(valid))  # the mask ends before the tokens: they are real
        parts = [layer(x[:, a:b], mask=Padding(valid), cache=cache) for a, b in ((0, 4), (4, 6))]
    assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-6)


@shows(CACHED, "One cache for several layers")
def test_one_cache_for_several_layers():
    def appended(x, cache=[]):  # noqa: B006
        cache.append(x)
        return len(cache)

    assert [appended(0), appended(0)] == [1, 2]
    layers, cache = [MultiHeadAttention(16, 2, mask=Causal()) for _ in range(2)], KVCache()
    layers[0](torch.randn(1, 3, 16), cache=cache)
    with pytest.raises(ValueError, match="another layer"):
        layers[1](torch.randn(1, 3, 16), cache=cache)


@shows(MQA, "Keys repeated before they are cached")
def test_keys_repeated_before_they_are_cached():
    names, cache = run(MQA), KVCache()
    names["layer"](names["x"], cache=cache)
    B, L, E, H = 2, 5, 32, 4
    assert cache.nbytes == 2 * B * L * (E // H) * 8
    k = torch.randn(B, 1, L, E // H, dtype=torch.float64)
    for repeated in (k.repeat(1, H, 1, 1), torch.cat([k.expand(-1, H, -1, -1)], dim=2)):
        assert 2 * repeated.untyped_storage().nbytes() == H * cache.nbytes


@shows(MQA, "`view(B, L, 1, D)` without a transpose")
def test_view_of_the_one_head_without_a_transpose():
    edit = ("p(x).unsqueeze(1)", "p(x).unsqueeze(2)")
    assert difference(run(MQA, edit, L=4)) > 1e-3
    with pytest.raises(RuntimeError, match="expanded size"):
        run(MQA, edit, L=5)


@shows(MQA, "The first head of an MHA checkpoint")
def test_the_first_head_of_mha():
    torch.manual_seed(0)
    many, one, x = MultiHeadAttention(16, 4), MultiQueryAttention(16, 4), torch.randn(1, 5, 16)
    state = many.state_dict()
    state |= {f"{n}_proj.weight": state[f"{n}_proj.weight"][:4] for n in "kv"}
    one.load_state_dict(state)
    assert (one(x) - many(x)).abs().max() > 1e-3


@shows(GQA, "The group size taken for the number of groups")
def test_the_group_size_taken_for_the_number_of_groups():
    swapped = ("GQA(E, H, G)", "GQA(E, H, H // G)")
    assert difference(run(GQA, swapped, H=4, G=2)) < 1e-12
    with pytest.raises(RuntimeError, match="size mismatch"):
        run(GQA, swapped)


@shows(GQA, "Positions that restart at 0")
def test_positions_that_restart():
    restarted = ("cache=cache)", "cache=cache, positions=torch.arange(chunk.size(1)))")
    names = run(GQA, restarted)
    error = (names["out"] - names["expected"]).abs().amax(dim=(0, 2))
    assert error[:3].max() < 1e-12
    assert error[3:].min() > 1e-3


@shows(GQA, "Cached keys rotated again")
def test_cached_keys_rotated_again():
    """Keys of two steps of one token: the first is rotated at both, by its slot in the cache."""
    x, rope = torch.randn(1, 1, 3, 4), Rotary(4)
    once, cached, slots = rope.rotate(x, torch.arange(3)), x[:, :, :0], torch.arange(3)
    for step in range(3):
        cached = torch.cat([cached, x[:, :, step : step + 1]], dim=2)
        cached = rope.rotate(cached, slots[: step + 1])
        if step < 2:
            assert torch.allclose(cached, once[:, :, : step + 1])
    assert (cached[:, :, 1] - once[:, :, 1]).abs().max() > 1e-3


@shows(ROPE, "Weights of one layout, rotated in the other")
def test_weights_of_one_layout_rotated_in_the_other():
    names = run(ROPE, ("rope_pairs(x), rope_halves(x)", "rope_halves(x), rope_pairs(x)"))
    for wrong, right in zip(names["expected"], names["out"], strict=True):
        assert torch.equal(wrong[:, :, 0], right[:, :, 0])
        assert (wrong - right)[:, :, 1].abs().max() > 1e-3
    layer, x = MultiHeadAttention(16, 2, rope=Rotary(8, pairing="pairs")), torch.randn(1, 5, 16)
    moved = with_pairing(layer, "halves")
    assert moved.rope == Rotary(8)
    assert torch.allclose(moved(x), layer(x), atol=1e-6)
    layer.rope = Rotary(8)
    assert (moved(x) - layer(x)).abs().max() > 1e-3


@shows(ROPE, "Both layouts mixed")
def test_both_layouts_mixed():
    names = run(ROPE, ("angles_of(x).repeat(1, 2)", "angles_of(x).repeat_interleave(2, -1)"))
    mixed, right, x = names["expected"][1], names["out"][1], names["x"]
    assert torch.allclose(right.norm(dim=-1), x.norm(dim=-1))
    assert (mixed.norm(dim=-1) - x.norm(dim=-1)).abs().max() > 1e-3


@shows(ROPE, "Positions in half precision")
def test_positions_in_half_precision():
    assert torch.tensor(257.0).to(torch.bfloat16) == 256
    layer = MultiHeadAttention(16, 2, rope=Rotary(8))
    assert not list(layer.buffers())


@shows(ROPE, "Rotation before the split into heads")
def test_rotation_before_the_split():
    flat = torch.randn(2, 5, 24)
    before = Rotary(24).rotate(flat[:, None], torch.arange(5))[:, 0]
    before = before.unflatten(-1, (3, 8)).transpose(1, 2)
    after = Rotary(8).rotate(flat.unflatten(-1, (3, 8)).transpose(1, 2), torch.arange(5))
    assert (before - after).abs().max() > 1e-3


@shows(MLA, "A rotary key for every head")
def test_a_rotary_key_for_every_head():
    edits = (
        ("matrix(R, E)", "matrix(H * R, E)"),
        ("rope((x @ w_kr.T)[:, None])", "rope(heads(x @ w_kr.T))"),
    )
    with pytest.raises(RuntimeError, match="size mismatch for kv_a_proj_with_mqa"):
        run(MLA, *edits)


@shows(MLA, "RoPE on the rebuilt keys")
def test_rope_on_the_rebuilt_keys():
    """q R(i)^T R(j) W c is not (q W) c, nor with q and c rotated, except at one position."""
    q, w, c = torch.randn(1, 1, 4, 6), torch.randn(6, 6), torch.randn(1, 1, 4, 6)
    rope = Rotary(6)

    def scores(slots):
        return rope.rotate(q, slots) @ rope.rotate(c @ w.T, slots).mT

    assert torch.allclose(scores(torch.zeros(4).long()), q @ w @ c.mT, atol=1e-5)
    slots = torch.arange(4)
    absorbed = rope.rotate(q @ w, slots) @ rope.rotate(c, slots).mT
    for wrong in (q @ w @ c.mT, absorbed):
        assert (scores(slots) - wrong).abs().max() > 1e-3


@shows(V3, "The norm of the latent left out")
def test_the_norm_of_the_latent_left_out():
    names = run(V3, ("w.kv_a_layernorm(latent)", "latent"))
    assert difference(names) > 1e-3
    options = {**names["layer"].arguments, "latent_norm": False}
    without = MultiHeadLatentAttention(**options).double()
    without.load_state_dict(names["layer"].state_dict(), strict=False)
    assert torch.allclose(without(names["x"]), names["expected"])
    with pytest.raises(RuntimeError, match=r"Unexpected key.*kv_a_layernorm"):
        without.load_state_dict(names["layer"].state_dict())


@shows(V3, "YaRN's softmax factor left out")
def test_the_softmax_factor_of_yarn():
    m, factor = 0.7, 40.0
    rope = Rotary(6, scaling=Yarn(factor, original_max_position=64, mscale=1.0, mscale_all_dim=m))
    names = run(V3)
    options = {**names["layer"].arguments, "rope": rope}
    plain = (names["D"] + names["R"]) ** -0.5
    wanted = plain * (0.1 * m * math.log(factor) + 1) ** 2
    assert MultiHeadLatentAttention(**options).scale == pytest.approx(wanted)
    assert MultiHeadLatentAttention(**options | {"scale": plain}).scale == plain


@shows(INFERENCE, "Expanded keys and values in the cache")
def test_expanded_keys_and_values_in_the_cache():
    H, D, V, R, C = 128, 128, 128, 64, 512
    (said,) = re.findall(r"that is (\d+) times", sections()[INFERENCE])
    assert int(said) == H * (D + R + V) // (C + R)


@shows(INFERENCE, "Rotary keys cached unrotated")
def test_rotary_keys_cached_unrotated():
    names = run(INFERENCE, ("    k_rope = rope.rotate(k_rope[:, None], slot)[:, 0]\n", ""))
    error = (names["out"] - names["expected"]).abs().amax(dim=(0, 2))
    assert error[0] < 1e-12
    assert error[1:].min() > 1e-4


@shows(INFERENCE, "Always absorbed")
def test_always_absorbed():
    names = run(INFERENCE, L=40)
    layer, x, cache = names["layer"], names["x"], names["cache"]
    assert "expanded" in layer.explain(x).splitlines()[0]
    assert "absorbed" in layer.explain(x[:, :1], cache=cache).splitlines()[0]


def test_every_mistake_of_the_page_is_shown():
    assert sorted(mistakes()) == sorted([*EDITS, *OWN])
