"""Linear layers of installed models: the same products, bound, unbound, traced and copied."""

import copy
import io
import pickle
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional

pytest.importorskip("numba")

from transformers import LlamaConfig, LlamaForCausalLM

import regard.hf
from regard import rates
from regard.hf.running import products
from regard.hf.running.products import SMALLEST, bind_linear
from regard.matrices import MOST_ROWS, product_objection
from regard.ops.kernels.vectors import machine_lanes

WIDTH = 256  # of a square layer of `SMALLEST` weights
CONFIG = LlamaConfig(hidden_size=256, num_attention_heads=4, num_key_value_heads=2, vocab_size=300,
                     num_hidden_layers=2, intermediate_size=512)  # fmt: skip
AVX2 = machine_lanes() == 8
TOKENS = torch.arange(3, 11).view(1, 8)


@pytest.fixture
def calls(monkeypatch):
    """The rows of each call that compiled code has run."""
    from regard.ops.kernels import chaining as module

    found, run = [], module.linear

    def recorded(x, weight, bias=None):
        out = run(x, weight, bias)
        if out is not None:
            found.append(x.numel() // x.shape[-1])
        return out

    monkeypatch.setattr(module, "linear", recorded)
    return found


@pytest.fixture
def layer():
    """A bound layer in a module of its own."""
    holder = nn.Sequential(nn.Linear(WIDTH, WIDTH)).requires_grad_(False)
    assert bind_linear(holder) == 1
    return holder[0]


def own(layer, x):
    return functional.linear(x, layer.weight, layer.bias)


@torch.no_grad()
def test_an_installed_model_decodes_by_compiled_products_and_a_prompt_does_not(calls):
    model = LlamaForCausalLM(CONFIG).eval()
    shipped = model(TOKENS).logits
    report = regard.hf.install(model)
    linears = 7 * CONFIG.num_hidden_layers + 1
    assert report.linear == linears - 2 * CONFIG.num_hidden_layers  # keys' and values' are small
    assert f"{report.linear} linear layers on a CPU: up to 8 tokens by compiled code" in str(report)
    torch.testing.assert_close(model(TOKENS).logits, shipped, atol=1e-5, rtol=1e-5)
    alone = report.linear - 3 * report.decoder_layers  # those of MLPs are run in chains
    assert calls == [TOKENS.shape[1]] * alone
    calls.clear()
    model(TOKENS.repeat(1, 2))
    assert calls == []
    regard.hf.uninstall(model)
    assert not any("forward" in vars(each) for each in model.modules())
    assert model(TOKENS).logits.equal(shipped)
    assert calls == []


def test_install_may_leave_linear_layers_alone(calls):
    model = LlamaForCausalLM(CONFIG).eval()
    report = regard.hf.install(model, linear=False)
    assert (report.linear, report.decoder_layers) == (0, 0)
    assert "compiled code" not in str(report)
    with torch.no_grad():
        model(TOKENS)
    assert calls == []


def test_installing_twice_is_installing_once():
    model = LlamaForCausalLM(CONFIG).eval()
    assert regard.hf.install(model).linear == regard.hf.install(model).linear > 0
    regard.hf.uninstall(model)
    assert not any("forward" in vars(each) for each in model.modules())


def test_only_plain_and_large_layers_are_bound():
    class Own(nn.Linear):
        """A layer of a user."""

    hooked = nn.Linear(WIDTH, WIDTH)
    hooked.forward = hooked.forward  # as accelerate's hooks leave it
    small = nn.Linear(WIDTH, SMALLEST // WIDTH - 1)
    holder = nn.Sequential(Own(WIDTH, WIDTH), hooked, small, nn.Linear(WIDTH, WIDTH, device="meta"))
    assert bind_linear(holder) == 0


def test_a_bound_layer_is_still_a_plain_product(layer):
    assert product_objection(layer) is None
    layer.register_forward_hook(lambda *_: None)
    assert "hooks" in product_objection(layer)


@pytest.mark.parametrize("biased", [False, True])
def test_gradients_are_those_of_torch(biased, calls):
    holder = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=biased))
    bind_linear(holder)
    x = torch.randn(2, WIDTH, requires_grad=True)
    found = torch.autograd.grad(holder(x).square().sum(), [x, *holder.parameters()])
    wanted = torch.autograd.grad(own(holder[0], x).square().sum(), [x, *holder.parameters()])
    assert all(a.equal(b) for a, b in zip(found, wanted, strict=True))
    holder.requires_grad_(False)
    assert holder(x).requires_grad
    assert calls == []


