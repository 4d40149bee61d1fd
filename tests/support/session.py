"""What a run of the tests is, and what it saw: for the tests to read and `conftest` to report."""

import os

LONG = os.environ.get("REGARD_LONG", "") == "1"
worst: dict[str, float] = {}  # the largest error seen, as a share of what the contract allows
