"""Measurements of a model with each attention that it can have, side by side.

load -> measure the first row, whose logits must be the model's own -> convert -> measure others

Examples:
    >>> from regard.compare import CANDIDATES
    >>> [each.key for each in CANDIDATES][:4]
    ['shipped', 'int8', 'int4', 'k8v4']
"""

from regard.compare.candidates import CANDIDATES, Candidate, chosen
from regard.compare.comparing import compare
from regard.compare.frontiers import Frontier, frontier
from regard.compare.measure import Row
from regard.compare.needles import Document, documents_of
from regard.compare.proving import Proof
from regard.compare.result import Comparison
from regard.compare.runner import Runner
from regard.compare.texts import Texts, texts_for

__all__ = [
    "CANDIDATES",
    "Candidate",
    "Comparison",
    "Document",
    "Frontier",
    "Proof",
    "Row",
    "Runner",
    "Texts",
    "chosen",
    "compare",
    "documents_of",
    "frontier",
    "texts_for",
]
