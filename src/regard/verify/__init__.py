"""A conformance suite for anyone's attention: 76 laws, asked of code that is only called.

    regard verify my_attention.py:MultiHeadAttention

finds out what it can, asks every law that applies, and shows the smallest case that breaks one.
"""

from regard.verify.law import CHECKS, Check, Counterexample
from regard.verify.laws import numbers as _numbers  # fills the table
from regard.verify.report.report import Outcome, Picture, Report
from regard.verify.run.entry import check
from regard.verify.subject.conventions import Conventions
from regard.verify.subject.subject import SubjectError
from regard.verify.subject.understand import understand

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
