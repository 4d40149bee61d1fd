"""The model type of lm-evaluation-harness, on a task of two questions."""

import pytest

pytest.importorskip("lm_eval")  # not among what the tests install: it brings 600 MB

from lm_eval.api.registry import get_model

from regard.hf import fetch_smollm2
from regard.hf.evaluating.harness import RegardLM


@pytest.fixture(scope="module")
def folder():
    path = fetch_smollm2()
    return str(path)


@pytest.mark.parametrize("cache", ["growing", "int4"])
def test_it_knows_the_capital(folder, cache):
    model = get_model("regard")(folder, cache=cache)
    assert isinstance(model, RegardLM)
    context = model.tok_encode("The capital of France is")
    right, wrong = (
        model._loglikelihood_tokens(
            [(("", word), context, model.tok_encode(word))], disable_tqdm=True
        )[0]
        for word in (" Paris", " Potato")
    )
    assert right[0] > wrong[0] + 3
    text = model.generate_until([request("The capital of France is")], disable_tqdm=True)
    assert "Paris" in text[0]


def request(text):
    from lm_eval.api.instance import Instance

    options = {"until": ["\n"], "max_gen_toks": 4, "do_sample": False}
    return Instance("generate_until", {}, (text, options), 0)