def test_half_frozen_layers_have_the_gradients_of_the_other_half(layer, calls):
    layer.bias.requires_grad_(True)
    layer(torch.randn(1, WIDTH)).sum().backward()
    assert layer.bias.grad.eq(1).all()
    assert calls == []


def test_rows_that_are_many_are_torch_s(layer, calls):
    for rows in (MOST_ROWS, MOST_ROWS + 1):
        x = torch.randn(rows, WIDTH)
        torch.testing.assert_close(layer(x), own(layer, x), atol=1e-5, rtol=1e-5)
    assert calls == [MOST_ROWS]


def test_another_dtype_is_that_of_torch(layer, calls, monkeypatch):
    x = torch.randn(1, WIDTH, dtype=torch.float64)
    assert layer.double()(x).equal(own(layer, x))
    assert calls == []
    with pytest.raises(RuntimeError, match="dtype"):
        layer(x.float())
    half = layer.bfloat16()
    x = x.bfloat16()
    torch.testing.assert_close(half(x), own(half, x))
    calls.clear()
    monkeypatch.setattr(products, "most_rows", lambda *_: 0)
    assert half(x).equal(own(half, x))
    assert calls == []


LANES = {"AMX": 16, "AVX-512": 16, "AVX-512 FP16": 16, "AVX2": 8, "Arm": 4, "no numba": 0}
FEATURES = {"AMX": {"+amx-bf16", "+avx512fp16"}, "AVX-512 FP16": {"+avx512fp16"}}


@pytest.mark.parametrize(
    ("processor", "few", "many"),
    [  # dtypes in which few rows are compiled, and in which many rows are computed in float32
        ("AMX", "float32 bfloat16", ""),
        ("AVX-512 FP16", "float32 bfloat16", ""),
        ("AVX-512", "float32 bfloat16", "float16"),
        ("AVX2", "float32 bfloat16", "bfloat16 float16"),
        ("Arm", "float32", ""),
        ("no numba", "", ""),
    ],
)
def test_a_processor_runs_products_that_are_slow_in_torch(processor, few, many, monkeypatch):
    monkeypatch.setattr(products, "is_installed", lambda: processor != "no numba")
    machine = LANES[processor], FEATURES.get(processor, set())
    monkeypatch.setattr(products, "_machine", lambda: machine)
    dtypes = torch.float64, torch.float32, torch.bfloat16, torch.float16
    most = products.most_rows.__wrapped__
    compiled = [each for each in dtypes if most(each, products.WIDE)]
    widened = [each for each in dtypes if products.is_emulated.__wrapped__(each)]
    for found, wanted in ((compiled, few), (widened, many)):
        assert " ".join(str(each)[6:] for each in found) == wanted
    rows = {each: most(each, 2 * products.WIDE) for each in compiled}
    assert rows == {
        each: 4 if (processor, each) == ("AMX", torch.bfloat16) else MOST_ROWS for each in compiled
    }


