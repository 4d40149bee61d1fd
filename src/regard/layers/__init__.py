"""The attention layers, and what they share. Start with `attention.py`."""
