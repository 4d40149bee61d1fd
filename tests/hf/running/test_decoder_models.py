"""Steps of installed decoders in one call: the same hidden states, however called."""

import copy
import gc
import threading
import weakref

import pytest
import torch

pytest.importorskip("numba")

from torch import nn
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import LlamaModel

import regard.hf
from decoders import MODELS, PROMPT, STEPS, TOKENS, assert_same, logits_of, model_of
from regard import PagePool
from regard.hf.running import decoder_models
from regard.hf.running.binding import is_bound
from regard.hf.running.products import most_rows
from regard.ops.kernels import model_stepping
from regard.ops.kernels.model_stepping import ModelStep
from regard.ops.observed import backends_run, calls_run

# The first token after a prompt is the step that the next ones repeat
REPEATED = STEPS - 1
WHOLE = "Llama", "Llama with biases", "Qwen2", "Qwen3"  # models whose steps are one call


@pytest.fixture
def runs(monkeypatch):
    """Whether each step that was begun in one call ran."""
    found, run = [], ModelStep.run

    def recorded(self, *given):
        out = run(self, *given)
        found.append(out is not None)
        return out

    monkeypatch.setattr(ModelStep, "run", recorded)
    return found


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_steps_compute_what_the_shipped_model_does(name, batch, runs):
    model = model_of(name)
    shipped = logits_of(model, batch=batch)
    regard.hf.install(model)
    with backends_run() as ran:
        assert_same(logits_of(model, batch=batch), shipped)
    assert runs == [True] * (REPEATED * (name in WHOLE))
    if name in WHOLE:
        assert ran["fused"] >= REPEATED * len(model.model.layers)
    regard.hf.uninstall(model)
    assert logits_of(model, batch=batch).equal(shipped)


KINDS = {"growing": {}, "static": {"max_length": 20}, "int8": {}, "int4": {}, "k8v4": {},
         "paged": {"page_size": 32, "tokens": 64}}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["Llama", "Qwen2"])
def test_steps_are_those_of_layers_that_run_one_by_one(name, kind, runs, monkeypatch):
    model = model_of(name, hidden_size=128, head_dim=32)
    regard.hf.install(model)
    found = logits_of(model, regard.hf.cache(model, kind, **KINDS[kind]))
    assert runs == [True] * REPEATED
    monkeypatch.setattr(decoder_models, "_states", lambda model, given: None)
    assert_same(logits_of(model, regard.hf.cache(model, kind, **KINDS[kind])), found)
    assert len(runs) == REPEATED


@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
@pytest.mark.parametrize("kind", ["growing", "int8"])
def test_bfloat16_is_as_near_to_float32_as_layer_by_layer(name, kind, runs, monkeypatch):
    wide = model_of(name, num_hidden_layers=4)
    model = copy.deepcopy(wide).bfloat16()
    exact = logits_of(wide.double())
    regard.hf.install(model)
    found = logits_of(model, regard.hf.cache(model, kind))
    assert runs == [True] * (REPEATED * (most_rows(torch.bfloat16, 64) > 0))
    monkeypatch.setattr(decoder_models, "_states", lambda model, given: None)
    others = logits_of(model, regard.hf.cache(model, kind))
    error, theirs = ((x.double() - exact).square().mean().sqrt() for x in (found, others))
    assert error <= 1.1 * theirs


@pytest.mark.parametrize(("kind", "options"), [
    ("condensing", {}),
    ("evicting", {"budget": 6, "recent": 2, "sinks": 1}),
])  # fmt: skip
def test_other_caches_run_layer_by_layer(kind, options, runs):
    model = model_of("Llama", hidden_size=128, head_dim=32)
    regard.hf.install(model)
    logits_of(model, regard.hf.cache(model, kind, **options))
    assert not any(runs)


@torch.no_grad()
def logits_with(model, cache, tokens=TOKENS[:2, :6], **given):
    """Of one token after the other, with further arguments."""
    outs = []
    for i, token in enumerate(tokens.split(1, dim=1)):
        own = {name: value[..., : i + 1] for name, value in given.items() if "mask" in name}
        others = {name: value for name, value in given.items() if "mask" not in name}
        outs.append(model(token, past_key_values=cache, **own, **others)[0])
    return torch.cat(outs, dim=1)


SHOWN = torch.ones(2, 6, dtype=torch.int64)
HIDDEN = SHOWN.clone()
HIDDEN[1, 1] = 0


