"""Decoding steps of installed models in compiled code."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("numba")
pytest.importorskip("transformers")

import transformers

from regard import PagePool, hf
from regard.hf.running import decoder_layers, heads, steps
from regard.ops.observed import calls_run
from regard.sparse import H2O, ExpectedAttention, SnapKV, Streaming

pytestmark = pytest.mark.usefixtures("layers_alone")

SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 16,
    "vocab_size": 50,
}
MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, num_key_value_heads=2)
    ),
    "norms": lambda: transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16)
    ),
    "windows": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=12)
    ),
    "learned positions": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=32, n_head=4, n_layer=2, vocab_size=50)
    ),
}
CACHES = {
    "growing": {},
    "static": {"max_length": 64},
    "sliding": {},
    "paged": {"page_size": 16, "tokens": 64},
    "int8": {},
    "k8v4": {},
    "k6v4": {},
}


def decoded(model, kind, tokens, /, **options):
    """The logits of a prompt of 5 tokens, then of one token after the other."""
    cache = hf.cache(model, kind, **options)
    with torch.no_grad():
        outs = [model(tokens[:, :5], past_key_values=cache).logits]
        for i in range(5, tokens.shape[1]):
            outs.append(model(tokens[:, i : i + 1], past_key_values=cache).logits)
    return torch.cat(outs, 1)


def repeat_none(monkeypatch):
    """Let no later call repeat a step."""
    for module in (heads, decoder_layers):
        monkeypatch.setattr(module, "repeated_step", lambda *call: None)


COMPILED = {("norms", "k6v4"), ("learned positions", "int8")}  # kernels that no other test has


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=pytest.mark.long if (name, kind) in COMPILED else ())
        for name in MODELS
        for kind in CACHES
        if kind != "sliding" or name == "windows"
    ],
)
def test_logits_are_the_models_own(name, kind, monkeypatch):
    model = MODELS[name]().eval()
    tokens = torch.randint(0, 50, (2, 20))
    with torch.no_grad():
        expected = model(tokens).logits
    hf.install(model)
    taken, run = [], steps.InstalledStep.run
    monkeypatch.setattr(
        steps.InstalledStep, "run", lambda *given: taken.append(run(*given)) or taken[-1]
    )
    got = decoded(model, kind, tokens, **CACHES[kind])
    count = sum(each is not None for each in taken)
    narrow = kind.startswith("k") and model.config.hidden_size == 32 and name != "norms"
    window = kind == "sliding" or (name == "windows" and kind not in ("growing", "static"))
    if window or narrow:  # heads of 8 channels have no codes of 4 or 6 bits that a kernel reads
        assert count == 0
    else:
        assert count >= (5 if name == "windows" else 20)
    if kind in ("growing", "static", "sliding", "paged"):
        assert torch.allclose(got, expected, atol=2e-5)
        return
    repeat_none(monkeypatch)
    assert torch.allclose(got, decoded(model, kind, tokens), atol=2e-5)


@pytest.mark.parametrize("kind", ["growing", "paged", "int8"])
@pytest.mark.parametrize("name", ["llama", "norms"])
def test_steps_in_bfloat16_are_as_near_to_float32_as_others(name, kind, monkeypatch):
    """The model's angles are bfloat16: a step rotates by them in float32, and rounds once."""
    model = MODELS[name]().eval().bfloat16()
    tokens = torch.randint(0, 50, (2, 30))
    wide = copy.deepcopy(model).float()
    hf.install(wide)
    expected = decoded(wide, "growing", tokens)
    hf.install(model)
    taken, run = [], steps.InstalledStep.run
    monkeypatch.setattr(
        steps.InstalledStep, "run", lambda *given: taken.append(run(*given)) or taken[-1]
    )
    got = decoded(model, kind, tokens, **CACHES[kind]).float()
    assert sum(each is not None for each in taken) >= 30
    repeat_none(monkeypatch)
    others = decoded(model, kind, tokens, **CACHES[kind]).float()
    error, theirs = ((each - expected).square().mean().sqrt() for each in (got, others))
    assert error <= 1.1 * theirs
    assert (got - others).abs().max() <= 8 * theirs


