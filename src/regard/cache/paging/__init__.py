"""Caches in pages: a pool of memory that many sequences share, and one batch's table over it."""
