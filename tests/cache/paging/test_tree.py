"""`Tree`: children by tokens, and which windows are stored for which nodes."""

from prefix_oracle import CONTEXT, Leaf
from regard.cache.paging.nodes import Kinds
from regard.cache.paging.tree import Tree

KINDS = Kinds((None, 3), page_size=1)


def grown(tree, text):
    """A path of these letters, every page of it there."""
    chunks = [letter.encode() * 8 for letter in text]
    levels = tree.levels(chunks, CONTEXT)
    path = tree.extended([level[0] for level in levels], chunks, CONTEXT, KINDS)
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
    assert [len(level) for level in tree.levels([b"a" * 8, b"b" * 8, b"z" * 8], CONTEXT)] == [1, 1]


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
