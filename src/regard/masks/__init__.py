"""Masks: rules for which keys a query may attend to, combined with `&`, `|` and `~`."""

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
