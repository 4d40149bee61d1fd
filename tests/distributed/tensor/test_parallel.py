"""Models with split layers: what is refused, and what is wrapped around them."""

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaModel

from ranks import on_ranks
from regard import Attention, KVCache, RelativeBias, SelfAttention, StaticCache
from regard.distributed import counted, tensor_parallel
from regard.distributed.tensor.heads import split_of
from regard.distributed.tensor.parallel import is_of_transformers
from session import LONG
from split_layers import (
    LAYERS,
    attention,
    drawn,
    gradients,
    inputs,
    largest_error,
    options_of,
    step,
)


class Model(nn.Module):
    """Two attention layers that share a score bias, as in T5, and other modules."""

    def __init__(self):
        super().__init__()
        bias = RelativeBias(6)
        self.layers = nn.ModuleList([attention(6, n, score_bias=bias)() for n in (2, 3)])
        self.mix = nn.Linear(24, 24)

    def forward(self, x):
        for layer in self.layers:
            x = x + self.mix(layer(x))
        return x


def _model(mesh):
    return step(tensor_parallel(drawn(Model), mesh), inputs())


@pytest.mark.parametrize("number", [2, 4])
def test_a_model_whose_layers_share_a_bias(number):
    judged = step(drawn(Model), inputs())
    for mine in on_ranks(number, _model):
        assert max(largest_error(mine, judged).values()) < 1e-11


def _refused(mesh):
    if mesh.ndim == 2:
        with pytest.raises(ValueError, match="mesh has one dimension, got 2"):
            tensor_parallel(attention(4, 4)(), mesh)
        return
    parallel = tensor_parallel(attention(4, 4)(), mesh)
    hooked = attention(4, 4)()
    hooked.q_proj.register_forward_hook(lambda *a: None)
    mixed = nn.ModuleDict({"good": attention(4, 4)(), "bad": SelfAttention(8)})
    cases = [
        (parallel, "Attention cannot be split: its parameters are split already"),
        (hooked, "q_proj has forward hooks; call this before adapters"),
        (mixed, r"bad \(SelfAttention\) cannot be split: it has one head"),
        (nn.Sequential(nn.Linear(2, 2)), "Sequential contains no attention layer"),
        (attention(3, 3, qk_norm="head", norm_eps=0.0)(), "eps=0 and would divide"),
    ]
    with counted() as sent:
        for module, message in cases:
            before = {name: id(p) for name, p in module.named_parameters()}
            with pytest.raises(ValueError, match=message):
                tensor_parallel(module, mesh)
            assert before == {name: id(p) for name, p in module.named_parameters()}
    assert all("agreement" in each for each in sent.steps)
    assert split_of(mixed["good"]) is None
    with pytest.raises(TypeError, match="DeviceMesh"):
        tensor_parallel(hooked, 2)


def test_refusals():
    on_ranks(2, _refused)
    on_ranks(4, _refused, mesh=(2, 2))


def _other_layers(mesh):
    layer = attention(4, 4 if mesh.get_local_rank() else 2)()
    with pytest.raises(ValueError, match=r"the ranks differ in module \w+: rank 0 .*, rank 1 "):
        tensor_parallel(layer, mesh)
    assert split_of(layer) is None
    hooked = attention(4, 4)()
    if mesh.get_local_rank():
        hooked.q_proj.register_forward_hook(lambda *a: None)
    with pytest.raises(ValueError, match="rank 1: Attention cannot be split: q_proj has forward"):
        tensor_parallel(hooked, mesh)


def test_ranks_with_other_layers_raise_alike():
    on_ranks(2, _other_layers)


def _described(mesh):
    layer, one = tensor_parallel(attention(6, 2)(), mesh), attention(6, 2)()
    assert (layer.kind, repr(layer)) == (one.kind, repr(one))
    assert (layer.num_heads, layer.num_kv_heads) == (6, 2)
    assert isinstance(layer, Attention)
    split = split_of(layer)
    assert split.ranks.rank == mesh.get_local_rank()
    assert layer.weights(inputs().float()).shape[1] == split.local_heads
    explained = layer.explain(inputs().float()).splitlines()[0]
    assert f"{split.local_heads} heads on {split.local_kv_heads}" in explained


def test_a_split_layer_describes_itself_as_on_one_device():
    on_ranks(2, _described)
    on_ranks(4, _described)


def _compiled(mesh):
    layer, x = tensor_parallel(drawn(LAYERS["gqa norm"][0]), mesh), inputs()
    plain = step(layer, x)
    layer.zero_grad()
    torch._dynamo.reset()
    compiled = torch.compile(nn.Sequential(layer), backend="aot_eager")
    xs = x.clone().requires_grad_()
    out = compiled(xs)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).double())
    return plain, (out.detach(), {**gradients(layer), "x": xs.grad})


def test_compiled():
    for plain, mine in on_ranks(2, _compiled):
        assert max(largest_error(mine, plain).values()) < 1e-12


def _recomputed(mesh):
    found = []
    for name in ("gqa width", "mla queries"):
        layer, xs = tensor_parallel(drawn(LAYERS[name][0]), mesh), inputs().requires_grad_()
        plain = step(layer, inputs())
        layer.zero_grad()
        out = checkpoint(layer, xs, use_reentrant=False)
        out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).double())
        found.append((plain, (out.detach(), {**gradients(layer), "x": xs.grad})))
    return found


