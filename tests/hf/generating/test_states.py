"""Caches of hybrid models: layers with states that cannot be cut, beside layers with keys."""

import gc
import weakref

import pytest
import torch

import regard
import regard.hf
from covering import covering
from hybrids import HYBRIDS, hybrid
from regard.cache.quantized import QuantizedWindow
from regard.hf.generating.states import HybridLayer, StateLayer

OPTIONS = {
    "auto": {},
    "growing": {},
    "static": {"max_length": 64},
    "int8": {"group": 4},
    "paged": {"prefixes": False, "tokens": 256, "page_size": 4},
}
PROMPT = torch.tensor(
    [[3, 4, 5, 6, 7, 8, 9, 4, 5, 6, 7, 8]]
)  # it repeats itself: a look-up finds it
ROWS = torch.tensor([[0, 0, 5, 6, 7, 9, 9], [8, 7, 5, 4, 2, 11, 12]])


def new_cache(model, kind):
    return regard.hf.cache(model, kind, **OPTIONS[kind])


def write(model, ids, cache=None, **options):
    given = {} if cache is None else {"past_key_values": cache}
    given |= {"attention_mask": (ids != 0).long(), "max_new_tokens": 14, "do_sample": False}
    return model.generate(ids, disable_compile=True, **given, **options)


def fed(model, cache, ids):
    """The logits of tokens: in one call, or one after another where states would begin anew."""
    size = 1 if "Jamba" in type(model).__name__ and cache and cache.get_seq_length() else 99
    with torch.no_grad():
        pieces = [model(each, past_key_values=cache, use_cache=True) for each in ids.split(size, 1)]
    return torch.cat([each.logits for each in pieces], 1)


@pytest.mark.parametrize(
    ("name", "kind"), covering([*HYBRIDS], ["auto", "growing", "static", "paged"], together=1)
)
def test_the_same_text_with_padding_and_with_beams(name, kind):
    model = hybrid(name)
    greedy, beams = write(model, ROWS), write(model, ROWS, num_beams=3)
    done = regard.hf.install(model)
    assert done.layers or done.called
    assert not done.left_alone  # linear attention is no attention that regard lacks
    assert write(model, ROWS, new_cache(model, kind)).equal(greedy)
    assert write(model, ROWS, new_cache(model, kind), num_beams=3).equal(beams)


@pytest.mark.parametrize(
    ("name", "kind"), covering([*HYBRIDS], ["auto", "static", "int8", "paged"], together=1)
)
def test_tokens_that_a_look_up_proposed_in_vain_leave_no_trace(name, kind):
    model = hybrid(name)
    regard.hf.install(model)
    plain = write(model, PROMPT, new_cache(model, kind))
    cache = new_cache(model, kind)
    refusal = "not supported with stateful models"
    if type(model)._is_stateful:
        with pytest.raises(ValueError, match=refusal):
            write(model, PROMPT, cache, prompt_lookup_num_tokens=3)
    with cache.assisted():
        if name == "jamba":
            with pytest.raises(ValueError, match="states of JambaForCausalLM forget earlier"):
                write(model, PROMPT, cache, prompt_lookup_num_tokens=3)
            return
        text = write(model, PROMPT, cache, prompt_lookup_num_tokens=3)
    assert "_is_stateful" not in vars(model)
    assert text.equal(plain)


def test_forks_in_pages_have_layers_of_their_own():
    model = hybrid("granite")
    cache = new_cache(model, "paged")
    fed(model, cache, PROMPT[:, :9])
    fork = cache.fork()
    fed(model, cache, PROMPT[:, 9:])
    cache.reorder(torch.tensor([0, 0]))
    assert fork.get_seq_length() == 9
    fork.truncate(6)
    whole = fed(model, None, PROMPT)
    torch.testing.assert_close(fed(model, fork, PROMPT[:, 6:]), whole[:, 6:], rtol=1e-4, atol=1e-4)
    fork.reorder(torch.tensor([0]))
    with pytest.raises(ValueError, match="row"):
        fork.reorder(torch.tensor([1]))


@pytest.mark.parametrize("name", HYBRIDS)
def test_forks_and_files_go_on_alike(name, tmp_path):
    model = hybrid(name)
    cache = regard.hf.cache(model)
    fed(model, cache, PROMPT[:, :9])
    fork, loaded = cache.fork(), regard.hf.cache(model)
    cache.save(tmp_path / "cache")
    expected = fed(model, cache, PROMPT[:, 9:])
    loaded.load(tmp_path / "cache")
    for other in (fork, loaded):
        assert other.get_seq_length() == 9
        assert other.nbytes > 0
        assert fed(model, other, PROMPT[:, 9:]).equal(expected)
    assert "States(" in cache.describe()


