"""Timing, a short benchmark of attention on this machine, and the rates for choosing backends."""

from regard.bench.short import Bench, Entry, Measured, Shape, bench
from regard.bench.tuning import Tuning, measure_speed

__all__ = ["Bench", "Entry", "Measured", "Shape", "Tuning", "bench", "measure_speed"]
