"""A fused projection split, or separate ones fused: the same rows, so the same attention."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard import Attention, Causal, Rotary
from regard.convert.exact.layouts import (
    LAYOUTS,
    SEPARATE,
    fuse,
    fuse_state,
    split_fused,
    split_state,
)
from regard.hf import attention_modules
from zoo import ZOO

FUSED = {  # a model of the zoo, its sizes (heads, key heads, size of a head), its rope
    "phi3": ("Phi3Attention", (4, 2, 6), Rotary(4, theta=100.0)),
    "gpt-neox": ("GPTNeoXAttention", (4, 4, 6), Rotary(2, theta=100.0)),
    "falcon": ("FalconAttention", (4, 1, 8), Rotary(8)),
    "falcon groups": ("FalconAttention", (4, 2, 8), Rotary(8)),
}


@st.composite
def shapes(draw):
    groups, size = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    return groups * size, groups, draw(st.integers(1, 5))


def sizes_of(shape):
    return {"num_heads": shape[0], "num_kv_heads": shape[1]}


@given(shapes(), st.sampled_from(sorted(LAYOUTS)), st.booleans())
def test_splitting_inverts_fusing(shape, name, weight):
    heads, groups, dim = shape
    width = (7,) if weight else ()
    parts = [torch.randn(n * dim, *width) for n in (heads, groups, groups)]
    fused = fuse(*parts, LAYOUTS[name], **sizes_of(shape))
    again = split_fused(fused, LAYOUTS[name], **sizes_of(shape))
    assert all(a.equal(b) for a, b in zip(again, parts, strict=True))
    assert fuse(*again, LAYOUTS[name], **sizes_of(shape)).equal(fused)


def loaded(model: str) -> tuple:
    """A fused module, and a layer of regard that has its split weights."""
    name, (heads, groups, dim), rope = FUSED[model]
    module = next(iter(attention_modules(ZOO[model].build()).values())).eval()
    state = split_state(module.state_dict(), LAYOUTS[name], num_heads=heads, num_kv_heads=groups)
    state = {key.replace("dense.", "o_proj."): value for key, value in state.items()}
    layer = Attention(
        state["o_proj.weight"].shape[0],
        heads,
        num_kv_heads=groups,
        head_dim=dim,
        bias={key.partition(".")[0] for key in state if key.endswith("bias")},
        rope=rope,
        mask=Causal(),
    )
    layer.load_state_dict(state)
    return module, layer.eval()


def angles(rope: Rotary, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines as transformers hands them to its modules."""
    twice = torch.cat([rope.angles(torch.arange(length))] * 2, dim=-1)[None]
    return twice.cos(), twice.sin()


@torch.no_grad()
@pytest.mark.parametrize("model", FUSED)
def test_a_module_of_transformers_split_is_the_same_attention(model):
    module, layer = loaded(model)
    x = torch.randn(2, 5, layer.hidden_size)
    given = {"attention_mask": None, "position_embeddings": angles(layer.rope, 5)}
    if "Falcon" in type(module).__name__:
        given["alibi"] = None
    torch.testing.assert_close(layer(x), module(x, **given)[0], atol=2e-6, rtol=2e-6)


@torch.no_grad()
def test_gpt2_split_is_the_same_attention():
    module = next(iter(attention_modules(ZOO["gpt2"].build()).values()))
    scale = module.head_dim**-0.5 / (module.layer_idx + 1)
    layer = Attention(24, 4, bias=True, mask=Causal(), scale=scale)
    state = split_state(module.state_dict(), LAYOUTS["GPT2Attention"], num_heads=4)
    wanted = {
        **{key: value for key, value in state.items() if key.partition(".")[0] in SEPARATE},
        "o_proj.weight": state["c_proj.weight"].mT,
        "o_proj.bias": state["c_proj.bias"],
    }
    layer.load_state_dict(wanted)
    x = torch.randn(2, 5, 24)
    torch.testing.assert_close(layer(x), module(x)[0], atol=2e-6, rtol=2e-6)


@torch.no_grad()
@pytest.mark.parametrize("bias", [True, False])
def test_torchs_own_module_split_is_the_same_attention(bias):
    module = torch.nn.MultiheadAttention(6, 3, bias=bias, batch_first=True).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    state = split_state(module.state_dict(), LAYOUTS["MultiheadAttention"], num_heads=3)
    layer = Attention(6, 3, bias=bias).double()
    layer.load_state_dict({key.replace("out_proj", "o_proj"): v for key, v in state.items()})
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    torch.testing.assert_close(layer(x), module(x, x, x)[0], atol=1e-12, rtol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("biased", [(), ("q_proj",), ("k_proj", "v_proj"), SEPARATE], ids=str)
def test_fused_for_torchs_own_module_is_the_same_attention(biased):
    layer = Attention(6, 3, bias=set(biased), out_bias=bool(biased)).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    state = fuse_state(layer.state_dict(), LAYOUTS["MultiheadAttention"], num_heads=3)
    module = torch.nn.MultiheadAttention(6, 3, bias=bool(biased), batch_first=True).double()
    module.load_state_dict({key.replace("o_proj", "out_proj"): v for key, v in state.items()})
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    torch.testing.assert_close(module(x, x, x)[0], layer(x), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("biased", [(), ("v_proj",), SEPARATE], ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_whole_state_dict_there_and_back(name, biased):
    layers = torch.nn.ModuleList(Attention(8, 4, bias=set(biased)) for _ in range(2))
    state = {**layers.state_dict(), "head.weight": torch.randn(3, 8)}
    fused = fuse_state(state, LAYOUTS[name], num_heads=4)
    assert not any(part in SEPARATE for key in fused for part in key.split("."))
    again = split_state(fused, LAYOUTS[name], num_heads=4)
    assert all(again[key].equal(value) for key, value in state.items())
    assert all(again[key].eq(0).all() for key in again.keys() - state.keys())


def test_split_weights_do_not_share_memory_with_the_fused_one():
    fused = torch.randn(6, 2)
    split_fused(fused, LAYOUTS["MultiheadAttention"], num_heads=2)[0].zero_()
    assert fused.ne(0).all()


@pytest.mark.parametrize(
    ("heads", "groups", "message"),
    [
        (4, 3, "num_kv_heads=3 does not divide num_heads=4"),
        (4, 0, "num_kv_heads=0 does not divide"),
        (4, 2, r"12 rows .* 4 query heads and 2 each of keys and values: 8 heads"),
    ],
)
def test_heads_that_do_not_divide_are_refused(heads, groups, message):
    given = {"num_heads": heads, "num_kv_heads": groups}
    with pytest.raises(ValueError, match=message):
        split_fused(torch.randn(12, 3), LAYOUTS["FalconAttention"], **given)


def test_parts_of_other_sizes_are_refused(unchecked):
    q, k, v = torch.randn(8, 3), torch.randn(8, 3), torch.randn(6, 3)
    with pytest.raises(ValueError, match="8, 8 and 6 rows, which are not 2, 2 and 2 heads"):
        fuse(q, k, v, LAYOUTS["GPTNeoXAttention"], num_heads=2)


def test_state_dicts_without_such_projections_are_refused():
    state = {"qkv.weight": torch.randn(6, 2)}
    with pytest.raises(ValueError, match=r"no parameter is named qkv_proj\.weight"):
        split_state(state, LAYOUTS["Phi3Attention"], num_heads=2)
    with pytest.raises(ValueError, match="no parameter is named q_proj, k_proj, v_proj"):
        fuse_state(state, LAYOUTS["Phi3Attention"], num_heads=2)
