"""Layers of regard as the attention modules of a transformers model."""
