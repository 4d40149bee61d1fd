"""Data that masks hold for each row of a batch: checked, read once, looked up by index tensors."""

import torch
from torch import Tensor

from regard.algebra import Mask


def positive(name: str, what: str, size: object) -> None:
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(f"{name} has a size of at least 1 ({what}), got {size!r}")


def kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype}, shape {tuple(value.shape)}"
    return type(value).__name__


def rows(name: str, what: str, value: Tensor) -> Tensor:
    """Data of one row for each sequence; a single row serves all."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} takes {what} as a tensor [B, S] or [S], got {kind(value)}")
    if value.dim() not in (1, 2) or (value.shape[-1] == 0 and name == "Documents"):
        raise ValueError(
            f"{name} takes {what} [B, S] or [S], got shape {tuple(value.shape)}; "
            "a mask of queries by keys is Dense(keep)"
        )
    return value if value.dim() == 2 else value.unsqueeze(0)


def zero_or_one(valid: Tensor) -> Tensor:
    whole = bool(((valid == 0) | (valid == 1)).all())
    if not whole:
        raise ValueError(
            f"Padding takes True or 1 for real tokens, False or 0 for padding, got other values "
            f"({valid.dtype}); an additive mask goes in Dense.from_additive(t)"
        )
    return valid == 1


def vector(name: str, value: Tensor | None) -> None:
    if value is not None and (not isinstance(value, Tensor) or value.dim() != 1):
        raise ValueError(f"{name} is [B], one number for each row, got {kind(value)}")


def readable(value: Tensor) -> bool:
    return not (torch.compiler.is_compiling() or value.is_meta or type(value) is not Tensor)


def bounds(value: Tensor) -> tuple[int, int] | None:
    if not readable(value) or not value.numel():
        return None
    return int(value.min()), int(value.max())


def last_true(rows: Tensor) -> int | None:
    """One past the last column that is True in any row; None if it cannot be read."""
    if not readable(rows):
        return None
    columns = rows.any(dim=0).nonzero()
    return int(columns[-1]) + 1 if len(columns) else 0


def row_index(data: Tensor, b: Tensor) -> Tensor:
    return b if data.shape[0] != 1 else torch.zeros_like(b)


def row(data: Tensor, b: Tensor) -> Tensor:
    data = data.to(b.device)
    return data[row_index(data, b)]


def clip(index: Tensor, size: int) -> Tensor:
    return torch.zeros_like(index) if size == 1 else index.clamp(0, size - 1)


def chunk(offset: Tensor, size: int) -> Tensor:
    return torch.div(offset, size, rounding_mode="floor")


def equal(mask: Mask, other: object, names: tuple[str, ...]) -> bool:
    """Equal numbers, the same tensors."""
    if type(mask) is not type(other):
        return False
    for name in names:
        mine, theirs = getattr(mask, name), getattr(other, name)
        if mine is not theirs and (isinstance(mine, Tensor) or isinstance(theirs, Tensor)):
            return False
        if not isinstance(mine, Tensor) and mine != theirs:
            return False
    return True


def code(name: str, **given: object) -> str:
    parts = [f"{key}={short(value)}" for key, value in given.items() if value is not None]
    return f"{name}({', '.join(parts)})"


def short(value: object) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    return f"<{list(value.shape)} {str(value.dtype).removeprefix('torch.')}>"