@pytest.mark.parametrize("few", [False, True], ids=["at once", "in parts"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_many_rows_of_half_precision_are_computed_in_float32(dtype, biased, few, monkeypatch):
    """Each output is the sum of float64, rounded once."""
    if few:
        monkeypatch.setattr(products, "WIDENED", 100 * WIDTH)
    layer = nn.Linear(WIDTH, WIDTH, bias=biased, dtype=dtype).requires_grad_(False)
    monkeypatch.setattr(products, "is_emulated", lambda dtype: True)
    bind_linear(nn.Sequential(layer))
    x = torch.randn(3, MOST_ROWS, WIDTH, dtype=dtype)
    bias = layer.bias.double() if biased else None
    wanted = functional.linear(x.double(), layer.weight.double(), bias)
    found = layer(x)
    assert found.dtype is dtype
    error = (found.double() - wanted).abs()
    assert (error <= 0.51 * torch.finfo(dtype).eps * wanted.abs() + 1e-5).all()
    weight = layer.weight
    layer.weight = nn.Parameter(weight.T.contiguous().T, requires_grad=False)
    assert layer(x).equal(found)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        layer(x[..., :-1])


@pytest.mark.skipif(AVX2, reason="on AVX2 half precision is computed in float32")
def test_many_rows_of_half_precision_are_torch_s_on_other_processors(layer):
    half, x = layer.bfloat16(), torch.randn(2 * MOST_ROWS, WIDTH).bfloat16()
    assert half(x).equal(own(half, x))


def test_autocast_casts(layer, calls):
    x = torch.randn(1, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype is torch.bfloat16
        assert layer(x).equal(own(layer, x))
    assert calls == []


def test_transforms_and_traces_see_torch_s_operator(layer, calls):
    x = torch.randn(3, WIDTH)
    torch.testing.assert_close(torch.vmap(layer)(x), own(layer, x))
    slope = torch.func.grad(lambda x: layer(x).sum())(x)
    torch.testing.assert_close(slope, torch.ones(3, WIDTH) @ layer.weight)
    program = torch.export.export(nn.Sequential(layer), (x,))
    assert "linear" in str(program.graph)
    assert calls == []


def test_a_parametrised_weight_is_read_as_it_is_now(layer):
    class Doubled(nn.Module):
        """Twice the weight."""

        def forward(self, weight):
            return 2 * weight

    x, before = torch.randn(1, WIDTH), layer.weight.detach().clone()
    nn.utils.parametrize.register_parametrization(layer, "weight", Doubled())
    wanted = functional.linear(x, 2 * before, layer.bias)
    torch.testing.assert_close(layer(x), wanted, atol=1e-5, rtol=1e-5)


def test_a_weight_that_moves_or_changes_is_read_as_it_is_now(layer, calls):
    x = torch.randn(1, WIDTH)
    layer(x)
    layer.weight.data = torch.randn(WIDTH, WIDTH)
    torch.testing.assert_close(layer(x), own(layer, x), atol=1e-5, rtol=1e-5)
    layer.weight.share_memory_()
    layer.weight.mul_(2)
    torch.testing.assert_close(layer(x), own(layer, x), atol=1e-5, rtol=1e-5)
    layer.weight = nn.Parameter(torch.randn(16, WIDTH), requires_grad=False)
    layer.bias = None
    torch.testing.assert_close(layer(x), own(layer, x), atol=1e-5, rtol=1e-5)
    assert calls == [1] * 4


def test_copies_and_pickles_call_themselves(layer, calls):
    x = torch.randn(1, WIDTH)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    others = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))
    for other in (*others, torch.load(file, weights_only=False)):
        with torch.no_grad():
            other.weight.mul_(2)
        torch.testing.assert_close(other(x), own(other, x), atol=1e-5, rtol=1e-5)
    assert calls == [1] * 3


def test_a_model_that_is_read_where_numba_is_missing_runs_on_torch(layer, calls, monkeypatch):
    x = torch.randn(1, WIDTH)
    monkeypatch.setattr(products, "is_installed", lambda: False)
    products.most_rows.cache_clear()
    assert layer(x).equal(own(layer, x))
    assert calls == []
    assert bind_linear(nn.Sequential(nn.Linear(WIDTH, WIDTH))) == 0
    products.most_rows.cache_clear()


def test_errors_of_wrong_sizes_are_torch_s(layer):
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        layer(torch.randn(1, WIDTH - 1))


def test_inference_mode_makes_inference_tensors(layer, calls):
    with torch.inference_mode():
        assert layer(torch.randn(1, WIDTH)).is_inference()
    assert calls == [1]


@pytest.fixture
def amd(monkeypatch):
    """Whether oneDNN ran each product of many rows, on a processor of AMD."""
    found, run = [], products.by_onednn
    monkeypatch.setattr(products, "is_made_by", "AuthenticAMD".__eq__)
    monkeypatch.setattr(products, "LARGE", SMALLEST)
    monkeypatch.setattr(products, "by_onednn", lambda *given: found.append(1) or run(*given))
    return found


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
@pytest.mark.parametrize("biased", [False, True])
def test_many_rows_of_float32_run_by_onednn_on_a_processor_of_amd(biased, amd):
    """However inputs, weights and biases lie in memory."""
    layer = nn.Linear(WIDTH, WIDTH, bias=biased).requires_grad_(False)
    bind_linear(nn.Sequential(layer))
    x = torch.randn(3, 2 * MOST_ROWS, WIDTH)
    wanted = own(layer.double(), x.double())
    layer.float()
    apart = x.transpose(0, 1).contiguous().transpose(0, 1)
    columns = torch.stack([x, x], -1)[..., 0]
    for each in (x, apart, columns, x[:, 1:], x[1:]):
        found, target = layer(each), wanted[-each.shape[0] :, -each.shape[1] :]
        torch.testing.assert_close(found.double(), target, atol=1e-5, rtol=1e-5)
        assert found.is_contiguous()
    layer.weight = nn.Parameter(layer.weight.T.contiguous().T, requires_grad=False)
    torch.testing.assert_close(layer(x).double(), wanted, atol=1e-5, rtol=1e-5)
    assert len(amd) == 6


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
def test_products_that_onednn_would_refuse_or_misread_are_those_of_torch(layer, amd):
    x = torch.randn(2 * MOST_ROWS, WIDTH)
    torch._C._set_mkldnn_enabled(False)  # `torch.backends.mkldnn.flags` warns where it returns
    try:
        layer(x)
    finally:
        torch._C._set_mkldnn_enabled(True)
    layer(x.requires_grad_()).sum().backward()
    assert x.grad is not None
    x = x.detach()
    spread = torch.stack([layer.bias, layer.bias], -1)[:, 0]  # oneDNN reads it as if side by side
    layer.bias = nn.Parameter(spread, requires_grad=False)
    torch.testing.assert_close(layer(x), own(layer, x), atol=1e-5, rtol=1e-5)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        layer(x[:, :-1])
    with torch.autocast("cpu"):
        assert layer(x).dtype is torch.bfloat16
    assert layer.double()(x.double()).dtype is torch.float64
    assert amd == []


def test_which_products_suit_onednn(monkeypatch):
    large, small = torch.empty(products.LARGE // 64, 64), torch.empty(products.LARGE // 64 - 1, 64)
    for name, wanted in (("vendor_id\t: AuthenticAMD", True), ("vendor_id\t: GenuineIntel", False)):
        monkeypatch.setattr(rates, "processor", lambda name=name: ("x86_64", "2", name))
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
        monkeypatch.setattr(products, "is_made_by", rates.is_made_by.__wrapped__)
        assert products.suits_onednn(large) == wanted
        monkeypatch.undo()
    monkeypatch.setattr(products, "is_made_by", "AuthenticAMD".__eq__)
    assert not products.suits_onednn(small)
    assert not products.suits_onednn(large.bfloat16())


def test_no_tokens_need_no_compiled_code(layer, monkeypatch):
    monkeypatch.setattr(products, "most_rows", lambda *_: 0)  # as without numba
    monkeypatch.setitem(sys.modules, "regard.ops.kernels.chaining", None)
    assert layer(torch.empty(0, WIDTH)).shape == (0, WIDTH)