@pytest.mark.parametrize(("given", "whole"), [
    ({"attention_mask": SHOWN}, True),
    ({"attention_mask": SHOWN.bool()}, True),
    ({"use_cache": True}, True),
    ({"attention_mask": HIDDEN}, True),
    ({"attention_mask": SHOWN[:, None, None].bool()}, False),
    ({"output_attentions": True}, False),
    ({"output_hidden_states": True}, False),
    ({"use_cache": False}, False),
])  # fmt: skip
def test_arguments_of_a_call(given, whole, runs):
    model = model_of("Llama", attn_implementation="eager")
    wanted = logits_with(model, DynamicCache(config=model.config), **given)
    regard.hf.install(model)
    assert_same(logits_with(model, regard.hf.cache(model), **given), wanted)
    assert any(runs) is whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padded_rows_are_those_of_layers_that_run_one_by_one(dtype, runs, monkeypatch):
    model, mask = model_of("Qwen3").to(dtype), torch.ones(3, PROMPT + STEPS, dtype=torch.int64)
    mask[0, :3] = mask[2, 1:4] = 0
    regard.hf.install(model)

    @torch.no_grad()
    def logits():
        cache, outs = regard.hf.cache(model), []
        for at in (PROMPT, *range(PROMPT + 1, PROMPT + STEPS + 1)):
            given = {"attention_mask": mask[:, :at], "past_key_values": cache}
            outs.append(model(TOKENS[:, cache.get_seq_length() : at], **given).logits)
        return torch.cat(outs, 1)

    found = logits()
    assert runs == [True] * (REPEATED * (most_rows(dtype, 64) > 0))
    monkeypatch.setattr(decoder_models, "_states", lambda model, given: None)
    others = logits()
    model.double()
    exact = logits()
    error, theirs = ((x.double() - exact).square().mean().sqrt() for x in (found, others))
    assert error <= 1.1 * theirs


def test_hidden_keys_that_are_not_finite_hide_from_a_step(runs):
    """A kernel multiplies them by 0: the layers find that out, and run another backend."""
    model, mask = model_of("Llama"), torch.ones(2, PROMPT + STEPS, dtype=torch.int64)
    mask[0, :2] = 0
    regard.hf.install(model)

    @torch.no_grad()
    def last(spoil):
        cache = regard.hf.cache(model)
        for at in range(PROMPT, PROMPT + STEPS + 1):
            if at == PROMPT + STEPS:
                for layer in cache.layers if spoil else ():
                    layer.cache.buffers[1][0, :, 0] = torch.nan
            given = {"attention_mask": mask[:, :at], "past_key_values": cache}
            out = model(TOKENS[:2, cache.get_seq_length() : at], **given).logits
        assert cache.get_seq_length() == PROMPT + STEPS
        return out

    assert_same(last(spoil=True), last(spoil=False))
    assert all(runs)


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions"])
def test_outputs_that_a_configuration_wants(name, runs):
    model = model_of("Llama", attn_implementation="eager")
    regard.hf.install(model)
    setattr(model.config, name, True)
    cache = regard.hf.cache(model)
    with torch.no_grad():
        for token in TOKENS[:1, :4].split(1, dim=1):
            out = model(token, past_key_values=cache)
    assert len(out[name.removeprefix("output_")]) >= len(model.model.layers)
    assert not runs


def test_positions_are_the_callers():
    model, positions = model_of("Llama"), torch.tensor([[7], [9]])
    wanted = logits_with(model, DynamicCache(config=model.config), position_ids=positions)
    regard.hf.install(model)
    found = logits_with(model, regard.hf.cache(model), position_ids=positions)
    assert_same(found, wanted)


@pytest.mark.parametrize("called", ["in training", "with gradients", "of a hook"])
def test_calls_that_run_layer_by_layer(called, runs):
    model = model_of("Llama")
    regard.hf.install(model)
    cache, (token, *others) = regard.hf.cache(model), TOKENS[:1].split(1, dim=1)
    with torch.no_grad():
        for x in (token, *others[:3]):
            model(x, past_key_values=cache)
    before, handle = len(runs), None
    if called == "of a hook":
        handle = nn.modules.module.register_module_forward_hook(lambda *call: None)
    try:
        model.train(called == "in training")
        with torch.set_grad_enabled(called == "with gradients"):
            model(others[3], past_key_values=cache)
    finally:
        if handle is not None:
            handle.remove()
    assert before > 0
    assert len(runs) == before or not runs[-1]
    assert cache.get_seq_length() == 5


