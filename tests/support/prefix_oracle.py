"""Stored prefixes as a plain dict of token sequences, and pages without memory."""

from regard.cache.paging.contexts import Context

CONTEXT = Context("5e1f", "Rotary(64)")


class Leaf:
    """A page that is full, and of which there is nothing else."""

    def __init__(self, sealed=True):
        self.references, self.used, self.node, self.sealed = 0, 0, None, sealed


def leaves(number):
    return [Leaf() for _ in range(number)]


def given(windows, count, *, first=None):
    """New pages of every layer: all of them, or from page `first(window)` on."""
    starts = [first(window) if first else 0 for window in windows]
    return [
        (window, start, leaves(count - start))
        for window, start in zip(windows, starts, strict=True)
    ]


class Plain:
    """For each stored prefix, the page of each layer; found by looking at all of them."""

    def __init__(self, size, windows):
        self.size, self.windows = size, windows
        self.pages = {}  # the key and the tokens up to the end of a page: its page in each layer

    def insert(self, tokens, key, layers):
        for stop in range(self.size, len(tokens) + 1, self.size):
            number = stop // self.size - 1
            held = self.pages.setdefault((key, *tokens[:stop]), [None] * len(self.windows))
            for layer, (_, first, pages) in enumerate(layers):
                page = pages[number - first] if first <= number < first + len(pages) else None
                if held[layer] is None and page is not None and page not in self.stored():
                    held[layer] = page

    def stored(self):
        return {page for held in self.pages.values() for page in held if page is not None}

    def dropped(self, gone):
        """Pages are there no longer, nor what follows one of a layer without a window."""
        for tokens, held in list(self.pages.items()):
            self.pages[tokens] = [None if page in gone else page for page in held]
        for tokens, held in list(self.pages.items()):
            if any(w is None and p is None for w, p in zip(self.windows, held, strict=True)):
                for other in list(self.pages):
                    if other[: len(tokens)] == tokens:
                        del self.pages[other]

    def find(self, tokens, key):
        """The length, and of each layer the pages that the next token attends to."""
        for length in range((len(tokens) - 1) // self.size * self.size, 0, -self.size):
            found = [
                [
                    (self.pages.get((key, *tokens[: slot + self.size])) or [None] * 99)[layer]
                    for slot in range(0, length, self.size)
                    if window is None or slot + self.size > length - window + 1
                ]
                for layer, window in enumerate(self.windows)
            ]
            start = key, *tokens[:length]
            known = (held for each, held in self.pages.items() if each[: len(start)] == start)
            if any(page is not None for held in known for page in held) and all(
                page is not None for pages in found for page in pages
            ):
                return length, found
        return 0, []
