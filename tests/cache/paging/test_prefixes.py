"""`Prefixes`: what it finds, against a plain dict of all stored sequences, and what goes first."""

import random
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from prefix_oracle import CONTEXT, Plain, given, leaves
from regard.cache.paging.prefixes import Layer, Match, Prefixes, first_page
from session import LONG

WINDOWS = [(None,), (None, 3), (2, 5), (None, 4, None, 1), (1,)]
TEXT = st.lists(st.integers(0, 1), max_size=13).map(tuple)


def pages_of(match):
    return [list(layer.pages) for layer in match.layers]


# ---- against the oracle ----


class Pair:
    """An index and its oracle, to which the same happens."""

    def __init__(self, size, windows):
        self.size, self.windows = size, windows
        self.index, self.plain = Prefixes(size), Plain(size, windows)
        self.held = []  # pages of sequences

    def find(self, tokens, key):
        match = self.index.find(tokens, replace(CONTEXT, key=key))
        length, pages = self.plain.find(tokens, key)
        assert (match.length, pages_of(match)) == (length, pages)
        return match

    def store(self, tokens, key, retain):
        """Find a sequence, compute the rest, store it; its sequence may go on."""
        match = self.find((*tokens, 0), key)
        count = len(tokens) // self.size
        layers = []
        for layer, window in enumerate(self.windows):
            had = list(match.layers[layer].pages) if match.layers else []
            first = match.layers[layer].first if match.layers else 0
            pages = had + leaves(count - first - len(had))
            skip = 0 if window is None else max(0, count - first - -(-(window - 1) // self.size))
            layers.append((window, first + skip, pages[skip:]))
        taken = self.index.insert(tokens, replace(CONTEXT, key=key), layers)
        before = self.plain.stored()
        self.plain.insert(tokens, key, layers)
        assert {*taken} == self.plain.stored() - before
        if retain:
            self.held.append([page for _, _, pages in layers for page in pages])
            for page in self.held[-1]:
                page.references += 1

    def release(self):
        if self.held:
            for page in self.held.pop(0):
                page.references -= 1

    def evict(self):
        stored = self.plain.stored()
        free = self.index.evict()
        assert len({*free}) == len(free) and {*free} <= stored
        assert all(page.references == 0 and page.node is None for page in free)
        assert free or all(page.references for page in stored)
        self.plain.dropped({page for page in stored if page.node is None})

    def check(self):
        stored = self.plain.stored()
        assert all(page.node is not None and page in page.node.pages for page in stored)
        assert stored == {page for node in self.index.nodes for page in node.stored()}


@drawn(st.data())
@settings(max_examples=400 if LONG else 60, deadline=None)
def test_an_index_is_a_plain_dict_of_sequences(data):
    pair = Pair(data.draw(st.integers(1, 3)), data.draw(st.sampled_from(WINDOWS)))
    for _ in range(data.draw(st.integers(1, 14))):
        step = data.draw(st.sampled_from(["store", "store", "find", "release", "evict"]))
        if step in ("store", "find"):
            tokens, key = data.draw(TEXT), data.draw(st.sampled_from("ab"))
            if step == "store":
                pair.store(tokens, key, retain=data.draw(st.booleans()))
            else:
                pair.find(tokens, key)
        else:
            getattr(pair, step)()
        pair.check()
    while pair.held:
        pair.release()
    while pair.plain.stored():
        pair.evict()
    assert len(pair.index) == 0


# ---- finding ----


def test_the_last_token_is_left_to_forward():
    index = Prefixes(2)
    index.insert([1, 2, 3, 4], CONTEXT, given([None], 2))
    assert [index.find([1, 2, 3, 4, 5][:n], CONTEXT).length for n in range(6)] == [0, 0, 0, 2, 2, 4]


def test_tokens_are_any_row_of_whole_numbers():
    index, tokens = Prefixes(2), torch.tensor([1, 2, 3, 4], dtype=torch.int32)
    index.insert(tokens, CONTEXT, given([None], 2))
    assert index.find(torch.tensor([1, 2, 3]), CONTEXT).length == 2
    for wrong in (torch.rand(3), [1, 2**64, 3], torch.zeros(1, 3).long(), torch.ones(3).bool()):
        with pytest.raises(ValueError, match="whole numbers"):
            index.find(wrong, CONTEXT)


@pytest.mark.parametrize(("field", "value"), [("weights", "5e20"), ("key", "Rotary(32)")])
def test_another_context_finds_nothing(field, value):
    index, tokens = Prefixes(2), [1, 2, 3, 4]
    index.insert(tokens, CONTEXT, given([None], 2))
    assert index.find(tokens, replace(CONTEXT, **{field: value})).length == 0
    assert index.find(tokens, CONTEXT).length == 2


def test_a_page_after_other_tokens_is_not_found():
    index = Prefixes(2)
    index.insert([1, 2, 3, 4], CONTEXT, given([None], 2))
    index.insert([5, 6], CONTEXT, given([None], 1))
    assert index.find([5, 6, 3, 4, 9], CONTEXT).length == 2


def test_kinds_of_layers_have_lengths_of_their_own():
    """Of 12 tokens, the window of 3 has pages 4 and 5 alone, the window of 5 pages 2 and 3."""
    index, windows = Prefixes(2), (None, 3, 5)
    full, short, long = given(windows, 6)
    layers = [full, (3, 4, short[2][4:]), (5, 2, [*long[2][2:4], None, None])]
    index.insert(range(12), CONTEXT, layers)
    assert index.find(range(13), CONTEXT).length == 0  # at 8, the shorter window has no page 3
    index.insert(range(8), CONTEXT, [full, (3, 3, leaves(1)), (5, 2, long[2][2:4])])
    match = index.find(range(13), CONTEXT)
    assert match.length == 8 and [layer.first for layer in match.layers] == [0, 3, 2]


# ---- storing ----


def test_pages_of_tokens_that_are_stored_stay_their_owners():
    index = Prefixes(2)
    first, second = given([None], 2), given([None], 3)
    assert index.insert([1, 2, 3, 4], CONTEXT, first) == first[0][2]
    assert index.insert([1, 2, 3, 4, 5, 6], CONTEXT, second) == second[0][2][2:]
    assert [page.node for page in second[0][2][:2]] == [None, None]
    found = index.find([1, 2, 3, 4, 5, 6, 7], CONTEXT).layers[0].pages
    assert found == [*first[0][2], second[0][2][2]]


def test_open_pages_are_not_stored():
    index, (layer,) = Prefixes(2), given([None], 3)
    layer[2][1].sealed = False
    assert index.insert(range(6), CONTEXT, [layer]) == layer[2][:1]
    assert index.find(range(7), CONTEXT).length == 2


FAULTS = {
    "windows": lambda pages: [(None, 0, pages[:3]), (4, 0, pages[3:])],
    "all pages of a prefix": lambda pages: [(None, 1, pages[:2])],
    "given twice": lambda pages: [(None, 0, [pages[0], pages[1], pages[0]])],
    "another prefix": lambda pages: [(None, 0, [pages[6], pages[0], pages[1]])],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_error_stores_nothing(fault):
    index, pages = Prefixes(2), leaves(7)
    index.insert([8, 8], CONTEXT, [(None, 0, pages[6:])])
    before = [node.stored() for node in index.nodes]
    with pytest.raises(ValueError, match=fault):
        index.insert(range(6), CONTEXT, FAULTS[fault](pages))
    assert [node.stored() for node in index.nodes] == before
    assert [page.node is None for page in pages] == [*[True] * 6, False]


# ---- evicting ----


def emptied(index):
    """The pages in the order in which they are evicted."""
    order = []
    while pages := index.evict():
        order.append(pages)
    return order


def test_the_least_recently_used_goes_first_and_a_child_before_its_parent():
    index = Prefixes(1)
    old, new = given([None], 3)[0][2], given([None], 2)[0][2]
    index.insert([1, 2, 3], CONTEXT, [(None, 0, old)])
    index.insert([7, 8], CONTEXT, [(None, 0, new)])
    index.find([1, 2, 0], CONTEXT)  # which leaves the third page behind
    order = [page for (page,) in emptied(index)]
    assert order == [old[2], new[1], new[0], old[1], old[0]]


def test_pages_that_sequences_hold_stay_stored():
    index, (layer,) = Prefixes(1), given([None], 3)
    index.insert([1, 2, 3], CONTEXT, [layer])
    layer[2][1].references = 1
    assert index.evict() == [layer[2][2]]
    assert index.evict() == [layer[2][0]]  # the only one that can be freed: nothing is found now
    assert index.find([1, 2, 3], CONTEXT).length == 0 and layer[2][1].node is None
    assert index.evict() == []


def test_pages_that_no_window_needs_go_first():
    """Stored are windows of 2 pages at the ends of 4 and of 8 pages, and one page between."""
    index, windows = Prefixes(1), (None, 3)
    full, window = leaves(8), leaves(8)
    index.insert(range(4), CONTEXT, [(None, 0, full[:4]), (3, 2, window[2:4])])
    index.insert(range(8), CONTEXT, [(None, 0, full), (3, 5, window[5:])])
    assert len(windows) == 2 and index.evict() == [window[5]]
    assert index.find(range(9), CONTEXT).length == 8
    assert index.find(range(6), CONTEXT).length == 4


def test_the_end_of_a_prefix_goes_first_and_its_windows_before_the_rest():
    index, full, window = Prefixes(1), leaves(6), leaves(6)
    index.insert(range(6), CONTEXT, [(None, 0, full), (3, 4, window[4:])])
    index.insert([9], CONTEXT, given((None, 3), 1))
    for page in (window[5], full[5], window[4], full[4]):
        assert index.evict() == [page]


def test_many_pages_are_evicted_at_once():
    index, (layer,) = Prefixes(1), given([None], 5)
    index.insert(range(5), CONTEXT, [layer])
    assert index.evict(3) == layer[2][:1:-1] and index.evict(9) == layer[2][1::-1]


def test_windows_where_a_text_went_on_lately_stay_longer():
    index, windows = Prefixes(1), {}
    for start in (10, 20):
        full, window = leaves(6), windows.setdefault(start, leaves(6))
        text = range(start, start + 6)
        index.insert(text[:3], CONTEXT, [(None, 0, full[:3]), (2, 2, window[2:3])])
        index.insert(text, CONTEXT, [(None, 0, full), (2, 5, window[5:])])
        for page in (*full, window[5]):
            page.references = 1
    assert index.find([10, 11, 12, 99], CONTEXT).length == 3
    assert index.evict() == [windows[20][2]]
    assert index.evict() == [windows[10][2]]


def test_a_model_whose_prefixes_are_gone_may_come_back_with_other_layers():
    index = Prefixes(1)
    index.insert([1], CONTEXT, given([None, 4], 1))
    emptied(index)
    assert len(index.insert([1], CONTEXT, given([None], 1))) == 1


class Chats:
    """Conversations over one system prompt in turn; the last answer is written anew each time.

    A model thinks before it answers, and the next prompt leaves that out. What was computed is
    stored when the prompt has been read, and again after the answer.
    """

    def __init__(self, windows, room, *, prompts_are_stored=True, seed=0):
        self.index, self.windows, self.room = Prefixes(4), windows, room
        self.random, self.stored = random.Random(seed), prompts_are_stored
        self.in_use = self.hits = self.asked = 0
        self.system = self.text(32)

    def text(self, tokens):
        return [self.random.randrange(1000) for _ in range(tokens)]

    def run(self, turns=30, chats=4):
        texts = [self.system + self.text(5) for _ in range(chats)]
        for _ in range(turns):
            chat = self.random.randrange(chats)
            answer = self.text(self.random.randrange(4, 16))
            self.turn(texts[chat], self.text(self.random.randrange(1, 40)), answer)
            texts[chat] += answer + self.text(6)
            if len(texts[chat]) > 200:
                texts[chat] = self.system + self.text(5)
        return self.hits / self.asked

    def turn(self, prompt, thoughts, answer):
        match = self.index.find(prompt, CONTEXT)
        self.hits, self.asked = self.hits + match.length, self.asked + len(prompt)
        held = [page for layer in match.layers for page in layer.pages]
        for page in held:
            page.references += 1
        whole = prompt + thoughts + answer
        for text in (prompt, whole)[0 if self.stored else 1 :]:
            match = self.store(text, match)
        for page in held:
            page.references -= 1

    def store(self, text, match):
        """The windows of a text's end, and full layers; each page is taken from bounded room."""
        layers = []
        for layer, window in enumerate(self.windows):
            had = match.layers[layer] if match.layers else Layer(window, 0, [])
            pages = [*had.pages, *leaves(len(text) // 4 - had.first - len(had.pages))]
            skip = 0 if window is None else max(0, len(pages) - -(-(window - 1) // 4))
            layers.append(Layer(window, had.first + skip, pages[skip:]))
        self.in_use += len(self.index.insert(text, CONTEXT, layers))
        while self.in_use > self.room and (free := self.index.evict()):
            self.in_use -= len(free)
        return Match(len(text) // 4 * 4, tuple(layers))


def test_chats_that_write_their_last_turn_anew_find_what_is_before_it():
    """Four chats of up to 50 pages each; of their prompts, 83 % were computed before."""
    endless = Chats((None,), 10**9).run()
    assert 0.8 < endless < 0.85
    assert Chats((None,), 200).run() > 0.97 * endless
    assert Chats((None,), 70).run() > 0.6 * endless


def test_chats_resume_at_windows_only_where_a_prompt_was_stored():
    windows = (None, 9)
    assert Chats(windows, 400).run() > 0.75
    assert Chats(windows, 10**9, prompts_are_stored=False).run() == 0


# ---- what it says, and what it costs ----


@pytest.mark.parametrize("page_size", [1, 2, 3, 4])
@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 9])
def test_the_first_page_is_that_of_the_oldest_slot_in_the_window(window, page_size):
    for count in range(8):
        length = count * page_size
        oldest = max(0, length - window + 1)  # a window counts the query's own token
        assert first_page(window, count, page_size) == min(count, oldest // page_size)
        assert first_page(None, count, page_size) == 0


@pytest.mark.long
def test_finding_and_storing_8192_tokens_of_30_layers_takes_milliseconds():
    index, tokens, best = Prefixes(64), list(range(8193)), [1.0, 1.0]
    for _ in range(5):
        while index.evict(1000):
            pass
        layers = given([None] * 30, 128)
        start = time.perf_counter()
        index.insert(tokens, CONTEXT, layers)
        stored = time.perf_counter()
        assert index.find(tokens, CONTEXT).length == 8192
        best = [min(best[0], stored - start), min(best[1], time.perf_counter() - stored)]
    assert max(best) < 0.010  # three times what one free core takes
