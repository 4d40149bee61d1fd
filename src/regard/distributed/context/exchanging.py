"""Tokens on their way between ranks: messages of exactly the runs that the receiver needs.

In a `"ring"` each rank sends to the rank t places after it in step t, while the tokens of the step
before are attended to (Ring Attention, Liu et al. 2023, arXiv:2310.01889; here tokens go straight
to where they are needed, so that those that a mask hides are not sent). In a `"gather"` all are
sent at once, and attended to together (as for Llama 3, arXiv:2407.21783).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from regard.distributed.context.needed import Needs, length_of, slots_of
from regard.distributed.ranks import Pending, Ranks
from regard.masks.runs import Runs, intersection, union, without_gaps
from regard.ops.blocks import GAP

Kind = Literal["ring", "gather"]
Streams = tuple[Tensor, ...]


class Tokens(NamedTuple):
    """Tokens at hand."""

    runs: Runs  # their slots, in order
    streams: Streams  # `[B, G, n, W]` each, the tokens of the runs side by side

    def copy(self, other: "Tokens", runs: Runs) -> None:
        """Copy the content of these slots from `other`; both have them."""
        for run in runs:
            for mine, its in zip(self._view(run), other._view(run), strict=True):
                mine.copy_(its)

    def add(self, other: "Tokens", runs: Runs) -> None:
        """Add the content of these slots of `other`; both have them."""
        for run in runs:
            for mine, its in zip(self._view(run), other._view(run), strict=True):
                mine.add_(its)

    def _view(self, run: tuple[int, int]) -> Streams:
        at = 0
        for start, stop in self.runs:
            if start <= run[0] and run[1] <= stop:
                at += run[0] - start
                return tuple(x.narrow(2, at, run[1] - run[0]) for x in self.streams)
            at += stop - start
        raise AssertionError(f"slots {run} are not among {self.runs}")


class Round(NamedTuple):
    """A step of an exchange: whose tokens are attended to, and to which ranks own ones are sent."""

    sources: tuple[int, ...]
    receivers: tuple[int, ...]


@dataclass(frozen=True)
class Exchange:
    """The steps in which a rank receives tokens that it needs, and sends its own to other ranks.

    Every rank goes through the same steps in the same order, and leaves out the same empty
    messages, so that each message meets its receiver.
    """

    ranks: Ranks
    needs: Needs
    kind: Kind

    @property
    def rounds(self) -> list[Round]:
        """The steps. That of this rank's own tokens, in a ring, is the first."""
        me, size = self.ranks.rank, self.ranks.size
        if self.kind == "gather":
            return [Round(tuple(range(size)), tuple(r for r in range(size) if r != me))]
        steps = range(1, size)
        ring = [Round(((me - t) % size,), ((me + t) % size,)) for t in steps]
        return [Round((me,), ()), *ring]

    def arrivals(self, own: Tokens) -> Iterator[tuple[Round, Tokens]]:
        """The tokens of each step; the messages of the next step are started before it returns."""
        rounds = self.rounds
        following = self._send(rounds[0], own)
        for number, step in enumerate(rounds):
            parts = following.wait()
            if number + 1 < len(rounds):
                following = self._send(rounds[number + 1], own)
            if self.ranks.rank in step.sources:
                parts = [*parts, own]
            pieces = union(*(slots_of(self.needs.shards, rank) for rank in step.sources))
            yield step, arrange(parts, pieces) if parts else Tokens([], own.streams)

    def _send(self, step: Round, own: Tokens) -> "Arriving":
        me, needs = self.ranks.rank, self.needs
        send = {to: message_of(own, needs.of(to, me)) for to in step.receivers}
        runs = {rank: needs.of(me, rank) for rank in step.sources if rank != me}
        return self._exchanged(send, runs, own.streams, "keys and values")

    def return_gradients(self, step: Round, found: Tokens) -> "Arriving":
        """Send the gradients of a step's tokens to their ranks, and receive the gradients of this
        rank's own tokens that were sent in the same step."""
        me, needs = self.ranks.rank, self.needs
        others = [rank for rank in step.sources if rank != me]
        send = {to: message_of(found, needs.of(me, to)) for to in others}
        runs = {rank: needs.of(rank, me) for rank in step.receivers}
        return self._exchanged(send, runs, found.streams, "gradients of keys and values")

    def _exchanged(
        self, send: Mapping[int, Tensor], runs: Mapping[int, Runs], like: Streams, what: str
    ) -> "Arriving":
        buffers = {rank: empty_message(like, length_of(of)) for rank, of in runs.items()}
        step = f"exchange of {what} with ranks {sorted({*send, *runs})}"
        pending = self.ranks.exchange(send, buffers, step)
        return Arriving(pending, runs, buffers, like)


class Arriving(NamedTuple):
    """Tokens on their way to this rank."""

    pending: Pending
    runs: Mapping[int, Runs]
    buffers: Mapping[int, Tensor]
    like: Streams

    def wait(self) -> list[Tokens]:
        """The tokens, when they have arrived."""
        self.pending.wait()
        return [
            Tokens(runs, streams_of(self.buffers[rank], self.like, length_of(runs)))
            for rank, runs in self.runs.items()
            if runs
        ]


def arrange(parts: Sequence[Tokens], pieces: Runs) -> Tokens:
    """The tokens of several messages in order of their slots.

    Runs of a piece, the slots of the ranks that the parts come from, with few slots between them
    are joined, to be attended to together. The slots between are zeros: they were not needed,
    because the mask hides them from every query.
    """
    known = union(*(part.runs for part in parts))
    runs = [run for piece in pieces for run in without_gaps(intersection(known, [piece]), GAP)]
    if len(parts) == 1 and parts[0].runs == runs:
        return parts[0]
    number = length_of(runs)
    streams = (x.new_zeros(*x.shape[:2], number, x.shape[3]) for x in parts[0].streams)
    whole = Tokens(runs, tuple(streams))
    for part in parts:
        whole.copy(part, part.runs)
    return whole


def message_of(tokens: Tokens, runs: Runs) -> Tensor:
    """The bytes of some tokens, one stream after the other."""
    number = length_of(runs)
    message = empty_message(tokens.streams, number)
    Tokens(runs, streams_of(message, tokens.streams, number)).copy(tokens, runs)
    return message


def empty_message(like: Streams, number: int) -> Tensor:
    """The memory of so many tokens' streams, as bytes."""
    return torch.empty(number * token_bytes(like), dtype=torch.uint8, device=like[0].device)


def token_bytes(streams: Streams) -> int:
    """Bytes of one token in all streams, over all rows of the batch and all heads."""
    return sum(x.shape[0] * x.shape[1] * x.shape[3] * x.itemsize for x in streams)


def streams_of(message: Tensor, like: Streams, number: int) -> Streams:
    """Views of a message as streams of `number` tokens, with the shapes and dtypes of `like`.

    The widest elements are first, so that each stream begins at a multiple of its own.
    """
    found: dict[int, Tensor] = {}
    at = 0
    for index in sorted(range(len(like)), key=lambda index: -like[index].itemsize):
        x = like[index]
        size = number * token_bytes((x,))
        shape = (*x.shape[:2], number, x.shape[3])
        found[index] = message[at : at + size].view(x.dtype).view(shape)
        at += size
    return tuple(found[index] for index in range(len(like)))
