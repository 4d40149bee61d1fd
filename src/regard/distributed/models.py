"""Which models are transformers' own: the plans split and shard those by the table of families."""

from torch import nn


def is_of_transformers(model: object) -> bool:
    """Whether this is a model of transformers: a class of its package with a config.

    Examples:
        >>> from regard import Attention
        >>> from regard.distributed.models import is_of_transformers
        >>> is_of_transformers(Attention(8, 2))
        False
    """
    packages = (each.__module__.partition(".")[0] for each in type(model).__mro__)
    return isinstance(model, nn.Module) and hasattr(model, "config") and "transformers" in packages
