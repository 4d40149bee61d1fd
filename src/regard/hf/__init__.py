"""Models of transformers whose attention regard runs: load one, install, uninstall.

Examples:
    >>> from regard.hf import FAMILIES, SMOLLM2
    >>> # attention classes of transformers that regard knows
    >>> FAMILIES["Gemma2Attention"].attention, len(FAMILIES) > 20
    ('Gemma2Attention', True)
    >>> SMOLLM2  # the small model of the examples
    'SmolLM2-135M-Instruct'
"""

from regard.hf.families.finding import attention_modules
from regard.hf.families.layers import attention_of, rope_of
from regard.hf.families.table import FAMILIES, Family
from regard.hf.generating.cache_of_model import cache
from regard.hf.generating.condensing import condense
from regard.hf.generating.text import Written, write
from regard.hf.loading.checkpoints import load
from regard.hf.loading.default_model import SMOLLM2, fetch_smollm2, smollm2
from regard.hf.loading.huge_pages import to_huge_pages
from regard.hf.loading.untrusted import CheckpointError
from regard.hf.placing.place import place
from regard.hf.running.installing import Installation, InstalledLayer, install, uninstall
from regard.hf.running.registering import register

__all__ = [
    "FAMILIES",
    "SMOLLM2",
    "CheckpointError",
    "Family",
    "Installation",
    "InstalledLayer",
    "Written",
    "attention_modules",
    "attention_of",
    "cache",
    "condense",
    "fetch_smollm2",
    "install",
    "load",
    "place",
    "register",
    "rope_of",
    "smollm2",
    "to_huge_pages",
    "uninstall",
    "write",
]
