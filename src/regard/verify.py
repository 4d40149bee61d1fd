"""`regard_verify` as `regard.verify`: a distribution of its own, which checks laws of attention.

Examples:
    >>> from regard.verify import LAWS
    >>> LAWS["convexity"].statement
    'Weights sum to 1: where all values are 1, so is the output.'
"""

try:
    from regard_verify import *  # noqa: F403
    from regard_verify import __all__ as __all__
except ModuleNotFoundError as error:
    if error.name != "regard_verify":
        raise
    raise ModuleNotFoundError(
        "regard.verify needs regard-verify: python -m pip install regard-verify, or, from a clone "
        "of regard, python -m pip install ./packages/regard-verify",
        name="regard_verify",
    ) from error
