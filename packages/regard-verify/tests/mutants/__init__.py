"""Attentions that are broken on purpose, one fault each."""
