"""Differential attention beside transformers' DiffLlama and the oracle."""

import pytest
import torch
import transformers as t
from transformers.models.diffllama import modeling_diffllama as diff

import oracle
from forms import CACHES, additive, bound_of, float64, gradients, stepwise
from regard import Causal, DifferentialAttention, Padding, Rotary, SlidingCache, SlidingWindow

TOKENS = 9


def both(heads: int, kv_heads: int):
    """DiffLlama's module, its angles, and the layer with its parameters."""
    torch.manual_seed(2)
    config = t.DiffLlamaConfig(
        hidden_size=16, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=6,
        attention_dropout=0.0,
    )  # fmt: skip
    config._attn_implementation = "eager"
    module = diff.DiffLlamaAttention(config, layer_idx=3).eval()
    for each in module.parameters():
        torch.nn.init.normal_(each, std=0.4)
    layer = DifferentialAttention(
        16, heads, num_kv_heads=kv_heads, head_dim=6, lambda_init=module.lambda_init,
        norm_eps=config.rms_norm_eps, rope=Rotary(6), mask=Causal(),
    )  # fmt: skip
    layer.load_state_dict(module.state_dict())
    return module, diff.DiffLlamaRotaryEmbedding(config), layer


def x_of() -> torch.Tensor:
    return torch.randn(2, TOKENS, 16)


HEADS = [(4, 4), (8, 4), (8, 2)]


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_it_is_diffllama(heads, kv_heads):
    with float64():
        module, rotary, layer = both(heads, kv_heads)
        x, places = x_of(), torch.arange(TOKENS)[None]
        valid = torch.ones(2, TOKENS, dtype=torch.bool)
        for hidden in ([0, 0], [0, 4]):
            valid[1, : hidden[1]] = False
            angles = rotary(x, places)
            wanted = module(x, angles, additive(TOKENS, hidden))[0]
            out = layer(x, mask=Padding(valid))
            # transformers sums the exponents of lambda in float32
            torch.testing.assert_close(out[valid], wanted[valid], rtol=0, atol=2e-6)
        ours = gradients(layer, layer(x))
        theirs = gradients(module, module(x, angles, additive(TOKENS, [0, 0]))[0])
        for name, gradient in ours.items():
            torch.testing.assert_close(gradient, theirs[name], rtol=0, atol=2e-5, msg=name)


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_every_cache_gives_the_result_without_one(name, heads, kv_heads):
    with float64():
        _, _, layer = both(heads, kv_heads)
        x, cache = x_of(), CACHES[name]()
        out = stepwise(layer, x, cache)
        assert (out - layer(x)).abs().max() <= bound_of(name)
        if name == "KVCache":  # as many numbers as grouped-query attention has
            assert cache.nbytes == 2 * TOKENS * 2 * kv_heads * 6 * 8


def test_a_window_is_cut_in_its_cache():
    with float64():
        _, _, layer = both(8, 4)
        layer.mask, x = Causal() & SlidingWindow(3), x_of()
        out = stepwise(layer, x, SlidingCache(3))
        torch.testing.assert_close(out, layer(x).detach())


def test_both_softmaxes_are_the_oracles():
    with float64(), torch.no_grad():
        _, _, layer = both(8, 4)
        x = x_of()
        q, k, v = layer.project(x)
        q, k = layer.rope(q, k, torch.arange(TOKENS))
        outs = [
            oracle.attention(*map(torch.Tensor.tolist, (a, b, v)), visible=_causal)
            for a, b in zip(q.chunk(2, 1), k.chunk(2, 1), strict=True)
        ]
        first, second = (torch.tensor(each.out) for each in outs)
        factor = float(layer.factor())
        wanted = first - factor * second
        root = (wanted.pow(2).mean(-1, keepdim=True) + layer.groupnorm.eps).sqrt()
        wanted = (1 - layer.lambda_init) * wanted / root
        out = layer.o_proj(wanted.transpose(1, 2).flatten(2))
        torch.testing.assert_close(layer(x), out)
        first, second = (torch.tensor(each.weights) for each in outs)
        torch.testing.assert_close(layer.weights(x), first - factor * second)


def _causal(b, h, i, j):
    return j <= i