def test_activations_recomputed():
    for results in on_ranks(2, _recomputed):
        for plain, mine in results:
            assert max(largest_error(mine, plain).values()) < 1e-12


def _trained(mesh, name):
    layer, x = drawn(LAYERS[name][0]), inputs()
    layer = layer if mesh is None else tensor_parallel(layer, mesh)
    optimizer, norms = torch.optim.AdamW(layer.parameters(), lr=0.01), []
    for _ in range(3):
        optimizer.zero_grad()
        layer(x, **options_of(name)).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(layer.parameters(), 0.1)
        norms.append(norm if mesh is None else norm.full_tensor())
        optimizer.step()
    return torch.stack(norms), layer(x, **options_of(name)).detach()


@pytest.mark.parametrize(
    ("number", "name"), [(2, "smol"), (4, "gqa width"), *([(4, "mla")] if LONG else [])]
)
def test_training_with_clipped_gradients(number, name):
    judged = _trained(None, name)
    for mine in on_ranks(number, _trained, name):
        torch.testing.assert_close(mine, judged, rtol=1e-9, atol=1e-9)


DECODED = ["mha", "gqa norm", "smol", "gqa width", "mla queries", "latent kv width"]


def _decoded(mesh, names, dtype):
    found = []
    for name in names:
        layer = drawn(LAYERS[name][0], dtype).eval()
        layer, x = tensor_parallel(layer, mesh), inputs(2, 9).to(dtype)
        caches = [KVCache(), *([StaticCache(16)] if hasattr(layer, "num_kv_heads") else [])]
        for cache in caches:
            with torch.inference_mode():
                pieces = [layer(x[:, :3], cache=cache)]
                pieces += [layer(x[:, i : i + 1], cache=cache) for i in range(3, 9)]
            found.append((name, torch.cat(pieces, dim=1), cache.nbytes))
    return found


@pytest.mark.parametrize("number", [2, 4])
def test_decoding_with_caches(number):
    names = DECODED if LONG else DECODED[number == 2 :: 2]
    for results in on_ranks(number, _decoded, names, torch.float32):
        for name, out, _ in results:
            layer = drawn(LAYERS[name][0])
            exact = layer(inputs(2, 9))
            plain = layer.float()(inputs(2, 9).float())
            unit = torch.finfo(torch.float32).eps * exact.abs().max()
            allowed = 4 * max((plain - exact).abs().max(), unit)
            assert (out - exact).abs().max() <= allowed, name


def test_a_cache_holds_the_key_heads_of_its_rank():
    sizes = {name: nbytes for name, _, nbytes in on_ranks(2, _decoded, ["mha"], torch.float32)[0]}
    layer, cache = drawn(LAYERS["mha"][0], torch.float32), KVCache()
    with torch.inference_mode():
        layer(inputs(2, 9).float(), cache=cache)
    assert cache.nbytes == 2 * 9 * 2 * 16 * 4
    assert sizes["mha"] <= 2 * 16 * 2 * 8 * 4


SHARDED = ["mha", "smol", "mqa", "mla queries", "latent kv width", "gqa width"]


def _sharded(mesh):
    for name in SHARDED if LONG else SHARDED[1:4]:
        layer = tensor_parallel(drawn(LAYERS[name][0]), mesh["b"])
        one, x = drawn(LAYERS[name][0]), inputs()
        fully_shard(layer, mesh=mesh["a"])
        got, want = layer(x, **options_of(name)), one(x, **options_of(name))
        torch.testing.assert_close(got, want)
        got.square().sum().backward()
        want.square().sum().backward()
        torch.optim.SGD(layer.parameters(), lr=0.01).step()
        torch.optim.SGD(one.parameters(), lr=0.01).step()
        whole = get_model_state_dict(layer, options=StateDictOptions(full_state_dict=True))
        for key, value in one.state_dict().items():
            torch.testing.assert_close(whole[key], value, msg=f"{name} {key}")
        layer.load_state_dict(drawn(LAYERS[name][0]).state_dict())
        torch.testing.assert_close(layer(x, **options_of(name)), want)


def test_fully_shard_takes_the_other_dimension():
    on_ranks(4, _sharded, mesh=(2, 2))


def _elsewhere(mesh):
    layer, x = attention(6, 3)().double(), inputs()
    expected = layer(x)
    with torch.device("meta"):  # what has no device of its own would be made there
        out = tensor_parallel(layer, mesh)(x)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


def test_another_default_device_changes_nothing():
    on_ranks(2, _elsewhere)


# ---- models ----


class Derived(LlamaModel):
    pass


def test_models_of_transformers():
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "vocab_size": 9, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, intermediate_size=8)
    with torch.device("meta"):
        model, derived = LlamaModel(config), Derived(config)
    assert is_of_transformers(model)
    assert is_of_transformers(derived)
    assert not is_of_transformers(model.layers[0])
    assert not is_of_transformers(torch.nn.Sequential(model))
    assert not is_of_transformers(Attention(8, 2))
    assert not is_of_transformers(config)
