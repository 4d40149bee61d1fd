"""Healing: a converted model learns from the one that it was made of."""
