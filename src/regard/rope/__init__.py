"""Rotary position embeddings: queries and keys are rotated by angles proportional to positions.

Examples:
    >>> from typing import get_args
    >>> from regard.rope import NO_ROPE, Pairing, Rotary
    >>> get_args(Pairing)  # which channels are a pair: Hugging Face's layout, and Meta's
    ('halves', 'pairs')
    >>> Rotary(8).dim, NO_ROPE.dim  # NO_ROPE rotates no channel
    (8, 0)
"""

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
