"""Whether a run is a long one, and the largest errors of it, which `conftest` reports."""

import os

LONG = os.environ.get("REGARD_LONG", "") == "1"
worst: dict[str, float] = {}  # the largest error seen, as a share of what the contract allows
