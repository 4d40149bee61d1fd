"""A conformance suite for attention of any origin: 83 laws, checked from outside, by calls alone.

`regard verify my_attention.py:MultiHeadAttention` probes the conventions of an attention, checks
every law that applies, and shows the smallest case that breaks one.

Examples:
    >>> from regard.verify import LAWS
    >>> LAWS["convexity"].statement
    'Weights sum to 1: where all values are 1, so is the output.'
"""

from regard.verify.law import Counterexample, Law
from regard.verify.laws import LAWS
from regard.verify.report.report import Outcome, Picture, Report
from regard.verify.run.check import check
from regard.verify.subject.conventions import Conventions
from regard.verify.subject.subject import SubjectError
from regard.verify.subject.understand import understand

__all__ = [
    "LAWS",
    "Conventions",
    "Counterexample",
    "Law",
    "Outcome",
    "Picture",
    "Report",
    "SubjectError",
    "check",
    "understand",
]
