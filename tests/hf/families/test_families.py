"""Every family: installed, a model computes what it computed before, forwards and backwards."""

import copy
from dataclasses import replace

import pytest
import torch

import regard.hf
from regard.hf import FAMILIES, attention_modules, attention_of
from regard.hf.families.finding import find
from regard.hf.running import calls
from zoo import DECODERS, SPOKEN, VOCABULARY, ZOO, inputs, result, tokens

UNIT = torch.finfo(torch.float32).eps / 2
ROUNDINGS = 32  # of the largest result, for each layer: what `regard compare` allows too
EITHER = [name for name in ZOO if name not in ("gemma2", "gpt-oss")]  # those have no sdpa
UNSTEADY = ["gemma3n"]  # whose own gradients in float32 are far from those in float64
ENCODERS = ["bert", "roberta"]


def run(model, given):
    with torch.no_grad():
        return result(model(**given))


def tolerance(model, largest):
    return ROUNDINGS * UNIT * len(attention_modules(model)) * float(largest.abs().max())


def close(model, after, before):
    torch.testing.assert_close(after, before, rtol=0, atol=tolerance(model, before))


def shown(given, output):
    """What is not padding: transformers leaves anything there."""
    mask = given.get("attention_mask")
    own = mask is not None and mask.shape == output.shape[:2]
    return output[mask.bool()] if own else output


@pytest.mark.parametrize("padding", ["", "left", "right"])
@pytest.mark.parametrize("name", ZOO)
def test_results_are_the_models_own(name, padding):
    model, given = ZOO[name].build(), inputs(name, padding=padding)
    before = shown(given, run(model, given))
    report = regard.hf.install(model)
    close(model, shown(given, run(model, given)), before)
    assert len(report.layers) == len(attention_modules(model))
    assert report.left_alone == {}


@pytest.mark.parametrize("name", EITHER)
def test_under_eager_masks_are_additive_and_hide_the_same(name):
    model, given = ZOO[name].build("eager"), inputs(name, padding="left")
    if name == "falcon alibi":
        pytest.skip("transformers adds ALiBi twice under eager")
    before = shown(given, run(model, given))
    regard.hf.install(model)
    close(model, shown(given, run(model, given)), before)


def loss_of(model, given):
    """Something of every result, so that every parameter has a part in it."""
    output = result(model(**given))
    weights = torch.linspace(-1, 1, output.numel()).view_as(output)
    return (output * weights).sum()


@pytest.mark.parametrize("name", ZOO)
def test_gradients_of_every_parameter_are_the_models_own(name):
    model, given = ZOO[name].build().train(), inputs(name, batch=1)

    def gradients(model):
        model.zero_grad()
        loss_of(model, given).backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    before = gradients(model)
    exact = gradients(copy.deepcopy(model).double()) if name in UNSTEADY else before
    regard.hf.install(model)
    after = gradients(model)
    assert after.keys() == before.keys()
    for parameter, shipped in before.items():
        wanted = exact[parameter].float()
        bound = 5 * tolerance(model, wanted) + 1e-4 * float(wanted.abs().mean())
        bound += float((shipped - wanted).abs().max())  # as far as the shipped model may be, too
        torch.testing.assert_close(after[parameter], wanted, rtol=0, atol=bound, msg=parameter)


@pytest.mark.parametrize("name", ZOO)
def test_uninstalling_restores_to_the_bit(name):
    model, given = ZOO[name].build(), inputs(name, padding="right")
    before, state = run(model, given), {n: t.clone() for n, t in model.state_dict().items()}
    modules = [(n, type(module)) for n, module in model.named_modules()]
    regard.hf.install(model)
    regard.hf.install(model)  # twice is once
    assert [(n, type(module)) for n, module in model.named_modules()] == modules
    assert all(state[n].equal(value) for n, value in model.state_dict().items())
    regard.hf.uninstall(model)
    regard.hf.uninstall(model)
    assert run(model, given).equal(before)
    assert not any("forward" in vars(module) for module in model.modules())


COUNTED = ["llama4"]  # queries are scaled by slots, whatever positions are, in transformers too


