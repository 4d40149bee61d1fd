"""Folders that regard.convert.save has written, and damaged ones."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from regard import Causal, LatentKVAttention, MultiHeadLatentAttention, Rotary, SlidingWindow
from regard.convert import as_latent, save
from regard.hf import attention_modules, attention_of, place
from regard.hf.loading.untrusted import CheckpointError
from regard.plan.converted import latent_shape
from regard.plan.describing import describe


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    config = LlamaConfig(
        hidden_size=24, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3
    )
    config.vocab_size, config.intermediate_size = 20, 16
    model = LlamaForCausalLM(config)
    layers = [as_latent(attention_of(each)) for each in attention_modules(model).values()]
    place(model, layers)
    folder = tmp_path_factory.mktemp("converted") / "small"
    save(model, None, folder)
    return folder, layers


def test_a_saved_conversion(converted: tuple[Path, Any]) -> None:
    folder, layers = converted
    model = describe(folder)
    assert model.architecture == "regard" and len(model.layers) == 3
    assert model.weight_bytes is not None and model.weight_bytes > 1000
    assert any("Converted from llama" in remark for remark in model.remarks)
    for shape, layer in zip(model.layers, layers, strict=True):
        assert shape.kind == "LatentKV" and shape.keys_by_position
        assert shape.kv_lora_rank == layer.kv_lora_rank
        assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (4, 2, 6)
        assert shape.rope == "Rotary(6)" and shape == latent_shape(layer)


@pytest.mark.parametrize(
    ("spoil", "rule"),
    [
        (lambda entry: entry["layers"].pop(), "an entry for each of the 3 layers"),
        (lambda entry: entry.pop("base"), "it must have"),
        (lambda entry: entry.update(base=[]), "'base' must be an object"),
        (lambda entry: entry.update(format=9), "format 1"),
        (lambda entry: entry["base"].update(hidden_size=48), "hidden_size=48"),
        (lambda entry: entry["base"].update(model_type="unheard"), "'base.model_type'"),
        (lambda entry: entry["layers"].__setitem__(1, None), "must have a kind"),
        (lambda entry: entry["layers"][1].update(kv_lora_rank=True), "'kv_lora_rank' of a layer"),
        (lambda entry: entry["layers"][1].update(kv_lora_rank=1 << 30), "'kv_lora_rank'"),
    ],
)
def test_damaged_ones(converted: tuple[Path, Any], tmp_path: Path, spoil: Any, rule: str) -> None:
    entry = copy.deepcopy(json.loads((converted[0] / "config.json").read_text()))
    spoil(entry)
    (tmp_path / "config.json").write_text(json.dumps(entry))
    with pytest.raises(CheckpointError, match=rule):
        describe(tmp_path)


def test_shapes_of_layers_with_all_options() -> None:
    mask = Causal() & SlidingWindow(5)
    layer = LatentKVAttention(
        16, 4, num_kv_heads=2, head_dim=8, kv_lora_rank=6, rope=Rotary(8), mask=mask,
        bias=True, qk_norm="head", softcap=20.0,
    )  # fmt: skip
    shape = latent_shape(layer)
    assert shape.window == 5 and shape.softcap == 20.0 and shape.qk_norm == "head"
    children = dict(layer.named_children())
    biased = {name for name in children if getattr(children[name], "bias", None) is not None}
    assert set(shape.bias) == biased
    mla = MultiHeadLatentAttention(
        16, 2, kv_lora_rank=6, q_lora_rank=4, qk_nope_head_dim=3, qk_rope_head_dim=2, v_head_dim=5,
        rope=Rotary(2, pairing="pairs"), mask=Causal(), latent_norm=False,
    )  # fmt: skip
    shape = latent_shape(mla)
    assert (shape.head_dim, shape.v_head_dim, shape.q_lora_rank) == (5, 5, 4)
    assert not shape.latent_norm and shape.window is None