@pytest.fixture
def stepping():
    """An installed model, the cache of a prompt and a step, and the next token."""
    model = MODELS["llama"]().eval()
    hf.install(model)
    cache, token = hf.cache(model, "growing"), torch.tensor([[3]])
    with torch.no_grad():
        model(torch.randint(0, 50, (1, 5)), past_key_values=cache)
        model(token, past_key_values=cache)
    return model, cache, token


@pytest.mark.parametrize(
    "given",
    [{"attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1, 1]])}, {"output_attentions": True}],
)
def test_masks_and_weights_are_no_steps(stepping, given, monkeypatch):
    model, cache, token = stepping
    twin = copy.deepcopy(cache)
    with torch.no_grad():
        got = model(token, past_key_values=cache, **given)
        repeat_none(monkeypatch)
        expected = model(token, past_key_values=twin, **given)
    assert got.logits.equal(expected.logits)
    if got.attentions is not None:
        assert got.attentions[0].shape == (1, 4, 1, 7)


@pytest.mark.parametrize(
    ("name", "kind", "options", "most"),
    [
        ("windows", "growing", {}, 12),  # the first key is hidden from the next token
        ("llama", "static", {"max_length": 20}, 20),  # the buffer ends
        ("llama", "growing", {}, 64),
    ],
)
def test_a_step_repeats_up_to_so_many_keys(name, kind, options, most):
    model = MODELS[name]().eval()
    hf.install(model)
    cache = hf.cache(model, kind, **options)
    with torch.no_grad():
        model(torch.randint(0, 50, (1, 5)), past_key_values=cache)
        model(torch.tensor([[3]]), past_key_values=cache)
    assert [layer.step.most for layer in cache.layers] == [most, most]


def pages_of(model, pool, tokens):
    cache = hf.cache(model, "paged", pool=pool, prefixes=False)
    model(tokens, past_key_values=cache)
    return cache


@torch.no_grad()
def test_steps_over_pages_go_on_between_other_operations(monkeypatch):
    """The memory grows for other caches and moves, pages are copied and released; a fork goes on
    by itself."""
    model, pool = MODELS["llama"]().eval(), PagePool(400, 16)
    held = torch.randint(0, 50, (2, 5))
    hf.install(model)
    cache, others, taken, run = pages_of(model, pool, held), [], [], steps.InstalledStep.run
    monkeypatch.setattr(
        steps.InstalledStep, "run", lambda *given: taken.append(run(*given)) or taken[-1]
    )
    for step, token in enumerate(torch.randint(0, 50, (60, 2, 1))):
        got, held = model(token, past_key_values=cache).logits, torch.cat([held, token], 1)
        assert torch.allclose(got, model(held).logits[:, -1:], atol=2e-5), step
        if step % 9 == 2:
            others.append(pages_of(model, pool, torch.randint(0, 50, (7, 40))))
        if step % 7 == 3:
            fork = cache.fork()
            for _ in range(3):
                model(token, past_key_values=fork)
        if step % 11 == 6:
            cache.reorder(torch.tensor([1, 0]))
            held = held.flip(0)
        if step % 13 == 5:
            cache.crop(-4)
            held = held[:, :-4]
        if step % 10 == 4:
            for each in cache.layers[0].cache.buffers:
                each.share_memory_()
        if step % 20 == 15:
            others.clear()
    assert sum(each is not None for each in taken) > 60


def test_threads_step_over_the_pages_of_one_pool():
    """Its memory grows for one while another reads it."""
    model, pool = MODELS["llama"]().eval(), PagePool(400, 16)
    hf.install(model)
    texts = torch.randint(0, 50, (4, 2, 60))
    with torch.no_grad():
        expected = [model(text).logits for text in texts]

    @torch.no_grad()
    def read(text):
        cache = pages_of(model, pool, text[:, :4])
        outs = [model(token, past_key_values=cache).logits for token in text[:, 4:].split(1, 1)]
        return torch.cat(outs, 1)

    with ThreadPoolExecutor(4) as threads:
        for got, wanted in zip(threads.map(read, texts), expected, strict=True):
            assert torch.allclose(got, wanted[:, 4:], atol=2e-5)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "format", "least"),
    [
        ("norms", "K8V8", 60),
        ("norms", "K4V4", 60),
        ("llama", "K4V4", 0),  # the kernel reads no 4-bit codes of heads of 8 channels
    ],
)
def test_steps_over_pages_of_codes_are_those_that_do_not_repeat(name, format, least, monkeypatch):
    """Beside an equal cache whose steps are described each time, with pages sealed in between."""
    model = MODELS[name]().eval()
    hf.install(model)
    options, taken, run = (
        {"page_size": 16, "tokens": 300, "format": format},
        [],
        steps.InstalledStep.run,
    )
    caches = [hf.cache(model, "paged", **options) for _ in range(2)]
    monkeypatch.setattr(
        steps.InstalledStep, "run", lambda *given: taken.append(run(*given)) or taken[-1]
    )
    prompt = torch.randint(0, 50, (3, 20))
    for cache in caches:
        model(prompt, past_key_values=cache)
    for token in torch.randint(0, 50, (50, 3, 1)):
        got = model(token, past_key_values=caches[0]).logits
        with monkeypatch.context() as patch:
            repeat_none(patch)
            wanted = model(token, past_key_values=caches[1]).logits
        assert torch.allclose(got, wanted, atol=2e-5)
    assert sum(each is not None for each in taken) >= least
    assert least or not any(each is not None for each in taken[-20:])