@pytest.mark.parametrize("name", [name for name in DECODERS if name not in COUNTED])
def test_no_tokens_result_depends_on_its_neighbours(name):
    """Alone, padded on the left, padded on the right, and with anything in the padding."""
    model = ZOO[name].build()
    regard.hf.install(model)
    length, most = 6, 11
    row = tokens(1, length)
    alone = run(model, {"input_ids": row})
    for filler in (0, 7):
        for side in ("left", "right"):
            start = most - length if side == "left" else 0
            ids = torch.full((2, most), filler)
            mask = torch.zeros(2, most, dtype=torch.long)
            ids[0], mask[0] = tokens(1, most), 1
            ids[1, start : start + length], mask[1, start : start + length] = row, 1
            given = {"input_ids": ids, "attention_mask": mask}
            if name in SPOKEN:
                given["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
            together = run(model, given)[1:, start : start + length]
            close(model, together, alone)


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_do_not_attend_to_padding(name):
    model = ZOO[name].build()
    regard.hf.install(model)
    row = tokens(1, 6)
    alone = run(model, {"input_ids": row})
    ids, mask = torch.zeros(2, 9, dtype=torch.long), torch.ones(2, 9, dtype=torch.long)
    ids[0], ids[1, :6], mask[1, 6:] = tokens(1, 9), row, 0
    close(model, run(model, {"input_ids": ids, "attention_mask": mask})[1:, :6], alone)


UNPACKED = ("gpt-oss", "falcon", "falcon groups", "bert decoder")  # masks are transformers' own


@pytest.mark.parametrize("name", [name for name in SPOKEN if name not in (*UNPACKED, *COUNTED)])
def test_packed_documents_do_not_attend_to_each_other(name):
    model = ZOO[name].build()
    regard.hf.install(model)
    rows = [tokens(1, length) for length in (5, 8)]
    positions = torch.cat([torch.arange(row.shape[1]) for row in rows])[None]
    given = {"input_ids": torch.cat(rows, 1), "position_ids": positions, "use_cache": False}
    packed = run(model, given).split([5, 8], dim=1)
    for row, own in zip(rows, packed, strict=True):
        close(model, own, run(model, {"input_ids": row}))


@pytest.mark.parametrize("name", ["llama", "gpt-neox", "deepseek-v3", "t5", "bert", "gpt-oss"])
def test_half_precision_stays_within_its_rounding(name):
    """bfloat16 under regard is no further from float32 than transformers' bfloat16 is, twice. All
    layers of DeepSeek are dense: a rounding that routes a token elsewhere is no rounding."""
    kind = ZOO[name]
    if "first_k_dense_replace" in kind.options:
        layers = kind.options["num_hidden_layers"]
        kind = replace(kind, options={**kind.options, "first_k_dense_replace": layers})
    model, given = kind.build(), inputs(name)
    exact = run(model, given)
    half = model.to(torch.bfloat16)
    before = (run(half, given).float() - exact).abs().max()
    regard.hf.install(half)
    assert (run(half, given).float() - exact).abs().max() <= 2 * before


@pytest.mark.parametrize("name", ZOO)
def test_every_attention_runs_on_regard(name, monkeypatch):
    prepared, model = [], ZOO[name].build()
    regard.hf.install(model)  # which tries a kind of layers the first time that it sees it
    attended = calls.prepare
    monkeypatch.setattr(
        calls, "prepare", lambda *a, **options: prepared.append(a) or attended(*a, **options)
    )
    run(model, inputs(name))
    assert len(prepared) == len(attention_modules(model))


def test_every_family_has_a_model_in_the_zoo():
    crossed = {"BertCrossAttention", "RobertaCrossAttention"}  # test_encoder_decoders.py
    here = [kind for kind in ZOO.values() if kind.is_here]
    seen = {type(module).__name__ for kind in here for module in find(kind.build()).known.values()}
    eager = {"XGLM", "TrOCR", "Mvp", "MegatronBertSelf", "RemBertSelf"}  # test_eager_models.py
    known = set(FAMILIES) - crossed - {f"{each}Attention" for each in eager}
    assert seen == known or (seen < known and len(here) < len(ZOO))


OTHERS = ("kimi", "axk1", "minicpm3", "mistral4", "bailing", "llama4", "gemma3n", "gemma4")
ALONE = [
    name
    for name in DECODERS
    if name.split()[0] not in ("phi3", "olmo", "starcoder2", "gpt2", "gpt-neox", "falcon", "bert")
    and not name.startswith(("deepseek", *OTHERS))
]


@pytest.mark.parametrize("name", ALONE)
def test_a_module_as_a_layer_computes_the_same(name):
    model = ZOO[name].build()
    ids = tokens(2, 17)
    seen = {}
    for path, module in attention_modules(model).items():
        module.register_forward_hook(
            lambda module, args, kwargs, out, path=path: seen.update(
                {path: (kwargs.get("hidden_states", *args), out[0])}
            ),
            with_kwargs=True,
        )
    run(model, {"input_ids": ids})
    for path, module in attention_modules(model).items():
        given, wanted = seen[path]
        with torch.no_grad():
            close(model, attention_of(module)(given), wanted)


def test_what_is_no_single_layer_is_refused():
    module = next(iter(attention_modules(ZOO["phi3"].build()).values()))
    with pytest.raises(ValueError, match=r"Phi3Attention projects or outputs in a way"):
        attention_of(module)
    module = next(iter(attention_modules(ZOO["vit"].build()).values()))
    with pytest.raises(ValueError, match="ViTAttention does not rotate halves"):
        attention_of(module)


def test_the_zoo_is_not_trivial():
    for name, kind in ZOO.items():
        if kind.fed == "decoder" and kind.is_here:
            logits = run(kind.build(), inputs(name))
            assert logits.shape[-1] == VOCABULARY
            assert logits.std() > 0.3, name
