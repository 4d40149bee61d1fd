"""Conversions that change no output: only the layout of the weights differs."""
