"""A mask for some of the rows and queries of a call: simpler there than over the whole call."""

from regard.masks.mask import Mask


def row_masks(mask: Mask, batch: int) -> list[Mask]:
    """The mask of each row of a batch; the mask alone if it is not known row by row.

    Examples:
        >>> from regard.masks import Causal, Padding
        >>> row_masks(Causal() & Padding.from_lengths([1, 3]), 2)
        [Causal() & Padding(valid=<[1, 3] bool>), Causal() & Padding(valid=<[1, 3] bool>)]
    """
    if batch == 1 or mask.batch in (None, 1):
        return [mask]
    rows = [each for row in range(batch) if (each := mask.row(row)) is not None]
    return rows if len(rows) == batch else [mask]


def edges_of(mask: Mask, first: int, stop: int) -> list[int]:
    """The slots between `first` and `stop` at which queries begin to attend to other keys.

    Examples:
        >>> import torch
        >>> from regard.masks import Documents
        >>> edges_of(Documents(torch.tensor([0, 0, 1, 1, 1, 2])), 0, 6)
        [2, 5]
    """
    return mask.finder()(first, stop - 1).edges_between(first, stop)
