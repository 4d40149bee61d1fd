"""Caches for `generate`, and text from a prompt."""
