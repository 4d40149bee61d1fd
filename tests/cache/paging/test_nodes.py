"""Kinds of layers, and nodes: which pages the token after a prefix attends to."""

import pytest

from prefix_oracle import CONTEXT, Leaf
from regard.cache.paging.nodes import Kinds, Node, key_of


@pytest.mark.parametrize("page_size", [1, 2, 3, 4])
@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 9])
def test_the_first_page_is_that_of_the_oldest_slot_in_the_window(window, page_size):
    kinds = Kinds((window,), page_size)
    for count in range(8):
        length = count * page_size
        oldest = max(0, length - window + 1)  # a window counts the query's own token
        assert kinds.first(window, count) == min(count, oldest // page_size)
        assert kinds.first(None, count) == 0


def chain(windows, count, page_size=1):
    kinds, nodes = Kinds(windows, page_size), []
    for number in range(count):
        parent = nodes[-1] if nodes else None
        nodes.append(Node(parent, CONTEXT, bytes([number]) * 8, kinds))
    return nodes


def test_a_node_knows_its_path_and_the_nodes_that_its_windows_need():
    nodes = chain((None, 3, 2, 3), 5)
    assert nodes[4].path() == nodes and nodes[4].depth == 5
    needed = list(nodes[4].resuming())
    assert needed == [(0, nodes[4]), (1, nodes[4]), (1, nodes[3])]  # of windows 2 and 3
    assert [nodes[4].kinds.windowed[i][0] for i, _ in needed] == [2, 3, 3]


def test_a_page_knows_its_node_as_long_as_it_is_there():
    (node,), page, other = chain((None, 2, 2), 1), Leaf(), Leaf()
    for layer, each in ((0, Leaf()), (1, page)):
        node.place(layer, each)
    node.refresh()
    assert page.node is node and node.whole == [False] and node.unneeded() == [1]
    node.place(2, other)
    node.refresh()
    assert node.whole == [True] and len(node.held()) == 3
    node.needed[0] = 1
    assert node.unneeded() == []
    node.place(1, None)
    node.refresh()
    assert page.node is None and node.whole == [False] and len(node.held()) == 2


def test_a_key_depends_on_everything_before_it():
    one, two = chain((None,), 2)
    keys = {one.key, two.key, key_of(None, CONTEXT, two.tokens), key_of(one, CONTEXT, one.tokens)}
    assert len(keys) == 4 and all(len(key) == 32 for key in keys)
