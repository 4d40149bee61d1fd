"""Conversions that lose something, chosen by calibration so that it is little."""
