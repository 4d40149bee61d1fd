"""A cache of all layers: what is done to it is done to all layers or to none."""

import gc
import threading

import pytest
import torch

import regard.hf
from covering import covering
from regard.cache import KVCache
from zoo import ZOO, inputs, tokens

KINDS = {
    "growing": {},
    "static": {"max_length": 40},
    "sliding": {},
    "quantized": {"bits": 8, "group": 4},
    "paged": {"page_size": 4, "tokens": 400},
}
LAYERS = 3


def filled(name="mistral", kind="growing", length=14, **options):
    model = ZOO[name].build()
    cache = regard.hf.cache(model, kind, **{**KINDS[kind], **options})
    with torch.no_grad():
        model(tokens(2, length), past_key_values=cache)
    return model, cache


def lengths(cache):
    return [each.length for each in cache.caches]


def read(model, cache, new=2):
    """The logits of more tokens, by a copy of the cache."""
    with torch.no_grad():
        return model(tokens(2, new), past_key_values=cache.fork()).logits


class Failure(Exception):
    pass


def failing(module, after=False):
    def fail(*_):
        raise Failure

    return (module.register_forward_hook if after else module.register_forward_pre_hook)(fail)


@pytest.mark.parametrize(("kind", "installed"), covering(KINDS, [False, True], together=1))
def test_a_failed_call_leaves_every_layer_as_it_was(kind, installed):
    model, cache = filled(kind=kind)
    if installed:
        regard.hf.install(model)
    before, logits = lengths(cache), read(model, cache)
    late = model.model.layers[-1]
    for module, after in [(late, False), (late.mlp, True), (model.lm_head, False)]:
        handle = failing(module, after)
        for new in (1, 5):
            with pytest.raises(Failure), torch.no_grad():
                model(tokens(2, new), past_key_values=cache)
        handle.remove()
        assert lengths(cache) == before
    assert read(model, cache).equal(logits)


@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_first_call_leaves_an_empty_cache(kind):
    model = ZOO["mistral"].build()
    cache = regard.hf.cache(model, kind, **KINDS[kind])
    handle = failing(model.model.layers[-1])
    with pytest.raises(Failure), torch.no_grad():
        model(tokens(2, 9), past_key_values=cache)
    handle.remove()
    assert lengths(cache) == [0] * LAYERS
    with torch.no_grad():  # of another batch size
        model(tokens(3, 9), past_key_values=cache)
    assert lengths(cache) == [9] * LAYERS


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_cross_attention_is_restored_too(name):
    model, given = ZOO[name].build(), inputs(name)
    cache = regard.hf.cache(model)
    with torch.no_grad():
        want = model(**given, use_cache=False).logits
        handle = failing(model.lm_head)
        with pytest.raises(Failure):
            model(**given, past_key_values=cache)
        handle.remove()
        assert cache.is_updated == {}
        got = model(**given, past_key_values=cache).logits
    torch.testing.assert_close(got, want, rtol=0, atol=5e-5)


def test_a_cache_that_cannot_return_says_so_on_the_error():
    class Odd:
        """A user's cache without snapshots, which cannot be truncated."""

        def __init__(self):
            self.own = KVCache()
            self.length, self.nbytes = 0, 0

        def span(self, new):
            return self.own.span(new)

        def update(self, *new):
            parts = self.own.update(*new)
            self.length = self.own.length
            return parts

        peek = update

        def truncate(self, length):
            raise ValueError("never")

        def reorder(self, rows): ...

    model = ZOO["mistral"].build()
    cache = regard.hf.cache(model, Odd)
    handle = failing(model.lm_head)
    with pytest.raises(Failure) as caught, torch.no_grad():
        model(tokens(2, 9), past_key_values=cache)
    handle.remove()
    assert "may hold tokens of this call: never" in caught.value.__notes__[0]


def test_an_interrupted_call_is_undone_by_the_next_operation():
    """Hooks of torch do not see KeyboardInterrupt."""
    model, cache = filled()
    before = lengths(cache)

    def interrupt(*_):
        raise KeyboardInterrupt

    for operation in (
        lambda: cache.truncate(14),
        lambda: cache.reorder(torch.tensor([0, 1])),
        lambda: cache.fork(),
        lambda: cache.can_truncate(3),
    ):
        handle = model.model.layers[1].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt), torch.no_grad():
            model(tokens(2, 3), past_key_values=cache)
        handle.remove()
        operation()
        assert lengths(cache) == before
    handle = model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt), torch.no_grad():
        model(tokens(2, 3), past_key_values=cache)
    handle.remove()
    with torch.no_grad():
        with pytest.raises(ValueError, match=r"interrupted .* call again"):
            model(tokens(2, 3), past_key_values=cache)
        model(tokens(2, 3), past_key_values=cache)
    assert lengths(cache) == [17] * LAYERS


@pytest.mark.parametrize("operation", ["truncate", "crop"])
def test_a_layer_that_cannot_be_truncated_leaves_all(operation):
    model, cache = filled("gemma3", "sliding")  # windows, all tokens, windows
    assert not cache.can_truncate(9)
    with pytest.raises(ValueError, match=r"layer 0: .* no layer was truncated"):
        cache.truncate(9) if operation == "truncate" else cache.crop(-5)
    assert lengths(cache) == [14] * LAYERS
    other = regard.hf.cache(model, "sliding", rollback=5)
    with torch.no_grad():
        model(tokens(2, 14), past_key_values=other)
    assert other.can_truncate(9)
    other.crop(-5)
    assert lengths(other) == [9] * LAYERS