@torch.no_grad()
@pytest.mark.parametrize(
    ("options", "steps_taken"),
    [
        ({"page_size": 16, "tokens": 64}, [0, 1, 1, 1, 1, 1, 0, 1, 1]),  # the 17th token opens one
        ({"page_size": 8, "tokens": 64}, [0] * 9),  # the kernel reads pages of 16 tokens or more
        # codes may replace the page that the 16th token fills
        ({"page_size": 16, "tokens": 64, "format": "K8V8"}, [0, 1, 1, 1, 1, 0, 0, 1, 1]),
    ],
)
def test_which_steps_over_pages_repeat(options, steps_taken, monkeypatch):
    model = MODELS["llama"]().eval()
    hf.install(model)
    cache, taken, run = hf.cache(model, "paged", **options), [], steps.InstalledStep.run
    monkeypatch.setattr(
        steps.InstalledStep, "run", lambda *given: taken.append(run(*given)) or taken[-1]
    )
    model(torch.randint(0, 50, (1, 10)), past_key_values=cache)
    counts = []
    for token in torch.randint(0, 50, (9, 1, 1)):
        taken.clear()
        model(token, past_key_values=cache)
        counts.append(sum(each is not None for each in taken) / 2)
    assert counts == steps_taken


@pytest.mark.parametrize("name", ["llama", "norms", "learned positions"])
@pytest.mark.parametrize("format", [None, "K8V8"])
@torch.no_grad()
def test_steps_over_heads_of_different_tokens_are_those_that_do_not_repeat(
    name, format, monkeypatch
):
    model, tokens = MODELS[name]().eval(), torch.randint(0, 50, (2, 60))
    hf.install(model)
    taken, run = [], steps.HeadSteps.run
    monkeypatch.setattr(
        steps.HeadSteps, "run", lambda *given: taken.append(run(*given)) or taken[-1]
    )

    def read():
        cache = hf.cache(model, "condensing", format=format)
        model(tokens[:, :40], past_key_values=cache)
        hf.condense(cache, tokens[:, :40], 0.6)
        outs = [model(each, past_key_values=cache).logits for each in tokens[:, 40:].split(1, 1)]
        held = [(each.length, each.rows, each.slots) for each in cache.caches]
        cache.crop(-15)
        outs.append(model(tokens[:, 45:46], past_key_values=cache).logits)
        return torch.cat(outs, 1), held

    got, held = read()
    # the others are the first after a buffer was replaced
    assert sum(each is not None for each in taken) >= 34
    assert len({rows for _, each, _ in held for rows in each}) > 1
    repeat_none(monkeypatch)
    expected, as_held = read()
    assert torch.allclose(got, expected, atol=2e-5)
    for (length, rows, slots), (*others, at) in zip(held, as_held, strict=True):
        assert [length, rows] == others
        assert all(map(torch.equal, slots, at))


