"""The usual layouts of one, two or three projections: which channel belongs to which head."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby, permutations
from typing import NamedTuple

import torch
from torch import Tensor

from regard_verify.law import Trial
from regard_verify.mistakes import heads_of, mistakes, turned
from regard_verify.oracle import pattern
from regard_verify.subject.channels import OPEN, Roles, Run

Channels = list[list[int]]  # of each head, or of each projection, in order

LENGTH = 4
CLOSE = 1e-4  # of the largest value: the error of float32 against the definition in float64


class Natural(NamedTuple):
    """A usual layout with which the definition or a mistake gives the module's own values."""

    roles: Roles
    causal: bool
    pairing: str


def natural_roles(
    run: Run, parts: list[list[int]], channels: int, declared: int | None, trial: Trial
) -> Natural | None:
    """The first usual layout with which the definition or a mistake gives what `run` gives.

    Args:
        run: values of all channels [B, L, C] to merged heads [B, L, O].
        parts: the channels of each projection that attention reads.
        channels: C.
        declared: the number of heads that the module names.
    """
    values = trial.randn(1, LENGTH, channels)
    unread = torch.ones(channels, dtype=torch.bool)
    unread[[c for part in parts for c in part]] = False
    values[..., unread] = 0.0
    gates, parts = _gates(run, parts, values)
    if len(parts) > 3 and len(parts) % 3 == 0:  # three projections of each head
        parts = [[c for part in parts[first::3] for c in part] for first in range(3)]
    for opened in OPEN if gates else (1.0,):
        values[..., gates] = opened
        got = run(values).double()
        layouts = usual_layouts(parts, got.shape[-1], declared)
        for _, alike in groupby(layouts, key=lambda roles: (roles.sizes, roles.others)):
            found = _first(values, list(alike), got)
            if found is not None:
                return found._replace(roles=replace(found.roles, gates=gates, opened=opened))
    return None


def _gates(run: Run, parts: Channels, values: Tensor) -> tuple[list[int], Channels]:
    """The channels of a projection that scales the output, as it is 0 where they are very small."""
    for part in parts if len(parts) > 1 else ():
        shut = values.clone()
        shut[..., part] = -OPEN[0]
        if float(run(shut).abs().max()) < 1e-6:
            return part, [each for each in parts if each is not part]
    return [], parts


def _first(values: Tensor, alike: list[Roles], got: Tensor) -> Natural | None:
    """The first of these layouts, all of one shape, that gives the module's output [1, L, O]."""
    first, found = len(alike), None
    for causal, pairing, out in _outputs(values, alike):
        merged = out.transpose(1, 2).flatten(-2)
        if merged.shape[-1] != got.shape[-1]:
            continue  # keys of another size, used as values
        agree = (merged - got).abs().amax((1, 2)) <= CLOSE * (1 + got.abs().max())
        if bool(agree[:first].any()):
            first = int(agree.int().argmax())
            found = Natural(alike[first], causal, pairing)
    return found


def _outputs(values: Tensor, alike: list[Roles]) -> Iterator[tuple[bool, str, Tensor]]:
    """Whether it is causal, its rotation, and the output of the definition and of each mistake.

    Outputs [N, H, L, Dv] are those of N layouts of one shape.
    """
    q, k, v = (
        values[0][:, torch.tensor([getattr(roles, part) for roles in alike])].permute(1, 2, 0, 3)
        for part in ("queries", "keys", "values")
    )
    dim = q.shape[-1]
    scale = (dim + alike[0].others) ** -0.5
    for causal in (False, True):
        keep = pattern(LENGTH, LENGTH, causal=causal)
        for tiled in (False, True) if k.shape[1] not in (1, q.shape[1]) else (False,):
            heads = heads_of(q, k, v, keep, scale, tiled=tiled)
            for pairing in ("none", "halves", "pairs") if dim % 2 == 0 else ("none",):
                yield causal, pairing, turned(heads, pairing).out()
                yield from ((causal, pairing, out) for _, out in mistakes(heads, pairing))


HEADS = (1, 2, 3, 4, 6, 8, 12, 16)


