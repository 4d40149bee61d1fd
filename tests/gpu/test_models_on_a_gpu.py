"""transformers' models on a GPU: the logits and the text of the same model on a CPU, in float32."""

import copy
import os

import pytest
import torch
import transformers

import regard
import regard.hf
import regard.see
from regard.convert import convert, target_of
from regard.hf import attention_modules, attention_of
from zoo import WRITERS, ZOO, inputs, result, tokens

DEVICE = os.environ.get("REGARD_TEST_DEVICE", "cuda")
pytestmark = pytest.mark.skipif(
    DEVICE == "cuda" and not torch.cuda.is_available(), reason="torch sees no GPU"
)
OPTIONS = {"static": {"max_length": 96}, "quantized": {"bits": 8, "group": 4}}


def built(name):
    if not hasattr(transformers, ZOO[name].model):
        pytest.skip(f"this transformers has no {ZOO[name].model}")
    return ZOO[name].build().eval()


@pytest.mark.parametrize("name", ZOO)
def test_logits_are_those_of_a_cpu(name, unchecked):
    model, given = built(name), inputs(name, padding="left", length=23)
    mask = given.get("attention_mask")
    seen = mask.bool() if mask is not None and "decoder_input_ids" not in given else slice(None)
    with torch.no_grad():
        want = result(model(**given))
        there = copy.deepcopy(model).to(DEVICE)
        moved = {key: x.to(DEVICE) for key, x in given.items()}
        shipped = result(there(**moved)).cpu()
        regard.hf.install(there)
        out = result(there(**moved)).cpu()
    size = want.abs().max()
    error, apart = ((x - want)[seen].abs().max() / size for x in (out, shipped))
    assert error <= 2e-5 + 3 * apart


@pytest.mark.parametrize("kind", [None, "auto", "static", "sliding", "quantized", "paged", "K8V4"])
@pytest.mark.parametrize("name", ["llama", "mistral", "deepseek-v3", "gpt-oss"])
def test_the_same_text(name, kind, unchecked):
    if kind == "sliding" and name not in ("mistral", "gpt-oss"):
        pytest.skip("it has no windows")
    model = built(name)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    ids = tokens(2, 9)
    settings = {"max_new_tokens": 16, "do_sample": False, "disable_compile": True}

    def write(model, ids):
        regard.hf.install(model)
        held = {}
        if kind is not None:
            held = {"past_key_values": regard.hf.cache(model, kind, **OPTIONS.get(kind, {}))}
        return model.generate(input_ids=ids, **settings, **held)

    there = copy.deepcopy(model).to(DEVICE)
    assert write(there, ids.to(DEVICE)).cpu().equal(write(model, ids))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_half_precision(name, dtype, unchecked):
    model = built(name).to(dtype)
    ids = tokens(2, 23)
    with torch.no_grad():
        want = copy.deepcopy(model).float()(ids).logits
        model.to(DEVICE)
        shipped = model(ids.to(DEVICE)).logits.cpu().float()
        regard.hf.install(model)
        out = model(ids.to(DEVICE)).logits.cpu().float()
    assert (out - want).norm() <= 2 * (shipped - want).norm() + 1e-3 * want.norm()


def test_conversions_and_maps(unchecked):
    model = built("llama").to(DEVICE)
    ids = torch.randint(3, 61, (4, 256)).to(DEVICE)
    shipped = [attention_of(module) for module in attention_modules(model).values()]
    asked = ("mqa", None), ("mla", 0.5), ("deepseek-50", None)
    targets = [target_of(to, shipped, budget=budget) for to, budget in asked]
    for made in convert(model, targets, ids):
        x = torch.randn(1, 5, 24, device=DEVICE)
        assert torch.isfinite(made.layers[0](x)).all()
    maps = regard.see.attention(model, ids[:1, :9])
    assert maps.overview.shape[0] == 3


@pytest.mark.parametrize("name", [name for name in WRITERS if not ZOO[name].fed])
def test_training_steps(name, unchecked):
    """Losses of three steps of the shipped and of the installed model."""
    ids, losses = tokens(2, 15).to(DEVICE), []
    for installed in (False, True):
        model = built(name).to(DEVICE).eval()  # no dropout
        if installed:
            regard.hf.install(model)
        steps = torch.optim.SGD(model.parameters(), lr=0.01)
        losses.append([])
        for _ in range(3):
            loss = torch.nn.functional.cross_entropy(
                model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
            )
            loss.backward()
            steps.step()
            steps.zero_grad()
            losses[-1].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