@pytest.mark.parametrize(
    ("score", "options", "least"),
    [
        (SnapKV(window=3, kernel=1), {"budget": 32}, 20),
        (ExpectedAttention(), {"budget": 0.7, "format": "K8V8"}, 12),
        (Streaming(), {"budget": 32}, 20),
        (H2O(), {"budget": 32}, 0),  # sums the attention of all queries
    ],
    ids=["queries", "codes", "streaming", "sums"],
)
@torch.no_grad()
def test_steps_over_a_budget_of_tokens_evict_those_of_others(score, options, least, monkeypatch):
    model, tokens = MODELS["llama"]().eval(), torch.randint(0, 50, (2, 70))
    hf.install(model)
    taken, run = [], steps.InstalledStep.run
    monkeypatch.setattr(
        steps.InstalledStep, "run", lambda *given: taken.append(run(*given)) or taken[-1]
    )

    def read():
        cache = hf.cache(model, "evicting", score=score, sinks=2, recent=4, **options)
        model(tokens[:, :40], past_key_values=cache)
        outs = [model(each, past_key_values=cache).logits for each in tokens[:, 40:].split(1, 1)]
        last = [each.record().streams[-1] for each in cache.caches]  # queries of the score, if any
        return torch.cat(outs, 1), [each.slots for each in cache.caches], last

    got, slots, last = read()
    assert sum(each is not None for each in taken) >= least
    assert bool(taken) == bool(least)
    repeat_none(monkeypatch)
    expected, at, as_last = read()
    assert torch.allclose(got, expected, atol=2e-5)
    assert all(map(torch.equal, slots, at))
    for mine, other in zip(last, as_last, strict=True):
        assert torch.allclose(mine, other, atol=2e-5)


@torch.no_grad()
def test_a_layer_with_sinks_does_not_step_over_heads(monkeypatch):
    """Though its angles, which compiled code does not read, were no reason against it."""
    monkeypatch.setattr(steps, "layer_of_step", steps.filled_layer)
    config = transformers.GptOssConfig(
        **SIZES, num_key_value_heads=2, head_dim=8, num_local_experts=2, num_experts_per_tok=1,
        layer_types=["full_attention"] * 2,
    )  # fmt: skip
    model, tokens = transformers.GptOssForCausalLM(config).eval(), torch.randint(0, 50, (1, 9))
    for layer in model.model.layers:
        layer.self_attn.sinks.fill_(2.0)
    expected = model(tokens).logits
    hf.install(model)
    assert torch.allclose(decoded(model, "condensing", tokens), expected, atol=2e-5)


def test_rows_of_different_lengths_are_no_steps(stepping):
    _, cache, _ = stepping
    own = cache.layers[0]
    own.cache.reorder(torch.tensor([0, 0]))
    own.cache.truncate(torch.tensor([3, 5]))
    x = torch.randn(2, 1, 32)
    with torch.no_grad():
        assert not own.step._replace(shape=x.shape, held=own.cache.buffers).fits(own.cache, x)
        own.cache.truncate(3)
        assert own.step._replace(shape=x.shape, held=own.cache.buffers).fits(own.cache, x)


def test_autocast_and_observers_are_no_steps(stepping):
    model, cache, token = stepping
    own, x, seen = cache.layers[0], torch.randn(1, 1, 32), []
    with torch.no_grad():
        assert own.step.fits(own.cache, x)
        with torch.autocast("cpu", torch.bfloat16):
            assert not own.step.fits(own.cache, x)
        with calls_run(lambda *call: seen.append(call)):
            model(token, past_key_values=cache)
    assert len(seen) == 2
    assert not own.step.fits(own.cache, x)  # gradients are on


