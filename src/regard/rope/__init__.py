"""Rotary position embeddings: queries and keys are rotated by angles proportional to positions."""

from regard.rope.rotary import NO_ROPE, NoRotary, Pairing, Rope, Rotary
from regard.rope.scaling import NTK, Frequencies, LinearScaling, Llama3, LongRope, Scaling, Yarn

__all__ = [
    "NO_ROPE",
    "NTK",
    "Frequencies",
    "LinearScaling",
    "Llama3",
    "LongRope",
    "NoRotary",
    "Pairing",
    "Rope",
    "Rotary",
    "Scaling",
    "Yarn",
]