def usual_layouts(
    parts: list[list[int]], width: int, declared: int | None = None
) -> Iterator[Roles]:
    """Layouts in which these projections may hold queries, keys and values.

    Args:
        parts: the channels of each projection, in the order in which they run.
        width: channels of the merged heads.
        declared: the number of heads that the module names; then only that number, and one head of
            the whole width, are tried.

    Examples:
        >>> first = next(usual_layouts([[0, 1], [2, 3], [4, 5]], width=2, declared=1))
        >>> first.queries, first.keys, first.values
        ([[0, 1]], [[2, 3]], [[4, 5]])
    """
    for heads in dict.fromkeys((declared, 1) if declared else HEADS):
        if width % heads:
            continue
        dim = width // heads
        outputs = _split(list(range(width)), heads)
        for queries, keys, values in _heads(parts, heads, dim):
            sizes = {len(head) for head in (*queries, *keys)}
            if len(sizes) == 1 and heads % len(keys) == 0 and len(values[0]) == dim:
                yield Roles(queries, keys, values, outputs, [])
            elif len(keys[0]) < len(queries[0]) and len(values[0]) == dim:
                size = len(keys[0])  # the other query channels meet keys that all heads share
                cut, others = [head[:size] for head in queries], [head[size:] for head in queries]
                yield Roles(cut, keys, values, outputs, [], other_queries=others)


def _heads(
    parts: list[list[int]], heads: int, dim: int
) -> Iterator[tuple[Channels, Channels, Channels]]:
    if len(parts) == 3:
        for q, k, v in permutations(parts):
            groups, rest = divmod(len(v), dim)
            if groups and not rest and not len(q) % heads and not len(k) % groups:
                for split in (_split, _tiled):
                    yield split(q, heads), split(k, groups), split(v, groups)
    elif len(parts) == 2:
        for q, both in (parts, parts[::-1]):
            for groups in (n for n in range(heads, 0, -1) if heads % n == 0):
                if len(q) % heads == 0 and len(both) % groups == 0:
                    for keys, values in _pairs(both, groups, dim):
                        yield _split(q, heads), keys, values
                        yield _tiled(q, heads), keys, values
    elif len(parts) == 1:
        yield from _fused(parts[0], heads, dim)


def _pairs(both: list[int], groups: int, dim: int) -> Iterator[tuple[Channels, Channels]]:
    """Keys and values of one projection: by head, or all keys before all values."""
    size = len(both) // groups - dim  # channels of a key head
    if size < 1:
        return
    for own in (_split(both, groups), _tiled(both, groups)):
        yield [head[:size] for head in own], [head[size:] for head in own]
        yield [head[dim:] for head in own], [head[:dim] for head in own]
        if size == dim:
            yield [head[::2] for head in own], [head[1::2] for head in own]
    for split in (_split, _tiled):
        yield split(both[: groups * size], groups), split(both[groups * size :], groups)
        yield split(both[groups * dim :], groups), split(both[: groups * dim], groups)


def _fused(
    channels: list[int], heads: int, dim: int
) -> Iterator[tuple[Channels, Channels, Channels]]:
    """One projection for all three: its axes in any order, or grouped by key heads."""
    if len(channels) == 3 * heads * dim:
        sizes = {"part": 3, "head": heads, "dim": dim}
        for axes in permutations(sizes):
            cube = torch.tensor(channels).view([sizes[axis] for axis in axes])
            cube = cube.permute([axes.index(axis) for axis in sizes])
            for order in permutations(range(3)):
                first, second, third = (cube[at].tolist() for at in order)
                yield first, second, third
    groups, rest = divmod(len(channels) - heads * dim, 2 * dim)
    if rest or not 0 < groups < heads or heads % groups:
        return
    start, end = heads * dim, heads * dim + groups * dim  # of the keys
    for split in (_split, _tiled):
        yield (
            split(channels[:start], heads), split(channels[start:end], groups),
            split(channels[end:], groups),
        )  # fmt: skip
    many = heads // groups
    for by_group in (_split(channels, groups), _tiled(channels, groups)):
        cut = [_split(group, many + 2) for group in by_group]
        queries = [head for group in cut for head in group[:many]]
        yield queries, [group[-2] for group in cut], [group[-1] for group in cut]


def _split(channels: list[int], heads: int) -> Channels:
    """The channels of a head one after the other."""
    dim = len(channels) // heads
    return [channels[head * dim : (head + 1) * dim] for head in range(heads)]


def _tiled(channels: list[int], heads: int) -> Channels:
    """Every head's first channel, then every head's second, and so on."""
    return [channels[head::heads] for head in range(heads)]
