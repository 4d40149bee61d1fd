"""Caches are saved and loaded as they are, or refused; operations on all layers or on none.

The oracles: the tensors that were given, and safetensors' own reader.
"""

import json
import struct

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from filled_caches import KINDS, STREAMS, content, filled, same
from regard import KVCache, QuantizedCache, SlidingCache, StaticCache
from regard.cache import load_all, save_all, truncate_all
from regard.cache.files import open_tensors, write_tensors
from regard.cache.saving import outlines_from, weights_text

RAGGED = [name for name, make in KINDS.items() if not isinstance(make(), SlidingCache)]
FILE = "cache.safetensors"


@pytest.mark.parametrize("streams", STREAMS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_cache_is_the_one_that_was_saved(tmp_path, kind, streams):
    cache, again = filled(kind, streams), KINDS[kind]()
    cache.save(tmp_path / FILE, weights="mine")
    again.load(tmp_path / FILE, weights="mine")
    assert same(content(cache), content(again))
    for each in (cache, again):  # both go on in the same way
        each.truncate(each.length)
        torch.manual_seed(5)
        each.update(*STREAMS[streams](4))
    assert same(content(cache), content(again))


@pytest.mark.parametrize("kind", RAGGED)
def test_rows_of_several_lengths_are_saved(tmp_path, kind):
    cache, again = filled(kind, "keys and values"), KINDS[kind]()
    cache.truncate(torch.tensor([2, 5]))
    cache.save(tmp_path / FILE, weights="mine")
    again.load(tmp_path / FILE, weights="mine")
    assert again.lengths.rows.tolist() == [2, 5]
    for each in (cache, again):
        torch.manual_seed(5)
        each.update(*STREAMS["keys and values"](3))
    mine, theirs = (each.peek(*STREAMS["keys and values"](1))[0] for each in (cache, again))
    for a, b in zip(mine.streams, theirs.streams, strict=True):
        assert torch.equal(a[0, :, :5], b[0, :, :5])
        assert torch.equal(a[1, :, :8], b[1, :, :8])


def test_dropped_tokens_are_not_in_the_file(tmp_path):
    cache, secret = KVCache(), torch.full((2, 1, 6, 3), 7.0)
    cache.update(secret)
    cache.truncate(torch.tensor([2, 5]))
    cache.save(tmp_path / FILE, weights="mine")
    (stream,) = load_file(tmp_path / FILE).values()
    assert stream.shape == (2, 1, 5, 3)
    assert stream.sum().item() == 7.0 * (2 + 5) * 3


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_cache_is_saved(tmp_path, kind):
    KINDS[kind]().save(tmp_path / FILE, weights="mine")
    cache = KINDS[kind]()
    cache.load(tmp_path / FILE, weights="mine")
    assert (cache.length, cache.nbytes) == (0, 0)
    emptied = filled(kind, "keys and values")
    emptied.truncate(0)
    emptied.save(tmp_path / FILE, weights="mine")
    cache.load(tmp_path / FILE, weights="mine")
    cache.update(*STREAMS["keys and values"](3))
    assert cache.length == 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_is_read_by_safetensors_too(tmp_path, kind):
    cache = filled(kind, "keys and values")
    cache.save(tmp_path / FILE, weights="mine")
    found = load_file(tmp_path / FILE)
    assert sum(each.nbytes for each in found.values()) == cache.nbytes
    for index, buffer in enumerate(cache.buffers):
        used = cache.length - cache._first
        assert torch.equal(found[f"layers.0.streams.{index}"], buffer[:, :, :used])


@pytest.mark.parametrize("kind", KINDS)
def test_surroundings_do_not_change_what_is_loaded(tmp_path, kind):
    cache, again = filled(kind, "keys and values"), KINDS[kind]()
    with torch.inference_mode():
        cache.save(tmp_path / FILE, weights="mine")
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), torch.inference_mode():
            again.load(tmp_path / FILE, weights="mine")
    finally:
        torch.set_default_dtype(torch.float32)
    assert same(content(cache), content(again))
    again.update(*STREAMS["keys and values"](2))  # outside of inference mode


def test_gradients_are_left_out(tmp_path):
    cache, again = KVCache(), KVCache()
    cache.update(torch.randn(1, 1, 3, 2, requires_grad=True))
    cache.save(tmp_path / FILE, weights="mine")
    again.load(tmp_path / FILE, weights="mine")
    assert not again.buffers[0].requires_grad
    assert torch.equal(again.buffers[0], cache.buffers[0])


