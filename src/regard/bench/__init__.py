"""How fast is this machine, and what does regard make of it? Timing, a short benchmark, tuning."""

from regard.bench.short import Bench, Entry, Measured, Shape, bench
from regard.bench.tuning import Tuning, measure_speed

__all__ = ["Bench", "Entry", "Measured", "Shape", "Tuning", "bench", "measure_speed"]
