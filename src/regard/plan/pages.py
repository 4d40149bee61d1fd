"""Tokens of a cache in pages: which are codes, and how many pages hold them.

A row's first page stays in the dtype's own bits, and so does its last one until it is full. Pages
that lie wholly before a window are released.
"""

from regard.plan.formula import Formula, ceil_div, floor_div, maximum, number, size
from regard.plan.shapes import LayerShape
from regard.plan.sizes import TOKENS, WINDOW

PAGE = size("page_size")


def coded_tokens(needed: Formula) -> Formula:
    """Those of the `needed` latest of all tokens that lie in full pages after the first.

    Args:
        needed: tokens; the oldest ones are not.

    Examples:
        >>> from regard.plan.pages import coded_tokens
        >>> from regard.plan.sizes import TOKENS
        >>> [coded_tokens(TOKENS).evaluate(context=n, cp=1, page_size=4) for n in (4, 7, 8, 13)]
        [0, 0, 4, 8]
    """
    return _coded(TOKENS - needed)


def coded_keys(visible: Formula) -> Formula:
    """Those of the `visible` keys of the next token, its own included, that are codes.

    Args:
        visible: keys, the latest ones.
    """
    return _coded(TOKENS + 1 - visible)


def pages(layer: LayerShape) -> tuple[Formula, Formula]:
    """Pages of one row in the dtype's own bits and pages of codes, after the prefill and one token.

    Args:
        layer: with a window or without.

    Examples:
        >>> from regard.plan.pages import pages
        >>> from regard.plan.shapes import LayerShape
        >>> gqa = LayerShape(hidden_size=64, num_heads=8, num_kv_heads=2, head_dim=8, v_head_dim=8)
        >>> [each.evaluate(context=256, cp=1, page_size=64) for each in pages(gqa)]
        [2, 3]
    """
    tokens = TOKENS + 1
    released = number(0)
    if layer.window is not None:
        released = floor_div(maximum(0, tokens + 1 - WINDOW), PAGE)
    coded = maximum(0, floor_div(tokens, PAGE) - maximum(1, released))
    return ceil_div(tokens, PAGE) - released - coded, coded


def _coded(start: Formula) -> Formula:
    """Tokens from slot `start` on in full pages after the first."""
    return maximum(0, PAGE * floor_div(TOKENS, PAGE) - maximum(PAGE, start))