def test_autocast_runs_layer_by_layer(runs):
    model = model_of("Llama")
    regard.hf.install(model)
    with torch.autocast("cpu"):
        logits_of(model)
    assert not any(runs)


def test_several_caches_and_texts_of_one_model(runs):
    model = model_of("Llama")
    regard.hf.install(model)
    wanted = [logits_with(model, regard.hf.cache(model), TOKENS[i : i + 1, :6]) for i in range(3)]
    runs.clear()
    caches, outs = [regard.hf.cache(model) for _ in range(3)], [[], [], []]
    with torch.no_grad():
        for at in range(6):
            for i, cache in enumerate(caches):
                outs[i].append(model(TOKENS[i : i + 1, at : at + 1], past_key_values=cache).logits)
    assert all(torch.cat(out, 1).equal(one) for out, one in zip(outs, wanted, strict=True))
    assert runs == [True] * len(runs)
    assert len(runs) >= 9


def test_a_cache_that_is_cut_grown_or_copied_goes_on(runs):
    model = model_of("Llama")
    regard.hf.install(model)
    cache, tokens = regard.hf.cache(model), TOKENS.view(1, -1)
    wanted = logits_with(model, cache, tokens)
    cache.crop(-20)
    again = logits_with(model, cache, tokens[:, -20:-10])
    assert_same(again, wanted[:, -20:-10])
    for each in (cache.fork(), cache):
        assert_same(logits_with(model, each, tokens[:, -10:]), wanted[:, -10:])
    with torch.no_grad():  # past the room that the buffers have
        long = torch.arange(300).view(1, -1) % 50
        whole = model(long, past_key_values=regard.hf.cache(model)).logits
        cache, before = regard.hf.cache(model), len(runs)
        model(long[:, :240], past_key_values=cache)
    assert_same(logits_with(model, cache, long[:, 240:]), whole[:, 240:])
    assert sum(runs[before:]) >= 50


LONG = torch.arange(3 * 60).view(3, -1) % 50


@torch.no_grad()
def tokens_after(model, cache, tokens, past=5):
    """Logits of a prompt and of each token after it."""
    parts = [tokens[:, :past], *tokens[:, past:].split(1, dim=1)]
    outs = [model(x, past_key_values=cache, logits_to_keep=1).logits for x in parts]
    return torch.cat(outs, 1)


