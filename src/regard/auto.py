"""`import regard.auto` adds "regard" to the attention implementations of transformers.

From then on every program that passes the name on can run it: `from_pretrained(...,
attn_implementation="regard")`, a Trainer, sentence-transformers, `model.set_attn_implementation`.

Examples:
    >>> import regard.auto
    >>> from transformers import AttentionInterface
    >>> "regard" in AttentionInterface().valid_keys()
    True
"""

from regard.hf.running.registering import register

register()
