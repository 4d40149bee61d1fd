"""Rules that hold tensors: their base class, and functions that check, summarise and index them."""

from collections.abc import Sequence
from copy import copy
from dataclasses import fields
from typing import Any, TypeVar

import torch
from torch import Tensor

from regard.masks.mask import Mask
from regard.span import Span
from regard.tracing import is_concrete
from regard.versions import ChangedInPlace, Versions
from regard.words import code_of

TOKEN_MASKS = (  # ends error messages about masks of tokens
    "for tokens, True or 1 is a real one and False or 0 is padding, as in Hugging Face's "
    "attention_mask; nn.MultiheadAttention's key_padding_mask is the opposite, give its ~"
)

Kind = TypeVar("Kind", bound="DataMask")


class DataMask(Mask):
    """A rule that holds tensors, or copies of them. A rule whose tensors were written since it was
    made is refused, where the write can be noticed: writes through `.data` or NumPy cannot."""

    given: tuple[Any, ...]  # what the rule was made of: tensors, and numbers
    versions: Versions  # of these tensors and of the copies, when the rule was made
    rows: dict[int, "DataMask"]  # the rule for single rows, each made once
    place: Span | None = None  # the slots of one call, of a rule that is placed there
    lasting = True

    def within(self, span: Span) -> Mask:
        self._check_unchanged()
        return super().within(span)

    def row(self, row: int) -> Mask | None:
        """The rule for one batch row, from that row of its tensors; None off the CPU."""
        given = [each.name for each in fields(self) if each.init]  # type: ignore[arg-type]
        data = {name: getattr(self, name) for name in given}
        if not all(on_cpu(each) for each in data.values() if isinstance(each, Tensor)):
            return None
        if self.batch in (None, 1):
            return self
        if row not in self.rows:
            parts = {name: _of_row(value, row) for name, value in data.items()}
            self.rows[row] = type(self)(**parts)
        return self.rows[row]

    def _at(self: Kind, span: Span) -> Kind:
        """A copy of this rule that is placed at the slots of a call."""
        placed = copy(self)
        placed._set(place=span, rows={})
        return placed

    def _set(self, **values: object) -> None:
        """Set fields of the frozen rule."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _copies(self, *given: Any) -> list[Any]:
        """Copy the tensors among these values, so that a write to the originals cannot change a
        rule after results were memoised."""
        copies = [each.clone() if isinstance(each, Tensor) else each for each in given]
        self._watch(given, copies)
        return copies

    def _watch(self, given: Sequence[object], copies: Sequence[object] = ()) -> None:
        """Refuse the rule once one of these tensors has been written."""
        tensors = (each for each in (*given, *copies) if isinstance(each, Tensor))
        self._set(given=tuple(given), versions=Versions(*tensors), rows={})

    def _check_unchanged(self) -> None:
        if self.versions.changed:
            raise ChangedInPlace(
                f"the tensor of {self!r} was written in place after the mask was made; make a new "
                "mask of it, or give the mask a clone()"
            )

    def __repr__(self) -> str:
        return code_of(self)


class EqualByData(DataMask):
    """A rule that equals another of its type whose fields are equal numbers, or were read from the
    same tensors, which had the same elements."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, EqualByData) or type(self) is not type(other):
            return False
        for mine, theirs in zip(self.given, other.given, strict=True):
            tensors = isinstance(mine, Tensor) or isinstance(theirs, Tensor)
            if mine is not theirs and (tensors or mine != theirs):
                return False
        names = [each.name for each in fields(self) if each.init]  # type: ignore[arg-type]
        pairs = ((getattr(self, name), getattr(other, name)) for name in names)
        return self.versions.numbers == other.versions.numbers and all(_same(*x) for x in pairs)

    def __hash__(self) -> int:
        given = (id(each) if isinstance(each, Tensor) else each for each in self.given)
        return hash((type(self), *given))


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


def _of_row(value: Any, row: int) -> Any:
    """The part of an argument that is about one row of the batch."""
    value = torch.as_tensor(value) if isinstance(value, tuple) else value
    return value[row : row + 1] if isinstance(value, Tensor) and len(value) > 1 else value


def check_size(name: str, size: object, meaning: str) -> None:
    whole = isinstance(size, int | torch.SymInt) and not isinstance(size, bool)
    if not whole or not 1 <= size < 2**63:  # type: ignore[operator]
        raise ValueError(f"{name} has a whole size < 2**63, at least 1, got {size!r}; {meaning}")