def test_all_layers_are_truncated_or_none():
    kinds = ("growing", "sliding", "8 bits")
    caches = [filled(kind, "latent", tokens=(9,)) for kind in kinds]
    before = [content(cache) for cache in caches]
    for length in (7, 10, -1):
        with pytest.raises(ValueError, match=r"layer \d: .*no layer was truncated"):
            truncate_all(caches, length)
        assert all(same(a, content(b)) for a, b in zip(before, caches, strict=True))
    truncate_all(caches, 8)
    assert [cache.length for cache in caches] == [8, 8, 8]

    class Other:
        length = 9

    with pytest.raises(TypeError, match="layer 3: Other cannot be truncated"):
        truncate_all([*caches, Other()], 8)
    assert [cache.length for cache in caches] == [8, 8, 8]


def test_all_layers_are_loaded_or_none(tmp_path):
    caches = [filled(kind, "keys and values") for kind in KINDS]
    save_all(caches, tmp_path / FILE, weights="mine")
    again = [make() for make in KINDS.values()]
    load_all(again, tmp_path / FILE, weights="mine")
    assert all(same(content(a), content(b)) for a, b in zip(caches, again, strict=True))

    again = [make() for make in KINDS.values()]
    others = [*again[:-1], QuantizedCache(4, 8)]
    with pytest.raises(ValueError, match="layer 6 is QuantizedCache"):
        load_all(others, tmp_path / FILE, weights="mine")
    with pytest.raises(ValueError, match="it has 6 caches, one for each layer, got 7"):
        load_all(again[:-1], tmp_path / FILE, weights="mine")
    with pytest.raises(ValueError, match="a cache comes twice"):
        load_all([again[0]] * 7, tmp_path / FILE, weights="mine")
    assert all(cache.length == 0 for cache in again)


def test_weights_are_named_by_a_text_or_a_module():
    assert weights_text("mine") == "mine"
    for wrong in ("", "  "):
        with pytest.raises(ValueError, match="names the weights"):
            weights_text(wrong)
    with pytest.raises(TypeError):
        weights_text(7)


def test_other_weights_of_equal_shape_are_refused(tmp_path):
    mine, other = nn.Linear(3, 3), nn.Linear(3, 3)
    cache, again = filled("growing", "latent"), KVCache()
    cache.save(tmp_path / FILE, weights=mine)
    with pytest.raises(ValueError, match="other weights give wrong results"):
        again.load(tmp_path / FILE, weights=other)
    other.load_state_dict(mine.state_dict())
    again.load(tmp_path / FILE, weights=other)
    assert same(content(cache), content(again))


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_that_holds_tokens_is_not_loaded(tmp_path, kind):
    cache = filled(kind, "keys and values")
    cache.save(tmp_path / FILE, weights="mine")
    before = content(cache)
    with pytest.raises(ValueError, match="layer 0 holds 6 tokens"):
        cache.load(tmp_path / FILE, weights="mine")
    assert same(before, content(cache))


@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds_and_arguments_are_refused(tmp_path, kind):
    filled(kind, "keys and values").save(tmp_path / FILE, weights="mine")
    others = [make() for name, make in KINDS.items() if name != kind]
    for other in (*others, StaticCache(14), SlidingCache(4), QuantizedCache(8, 6)):
        with pytest.raises(ValueError, match=r"layer 0 is .*load it into that"):
            other.load(tmp_path / FILE, weights="mine")
        assert other.length == 0


def rewritten(path, change, *, entry=None, **metadata):
    """The file again, with some of its metadata changed, and `change` made to its tensors."""
    with open_tensors(path) as file:
        texts = {**file.metadata, **metadata}
        tensors = {name: file.read(name) for name in file.entries}
    caches = json.loads(texts["caches"])
    if entry is not None:
        entry(caches[0])
    write_tensors(path, {**texts, "caches": json.dumps(caches)}, change(tensors))


def state(**values):
    return lambda entry: entry["state"].update(values)


def stream(**values):
    return lambda entry: entry["streams"][0].update(values)


