"""A model with regard through transformers' own doors: caches by name, Trainer, peft, saving."""

import copy
import warnings

import pytest
import torch
import transformers
from transformers.generation.configuration_utils import (
    DYNAMIC_CACHE_IMPLEMENTATIONS,
    STATIC_CACHE_IMPLEMENTATIONS,
)

import regard.hf
from zoo import ZOO, inputs, tokens

WAYS = ("install", "register")
CACHES = (*DYNAMIC_CACHE_IMPLEMENTATIONS, *STATIC_CACHE_IMPLEMENTATIONS)
ELSEWHERE = ("offloaded", "offloaded_static")  # they need another device than the CPU


def on_regard(model, way):
    if way == "install":
        assert regard.hf.install(model).layers
    else:
        model.set_attn_implementation(regard.hf.register())
    return model


def written(model, cache):
    given = {"cache_config": {"backend": "fp8"}} if cache == "quantized" else {}
    return model.generate(
        **inputs("llama", padding="left", length=7),
        cache_implementation=cache,
        max_new_tokens=9,
        do_sample=False,
        disable_compile=True,
        **given,
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cache", CACHES)
def test_every_cache_that_has_a_name(way, cache):
    model = ZOO["llama"].build()
    model.generation_config.eos_token_id = None
    try:
        before = written(model, cache)
    except Exception as reason:  # quantised caches of 5.17 need packages, offloading another device
        assert cache in (*ELSEWHERE, "quantized")
        pytest.skip(f"transformers cannot here: {type(reason).__name__}")
    assert written(on_regard(model, way), cache).equal(before)


def trained(model, folder, **options):
    """The parameters after three steps of Trainer, on documents packed without padding."""
    collator = transformers.DataCollatorWithFlattening(**options)
    ids = [tokens(1, length)[0].tolist() for length in (5, 9, 3, 7, 4, 6)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = transformers.TrainingArguments(
            folder,
            per_device_train_batch_size=2,
            max_steps=3,
            learning_rate=0.3,
            optim="sgd",  # Adam divides by a gradient's size: rounding decides where it is zero
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            seed=3,
        )
        transformers.Trainer(
            model.train(),
            arguments,
            train_dataset=[{"input_ids": each} for each in ids],
            data_collator=collator,
        ).train()
    return {name: each.detach() for name, each in model.named_parameters()}


@pytest.mark.parametrize("packed", [{}, {"return_flash_attn_kwargs": True}], ids=["", "lengths"])
@pytest.mark.parametrize("way", WAYS)
def test_trainer_with_documents_without_padding(way, packed, tmp_path):
    plain = ZOO["llama"].build()
    ours = on_regard(copy.deepcopy(plain), way)
    before = copy.deepcopy(plain.state_dict())
    expected = trained(plain, tmp_path)
    assert not all(each.equal(before[name]) for name, each in expected.items())
    for name, each in trained(ours, tmp_path, **packed).items():
        torch.testing.assert_close(each, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("order", ["peft first", "regard first"])
def test_adapters_before_and_after(way, order, tmp_path):
    from peft import LoraConfig, PeftModel, get_peft_model

    def adapted(model):
        torch.manual_seed(1)
        options = {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return get_peft_model(model, LoraConfig(**options)).eval()

    given = inputs("llama", padding="left")
    shown = given["attention_mask"].bool()
    expected = adapted(ZOO["llama"].build())(**given).logits[shown]
    model = ZOO["llama"].build()
    if order == "peft first":
        model = adapted(model)
        on_regard(model.get_base_model(), way)
    else:
        model = adapted(on_regard(model, way))
    torch.testing.assert_close(model(**given).logits[shown], expected, rtol=1e-4, atol=1e-4)
    model.save_pretrained(tmp_path)
    base = on_regard(ZOO["llama"].build(), way)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = PeftModel.from_pretrained(base, tmp_path).eval()
    torch.testing.assert_close(again(**given).logits[shown], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_what_was_saved_is_read_and_writes_the_same(way, tmp_path):
    plain = ZOO["llama"].build()
    plain.generation_config.eos_token_id = None
    before = written(plain, "dynamic")
    on_regard(plain, way).save_pretrained(tmp_path)
    kind, name = type(plain), regard.hf.register()
    given = {"attn_implementation": name} if way == "register" else {}
    again = kind.from_pretrained(tmp_path, **given)
    if way == "install":
        regard.hf.install(again)
    assert written(again, "dynamic").equal(before)