def test_gradients_are_no_steps(stepping):
    model, cache, token = stepping
    model(token, past_key_values=cache).logits.sum().backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad is not None


@pytest.mark.parametrize("kind", ["growing", "paged"])
def test_a_cache_that_is_cropped_or_reset_goes_on(kind):
    model = MODELS["llama"]().eval()
    tokens = torch.randint(0, 50, (1, 12))
    hf.install(model)
    expected = decoded(model, "growing", tokens)
    cache = hf.cache(model, kind, **CACHES[kind])
    with torch.no_grad():
        for _ in range(2):
            model(tokens[:, :5], past_key_values=cache)
            for i in range(5, 12):
                out = model(tokens[:, i : i + 1], past_key_values=cache).logits
            assert torch.allclose(out, expected[:, -1:], atol=2e-5)
            cache.crop(-4)
            for i in range(8, 12):
                out = model(tokens[:, i : i + 1], past_key_values=cache).logits
            assert torch.allclose(out, expected[:, -1:], atol=2e-5)
            cache.reset()
    if kind == "paged":
        assert cache.layers[0].cache.pool.pages_in_use == 0


def test_a_copy_of_a_cache_has_no_step(stepping):
    _, cache, _ = stepping
    assert all(layer.step is not None for layer in cache.layers)
    for copied in (copy.copy(cache.layers[0]), copy.deepcopy(cache).layers[0]):
        assert copied.step is None


def counted(monkeypatch):
    """A list that grows by a result for each step that a layer begins to repeat."""
    taken, run = [], steps.InstalledStep.run
    monkeypatch.setattr(
        steps.InstalledStep, "run", lambda *given: taken.append(run(*given)) or taken[-1]
    )
    return taken


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(
            name, kind, marks=pytest.mark.long if name != "llama" and kind != "growing" else ()
        )
        for name in ("llama", "windows", "learned positions")
        for kind in ("growing", "static", "int8")
    ],
)
def test_left_padded_rows_are_decoded_as_each_alone(name, kind, monkeypatch):
    model = MODELS[name]().eval()
    model.generation_config.pad_token_id = 0
    short, long = torch.randint(1, 50, (1, 4)), torch.randint(1, 50, (1, 7))
    both = torch.cat([torch.nn.functional.pad(short, (3, 0)), long])
    hf.install(model)
    options = {"max_new_tokens": 12, "output_logits": True, "return_dict_in_generate": True}

    def logits(tokens, **given):
        cache = hf.cache(model, kind, **CACHES[kind])
        out = model.generate(tokens, past_key_values=cache, do_sample=False, **options, **given)
        return torch.stack(out.logits, 1)

    taken = counted(monkeypatch)
    got = logits(both, attention_mask=(both != 0).long())
    repeats = 10 if name != "windows" else 4 if kind != "int8" else 0  # layers; up to the window
    repeats = 0 if kind == "static" else repeats  # whose masks are of slots
    assert sum(each is not None for each in taken) >= 2 * repeats
    assert torch.allclose(got, torch.cat([logits(short), logits(long)]), atol=2e-5)


@pytest.fixture
def padded():
    """An installed model, the cache of a padded prompt and a step, the next tokens and mask."""
    model = MODELS["llama"]().eval()
    hf.install(model)
    cache, mask = hf.cache(model, "growing"), torch.ones(2, 8).long()
    mask[0, :3] = 0
    with torch.no_grad():
        for ids, length in ((torch.randint(0, 50, (2, 6)), 6), (torch.tensor([[3], [4]]), 7)):
            model(ids, past_key_values=cache, attention_mask=mask[:, :length])
    return model, cache, torch.tensor([[3], [5]]), mask


def nothing(cache, mask):
    return mask