WRONG = {
    "another version": ({"version": "2"}, None, "it has the version '1'"),
    "another format": ({"format": "regard.pool"}, None, "give a file that"),
    "other weights": ({"weights": "theirs"}, None, "it has the weights 'mine'"),
    "a length": ({}, state(length=7), "the tokens from slot 0 to 7"),
    "a length that is none": ({}, state(length=True), "whole numbers"),
    "a negative length": ({}, state(length=-6), "whole numbers"),
    "rows": ({}, state(rows=[6, 5, 6]), "a row for each length"),
    "longer rows": ({}, state(rows=[6, 7]), "the longest of 6"),
    "rows that are none": ({}, state(rows=["6", "7"]), "whole numbers"),
    "a first slot": ({}, state(first=1, length=7), "from slot 0 on|codes"),
    "an entry more": ({}, lambda e: e.update(extra=1), "kind, arguments, state and streams"),
    "no state": ({}, lambda e: e.update(state=[]), "state is an object"),
    "a stream less": ({}, lambda e: e["streams"].pop(), "its tensors are"),
    "a shape": ({}, stream(shape=[2, 3, 6, 7]), "its tensors are"),
    "a dtype": ({}, stream(dtype="float64"), "its tensors are"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("kind", ["growing", "static", "8 bits"])
def test_metadata_that_is_wrong_is_refused(tmp_path, kind, wrong):
    filled(kind, "keys and values").save(tmp_path / FILE, weights="mine")
    metadata, entry, says = WRONG[wrong]
    rewritten(tmp_path / FILE, lambda tensors: tensors, entry=entry, **metadata)
    cache = KINDS[kind]()
    with pytest.raises(ValueError, match=says):
        cache.load(tmp_path / FILE, weights="mine")
    assert (cache.length, cache.nbytes, cache.allocated_bytes) == (0, 0, 0)


def test_a_window_that_is_not_held_is_refused(tmp_path):
    filled("sliding", "latent", tokens=(2,)).save(tmp_path / FILE, weights="mine")
    rewritten(tmp_path / FILE, lambda tensors: tensors, entry=state(first=7, length=9))
    with pytest.raises(ValueError, match="holds the tokens from slot 6 on"):
        SlidingCache(4, 1).load(tmp_path / FILE, weights="mine")


def test_a_file_without_codes_rotates_nothing_whatever_its_widths(tmp_path):
    cache = QuantizedCache(format="K4V4")
    cache.update(torch.zeros(1, 1, 1, 64), torch.zeros(1, 1, 1, 64))
    cache.truncate(0)
    cache.save(tmp_path / FILE, weights="mine")

    def wider(entry):
        entry["state"]["outlines"][0]["shape"][3] = 1 << 40

    rewritten(tmp_path / FILE, lambda tensors: tensors, entry=wider)
    with pytest.raises(ValueError, match="the codes of streams"):
        QuantizedCache(format="K4V4").load(tmp_path / FILE, weights="mine")


def test_codes_that_do_not_fit_their_streams_are_refused(tmp_path):
    filled("4 bits", "keys and values").save(tmp_path / FILE, weights="mine")

    def wider(entry):
        entry["state"]["outlines"][0]["shape"][3] = 9

    rewritten(tmp_path / FILE, lambda tensors: tensors, entry=wider)
    with pytest.raises(ValueError, match="the codes of streams"):
        QuantizedCache(4, 6).load(tmp_path / FILE, weights="mine")
    for wrong in (None, [{}], [{"shape": [1, 1, 5, 2], "dtype": "float32"}], [{"shape": 3}]):
        with pytest.raises(ValueError, match="outlines have a shape"):
            outlines_from(wrong, ())


@pytest.mark.parametrize("pieces", [[9], [], [0, 7], 7, [-1, 8], [1 << 50]])
def test_pieces_that_are_no_streams_are_refused(tmp_path, pieces):
    cache = QuantizedCache(format="K4V4", group=4)
    cache.pieces = (4, 3)
    cache.update(torch.randn(2, 1, 5, 7))
    cache.save(tmp_path / FILE, weights="mine")
    again = QuantizedCache(format="K4V4", group=4)
    again.load(tmp_path / FILE, weights="mine")
    assert again.pieces == (4, 3) and same(content(cache), content(again))
    rewritten(tmp_path / FILE, lambda tensors: tensors, entry=state(pieces=pieces))
    with pytest.raises(ValueError, match="pieces are 7 channels wide together"):
        QuantizedCache(format="K4V4", group=4).load(tmp_path / FILE, weights="mine")


def test_a_static_cache_is_no_smaller_than_its_tokens(tmp_path):
    cache = StaticCache(12)
    cache.update(torch.zeros(1, 1, 12, 2))
    cache.save(tmp_path / FILE, weights="mine")

    def shorter(entry):
        entry["arguments"]["max_length"] = 11

    rewritten(tmp_path / FILE, lambda tensors: tensors, entry=shorter)
    with pytest.raises(ValueError, match="more than max_length=11"):
        StaticCache(11).load(tmp_path / FILE, weights="mine")


def test_nothing_is_allocated_for_sizes_without_elements(tmp_path):
    """A header may name any shape of no elements."""
    cache = KVCache()
    cache.update(torch.zeros(1, 1, 2, 3))
    cache.truncate(0)
    cache.save(tmp_path / FILE, weights="mine")
    shape = [1 << 40, 1, 0, 1]
    with open_tensors(tmp_path / FILE) as file:
        metadata = file.metadata
    caches = json.loads(metadata["caches"])
    caches[0]["streams"][0]["shape"] = shape
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}
    header = {"__metadata__": {**metadata, "caches": json.dumps(caches)}}
    text = json.dumps({**header, "layers.0.streams.0": entry}).encode()
    (tmp_path / FILE).write_bytes(struct.pack("<Q", len(text)) + text)
    again = KVCache()
    again.load(tmp_path / FILE, weights="mine")
    assert again.allocated_bytes == 0
