"""generate with caches that are spread over ranks: the text of one process."""

import pytest
import torch

import regard.hf
from ranks import on_ranks
from regard import QuantizedCache
from regard.distributed import ShardedCache
from session import LONG
from zoo import WRITERS, ZOO, inputs

SOME = ("gpt-oss", "deepseek-v3", "falcon alibi")  # windows and sinks, latents, a score bias
NAMES = WRITERS if LONG else SOME
BEAMS = (1, 3) if LONG else (2,)
STEPS = 7


def _model(name):
    model = ZOO[name].build()
    model.generation_config.eos_token_id = None  # write to the end
    model.generation_config.pad_token_id = 0
    regard.hf.install(model)
    return model


def _write(model, name, *, rows=2, **options):
    given = {key: each[-rows:] for key, each in inputs(name, padding="left", length=9).items()}
    given.pop("decoder_input_ids", None)
    settings = {"max_new_tokens": STEPS, "do_sample": False, "disable_compile": True}
    return model.generate(**given, **settings, **options).tolist()


def _texts(mesh, names):
    texts = {}
    for name in names:
        model = _model(name)
        for beams in BEAMS:
            cache = regard.hf.cache(model, lambda: ShardedCache(mesh, 2))
            texts[name, beams] = _write(model, name, past_key_values=cache, num_beams=beams)
    return texts


@pytest.mark.parametrize("number", [2, 3] if LONG else [2])
def test_the_text_of_one_process(number):
    results = on_ranks(number, _texts, NAMES)
    for (name, beams), text in results[0].items():
        assert all(other[name, beams] == text for other in results)
        assert text == _write(_model(name), name, num_beams=beams), name


def _shares(mesh):
    model = _model("llama")
    cache = regard.hf.cache(model, lambda: ShardedCache(mesh, 2, lambda: QuantizedCache(8, 4)))
    text = _write(model, "llama", past_key_values=cache, rows=1, prompt_lookup_num_tokens=2)
    return text, cache.nbytes, cache.get_seq_length()


def test_codes_assisted_and_each_token_once():
    model = _model("llama")
    alone = regard.hf.cache(model, kind="quantized", bits=8, group=4)
    text = _write(model, "llama", past_key_values=alone, rows=1, prompt_lookup_num_tokens=2)
    texts, nbytes, lengths = zip(*on_ranks(2, _shares), strict=True)
    assert texts == (text, text)
    assert sum(nbytes) == alone.nbytes
    assert lengths == (alone.get_seq_length(),) * 2


def _refused(mesh):
    model = _model("llama")
    cache = regard.hf.cache(model, lambda: ShardedCache(mesh))
    with pytest.raises(ValueError, match="leave output_attentions out"), torch.no_grad():
        model(torch.tensor([[3, 4]]), past_key_values=cache, output_attentions=True)
    regard.hf.uninstall(model)
    cache = regard.hf.cache(model, lambda: ShardedCache(mesh))
    with pytest.raises(ValueError, match=r"regard\.hf\.install\(model\) lets"):
        _write(model, "llama", past_key_values=cache)
    with pytest.raises(ValueError, match="takes no options, got page_size=2"):
        regard.hf.cache(model, lambda: ShardedCache(mesh), page_size=2)


def test_refusals():
    on_ranks(2, _refused)