def number_missing(cache, mask):
    cache.layers[0].cache.buffers[1][0, :, 1] = torch.nan  # of a token that is hidden
    return mask


def everything_hidden(cache, mask):
    mask[0] = 0
    return mask


def later_token_hidden(cache, mask):
    mask[1, 5] = 0
    return mask


def no_mask(cache, mask):
    return None


def of_heads(cache, mask):
    return mask[:, None, None].bool() & (torch.arange(8) != torch.arange(4)[:, None, None])


def added(cache, mask):
    return torch.where(mask[:, None, None] == 1, torch.arange(8) / 8.0, -torch.inf)


@pytest.mark.parametrize(
    ("change", "repeats"),
    [
        (nothing, True),
        (later_token_hidden, True),
        (number_missing, False),
        (everything_hidden, False),
        (no_mask, False),
        (of_heads, False),
        (added, False),
    ],
)
@torch.no_grad()
def test_a_step_under_another_mask_is_the_same_as_without_repeating(
    change, repeats, padded, monkeypatch
):
    model, cache, tokens, mask = padded
    mask = change(cache, mask)
    twin, taken = copy.deepcopy(cache), counted(monkeypatch)
    got = model(tokens, past_key_values=cache, attention_mask=mask).logits
    assert any(each is not None for each in taken) == (repeats or change is number_missing)
    repeat_none(monkeypatch)
    expected = model(tokens, past_key_values=twin, attention_mask=mask).logits
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5, equal_nan=True)


class Held(torch.nn.Module):
    """Angles that every call writes to the same two tensors, as static buffers are."""

    def __init__(self, own, write):
        super().__init__()
        self.own, self.write, self.held = own, write, None

    def forward(self, x, position_ids):
        angles = self.own(x, position_ids)
        if self.held is None or self.held[0].shape != angles[0].shape:
            self.held = tuple(each.clone() for each in angles)
        for mine, new in zip(self.held, angles, strict=True):
            self.write(mine, new)
        return self.held


WRITES = {
    "in place": torch.Tensor.copy_,
    "by data": lambda x, new: x.data.copy_(new),
    "other data": lambda x, new: setattr(x, "data", new.clone()),
    "by NumPy": lambda x, new: x.numpy().__setitem__(slice(None), new.numpy()),
}


@pytest.mark.parametrize("kind", ["growing", None])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_angles_are_read_in_every_call(write, mode, kind):
    model = MODELS["llama"]().eval()
    with torch.no_grad():  # positions matter more than in a model that was just initialised
        for name, weight in model.named_parameters():
            weight.mul_(10 if "q_proj" in name or "k_proj" in name else 1)
    tokens = torch.randint(0, 50, (2, 16))
    with mode():
        expected = model(tokens).logits
        hf.install(model)
        model.model.rotary_emb = Held(model.model.rotary_emb, write)
        cache = transformers.DynamicCache() if kind is None else hf.cache(model, kind)
        outs = [model(each, past_key_values=cache).logits for each in tokens.split(1, 1)]
    assert torch.allclose(torch.cat(outs, 1), expected, atol=2e-5)


def test_buffers_may_move_and_modules_may_return_any_strides(stepping):
    """Freed memory is filled with numbers that no result may contain."""
    model, cache, token = stepping
    expected = copy.deepcopy(model)
    twin = copy.deepcopy(cache)
    hf.uninstall(expected)
    for layer in cache.layers:
        for each in layer.cache.buffers:
            each.share_memory_()
    for module in model.model.layers:
        module.self_attn.k_proj.register_forward_hook(
            lambda _, __, out: torch.stack([out, out + 9], -1)[..., 0]
        )
    others = [torch.full((1 << size,), 7e30) for size in range(6, 16)]
    with torch.no_grad():
        for _ in range(3):
            got = model(token, past_key_values=cache).logits
            wanted = expected(token, past_key_values=twin).logits
            assert torch.allclose(got, wanted, atol=2e-5)
    assert all((each == 7e30).all() for each in others)