def described(value: object) -> str:
    """The type of an argument, for an error message; dtype and shape of a tensor."""
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype}, shape {tuple(value.shape)}"
    return type(value).__name__


def is_whole(value: Tensor) -> bool:
    """Whether a tensor has an integer dtype."""
    return not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)


def as_rows(name: str, argument: str, value: Tensor) -> Tensor:
    """A tensor `[B, S]` from `[B, S]` or `[S]`; a single row broadcasts over the batch."""
    if not isinstance(value, Tensor):
        got = described(value)
        raise TypeError(f"{name} takes {argument} as a tensor [B, S] or [S], got {got}")
    if value.dim() not in (1, 2):
        raise ValueError(
            f"{name} takes {argument} [B, S] or [S], got shape {tuple(value.shape)}; "
            "a mask of queries by keys is Dense(keep)"
        )
    return value if value.dim() == 2 else value.unsqueeze(0)


def as_booleans(valid: Tensor) -> Tensor:
    """Booleans from booleans, or from the integers 0 and 1."""
    if valid.dtype == torch.bool:
        return valid
    if not is_whole(valid):
        raise TypeError(
            f"Padding takes booleans, or whole numbers 0 and 1, got {valid.dtype}: {TOKEN_MASKS}; "
            "a mask of 0 and -inf that is added to scores is Dense.from_additive(t)"
        )
    if readable(valid) and not bool(((valid == 0) | (valid == 1)).all()):
        raise ValueError(
            f"Padding takes 0 and 1, got numbers from {int(valid.min())} to {int(valid.max())}: "
            f"{TOKEN_MASKS}; numbers of documents go in Documents(ids)"
        )
    return valid != 0


def check_vector(name: str, value: object) -> None:
    """Raise unless `value` is None or a tensor `[B]` of integers."""
    if value is None:
        return
    if not isinstance(value, Tensor) or value.dim() != 1 or not is_whole(value):
        raise ValueError(
            f"{name} is [B], one whole number for each row, got {described(value)}; "
            "torch.tensor([...]) makes one"
        )


def readable(value: Tensor) -> bool:
    """Whether the elements of a tensor can be read: it is neither traced nor transformed."""
    return not value.is_meta and is_concrete(value)


def may_read(value: Tensor) -> bool:
    """Whether the elements can be read now, also on a GPU: no CUDA graph is being captured."""
    return readable(value) and not (value.is_cuda and torch.cuda.is_current_stream_capturing())


def on_cpu(value: Tensor) -> bool:
    """Whether the elements can be read without waiting for a device."""
    return value.device.type == "cpu" and readable(value)


def changes(rows: Tensor) -> list[int]:
    """The columns that differ from the column before in some row; none for tensors on a device,
    which would have to be waited for."""
    if not on_cpu(rows):
        return []
    found: list[int] = ((rows[:, 1:] != rows[:, :-1]).any(0).nonzero().squeeze(1) + 1).tolist()
    return found


def distinct(value: Tensor) -> tuple[int, ...] | None:
    """The elements, sorted, each once; None if they cannot be read."""
    return tuple(sorted(set(value.tolist()))) if readable(value) else None


def bounds(value: int | Tensor) -> tuple[int, int] | None:
    """The smallest and the largest element; None if there is none, or it cannot be read."""
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
    """The first column that is True in any row, else their number; None if it cannot be read."""
    stop = last_true(rows.flip(1))
    return None if stop is None else rows.shape[1] - stop


def index(number: int) -> Tensor:
    """An index as masks take it: a tensor, on the CPU for any default device."""
    return torch.tensor(number, device="cpu")


def row_index(data: Tensor, b: Tensor) -> int | Tensor:
    """The row of `data` for batch row `b`; 0 for a single row, which adds no axis to the result."""
    return b if data.shape[0] != 1 else 0


def at_row(data: Tensor, b: Tensor) -> Tensor:
    """The element of `data` `[B]` for batch row `b`."""
    data = data.to(b.device)
    return data[row_index(data, b)]


def clamped(index: Tensor, size: int) -> int | Tensor:
    """An index within an axis of that size."""
    return 0 if size == 1 else index.clamp(0, size - 1)


def _same(mine: object, theirs: object) -> bool:
    """Whether two fields are equal; the elements of tensors on a GPU are not waited for."""
    if not isinstance(mine, Tensor) or not isinstance(theirs, Tensor):
        return mine == theirs
    return mine is theirs or mine.device.type != "cpu" or not readable(mine) or mine.equal(theirs)
