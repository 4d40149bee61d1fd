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
    assert len(again.memory.prefixes) == len(pool.memory.prefixes)
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


def context(**values):
    return lambda content: content["contexts"][0].update(values)


def node(row, column, value):
    """A number of the nodes: the parent, four tokens, and the page of either layer."""
    return lambda tensors: tensors["layers.0.streams.0"].__setitem__((row, column), value)


def nothing(content):
    pass


def as_floats(tensors):
    tensors["layers.0.streams.0"] = tensors["layers.0.streams.0"].float()


WRONG = {
    "no contexts": (lambda content: content.update(contexts=3), None, "contexts have a key"),
    "a context less": (lambda content: content["contexts"].pop(), None, "pages are stored as"),
    "no groups": (lambda content: content.pop("groups"), None, "groups of pages are a list"),
    "a context that is none": (lambda c: c["contexts"].append(3), None, "contexts have a key"),
    "a key that is no text": (context(key=["a"]), None, "contexts have a key"),
    "no layers": (context(windows=[]), None, "contexts have a key"),
    "more layers": (context(windows=[None, 6, 6]), None, "has 8 columns"),
    "a window of none": (context(windows=[None, 0]), None, "contexts have a key"),
    "a page that is not there": (nothing, node(0, 5, 99), "pages below"),
    "a negative page": (nothing, node(0, 6, -7), "pages below"),
    "a page of no full layer": (nothing, node(0, 5, -1), "every layer without a window"),
    "a page twice": (nothing, node(0, 5, 1), "is in one place"),
    "a page that is not used": (nothing, node(3, 6, -1), "is in one place"),
    "a parent that comes later": (nothing, node(0, 0, 1), "follows its parent"),
    "a parent that is none": (nothing, node(1, 0, -2), "follows its parent"),
    "numbers": (nothing, as_floats, "its tensors are"),
    "streams": (nothing, lambda tensors: tensors.pop("layers.0.streams.2"), "its tensors are"),
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


def test_layers_with_other_windows_than_the_stored_ones_are_refused(tmp_path):
    stored(pool_of()).save(tmp_path / FILE)
    rewritten(tmp_path / FILE, context(windows=[None, None]))
    pool = stored(pool_of())
    before = pool.pages_in_use
    with pytest.raises(ValueError, match="have the windows"):
        pool.load(tmp_path / FILE, weights="5e1f")
    assert pool.pages_in_use == before
