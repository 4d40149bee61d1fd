"""Caches for `generate`, logits of parts of a text, and text from a prompt."""
