"""Masks: rules for which keys a query may attend to, combined with `&`, `|` and `~`.

Examples:
    >>> from regard.masks import EVERYTHING, NOTHING, Causal
    >>> Causal() & EVERYTHING, Causal() | NOTHING  # the neutral elements
    (Causal(), Causal())
"""

from regard.masks.algebra import AllOf, AnyOf, Not
from regard.masks.data import Documents, Padding
from regard.masks.dense import Dense
from regard.masks.mask import EVERYTHING, NOTHING, Everything, Mask, Nothing
from regard.masks.rules import BeyondData, Causal, Chunked, Prefix, SlidingWindow, Where
from regard.masks.runs import Shown
from regard.masks.tree import Tree
from regard.span import Span

__all__ = [
    "EVERYTHING",
    "NOTHING",
    "AllOf",
    "AnyOf",
    "BeyondData",
    "Causal",
    "Chunked",
    "Dense",
    "Documents",
    "Everything",
    "Mask",
    "Not",
    "Nothing",
    "Padding",
    "Prefix",
    "Shown",
    "SlidingWindow",
    "Span",
    "Tree",
    "Where",
]
