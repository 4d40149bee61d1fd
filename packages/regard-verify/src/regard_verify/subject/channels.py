"""The role of each channel of a module's projections, found from the outputs that it changes.

A value channel enters the output linearly. A key channel changes the outputs of other tokens, but
not linearly. A query channel changes the output of its own token, and nothing once all keys are 0.
Channels that change the same output channels belong to one head. So the heads are found in any
order of the axes, and without the names and numbers that the code gives them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from regard_verify.law import Trial

Run = Callable[[Tensor], Tensor]  # values of all channels [B, L, C] to merged heads [B, L, O]

LENGTH = 5  # tokens of a probe
AT = 2  # the token that is changed: under a causal rule it sees two others, and two see it
CHUNK = 64  # rows of one call, each with another channel changed
STEPS = (1.0, 2.0, 16.0, 64.0)  # added to a channel: the large ones bend the faintest scores
FAINT = (0.2, 0.3, 1.0)  # sizes of further values
SPREAD = 1.4  # of the logarithms of the numbers that name key channels: from 0.5 to 2
MOVED = 2e-6  # of the largest output: a smaller change is rounding
OPEN = (30.0, 1.0, 0.0, 1.2784645)  # at one of these, sigmoid, product, exp, and SiLU give 1


@dataclass(frozen=True)
class Roles:
    """The roles of channels, which are numbered over all sources.

    Attributes:
        queries: channel of each query head and dimension, [H][D].
        keys: ... of each key head, [G][D].
        values: ... of each key head, [G][Dv].
        outputs: channel of the merged heads for each query head, [H][Dv].
        gates: channels that scale the output and attend to nothing.
        opened: the value of a gate that scales by 1.
        left_out: query and key channels that stay 0: keys that all heads share, beside keys of each
            head, as those that carry positions in latent attention.
        other_queries: the query channels of each head that are left out, [H][R].
        other_keys: the key channels that are left out and shared, in the same order, [R].
    """

    queries: list[list[int]]
    keys: list[list[int]]
    values: list[list[int]]
    outputs: list[list[int]]
    gates: list[int]
    opened: float = 1.0
    left_out: list[int] = field(default_factory=list)
    other_queries: list[list[int]] = field(default_factory=list)
    other_keys: list[int] = field(default_factory=list)

    @property
    def others(self) -> int:
        """How many query channels of each head are left out."""
        return len(self.other_queries[0]) if self.other_queries else 0

    @property
    def cut(self) -> str:
        """The axes of the projections from the outermost, as in `"part, head, channel"`.

        A part is all queries, all keys or all values. An axis of size 1 is left out.
        """
        steps = {
            "part": abs(self.keys[0][0] - self.queries[0][0]),
            "head": abs(self.queries[-1][0] - self.queries[0][0]) // max(len(self.queries) - 1, 1),
            "channel": self.queries[0][-1] - self.queries[0][0]
            and self.queries[0][1] - self.queries[0][0],
        }
        return ", ".join(sorted((axis for axis in steps if steps[axis]), key=lambda a: -steps[a]))

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """H, G, D and Dv."""
        return len(self.queries), len(self.keys), len(self.queries[0]), len(self.values[0])


@dataclass
class _Kinds:
    """Channels by what they change."""

    queries: list[int]
    keys: list[int]
    values: list[int]
    gates: list[int]
    moved: Tensor  # [C, O]: which output channels each changes


def find_roles(run: Run, channels: int, trial: Trial) -> Roles | None:
    """The roles of all channels; None where they are not those of heads."""
    kinds = _kinds(run, channels, trial)
    if kinds is None or not (kinds.queries and kinds.keys and kinds.values):
        return None
    heads: list[Tensor] = []  # of each, the output channels that its queries change
    for query in kinds.queries:
        if not any(torch.equal(kinds.moved[query], head) for head in heads):
            heads.append(kinds.moved[query])
    outputs = [_channels(mask) for mask in heads]
    covered = [channel for each in outputs for channel in each]
    if len(covered) != len(set(covered)) or len({len(each) for each in outputs}) > 1:
        return None
    shared = _shared(kinds, outputs)
    if shared is None:
        return None
    opened = _opened(run, kinds, channels)
    if opened is None:
        return None
    for key in (AT, AT - 1):  # its own key may be hidden
        partners = _partners(run, kinds, channels, opened, key)
        if partners is not None:
            return _roles(kinds, heads, outputs, shared, partners, opened)
    return None


def _generic(channels: int, trial: Trial) -> Tensor:
    """Values [L, C] of any sign, none of them near 0."""
    size = trial.rand(LENGTH, channels) * 0.8 + 0.4
    return torch.where(trial.rand(LENGTH, channels) < 0.5, -size, size).float()


def changes(run: Run, base: Tensor, of: list[int], step: float) -> Tensor:
    """How the output [L, O] changes when `step` is added to one channel of token AT at a time."""
    found = []
    for first in range(0, len(of), CHUNK):
        some = torch.tensor(of[first : first + CHUNK])
        rows = base.repeat(len(some) + 1, 1, 1)  # the last one is not changed
        rows[torch.arange(len(some)), AT, some] += step
        out = run(rows)
        found.append(out[:-1] - out[-1:])
    return torch.cat(found)


def _kinds(run: Run, channels: int, trial: Trial) -> _Kinds | None:
    every = list(range(channels))
    base = _generic(channels, trial)
    found = [changes(run, base, every, step) for step in STEPS]
    # Where a wrong scale does not saturate the softmax, and where other channels happen to cancel.
    others = [changes(run, size * _generic(channels, trial), every, STEPS[0]) for size in FAINT]
    if not all(bool(each.isfinite().all()) for each in found):
        return None
    least = MOVED * (1 + float(run(base[None]).abs().max()))
    moved = torch.stack([each.abs() > least for each in (*found, *others)]).any(0)
    wide = moved[:, torch.arange(LENGTH) != AT].any(-1).any(-1)
    linear = _linear(found, least)
    alone = [c for c in every if bool(moved[c, AT].any()) and not wide[c]]
    keys = [c for c in every if wide[c] and not linear[c]]
    values = [c for c in every if wide[c] and linear[c]]
    muted = base.clone()
    muted[:, keys] = 0.0
    if not alone or not keys:
        return None
    still = (changes(run, muted, alone, STEPS[0]).abs() > least).flatten(1).any(-1)
    queries = [c for c, gate in zip(alone, still, strict=True) if not gate]
    gates = [c for c, gate in zip(alone, still, strict=True) if gate]
    return _Kinds(queries, keys, values, gates, moved.any(1))


def _linear(found: list[Tensor], least: float) -> Tensor:
    """A mask of the channels [N] that change the output in proportion to the step, for small
    and large steps.
    """
    linear = torch.ones(len(found[0]), dtype=torch.bool)
    for step, change in zip(STEPS, found, strict=True):
        right = found[0] * (step / STEPS[0])
        error = (change - right).abs().amax((1, 2))
        linear &= error <= 1e-3 * right.abs().amax((1, 2)) + least
    return linear


def _channels(mask: Tensor) -> list[int]:
    return [int(c) for c in mask.nonzero().flatten()]


def _shared(kinds: _Kinds, outputs: list[list[int]]) -> dict[int, tuple[int, ...]] | None:
    """The query heads that read each key and value channel; None if it reads parts of heads."""
    head_of = {c: head for head, each in enumerate(outputs) for c in each}
    found = {}
    for channel in (*kinds.keys, *kinds.values):
        changed = _channels(kinds.moved[channel])
        heads = sorted({head_of.get(c, -1) for c in changed})
        whole = len(heads) * (len(outputs[0]) if channel in set(kinds.keys) else 1)
        if -1 in heads or len(changed) != whole:
            return None
        found[channel] = tuple(heads)
    return found


def _opened(run: Run, kinds: _Kinds, channels: int) -> float | None:
    """The value at which gates scale by 1; None if there is none."""
    if not kinds.gates:
        return 1.0
    for value in OPEN:
        values = torch.zeros(1, LENGTH, channels, dtype=torch.float32)
        values[..., kinds.values] = 1.0
        values[..., kinds.gates] = value
        near = (run(values) - 1).abs() < 1e-5  # a mistake may spoil some tokens
        if float(near.float().mean()) > 0.4:
            return value
    return None


def _partners(
    run: Run, kinds: _Kinds, channels: int, opened: float, key: int
) -> dict[int, int] | None:
    """The key channel that each query channel is multiplied by.

    One query channel of token AT is 1, and the channels of token `key` are known numbers, so that
    the log odds of that key name the number; if it is the token's own, a rotation by positions does
    not change that score. Two sets of numbers with distinct ratios make it independent of the
    scale.
    """
    first = _numbers(kinds)
    second = {channel: 1 / number for channel, number in first.items()}
    odds = [_log_odds(run, kinds, channels, opened, keys, key) for keys in (first, second)]
    nearest = 0.4 * 2 * SPREAD / len(set(first.values()))
    found = {}
    for channel, one, two in zip(kinds.queries, *(each.tolist() for each in odds), strict=True):
        if not (math.isfinite(one) and math.isfinite(two)) or min(abs(one), abs(two)) < 1e-6:
            return None
        reads = kinds.moved[channel]
        near = {
            c: abs(math.log(one / two) - 2 * math.log(number))
            for c, number in first.items()
            if one / two > 0 and bool((kinds.moved[c] & reads).any())
        }
        best = min(near, key=lambda c: near[c], default=None)
        if best is None or near[best] > nearest:
            return None
        found[channel] = best
    return found


def _numbers(kinds: _Kinds) -> dict[int, float]:
    """For each key channel a number that no other channel has which the same head may read."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for channel in kinds.keys:
        groups.setdefault(tuple(_channels(kinds.moved[channel])), []).append(channel)
    sizes: dict[int, int] = {}  # of the largest group, by how many output channels it changes
    for reach, group in groups.items():
        sizes[len(reach)] = max(sizes.get(len(reach), 0), len(group))
    total = sum(sizes.values())
    starts = {size: sum(n for other, n in sizes.items() if other < size) for size in sizes}
    return {
        channel: math.exp(SPREAD * ((starts[len(reach)] + at + 0.5) / total - 0.5))
        for reach, group in groups.items()
        for at, channel in enumerate(group)
    }


