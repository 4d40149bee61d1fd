"""Decoding from a cache whose tokens are split over ranks."""
