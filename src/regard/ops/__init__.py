"""Attention as an operation: a call is described, a backend is chosen for it, and runs."""

from regard.first_calls import call_vector_functions

call_vector_functions()
