"""Exact conversions: outputs are equal, and only the layout of the weights differs."""
