"""Attention as an operation: a call is described, a backend is chosen for it, and runs."""