@pytest.mark.parametrize("kind", KINDS)
def test_one_length_is_that_of_all_rows(kind):
    _, cache = filled(kind=kind)
    before = lengths(cache)
    for wrong in (torch.tensor([13, 12]), torch.tensor(13), 12.5, 13.0, "x", None):
        assert not cache.can_truncate(wrong)
        with pytest.raises(ValueError, match="length is a whole number, got"):
            cache.truncate(wrong)
        assert lengths(cache) == before
    assert not cache.can_truncate(-1) and cache.can_truncate(14)


@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_other_rows_are_refused_by_a_sentence(kind, new):
    model, cache = filled(kind=kind)
    before, logits = lengths(cache), read(model, cache)
    for rows in (1, 3):
        refused = pytest.raises(ValueError, match=f"has a batch of {rows}, the cache one of 2")
        with refused, torch.no_grad():
            model(tokens(rows, new), past_key_values=cache)
        assert lengths(cache) == before
        assert read(model, cache).equal(logits)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_not_held_leave_all(kind):
    model, cache = filled(kind=kind)
    logits = read(model, cache)
    for rows in ([0, 2], [-1]):
        with pytest.raises(ValueError, match=r"are not all in 0..1"):
            cache.reorder(torch.tensor(rows))
    with pytest.raises(ValueError, match="int64 or int32"):
        cache.reorder(torch.tensor([0.0]))
    assert read(model, cache).equal(logits)
    cache.reorder(torch.tensor([1, 1, 0]))
    with torch.no_grad():
        got = model(tokens(2, 2)[[1, 1, 0]], past_key_values=cache).logits
    torch.testing.assert_close(got, logits[[1, 1, 0]], rtol=0, atol=5e-5)


def test_repeated_and_selected_rows():
    model, cache = filled()
    logits = read(model, cache)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0]))
    with torch.no_grad():
        got = model(tokens(2, 2)[[1, 0]], past_key_values=cache).logits
    torch.testing.assert_close(got, logits[[1, 0]], rtol=0, atol=5e-5)
    empty = regard.hf.cache(model)
    empty.batch_repeat_interleave(2)
    assert empty.get_seq_length() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_forks_share_nothing_that_changes(kind):
    model, cache = filled(kind=kind)
    logits = read(model, cache)
    fork = cache.fork()
    with torch.no_grad():
        model(tokens(2, 7), past_key_values=fork)
    assert lengths(fork) == [21] * LAYERS
    assert lengths(cache) == [14] * LAYERS
    assert read(model, cache).equal(logits)


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded(kind, tmp_path):
    model, cache = filled(kind=kind)
    logits = read(model, cache)
    path = tmp_path / "cache.safetensors"
    cache.save(path)
    again = regard.hf.cache(model, kind, **KINDS[kind])
    again.load(path)
    assert lengths(again) == [14] * LAYERS
    torch.testing.assert_close(read(model, again), logits, rtol=0, atol=5e-5)
    with pytest.raises(ValueError, match="load into an empty one"):
        again.load(path)
    other = ZOO["mistral"].build()
    with torch.no_grad():
        other.lm_head.weight[0] += 1
    foreign = regard.hf.cache(other, kind, **KINDS[kind])
    with pytest.raises(ValueError, match="other weights"):
        foreign.load(path)
    assert lengths(foreign) == [0] * LAYERS


def test_the_model_of_a_cache_may_be_gone(tmp_path):
    model, cache = filled()
    del model
    gc.collect()
    assert cache.model is None
    with pytest.raises(ValueError, match="exists no more"):
        cache.save(tmp_path / "cache.safetensors")
    cache.truncate(3)
    assert lengths(cache) == [3] * LAYERS


def test_layers_that_are_alike_are_described_once():
    _, cache = filled("gemma3", "sliding")
    text = cache.describe()
    assert repr(cache) == f"GenerationCache: {text}"  # not one text for each of 30 layers
    assert text.startswith("layers 0, 2: SlidingCache(5): 2 rows of 14 tokens")
    assert "\nlayers 1: KVCache(): 2 rows of 14 tokens" in text
    assert cache.nbytes == sum(each.nbytes for each in cache.caches)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("length", [6, 13, 18])
def test_a_prompt_no_longer_than_what_is_held_is_refused(length, masked):
    """generate cuts it somewhere, and its own caches go on with other tokens."""
    model, ids = ZOO["llama"].build(), tokens(1, 18)
    cache = regard.hf.cache(model)
    options = {"past_key_values": cache, "max_new_tokens": 1, "do_sample": False, "pad_token_id": 0}
    mask = {"attention_mask": torch.ones(1, length)} if masked else {}
    model.generate(ids, **options)
    with pytest.raises(ValueError, match="this cache holds 18 tokens"):
        model.generate(ids[:, :length], **options, **mask)
    assert cache.get_seq_length() == 18
    cache.truncate(length - 1)
    model.generate(ids[:, :length], **options)
    assert cache.get_seq_length() == length


def test_another_thread_that_fills_the_cache_is_refused():
    model, ids, errors = ZOO["llama"].build(), tokens(1, 9), []
    cache = regard.hf.cache(model)

    def call():
        try:
            with torch.no_grad():
                model(ids, past_key_values=cache)
        except ValueError as error:
            errors.append(str(error))

    def beside(*_):
        handle.remove()
        other = threading.Thread(target=call)
        other.start()
        other.join()

    handle = model.model.layers[1].register_forward_pre_hook(beside)
    call()
    assert len(errors) == 1
    assert "give each thread a cache of its own" in errors[0]
    assert {each.length for each in cache.caches} == {9}
