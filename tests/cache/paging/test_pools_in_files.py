"""Stored prefixes in files: another pool finds them, all of them or none.

The oracle: what the pool that was saved finds.
"""

import json
from dataclasses import replace

import pytest
import torch

from regard import PagedCache, PagePool
from regard.cache.files import open_tensors, write_tensors
from regard.cache.paging.contexts import Context

FILE = "pool.safetensors"
TEXTS = {
    "first": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13],
    "branched": [1, 2, 3, 4, 5, 6, 7, 8, 20, 21, 22, 23, 24, 25],
    "other": [7, 7, 7, 7, 7, 7],
}


def context_of(**changes):
    return replace(Context("5e1f", "Rotary(4)"), **changes)


def pool_of(form="plain", pages=200):
    return PagePool(pages, 4, format=form)


def caches_over(pool):
    """With a rollback, the pages before a window are there when a text is stored."""
    return [PagedCache(pool), PagedCache(pool, window=6, rollback=100)]


def stored(pool, texts=None):
    """Texts of two layers, the second with a window; what each holds follows from its tokens."""
    for text in texts or TEXTS.values():
        caches = caches_over(pool)
        for layer, cache in enumerate(caches):
            for at in range(len(text)):
                k = streams_of(text, at, layer)
                cache.update(k, -k)
        pool.store(text, caches, context=context_of())
        for cache in caches:
            cache.release()
    return pool


def streams_of(text, at, layer):
    seed = hash(tuple(text[: at + 1])) % 1000 + layer
    return torch.randn(1, 2, 1, 6, generator=torch.Generator().manual_seed(seed))


def found(pool, text):
    """What a pool has of a text."""
    prefix = pool.prefix([*text, 0], context=context_of())
    values = [prefix.length]
    for cache in prefix.caches() if prefix.length else ():
        k = torch.ones(1, 2, 1, 6)
        parts = cache.peek(k, k)
        values += [parts[0].kv_start, *(x.clone() for part in parts for x in part.streams[:])]
        cache.release()
    return values


