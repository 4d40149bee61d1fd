"""How much of a subject was judged: without its values and its scale, no verdict is a green one."""

from regard_verify.report.report import DEFINITION, Report

ATTENTION = ("function", "module")
DECLARE = (
    "Name the function of (q, k, v) inside it, or declare reference=NAME, a function or module in "
    "its file that returns the right output"
)


def unjudged(report: Report) -> str:
    """What could not be judged of an attention, and what to declare; empty if its values were.

    Examples:
        >>> from regard_verify.report.report import Outcome
        >>> asked = Outcome("oracle_forward", "not applicable", "", "", reason="no heads")
        >>> unjudged(Report("mine", "module", outcomes=[asked]))[:52]
        'Its values and its scale were not judged: no heads. '
    """
    if report.problem or report.kind not in ATTENTION:
        return ""
    status = {each.law: each for each in report.outcomes}
    asked = status.get(DEFINITION)
    judged_by_reference = status.get("reference_parity")
    if asked is None or asked.status not in ("not applicable", "defect"):
        return ""
    if judged_by_reference is not None and judged_by_reference.status == "passed":
        return ""
    return f"Its values and its scale were not judged: {asked.reason}. {DECLARE}."
