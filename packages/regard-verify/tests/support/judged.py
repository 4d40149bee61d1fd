"""A report that was never measured: one law of each status after the other."""

from regard_verify import LAWS, Counterexample, Outcome, Report

STATUSES = (
    "passed", "failed", "advice", "not applicable", "follows", "undecided", "defect",
)  # fmt: skip
WHY = {
    "not applicable": "it has no past that was found",
    "undecided": "it did not come back within 30 s",
    "defect": "AttributeError: no such thing (laws/caches.py:12)",
}
EXAMPLE = Counterexample(
    "B=1 H=4 L=4 S=4", "[0, 2, 1, 0]", "0.818", "nan",
    "a weight of 0 was multiplied by what is hidden, and 0 times nan is nan",
    [[True, False], [True, True]], [[True, True], [True, True]],
)  # fmt: skip
JUDGED = Report(
    "my_attention.py:MultiHeadAttention",
    kind="module",
    inferred={"mask": "mask= bool BHLS, true or 1 may look, as in scaled_dot_product_attention"},
    notes=["torch.float16 is refused: it raised RuntimeError: value cannot be converted to Half"],
    outcomes=[
        Outcome(
            each.name,
            status,
            each.statement,
            each.kind,
            reason=WHY.get(status, ""),
            example=EXAMPLE if status in ("failed", "advice", "follows") else None,
            because=list(LAWS)[at - 3] if status == "follows" else "",
            line="my_attention.py:35: scores = q @ k.mT" if status == "failed" else "",
        )
        for at, each in enumerate(LAWS.values())
        for status in [STATUSES[at % len(STATUSES)]]
    ],
    unjudged="Its heads were not found, so the scale was not judged. Declare heads: --like heads=4",
)  # fmt: skip
