"""`Tree`: children by tokens, which windows are stored for which nodes, and the nodes."""

import pytest

from prefix_oracle import CONTEXT, Leaf
from regard.cache.paging.tree import Kinds, Node, Tree

KINDS = Kinds((None, 3), page_size=1)


def grown(tree, text):
    """A path of these letters, every page of it there."""
    chunks = [letter.encode() * 8 for letter in text]
    path = tree.extended(tree.path(chunks, CONTEXT), chunks, CONTEXT, KINDS)
    for node in path:
        for layer in range(2):
            if node.pages[layer] is None:
                node.place(layer, Leaf())
        node.refresh()
    tree.add_resume_points(path)
    return path


def test_paths_share_their_beginning():
    tree = Tree()
    one, two = grown(tree, "abcd"), grown(tree, "abxy")
    assert one[:2] == two[:2] and len(tree) == 6 and [*tree][:4] == one
    assert [node.branched for node in one] == [False, True, False, False]
    assert tree.path([b"a" * 8, b"b" * 8, b"z" * 8], CONTEXT) == one[:2]


def test_windows_are_stored_for_ends_and_branch_points():
    """A window of 3 needs the last two pages."""
    tree = Tree()
    path = grown(tree, "abcdefgh")
    assert [node.needed for node in path] == [[0]] * 6 + [[1]] * 2
    assert {*tree.spare} == {*path[:6]}
    grown(tree, "abcdx")
    assert [node.is_resume_point for node in path] == [
        False,
        False,
        False,
        True,
        False,
        False,
        False,
        True,
    ]
    assert [node.needed for node in path[2:4]] == [[1], [2]]  # x needs d too
    tree.release(path[3])
    assert [node.needed for node in path[2:4]] == [[0], [1]]


def test_what_is_dropped_needs_nothing_any_more():
    tree = Tree()
    path = grown(tree, "abcd")
    grown(tree, "abcx")
    free = tree.dropped(path[3])
    assert len(free) == 2 and all(page.node is None for page in free)
    assert path[2].needed == [2] and path[1].needed == [1]  # the branch point, and x
    path[0].pages[0].references = 1
    assert len(tree.dropped(path[0])) == 2 * 4 - 1
    assert len(tree) == 0 and not tree.spare


def test_nodes_that_hold_and_lead_to_nothing_are_removed():
    tree, kinds = Tree(), Kinds((2,), page_size=1)
    path = tree.extended([], [b"a" * 8, b"b" * 8, b"c" * 8], CONTEXT, kinds)
    path[2].place(0, Leaf())
    path[2].refresh()
    tree.add_resume_points(path)
    assert len(tree) == 3  # whose first two hold no page, and lead to one
    tree.removed(path[2], [0])
    assert len(tree) == 0


# ---- nodes ----


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