@pytest.mark.parametrize("name", sorted({*HYBRIDS} - {"jamba"}))
def test_a_cache_returns_to_the_last_call_to_marks_and_nowhere_else(name):
    model = hybrid(name)
    cache = regard.hf.cache(model)
    whole = fed(model, None, PROMPT)
    fed(model, cache, PROMPT[:, :3])
    cache.mark()
    fed(model, cache, PROMPT[:, 3:5])
    fed(model, cache, PROMPT[:, 5:10])
    for length in (10, 8, 6, 5):  # within the last call: its first tokens are computed again
        assert cache.can_truncate(length)
        cache.truncate(length)
        assert cache.get_seq_length() == length
        assert all(each.length == length for each in cache.caches)
        rest = fed(model, cache.fork(), PROMPT[:, length:])
        torch.testing.assert_close(rest, whole[:, length:], rtol=1e-4, atol=1e-4)
    before = [each.length for each in cache.caches]
    assert not cache.can_truncate(4)
    with pytest.raises(ValueError, match=r"return to 0, 3, 5 alone, got length=4.*no layer"):
        cache.truncate(4)
    assert [each.length for each in cache.caches] == before
    cache.truncate(3)
    rest = fed(model, cache, PROMPT[:, 3:])
    torch.testing.assert_close(rest, whole[:, 3:], rtol=1e-4, atol=1e-4)
    cache.truncate(0)
    assert fed(model, cache, PROMPT).equal(fed(model, regard.hf.cache(model), PROMPT))


