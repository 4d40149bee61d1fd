"""A conformance suite for anyone's attention: 76 laws, asked of code that is only called.

    regard verify my_attention.py:MultiHeadAttention

finds out what it can, asks every law that applies, and shows the smallest case that breaks one.
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
