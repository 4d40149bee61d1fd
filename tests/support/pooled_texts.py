"""Sequences over a pool whose keys and values can be told from their tokens, so that what is read
can be checked at any time, also where pages are shared."""

import torch

from regard import PagedCache
from regard.cache.paging.contexts import Context

WINDOWS = (None, 6)  # of the layers
HEADS, WIDTHS = 2, (4, 2)  # of keys and of values


def context(name=""):
    return Context("5e1f", name)


def content(tokens, first=0, layer=0):
    """Streams `[1, G, L, W]` of a layer: a number that bfloat16 holds exactly for each token."""
    slots = torch.arange(first, first + len(tokens))
    numbers = (31 * torch.tensor(tokens, dtype=torch.int64) + 7 * slots + 101 * layer) % 251
    values = (numbers / 256).float()[None, None, :, None]
    return tuple(values.expand(1, HEADS, -1, width).contiguous() for width in WIDTHS)


class Sequence:
    """One text and its caches, a full layer and one with a window."""

    def __init__(self, pool, tokens, name=""):
        """Begin with the stored prefix of `tokens`, and append the rest."""
        self.pool, self.tokens, self.name = pool, [], name
        prefix = pool.prefix(tokens, context=context(name))
        self.caches = [PagedCache(pool, window=window) for window in WINDOWS]
        if prefix.length:
            self.caches = prefix.caches()
        self.tokens = list(tokens[: prefix.length])
        self.found = prefix.length
        self.check()

    def append(self, tokens):
        """All layers, or an error and none."""
        before = [cache.snapshot() for cache in self.caches]
        try:
            for layer, cache in enumerate(self.caches):
                cache.update(*content(tokens, len(self.tokens), layer))
        except ValueError:
            for cache, snapshot in zip(self.caches, before, strict=True):
                cache.restore(snapshot)
            raise
        self.tokens += tokens

    def check(self):
        """What the caches hold is what belongs to the tokens."""
        for layer, cache in enumerate(self.caches):
            assert cache.length == len(self.tokens)
            nothing = content([], len(self.tokens), layer)
            for part in cache.peek(*nothing):
                tokens = self.tokens[part.kv_start : part.kv_stop]
                wanted = content(tokens, part.kv_start, layer)
                for got, want in zip(part.streams[:], wanted, strict=True):
                    assert torch.equal(got, want), (layer, part.kv_start, part.kv_stop)

    def store(self):
        self.pool.store(self.tokens, self.caches, context=context(self.name))

    def fork(self):
        new = object.__new__(Sequence)
        new.pool, new.tokens, new.name = self.pool, list(self.tokens), self.name
        new.found, new.caches = self.found, []
        new.caches = [cache.fork() for cache in self.caches]
        return new

    def truncate(self, length):
        """All layers or none: a copy of each is cut, for which there may be no room."""
        if all(cache.can_truncate(length) for cache in self.caches):
            copies = self.fork()
            for cache in copies.caches:
                cache.truncate(length)
            self.release()
            self.tokens, self.caches = self.tokens[:length], copies.caches

    def release(self):
        for cache in self.caches:
            cache.release()