@pytest.mark.parametrize("name", ["qwen3-next", "falcon-h1", "lfm2"])
def test_rows_of_marks_are_chosen_too(name):
    model = hybrid(name)
    cache = regard.hf.cache(model)
    fed(model, cache, ROWS[:, :4])
    cache.mark()
    fed(model, cache, ROWS[:, 4:])
    cache.reorder(torch.tensor([1, 1, 0]))
    cache.truncate(4)
    whole = fed(model, None, ROWS[[1, 1, 0]])
    rest = fed(model, cache, ROWS[[1, 1, 0], 4:])
    torch.testing.assert_close(rest, whole[:, 4:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["granite", "falcon-h1", "nemotron-h"])
def test_a_call_that_fails_leaves_keys_and_states(name, monkeypatch):
    model = hybrid(name)
    cache = regard.hf.cache(model)
    fed(model, cache, PROMPT[:, :6])
    expected = fed(model, cache.fork(), PROMPT[:, 6:])

    def broken(*args, **given):
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(model.lm_head, "forward", broken)
        with pytest.raises(RuntimeError, match="broken"):
            fed(model, cache, PROMPT[:, 6:])
    assert cache.get_seq_length() == 6
    assert fed(model, cache, PROMPT[:, 6:]).equal(expected)


def test_tokens_that_cannot_be_computed_again_are_not(monkeypatch):
    """A call with embeddings that are more than tokens, or in training, is not repeated."""
    model = hybrid("qwen3-next")
    cache = regard.hf.cache(model)
    fed(model, cache, PROMPT[:, :3])
    with torch.no_grad():
        model.train()(PROMPT[:, 3:8], past_key_values=cache, use_cache=True)
    assert not cache.can_truncate(5)
    assert cache.can_truncate(3)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("name", ["lfm2", "granite"])
def test_tokens_that_failed_to_be_computed_again_are_not_lost(name, kind, error):
    model = hybrid(name)
    cache = new_cache(model, kind)
    fed(model, cache, PROMPT[:, :2])
    cache.mark()
    fed(model, cache, PROMPT[:, 2:9])
    expected = fed(model, cache.fork(), PROMPT[:, 9:])

    def broken(module, given):
        raise error

    handle = model.model.layers[-1].register_forward_pre_hook(broken)
    with pytest.raises(error):
        cache.truncate(6)
    handle.remove()
    assert cache.get_seq_length() == 9
    assert all(each.length == 9 for each in cache.caches)
    fork = cache.fork()
    torch.testing.assert_close(fed(model, fork, PROMPT[:, 9:]), expected, rtol=1e-4, atol=1e-4)
    for length in (6, 2):
        cache.truncate(length)
        assert all(each.length == length for each in cache.caches)
    with pytest.raises(ValueError, match="length is a whole number"):
        cache.truncate(1.5)


def test_a_call_with_gradients_can_be_forked():
    model = hybrid("lfm2")
    cache = regard.hf.cache(model)
    x = model.get_input_embeddings()(PROMPT[:, :9])
    assert x.requires_grad and not x.is_leaf
    model(inputs_embeds=x, past_key_values=cache, use_cache=True)
    fork = cache.fork()
    for each in (cache, fork):
        each.truncate(7)
    assert fed(model, fork, PROMPT[:, 7:]).equal(fed(model, cache, PROMPT[:, 7:]))


@pytest.mark.parametrize("grad", [torch.enable_grad, torch.inference_mode])
def test_tokens_are_computed_again_as_they_were(grad):
    model = hybrid("granite")
    cache = regard.hf.cache(model)
    with grad():
        model(PROMPT[:, :9], past_key_values=cache, use_cache=True)
    cache.truncate(5)
    with grad():
        out = model(PROMPT[:, 5:], past_key_values=cache, use_cache=True).logits
    torch.testing.assert_close(out, fed(model, None, PROMPT)[:, 5:], rtol=1e-4, atol=1e-4)


def test_a_cache_is_gone_with_its_last_reference():
    model = hybrid("falcon-h1")
    cache = regard.hf.cache(model)
    fed(model, cache, PROMPT)
    gone = weakref.ref(cache)
    gc.disable()
    try:
        del cache
        assert gone() is None
    finally:
        gc.enable()


def test_states_that_would_begin_anew_are_refused_before_anything_changes():
    model, ids = hybrid("jamba"), PROMPT
    cache = regard.hf.cache(model)
    whole = fed(model, None, ids)
    fed(model, cache, ids[:, :6])
    with pytest.raises(ValueError, match=r"got 2 tokens after 6.*one token in each"):
        model(ids[:, 6:8], past_key_values=cache, use_cache=True)
    rest = fed(model, cache, ids[:, 6:])
    torch.testing.assert_close(rest, whole[:, 6:], rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="return to 0, 11, 12 alone, got length=4"):
        cache.truncate(4)


def test_each_layer_has_its_kind():
    nemotron = regard.hf.cache(hybrid("nemotron-h")).layers
    assert [isinstance(each, StateLayer) for each in nemotron] == [True, False, False]
    assert nemotron[1].stored == ()
    assert all(isinstance(x, HybridLayer) for x in regard.hf.cache(hybrid("falcon-h1")).layers)


def test_a_layer_with_keys_has_as_many_states_as_asked_for():
    layer = HybridLayer(regard.KVCache, 3)
    layer.reset()
    assert layer.number_of_states == len(layer.conv_states) == 3


def test_a_window_beside_states_is_a_window_of_codes():
    model = hybrid("olmo-hybrid")
    model.config.layer_types[1] = "sliding_attention"
    model.config.sliding_window = 5
    (codes,) = (x for x in regard.hf.cache(model, "int8").caches if not hasattr(x, "layer"))
    assert isinstance(codes, QuantizedWindow)


def test_pages_share_no_prefix_with_states():
    with pytest.raises(ValueError, match="no prefix can be shared; give prefixes=False"):
        regard.hf.cache(hybrid("lfm2"), "paged")


def test_a_file_of_other_states_is_refused(tmp_path):
    model = hybrid("jamba")
    cache = regard.hf.cache(model)
    fed(model, cache, PROMPT)
    record = cache.caches[0].record()
    other = regard.hf.cache(model).caches[0]
    for change in (
        {"length": -1},
        {"tensors": [["conv_states", 0], ["conv_states", 0]]},
        {"tensors": [["conv_states", 7], ["recurrent_states", 0]]},
        {"tensors": [["__class__", 0], ["recurrent_states", 0]]},
        {"past": [5]},
        {"past": None},
    ):
        with pytest.raises(ValueError, match=r"have tensors of \[B, ..., W\]"):
            other.fill(record._replace(state=record.state | change))
    with pytest.raises(ValueError, match=r"have tensors of \[B, ..., W\]"):
        other.fill(record._replace(streams=[record.streams[0][0, 0], record.streams[1]]))
    assert other.length == 0
    assert not other.tensors
