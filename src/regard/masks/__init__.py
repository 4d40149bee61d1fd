"""Masks: rules for which keys a query may attend to, combined with `&`, `|` and `~`.

Examples:
    >>> from regard.masks import EVERYTHING, NOTHING, Causal
    >>> Causal() & EVERYTHING, Causal() | NOTHING  # the neutral elements
    (Causal(), Causal())
    >>> EVERYTHING.draw(2) == (~NOTHING).draw(2).replace("~Nothing", "Everything")
    True
"""

from regard.masks.algebra import EVERYTHING, NOTHING, AllOf, AnyOf, Everything, Mask, Not, Nothing
from regard.masks.data import Chunked, Documents, Padding, Prefix
from regard.masks.rules import BeyondData, Causal, Dense, SlidingWindow, Where
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
    "SlidingWindow",
    "Span",
    "Where",
]
