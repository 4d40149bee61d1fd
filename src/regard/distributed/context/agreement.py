"""A check, before any keys are sent, that all ranks make the same call.

One gather of a few integers a call. Only if the ranks differ, or one of them refuses the call, are
texts gathered, so that every rank raises the same error, which names the ranks.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from itertools import groupby
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from regard.cache.paging.contexts import tensor_digest
from regard.distributed.ranks import Ranks
from regard.masks import Mask
from regard.masks.row_data import DataMask
from regard.span import Span

Facts = Mapping[str, int | str]

NUMBERS = 2  # integers of a call that may differ between ranks
NBYTES = 8 * (2 + NUMBERS)  # of the message: int64, with the digest and whether the rank refuses
_STEP = "agreement of the ranks on a call"


def agree(
    ranks: Ranks, facts: Facts, numbers: Iterable[int] = (), refusal: Exception | None = None
) -> list[list[int]]:
    """Check that every rank gives the same facts, by their names in an error, and that none refuses
    the call; returns for each of `numbers`, at most two that may differ, that of every rank.

    Keeps nothing between calls, so that a call may be repeated, as activation checkpointing does.
    If one rank has a `refusal`, the error of its own checks, every rank raises it; if facts differ,
    every rank raises a ValueError.
    """
    own = [*numbers]
    assert len(own) <= NUMBERS
    line = [int(refusal is not None), _digest_of(json.dumps([*facts.items()])), *own]
    line += [0] * (2 + NUMBERS - len(line))
    sent = torch.tensor(line, device=ranks.mesh.device_type)
    table = [row.tolist() for row in ranks.all_gather(sent, _STEP)]
    if any(row[0] for row in table):
        _raise_refusal(ranks, refusal)
    if len({row[1] for row in table}) > 1:
        _raise_difference(ranks, facts)
    return [[row[2 + index] for row in table] for index in range(len(own))]


def _raise_refusal(ranks: Ranks, refusal: Exception | None) -> None:
    """The error of the first rank that refuses, with the ranks whose error is the same."""
    own = [] if refusal is None else [isinstance(refusal, TypeError), str(refusal)]
    told = _told(ranks, own)
    first = next(each for each in told if each)
    kind = TypeError if first[0] else ValueError
    refusing = [rank for rank, each in enumerate(told) if each == first]
    where = "every rank" if len(refusing) == ranks.size else _named(refusing)
    raise kind(f"{where}: {first[1]}") from refusal


def _raise_difference(ranks: Ranks, facts: Facts) -> None:
    """Raise an error that names the first fact on which ranks differ, with each rank's value."""
    told = [dict(each) for each in _told(ranks, [*facts.items()])]
    names = [name for name in facts if len({str(each.get(name)) for each in told}) > 1]
    if not names or any(each.keys() != facts.keys() for each in told):
        raise ValueError(
            "the ranks make different calls, which have different arguments: "
            + _by_rank([str(sorted(each)) for each in told])
        )
    values = _by_rank([str(each[names[0]]) for each in told])
    raise ValueError(
        f"the ranks differ in {names[0]}: {values}; make the same call on every rank, "
        "each with its own tokens"
    )


def _by_rank(values: list[str]) -> str:
    """Each value with the ranks that have it."""
    order = sorted(range(len(values)), key=lambda rank: (values.index(values[rank]), rank))
    groups = groupby(order, key=lambda rank: values[rank])
    return ", ".join(f"{_named(list(those))} {value}" for value, those in groups)


def _named(numbers: list[int]) -> str:
    *first, last = map(str, numbers)
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"


def _told(ranks: Ranks, own: list[Any]) -> list[Any]:
    """Gather a list of texts and numbers from every rank."""
    every: list[Any] = [None] * ranks.size
    dist.all_gather_object(every, own, group=ranks.group)
    return every


def text_of(mask: Mask) -> str:
    """A mask as text that is the same on ranks with the same rule, and another for other data."""
    rule = re.sub(" at 0x[0-9a-f]+", "", repr(mask))  # addresses differ between ranks
    return f"{rule} (digest {_digest_of(_code(mask)) & 0xFFFFFFFF:08x})"


_DIGESTS: WeakKeyDictionary[DataMask, str] = WeakKeyDictionary()  # their tensors never change


def _code(value: object) -> str:
    """A value as text: numbers as they are, tensors by their digest, other objects by their type,
    since addresses differ between ranks."""
    match value:
        case DataMask():
            value._check_unchanged()
            if value not in _DIGESTS:
                _DIGESTS[value] = _fields(value)
            return _DIGESTS[value]
        case Mask() | Span():
            return _fields(value)
        case Tensor():
            return tensor_digest("mask", value).hex()
        case tuple() | list():
            return f"[{', '.join(map(_code, value))}]"
        case None | bool() | int() | float() | str():
            return repr(value)
    cells = getattr(value, "__closure__", None) or ()  # of a function, as `Where` has one
    name = getattr(value, "__qualname__", str(type(value)))
    return _code([name, *(cell.cell_contents for cell in cells)])


def _fields(value: object) -> str:
    """The constructor arguments of an object as text, without memoised attributes."""
    names = sorted(vars(value))
    if is_dataclass(value):
        names = [each.name for each in fields(value) if each.init]
    given = ", ".join(f"{name}={_code(getattr(value, name))}" for name in names)
    return f"{type(value).__qualname__}({given})"


def _digest_of(text: str) -> int:
    """The digest of a text as an int64."""
    raw = hashlib.sha1(text.encode(), usedforsecurity=False).digest()
    return int.from_bytes(raw[:8], signed=True)
