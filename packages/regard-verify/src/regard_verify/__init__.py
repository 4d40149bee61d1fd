"""A conformance suite for attention of any origin: 55 laws, checked from outside, by calls alone.

`regard-verify my_attention.py:MultiHeadAttention` probes the conventions of an attention, checks
every law that applies, and shows the smallest case that breaks one. Importing this package imports
nothing else; torch is imported with the first name that is used.

Examples:
    >>> from regard_verify import LAWS
    >>> LAWS["convexity"].statement
    'Weights sum to 1: where all values are 1, so is the output.'
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regard_verify.law import Counterexample, Law
    from regard_verify.laws import LAWS
    from regard_verify.report.report import Outcome, Report
    from regard_verify.run.check import check
    from regard_verify.subject.conventions import Conventions
    from regard_verify.subject.subject import SubjectError
    from regard_verify.subject.understand import understand

__version__ = "0.1.0"

__all__ = [
    "LAWS",
    "Conventions",
    "Counterexample",
    "Law",
    "Outcome",
    "Report",
    "SubjectError",
    "check",
    "understand",
]

_MODULES = {  # the module of each public name
    "LAWS": "laws",
    "Conventions": "subject.conventions",
    "Counterexample": "law",
    "Law": "law",
    "Outcome": "report.report",
    "Report": "report.report",
    "SubjectError": "subject.subject",
    "check": "run.check",
    "understand": "subject.understand",
}


def __getattr__(name: str) -> Any:
    """Import the module of a public name at its first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
