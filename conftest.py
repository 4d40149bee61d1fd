"""Modules whose examples cannot run where an optional package is missing."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("lm_eval") else ["src/regard/hf/evaluating/harness.py"]