def test_its_code_and_its_kind():
    import regard
    from regard.plan.modules import shape_of

    with float64():
        layer = both(8, 4)[2]
    again = eval(repr(layer), vars(regard))
    assert sorted(again.state_dict()) == sorted(layer.state_dict())
    assert layer.kind == "Differential"
    assert layer.explain(torch.randn(1, 3, 16).double()).startswith("3 queries x 3 keys, 4 heads")
    with pytest.raises(TypeError, match="DifferentialAttention"):
        shape_of(layer)


@pytest.mark.parametrize("heads", [{"num_heads": 3}, {"num_heads": 6, "num_kv_heads": 3}])
def test_odd_heads_are_refused(heads):
    with pytest.raises(ValueError, match="are even"):
        DifferentialAttention(12, **heads)


GROUPED = [(10, 2, 4), (10, 2, 2), (6, 3, None), (5, 1, 2)]  # query, noise and key heads


def grouped(heads: int, noise: int, kv_heads: int | None):
    torch.manual_seed(3)
    layer = DifferentialAttention(
        16, heads, num_kv_heads=kv_heads, head_dim=6, num_noise_heads=noise, rope=Rotary(6),
        mask=Causal(),
    ).eval()  # fmt: skip
    for each in layer.parameters():
        torch.nn.init.normal_(each, std=0.4)
    return layer


@pytest.mark.parametrize(("heads", "noise", "kv_heads"), GROUPED)
def test_grouped_heads_are_the_oracles_head_by_head(heads, noise, kv_heads):
    """Head `s` of group `g` of the first softmax less the last head of the group."""
    with float64(), torch.no_grad():
        layer, x = grouped(heads, noise, kv_heads), x_of()
        of_group, places = heads // noise, torch.arange(TOKENS)
        pairs = layer.num_kv_heads // 2

        def one(weight, head, rotated=True):
            """A head of a projection, `[B, 1, L, 6]`."""
            y = (x @ weight.weight.mT)[:, None, :, 6 * head : 6 * head + 6]
            return layer.rope.rotate(y, places) if rotated else y

        def softmax(head, key, pair):
            v = [one(layer.v_proj, 2 * pair + each, False) for each in (0, 1)]
            three = one(layer.q_proj, head), one(layer.k_proj, key), torch.cat(v, -1)
            judged = oracle.attention(*map(torch.Tensor.tolist, three), visible=_causal)
            return torch.tensor(judged.out), torch.tensor(judged.weights)

        outs, weights, factor = [], [], float(layer.factor())
        for group in range(noise):
            pair, last = group * pairs // noise, of_group * (group + 1) - 1
            second = softmax(last, 2 * pair + 1, pair)
            for head in range(of_group * group, last):
                first = softmax(head, 2 * pair, pair)
                outs.append(first[0] - factor * second[0])
                weights.append(first[1] - factor * second[1])
        out = torch.cat(outs, 1)
        root = (out.pow(2).mean(-1, keepdim=True) + layer.groupnorm.eps).sqrt()
        out = (1 - layer.lambda_init) * out / root * layer.groupnorm.weight
        torch.testing.assert_close(layer(x), layer.o_proj(out.transpose(1, 2).flatten(2)))
        torch.testing.assert_close(layer.weights(x), torch.cat(weights, 1))


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize(("heads", "noise", "kv_heads"), GROUPED)
def test_every_cache_gives_the_result_of_grouped_heads(name, heads, noise, kv_heads):
    with float64():
        layer, x, cache = grouped(heads, noise, kv_heads), x_of(), CACHES[name]()
        out = stepwise(layer, x, cache)
        assert (out - layer(x)).abs().max() <= bound_of(name)
        if name == "KVCache":
            assert cache.nbytes == 2 * TOKENS * 2 * layer.num_kv_heads * 6 * 8


def test_grouped_heads_have_gradients_and_code():
    import regard

    with float64():
        layer = grouped(10, 2, 4)
        assert all(each.abs().sum() > 0 for each in gradients(layer, layer(x_of())).values())
        again = eval(repr(layer), vars(regard))
        assert again.num_noise_heads == 2
        again.load_state_dict(layer.state_dict())
        assert layer.explain(x_of()[:1]).startswith("9 queries x 9 keys, 8 heads")


@pytest.mark.parametrize(
    "heads",
    [(10, 3, 2), (10, 10, 2), (10, 2, 3), (10, 2, 8), (10, 0, 2), (10, 2, 0)],
)
def test_groups_that_do_not_divide_are_refused(heads):
    with pytest.raises(ValueError, match=r"num_(noise|kv)_heads"):
        grouped(*heads)
