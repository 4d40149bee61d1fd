"""Weights of a model in huge pages, from which each decoding step reads them."""

from typing import Any

from regard.huge_pages import move_to_huge_pages


def to_huge_pages(model: Any) -> int:
    """Move the weights of a model on the CPU to huge pages of the system, and return their bytes.

    Each step reads all weights: one of SmolLM2-135M takes 8 to 20 % less time in float32, 3 to 16 %
    in bfloat16, on two cores of an AMD EPYC (`benchmarks/huge_pages.py`). `load` has done it.
    Weights that transformers has loaded may be a mapped file, which processes share; afterwards
    each process has its own copy. Parameters stay the same objects.

    Weights are copied once, which takes longer where a virtual machine gets new memory for it.
    Weights stay where they are if they are on another device, share memory with one another or with
    other processes, or are of less than 4 MiB together, or of more than half of the machine's
    memory; all do on systems other than Linux.

    Examples:
        >>> from torch import nn
        >>> from regard.hf import to_huge_pages
        >>> to_huge_pages(nn.Linear(8, 8))  # too few
        0
    """
    return move_to_huge_pages(model.parameters())
