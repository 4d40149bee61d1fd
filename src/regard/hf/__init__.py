"""Models of transformers whose attention regard runs: load one, install, uninstall.

>>> import regard.hf
>>> model, tokenizer = regard.hf.load("path/to/model")  # doctest: +SKIP
>>> print(regard.hf.install(model))                     # doctest: +SKIP
"""

from regard.hf.families.finding import attention_modules
from regard.hf.families.layers import attention_of, rope_of
from regard.hf.families.table import FAMILIES, Family
from regard.hf.generating.cache_of_model import cache
from regard.hf.generating.text import Written, write
from regard.hf.loading.checkpoints import load
from regard.hf.loading.default_model import SMOLLM2, fetch_smollm2, smollm2
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
    "fetch_smollm2",
    "install",
    "load",
    "place",
    "register",
    "rope_of",
    "smollm2",
    "uninstall",
    "write",
]
