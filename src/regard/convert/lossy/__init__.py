"""Lossy conversions, calibrated on text to lose little."""