def same(mine, theirs):
    pairs = zip(mine, theirs, strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


@pytest.mark.parametrize("form", ["plain", "K4V4"])
def test_another_pool_finds_the_same(tmp_path, form):
    pool, again = stored(pool_of(form)), pool_of(form)
    written = pool.save(tmp_path / FILE)
    assert again.load(tmp_path / FILE, weights="5e1f") == written == pool.pages_in_use
    assert again.weights == "5e1f"
    for text in TEXTS.values():
        assert same(found(pool, text), found(again, text))
        assert found(again, text)[0] == len(text) // 4 * 4
    assert again.nbytes.held == 0 and again.nbytes.reusable == pool.nbytes.reusable
    assert again.prefixes.describe() == pool.prefixes.describe()
    again.evict()
    assert again.pages_in_use == 0


def test_what_is_stored_already_is_not_loaded_twice(tmp_path):
    pool = stored(pool_of())
    pool.save(tmp_path / FILE)
    before = pool.pages_in_use
    assert pool.load(tmp_path / FILE, weights=context_of()) == 0
    assert pool.pages_in_use == before
    other = pool_of()
    stored(other, [TEXTS["first"][:8]])
    assert 0 < other.load(tmp_path / FILE, weights="5e1f") < before
    assert all(same(found(pool, text), found(other, text)) for text in TEXTS.values())


def test_names_stay_apart(tmp_path):
    pool, again = pool_of(), pool_of()
    text = TEXTS["first"]
    for name in ("a", "b"):
        cache = PagedCache(pool)
        cache.update(torch.full((1, 1, 12, 4), float(ord(name))))
        pool.store(text[:12], [cache], context=context_of(key=name))
    pool.save(tmp_path / FILE)
    again.load(tmp_path / FILE, weights="5e1f")
    for name in ("a", "b", "c"):
        prefix = again.prefix(text, context=context_of(key=name))
        if name == "c":
            assert prefix.length == 0
            continue
        (cache,) = prefix.caches()
        (part,) = cache.peek(torch.zeros(1, 1, 0, 4))
        assert part.streams[0].eq(ord(name)).all()


def test_an_empty_pool_is_saved(tmp_path):
    pool, again = pool_of(), pool_of()
    pool.bind(context_of())
    assert pool.save(tmp_path / FILE) == 0
    assert again.load(tmp_path / FILE, weights="5e1f") == 0
    with pytest.raises(ValueError, match="belongs to no model yet"):
        pool_of().save(tmp_path / FILE)


def test_pools_that_do_not_fit_refuse_and_are_as_before(tmp_path):
    pool = stored(pool_of())
    pool.save(tmp_path / FILE)
    bound = pool_of()
    bound.bind(context_of(weights="theirs"))
    small, other = pool_of(pages=pool.pages_in_use - 1), PagePool(200, 8)
    for made, weights, says in (
        (pool_of(), "theirs", "other weights give wrong results"),
        (bound, "5e1f", "give each model a pool of its own"),
        (pool_of("K8V4"), "5e1f", "format='plain'"),
        (other, "5e1f", "page_size=4"),
        (small, "5e1f", "make a larger PagePool"),
    ):
        before = made.weights
        with pytest.raises(ValueError, match=says):
            made.load(tmp_path / FILE, weights=weights)
        assert made.pages_in_use == 0 and made.nbytes == (0, 0, 0)
        assert made.weights == before


def rewritten(path, change, numbers=None):
    """The file again with a change of its content."""
    with open_tensors(path) as file:
        caches = json.loads(file.metadata["caches"])
        tensors = {name: file.read(name) for name in file.entries}
        metadata = dict(file.metadata)
    change(caches[0]["state"])
    if numbers is not None:
        numbers(tensors)
    write_tensors(path, {**metadata, "caches": json.dumps(caches)}, tensors)


def entry(**values):
    return lambda content: content["entries"][0].update(values)


def layer(index, value):
    return lambda content: content["entries"][0]["layers"].__setitem__(index, value)


def page(at, value):
    return lambda tensors: tensors["layers.0.streams.1"].__setitem__(at, value)


def nothing(content):
    pass


WRONG = {
    "no entries": (lambda content: content.update(entries=3), None, "entries are a list"),
    "an entry less": (lambda content: content["entries"].pop(), None, "belong to no entry|fewer"),
    "no groups": (lambda content: content.pop("groups"), None, "groups of pages are a list"),
    "an entry that is none": (lambda c: c["entries"].append(3), None, "an entry has a key"),
    "a key that is no text": (entry(key=["a"]), None, "the key of an entry is text"),
    "tokens": (entry(tokens=-1), None, "a number of tokens"),
    "more tokens": (entry(tokens=1 << 30), None, "fewer tokens|belong to no entry|numbers below"),
    "no layers": (entry(layers=[]), None, "a layer has a window"),
    "other layers": (entry(layers=[[None, 0, 2], [None, 0, 2]]), None, "have the windows"),
    "a layer that is none": (layer(0, [None, 0]), None, "a layer has a window"),
    "a window of none": (layer(1, [0, 0, 3]), None, "a layer has a window"),
    "more pages than tokens": (layer(0, [None, 0, 4]), None, "a layer has a window"),
    "a first page": (layer(0, [None, 1, 1]), None, "all pages of a prefix|belong to no entry"),
    "a page that is not there": (nothing, page(0, 99), "are numbers below"),
    "a negative page": (nothing, page(0, -7), "are numbers below"),
    "a page of no full layer": (nothing, page(0, -1), "has all pages of a prefix"),
    "a page twice": (nothing, page(0, 1), "different ones|belong to no entry"),
    "numbers": (
        nothing,
        lambda tensors: tensors.update(
            {"layers.0.streams.0": tensors["layers.0.streams.0"].float()}
        ),
        "its tensors are",
    ),
    "streams": (nothing, lambda tensors: tensors.pop("layers.0.streams.3"), "its tensors are"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_content_that_is_wrong_is_refused(tmp_path, wrong):
    stored(pool_of()).save(tmp_path / FILE)
    change, numbers, says = WRONG[wrong]
    rewritten(tmp_path / FILE, change, numbers)
    pool = pool_of()
    with pytest.raises(ValueError, match=says):
        pool.load(tmp_path / FILE, weights="5e1f")
    assert pool.pages_in_use == 0 and pool.nbytes == (0, 0, 0) and pool.weights is None
    stored(pool)
    assert found(pool, TEXTS["first"])[0] == 12
