"""Putting regard's layers into a transformers model."""
