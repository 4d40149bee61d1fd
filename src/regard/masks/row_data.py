"""Data that masks hold for each row of a batch: checked, read once, looked up by index tensors."""

import torch
from torch import Tensor

from regard.masks.algebra import Mask
from regard.tracing import holds_numbers
from regard.versions import ChangedInPlace, Versions

TOKENS_SAY = (
    "for tokens, True or 1 is a real one and False or 0 is padding, as in Hugging Face's "
    "attention_mask; nn.MultiheadAttention's key_padding_mask says the opposite, give its ~"
)


def positive(name: str, why: str, size: object) -> None:
    whole = isinstance(size, int | torch.SymInt) and not isinstance(size, bool)
    if not whole or size < 1:  # type: ignore[operator]
        raise ValueError(f"{name} has a whole size of at least 1, got {size!r}; {why}")


def kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype}, shape {tuple(value.shape)}"
    return type(value).__name__


def is_whole(value: Tensor) -> bool:
    return not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)


def rows(name: str, what: str, value: Tensor) -> Tensor:
    """Data of one row for each sequence; a single row serves all."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} takes {what} as a tensor [B, S] or [S], got {kind(value)}")
    if value.dim() not in (1, 2):
        raise ValueError(
            f"{name} takes {what} [B, S] or [S], got shape {tuple(value.shape)}; "
            "a mask of queries by keys is Dense(keep)"
        )
    return value if value.dim() == 2 else value.unsqueeze(0)


def zero_or_one(valid: Tensor) -> Tensor:
    """Booleans out of booleans, or of whole numbers that are 0 and 1."""
    if valid.dtype == torch.bool:
        return valid
    if not is_whole(valid):
        raise TypeError(
            f"Padding takes booleans, or whole numbers 0 and 1, got {valid.dtype}: {TOKENS_SAY}; "
            "a mask of 0 and -inf that is added to scores is Dense.from_additive(t)"
        )
    if readable(valid) and not bool(((valid == 0) | (valid == 1)).all()):
        raise ValueError(
            f"Padding takes 0 and 1, got numbers from {int(valid.min())} to {int(valid.max())}: "
            f"{TOKENS_SAY}; numbers of documents go in Documents(ids)"
        )
    return valid != 0


def vector(name: str, value: Tensor | None) -> None:
    if value is None:
        return
    if not isinstance(value, Tensor) or value.dim() != 1 or not is_whole(value):
        raise ValueError(
            f"{name} is [B], one whole number for each row, got {kind(value)}; "
            "torch.tensor([...]) makes one"
        )


def lasting(value: Tensor) -> Tensor:
    """The tensor itself where a later write in place is noticed, else a copy."""
    inference = not torch.compiler.is_compiling() and value.is_inference()
    return value.clone() if inference else value


def check_unchanged(mask: Mask, read: Versions) -> None:
    """Raise if the data of a mask was written after the mask had read it."""
    if read.changed:
        raise ChangedInPlace(
            f"the tensor of {mask!r} was written in place after the mask had read it; make a new "
            "mask of it, or give the mask a clone()"
        )


def readable(value: Tensor) -> bool:
    """Whether a tensor's values can be known now; never while torch traces or transforms it."""
    return not value.is_meta and holds_numbers(value)


def distinct(value: Tensor) -> tuple[int, ...] | None:
    """The numbers that occur; None if they cannot be read."""
    return tuple(sorted(set(value.tolist()))) if readable(value) else None


def bounds(value: int | Tensor) -> tuple[int, int] | None:
    """The smallest and largest number; None if there is none, or it cannot be read."""
    if not isinstance(value, Tensor):
        return value, value
    if not readable(value) or not value.numel():
        return None
    return int(value.min()), int(value.max())


def last_true(rows: Tensor) -> int | None:
    """One past the last column that is True in any row; None if it cannot be read."""
    if not readable(rows):
        return None
    columns = rows.any(dim=0).nonzero()
    return int(columns[-1]) + 1 if len(columns) else 0


def first_true(rows: Tensor) -> int | None:
    """The first column that is True in any row, or one past them all; None if it cannot be read."""
    if not readable(rows):
        return None
    columns = rows.any(dim=0).nonzero()
    return int(columns[0]) if len(columns) else rows.shape[1]


def index(number: int) -> Tensor:
    """A batch row or a slot as masks take it, on the CPU whatever the default device."""
    return torch.tensor(number, device="cpu")


def row_index(data: Tensor, b: Tensor) -> int | Tensor:
    """Which row of the data serves which row of the batch; a plain 0 adds no axis to the answer."""
    return b if data.shape[0] != 1 else 0


def row(data: Tensor, b: Tensor) -> Tensor:
    data = data.to(b.device)
    return data[row_index(data, b)]


def clip(index: Tensor, size: int) -> int | Tensor:
    return 0 if size == 1 else index.clamp(0, size - 1)


def chunk(offset: Tensor, size: int) -> Tensor:
    return torch.div(offset, size, rounding_mode="floor")


def equal(mask: Mask, other: object, names: tuple[str, ...]) -> bool:
    """Equal numbers, the same tensors."""
    if type(mask) is not type(other):
        return False
    for name in names:
        mine, theirs = getattr(mask, name), getattr(other, name)
        tensors = isinstance(mine, Tensor) or isinstance(theirs, Tensor)
        if mine is not theirs and (tensors or mine != theirs):
            return False
    return True


def code(name: str, **given: object) -> str:
    parts = [f"{key}={short(value)}" for key, value in given.items() if value is not None]
    return f"{name}({', '.join(parts)})"


def short(value: object) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    return f"<{list(value.shape)} {str(value.dtype).removeprefix('torch.')}>"
