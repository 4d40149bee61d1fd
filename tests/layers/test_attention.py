"""The layer with one projection each for queries, keys and values: its names, kinds and options."""

import pytest
import torch

from kinds import LAYERS, MLA
from regard import (
    Causal,
    GroupedQueryAttention,
    LatentKVAttention,
    MultiHeadAttention,
    MultiHeadLatentAttention,
    MultiQueryAttention,
    Rotary,
    SelfAttention,
    attend,
)
from regard.heads import merge_heads


def test_names_of_parameters_are_hugging_faces():
    names = {
        name
        for name, _ in GroupedQueryAttention(
            32, 4, 2, qk_norm="head", sinks=True, gate="head"
        ).named_parameters()
    }
    assert names == {
        *(f"{each}_proj.weight" for each in ("q", "k", "v", "o", "gate")),
        "q_norm.weight",
        "k_norm.weight",
        "sinks",
    }
    names = dict(MultiHeadLatentAttention(32, 4, **MLA, q_lora_rank=10).named_parameters())
    parts = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm")
    assert names.keys() == {f"{part}.weight" for part in (*parts, "kv_b_proj", "o_proj")}


def test_kinds():
    kinds = [layer.kind for layer in LAYERS]
    assert kinds == ["MHA", "MHA", "MQA", "GQA", "GQA", "MLA", "LatentKV"]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("kind", [MultiHeadAttention, MultiHeadLatentAttention, LatentKVAttention])
def test_fast_precision_is_attends(kind):
    """A layer hands its precision to `attend`, which says what it gives up for it."""
    sizes = {
        MultiHeadAttention: {},
        MultiHeadLatentAttention: MLA,
        LatentKVAttention: {"num_kv_heads": 2, "head_dim": 8, "kv_lora_rank": 12},
    }[kind]
    options = {"mask": Causal(), "backend": "blocked"}
    x = torch.randn(1, 300, 32).bfloat16()
    outputs = {}
    for precision in ("strict", "fast"):
        torch.manual_seed(0)
        layer = kind(32, 4, **sizes, **options, precision=precision).bfloat16().eval()
        with torch.no_grad():
            outputs[precision] = layer(x)
            assert ("kept in bfloat16" in layer.explain(x)) == (precision == "fast")
            if kind is MultiHeadAttention:
                out = attend(*layer.project(x), **options, precision=precision)
                assert torch.equal(outputs[precision], layer.o_proj(merge_heads(out)))
    assert not torch.equal(outputs["strict"], outputs["fast"])
    with pytest.raises(ValueError, match="'strict' or 'fast', got 'quick'"):
        kind(32, 4, **sizes, precision="quick")


class Negated:
    """A user's rope, whose rotation by half a turn changes every sign of the first channels."""

    dim, softmax_factor = 4, 2.0

    def __call__(self, q, k, positions):
        return self.rotate(q, positions), self.rotate(k, positions)

    def rotate(self, x, positions):
        assert positions.shape[-1] == x.shape[2]
        return torch.cat([-x[..., : self.dim], x[..., self.dim :]], -1)


@pytest.mark.usefixtures("unchecked")
def test_any_object_with_the_methods_of_a_rope_is_one():
    """Equal signs cancel in the products; the factor is that of the scale."""
    torch.manual_seed(0)
    layer = GroupedQueryAttention(32, 4, 2, rope=Negated(), mask=Causal())
    plain = GroupedQueryAttention(32, 4, 2, mask=Causal(), scale=2 * 8**-0.5)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(2, 5, 32)
    torch.testing.assert_close(layer(x), plain(x))
    latent = MultiHeadLatentAttention(32, 4, **{**MLA, "rope": Negated()}, mask=Causal())
    assert latent(x).shape == x.shape
    for wrong in ("rotary", None, Rotary):
        with pytest.raises(TypeError, match=r"methods of regard\.rope\.Rope"):
            GroupedQueryAttention(32, 4, 2, rope=wrong)


@pytest.mark.parametrize(
    ("kind", "decided"),
    [
        (SelfAttention, {"num_heads": 2}),
        (MultiHeadAttention, {"num_kv_heads": 2}),
        (MultiQueryAttention, {"num_kv_heads": 2}),
    ],
)
def test_what_a_name_decides_is_no_option(kind, decided):
    sizes = (32,) if kind is SelfAttention else (32, 4)
    with pytest.raises(TypeError, match=next(iter(decided))):
        kind(*sizes, **decided)
    assert not decided.keys() & kind(*sizes).arguments.keys()
