"""A plugin for runs of pytest that tests start: subjects are judged in forks of that pytest.

`check` starts a new Python, which takes seconds to import torch. A fork gives the same reports:
test_separate_process.py compares them.
"""

import sys

import regard_verify.run.check  # noqa: F401
from regard_verify.run.separate_process import forked

sys.modules["regard_verify.run.check"].new_python = forked
