"""transformers hosts the models, regard runs their attention: load one, install, uninstall.

>>> import regard.hf
>>> model, tokenizer = regard.hf.load("path/to/model")  # doctest: +SKIP
>>> print(regard.hf.install(model))                     # doctest: +SKIP
"""

from regard.hf.default_model import SMOLLM2, fetch_smollm2, smollm2
from regard.hf.families import FAMILIES, Family
from regard.hf.finding import attention_modules
from regard.hf.generation import cache
from regard.hf.hosting import place
from regard.hf.installing import Installation, InstalledLayer, install, uninstall
from regard.hf.layers import attention_of, rope_of
from regard.hf.loading import load
from regard.hf.registering import register
from regard.hf.untrusted import CheckpointError
from regard.hf.writing import Written, write

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
