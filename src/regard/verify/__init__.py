"""A conformance suite for anyone's attention: 76 laws, asked of code that is only called.

    regard verify my_attention.py:MultiHeadAttention

finds out what it can, asks every law that applies, and shows the smallest case that breaks one.
"""

from regard.verify.checking import CHECKS, Check, Counterexample
from regard.verify.checks import numbers as _numbers  # fills the table
from regard.verify.conventions import Conventions
from regard.verify.entry import check
from regard.verify.report import Outcome, Picture, Report
from regard.verify.subject import SubjectError
from regard.verify.understand import understand

del _numbers

__all__ = [
    "CHECKS",
    "Check",
    "Conventions",
    "Counterexample",
    "Outcome",
    "Picture",
    "Report",
    "SubjectError",
    "check",
    "understand",
]
