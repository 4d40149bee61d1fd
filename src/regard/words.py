"""Numbers in sentences."""


def counted(number: int, one: str, many: str = "") -> str:
    """A number of things; `many` is the plural where that is not `one` with an s.

    >>> counted(1, "law"), counted(1_234, "law"), counted(2, "query", "queries")
    ('1 law', '1,234 laws', '2 queries')
    """
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"
