"""A conversion of offloaded weights is equal to one of weights in memory."""

import pytest
import torch

from covering import covering
from regard.convert import convert, save, target_of
from regard.hf import attention_modules, attention_of, load, place
from regard.hf.loading.offloaded import fetched
from tiny import tiny, tokens

FAMILIES = ("llama", "qwen2")


@pytest.fixture
def folder(tmp_path, request):
    tiny(request.param).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("folder", "to"),
    [
        *covering(FAMILIES, ("mha", "mqa", "mla:12", "mla:12+4"), together=1),
        *((family, to) for family in ("qwen3", "gemma3") for to in ("mha", "mla:12", "mla:24")),
    ],
    indirect=["folder"],
)
@torch.no_grad()
def test_an_offloaded_model_is_converted_and_saved(folder, to):
    logits = []
    for low_memory in (False, True):
        model, _ = load(folder, low_memory=low_memory)
        assert any(each.is_meta for each in model.parameters()) == low_memory
        shipped = [attention_of(module) for module in attention_modules(model).values()]
        (made,) = convert(model, [target_of(to, shipped)], tokens(8, 128))
        out = folder.parent / f"made {low_memory}"
        save(place(model, made.layers), None, out, card="", report={})
        logits.append(load(out)[0](tokens(2, 20)).logits)
    torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_tied_weights_on_disk_are_written_once_and_too_large_ones_not_at_all(tmp_path):
    model = tiny("llama")
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.model.embed_tokens.weight[0, 0] = 1e5
    model.save_pretrained(tmp_path / "model")
    there, _ = load(tmp_path / "model", low_memory=True)
    out = save(there, None, tmp_path / "out", dtype=torch.float32)
    assert b"lm_head" not in (out / "model.safetensors").read_bytes()
    made, _ = load(out)
    torch.testing.assert_close(made(tokens(2, 20)).logits, model(tokens(2, 20)).logits)
    with pytest.raises(
        ValueError, match=r"embed_tokens.weight has a weight of 1e\+05, and float16"
    ):
        save(there, None, tmp_path / "half", dtype=torch.float16)
    assert not (tmp_path / "half").exists()


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
@torch.no_grad()
def test_fetched_weights_are_those_that_were_written(folder):
    model, _ = load(folder, low_memory=True)
    there, _ = load(folder)
    torch.testing.assert_close(model(tokens(2, 20)).logits, there(tokens(2, 20)).logits)
    for name, module in model.named_modules():
        for key, _ in module.named_parameters(recurse=False):
            assert torch.equal(fetched(module, key), getattr(there.get_submodule(name), key))
    with pytest.raises(ValueError, match="it has no values"):
        fetched(torch.nn.Linear(2, 2, device="meta"), "weight")


def test_only_stock_safetensors_can_be_offloaded(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"no")
    with pytest.raises(ValueError, match="low_memory reads stock safetensors"):
        load(tmp_path / "model.gguf", low_memory=True)
