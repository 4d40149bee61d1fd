"""Rotary position embeddings: positions become angles, angles rotate queries and keys."""

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
