"""Healing: a converted model is trained to imitate the original."""