def _log_odds(
    run: Run, kinds: _Kinds, channels: int, opened: float, keys: dict[int, float], key: int
) -> Tensor:
    """For each query channel, the score of token AT with a key where that channel alone is 1."""
    base = torch.zeros(LENGTH, channels, dtype=torch.float32)
    base[key, kinds.values] = 1.0
    base[:, kinds.gates] = opened
    base[key, list(keys)] = torch.tensor(list(keys.values()))
    weights = changes(run, base, kinds.queries, 1.0) + run(base[None])
    plain = run(base[None])[0, AT]
    found = []
    for at, channel in enumerate(kinds.queries):
        where = int(kinds.moved[channel].nonzero()[0])
        found.append(torch.logit(weights[at, AT, where]) - torch.logit(plain[where]))
    return torch.stack(found)


def _roles(
    kinds: _Kinds,
    heads: list[Tensor],
    outputs: list[list[int]],
    shared: dict[int, tuple[int, ...]],
    partners: dict[int, int],
    opened: float,
) -> Roles | None:
    """Heads in the order of their first channels, in queries, keys, values and outputs alike.

    So it does not matter here whether the weights of a head are applied to the values of another:
    the laws find that.
    """
    groups = _by_readers(kinds.values, shared)
    many = len(heads) // max(len(groups), 1)
    by_readers = _by_readers(kinds.keys, shared)
    own = {readers: channels for readers, channels in by_readers.items() if len(readers) == many}
    by_key = [
        {partners[c]: c for c in kinds.queries if torch.equal(kinds.moved[c], head)}
        for head in heads
    ]
    queries: list[list[int]] = [[] for _ in heads]
    for readers, channels in own.items():
        for head in readers:
            queries[head] = [by_key[head][key] for key in channels if key in by_key[head]]
    keys = list(own.values())
    values = []  # of each key head, in the order of the output channels of its first query head
    for readers, group in groups.items():
        into = {place: c for c in group for place in _channels(kinds.moved[c])}
        values.append([into[place] for place in outputs[readers[0]] if place in into])
    dims, widths = {len(x) for x in (*queries, *keys)}, {len(x) for x in (*values, outputs[0])}
    if len(keys) != len(values) or len(dims) > 1 or len(widths) > 1 or len(queries) % len(keys):
        return None
    used = {c for part in (*queries, *keys) for c in part}
    left_out = [c for c in (*kinds.queries, *kinds.keys) if c not in used]
    other_keys = [c for c in kinds.keys if c not in used]
    if any(not set(other_keys) <= set(mine) for mine in by_key):
        return None
    other_queries = sorted([mine[key] for key in other_keys] for mine in by_key)
    parts = (queries, keys, values, outputs)
    queries, keys, values, outputs = (sorted(part, key=min) for part in parts)
    return Roles(
        queries, keys, values, outputs, kinds.gates, opened, left_out, other_queries, other_keys
    )  # fmt: skip


def _by_readers(
    of: list[int], shared: dict[int, tuple[int, ...]]
) -> dict[tuple[int, ...], list[int]]:
    """Channels by the query heads that read them."""
    found: dict[tuple[int, ...], list[int]] = {}
    for channel in of:
        found.setdefault(shared[channel], []).append(channel)
    return found
