"""Attention layers of newer models, made of the functions of `regard.layers`."""