@pytest.mark.parametrize("batch", [1, 3])
def test_pages_open_and_fill(batch, runs):
    """A token that opens or fills a page runs layer by layer, and the next is recorded anew."""
    model = model_of("Llama")
    regard.hf.install(model)
    wanted = tokens_after(model, regard.hf.cache(model), LONG[:batch])
    runs.clear()
    cache = regard.hf.cache(model, "paged", page_size=16, tokens=512)
    assert_same(tokens_after(model, cache, LONG[:batch]), wanted)
    assert runs == [True] * len(runs)
    assert len(runs) >= 40


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("format", ["K8V8", "K8V4", "K4V4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sealed_pages_of_codes(dtype, format, batch, runs, monkeypatch):
    """The first page stays as it is; the second one is codes, beside the open third one."""
    wide = model_of("Llama", hidden_size=128, head_dim=32)
    model = copy.deepcopy(wide).to(dtype)
    regard.hf.install(model)
    options = {"format": format, "page_size": 16, "tokens": 512}
    found = tokens_after(model, regard.hf.cache(model, "paged", **options), LONG[:batch])
    assert runs == [True] * len(runs)
    assert len(runs) >= 40 * (most_rows(dtype, 64) > 0)
    monkeypatch.setattr(decoder_models, "_states", lambda model, given: None)
    others = tokens_after(model, regard.hf.cache(model, "paged", **options), LONG[:batch])
    if dtype is torch.float32:
        assert_same(found, others)
        return
    regard.hf.install(wide)
    exact = tokens_after(wide, regard.hf.cache(wide, "paged", **options), LONG[:batch])
    error, theirs = ((x - exact).square().mean().sqrt() for x in (found, others))
    assert error <= 1.1 * theirs


def test_a_step_over_codes_is_made_once_a_page(monkeypatch):
    """And anew when the pool moves the memory of the codes, which the old step would keep."""
    made, prepare = [], model_stepping.prepare_model

    def prepared(layers, *given):
        others = layers[0].attention.others
        made.append([weakref.ref(each.source.k.codes) for each in others])
        return prepare(layers, *given)

    monkeypatch.setattr(model_stepping, "prepare_model", prepared)
    model = model_of("Llama", hidden_size=128, head_dim=32)
    regard.hf.install(model)
    cache, again = (
        regard.hf.cache(model, "paged", format="K8V8", page_size=16, tokens=4096) for _ in range(2)
    )
    wanted = tokens_after(model, again, LONG[:1, :42])
    assert len(made) == 3  # pages of 16 tokens, and no step for the first tokens of one
    tokens_after(model, cache, LONG[:1, :40])
    (kept,) = made[-1]
    codes = cache.layers[0].cache.segments_of_step[1].slab
    codes.reserve(2 * codes.capacity)
    assert kept() is not None
    assert_same(tokens_after(model, cache, LONG[:1, 40:42], past=1), wanted[:, -2:])
    assert kept() is None


def test_pages_that_caches_share_and_copy(runs):
    model, pool = model_of("Llama"), PagePool(num_pages=128, page_size=16)
    regard.hf.install(model)
    text, others = LONG[:1], torch.cat([LONG[:1, :40], LONG[1:2, :20]], 1)
    wanted = [tokens_after(model, regard.hf.cache(model), each) for each in (text, others)]
    first = regard.hf.cache(model, "paged", pool=pool)
    assert_same(tokens_after(model, first, text), wanted[0])
    # the pages of a prompt that the pool stores, then pages of its own
    second = regard.hf.cache(model, "paged", pool=pool)
    assert_same(tokens_after(model, second, others, past=40)[:, 1:], wanted[1][:, -20:])
    assert second.found > 0
    runs.clear()
    # forks in turns, each of which writes to an open page of its own
    first.truncate(50)
    forks = [first, first.fork()]
    for at in range(50, 60):
        for fork, tokens in zip(forks, (text, others), strict=True):
            with torch.no_grad():
                fork.last = model(tokens[:, at : at + 1], past_key_values=fork).logits
    assert_same(forks[0].last, wanted[0][:, -1:])
    with torch.no_grad():
        again = regard.hf.cache(model)
        model(torch.cat([text[:, :50], others[:, 50:59]], 1), past_key_values=again)
        expected = model(others[:, 59:], past_key_values=again).logits
    assert_same(forks[1].last, expected)
    assert sum(runs) >= 8


def test_a_pool_that_grows_between_steps(runs):
    """Another cache takes pages meanwhile, and the pool's memory moves."""
    model, pool = model_of("Llama"), PagePool(num_pages=512, page_size=16)
    regard.hf.install(model)
    wanted = tokens_after(model, regard.hf.cache(model), LONG[:1])
    cache, caches = regard.hf.cache(model, "paged", pool=pool, prefixes=False), []
    with torch.no_grad():
        model(LONG[:1, :5], past_key_values=cache)
        for at in range(5, 60):
            if at % 5 == 0:
                caches.append(regard.hf.cache(model, "paged", pool=pool, prefixes=False))
                model(LONG[1:2].repeat(1, 3), past_key_values=caches[-1])
            last = model(LONG[:1, at : at + 1], past_key_values=cache).logits
    assert_same(last, wanted[:, -1:])
    assert sum(runs) >= 20


def test_other_numbers_of_threads(runs):
    """More than there are processors, so that some come late to a kernel."""
    model = model_of("Llama", num_hidden_layers=6)
    regard.hf.install(model)
    wanted, before = logits_of(model), torch.get_num_threads()
    try:
        for threads in (1, 2, 5, 3):
            torch.set_num_threads(threads)
            cache = regard.hf.cache(model)
            for _ in range(20):
                cache.reset()
                assert_same(logits_of(model, cache), wanted)
    finally:
        torch.set_num_threads(before)
    assert all(runs)


def test_another_number_of_threads_between_two_steps(runs):
    model, before = model_of("Llama"), torch.get_num_threads()
    regard.hf.install(model)
    wanted, cache, outs = logits_with(model, regard.hf.cache(model)), regard.hf.cache(model), []
    try:
        for i, part in enumerate(TOKENS[:2, :6].split(3, dim=1)):
            torch.set_num_threads(before + i)
            outs.append(logits_with(model, cache, part))
            assert decoder_models._steps[model.model][cache].kernels.threads == before + i
    finally:
        torch.set_num_threads(before)
    assert_same(torch.cat(outs, 1), wanted)


def test_two_threads_write_with_caches_of_their_own():
    model, found = model_of("Llama"), {}
    regard.hf.install(model)
    wanted = logits_of(model)

    def write(i):
        found[i] = [logits_of(model, regard.hf.cache(model)) for _ in range(5)]

    threads = [threading.Thread(target=write, args=(i,)) for i in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for outs in found.values():
        for out in outs:
            assert_same(out, wanted)


@pytest.mark.parametrize("change", ["of the weight", "of a constant", "by a hook", "of the module"])
def test_a_last_norm_that_changes_between_two_steps(change):
    def changed(own):
        cache = regard.hf.cache(own) if is_bound(own.model) else DynamicCache()
        first, norm = logits_with(own, cache), own.model.norm
        if change == "of the weight":
            norm.weight = nn.Parameter(norm.weight.detach() / 2)
        elif change == "of a constant":
            norm.variance_epsilon = 0.5
        elif change == "by a hook":
            norm.register_forward_hook(lambda module, given, out: out / 2)
        else:
            own.model.norm = nn.Identity()
        return torch.cat([first, logits_with(own, cache, TOKENS[:2, 6:9])], dim=1)

    model = model_of("Llama")
    wanted = changed(copy.deepcopy(model))
    regard.hf.install(model)
    assert_same(changed(model), wanted)


@pytest.mark.parametrize("change", ["removed", "exchanged", "hooked", "patched"])
def test_layers_that_change_between_two_steps(change):
    model = model_of("Llama", num_hidden_layers=3)

    def changed(own):
        """Logits before and after a change of the layers."""
        cache, seen = regard.hf.cache(own) if is_bound(own.model) else DynamicCache(), []
        first = logits_with(own, cache)
        layers = own.model.layers
        if change == "removed":
            own.config.num_hidden_layers = own.model.config.num_hidden_layers = 2
        elif change == "exchanged":
            layers[0].mlp, layers[1].mlp = layers[1].mlp, layers[0].mlp
        elif change == "hooked":
            layers[1].register_forward_hook(lambda module, given, out: seen.append(1) or out / 2)
        else:
            forward = layers[1].forward
            layers[1].forward = lambda *given, **named: forward(*given, **named) / 2
        return torch.cat([first, logits_with(own, cache, TOKENS[:2, 6:9])], dim=1)

    shipped, own = copy.deepcopy(model), copy.deepcopy(model)
    wanted = changed(shipped)
    regard.hf.install(own)
    assert_same(changed(own), wanted)


def test_hidden_states_after_steps():
    """transformers leaves hooks on the layers after a call that returned hidden states."""
    model = model_of("Llama")

    @torch.no_grad()
    def states(cache):
        outs = []
        for at, token in enumerate(TOKENS[:1, :7].split(1, dim=1)):
            out = model(token, past_key_values=cache, output_hidden_states=at == 4)
            outs.append(out.logits)
            if at == 4:
                outs += out.hidden_states
        return outs

    wanted = states(DynamicCache(config=model.config))
    regard.hf.install(model)
    found = states(regard.hf.cache(model))
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert_same(one, other)


def test_generate(runs):
    model = model_of("Llama")
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    wanted = model.generate(TOKENS[:1], **options)
    regard.hf.install(model)
    found = model.generate(TOKENS[:1], past_key_values=regard.hf.cache(model), **options)
    assert found.equal(wanted)
    assert sum(runs) >= 9


def test_calls_are_observed_layer_by_layer(runs):
    model = model_of("Llama")
    regard.hf.install(model)
    seen = []
    with calls_run(lambda prepared, q, parts: seen.append(q.shape[2])):
        logits_of(model)
    assert len(seen) == len(model.model.layers) * (1 + STEPS)
    assert not runs


def test_steps_keep_neither_model_nor_cache_alive():
    model = model_of("Llama")
    regard.hf.install(model)
    cache = regard.hf.cache(model)
    logits_of(model, cache)
    of_model, of_cache = weakref.ref(model.model), weakref.ref(cache)
    assert [*decoder_models._steps[model.model]] == [cache]
    del cache
    gc.collect()
    assert of_cache() is None
    assert not len(decoder_models._steps[model.model])
    del model
    gc.collect()
    assert of_model() is None


def test_decoders_of_another_form_are_left_alone():
    class Scaled(LlamaModel):
        def forward(self, *given, **named):
            return super().forward(*given, **named)

    model = model_of("Llama")
    model.model.__class__ = Scaled
    regard.hf.install(model)
    assert not is_bound(model.model)
    gemma = model_of("Gemma")
    regard.hf.install(gemma)
    assert not is_bound(gemma.model)
    assert is_bound(gemma.model.layers[0])
