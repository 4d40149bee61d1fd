"""The forward and the backward pass of attention over the tokens of several ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.constants import accumulating_dtype
from regard.distributed.context.exchanging import Arriving, Exchange, Round, Streams, Tokens
from regard.distributed.context.gradients import Attended, OfKeys, Sums, of_sinks
from regard.distributed.context.needed import length_of, slots_of
from regard.distributed.context.rectangles import Scoring, attend_rectangle, rectangles
from regard.masks.runs import Runs
from regard.ops.partial import Partial, merge
from regard.tracing import without_autocast

KeysOf = Callable[[Streams, tuple[Tensor, ...]], tuple[Tensor, Tensor]]
Autocast = tuple[bool, torch.dtype]


def autocast_of(device: torch.device) -> Autocast | None:
    """The state and dtype of autocast for a device; None where the device has no autocast."""
    kind = device.type
    if not torch.amp.is_autocast_available(kind):
        return None
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


@dataclass(frozen=True, eq=False)
class Expansion:
    """The function that makes keys and values of streams."""

    keys_of: KeysOf | None  # makes them; None for streams that are keys and values, or both joined
    v_head_dim: int | None  # the width of the values of a joined stream
    autocast: Autocast | None  # as it was when the call was made: backward passes run without

    def keys(self, streams: Streams, parameters: Streams) -> tuple[Tensor, Tensor]:
        """The keys and values of some tokens."""
        if self.keys_of is None:
            k = streams[0]
            return k, streams[1] if len(streams) > 1 else k[..., : self.v_head_dim]
        if self.autocast is None:
            return self.keys_of(streams, parameters)
        enabled, dtype = self.autocast
        # without its cache: a cast that is cached here, without a graph, would be used elsewhere
        with torch.autocast(streams[0].device.type, dtype, enabled, cache_enabled=False):
            return self.keys_of(streams, parameters)


@dataclass
class Recorded:
    """Keys and values of some tokens, with autograd's graph back to streams and parameters."""

    expansion: Expansion
    leaves: list[Tensor]
    made: tuple[Tensor, Tensor]

    @classmethod
    def of(
        cls, expansion: Expansion, tensors: Streams, needed: tuple[bool, ...], number: int
    ) -> "Recorded":
        """Compute keys and values of `number` streams and the parameters after them."""
        leaves = [x.detach().requires_grad_(flag) for x, flag in zip(tensors, needed, strict=True)]
        with torch.enable_grad():
            made = expansion.keys(tuple(leaves[:number]), tuple(leaves[number:]))
        return cls(expansion, leaves, made)

    def gradients(self, of_keys: tuple[Tensor, Tensor]) -> list[Tensor | None]:
        """The gradients of the streams and parameters, from those of keys and values."""
        of_k, of_v = of_keys
        if self.expansion.keys_of is None and len(self.leaves) > 1:
            return [of_k, of_v]
        if self.expansion.keys_of is None:
            of_k[..., : of_v.shape[3]] += of_v
            return [of_k]
        pairs = [(x, g) for x, g in zip(self.made, of_keys, strict=True) if x.requires_grad]
        inputs = [x for x in self.leaves if x.requires_grad]
        if not inputs or not pairs:
            return [None for _ in self.leaves]
        outputs, slopes = zip(*((x, g.to(x.dtype)) for x, g in pairs), strict=True)
        found = iter(torch.autograd.grad(outputs, inputs, slopes, allow_unused=True))
        return [next(found) if x.requires_grad else None for x in self.leaves]


class Given(NamedTuple):
    """The tensors of a call, or as many values about them."""

    q: Any
    sinks: Any
    bias: Any
    streams: tuple[Any, ...]
    parameters: tuple[Any, ...]
    learned: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Task:
    """A call, apart from its tensors."""

    exchange: Exchange  # the messages
    scoring: Scoring  # how scores are computed
    expansion: Expansion  # how streams become keys and values
    streams: int  # their number
    parameters: int  # their number

    def given(self, values: Sequence[Any]) -> Given:
        """The values by their meaning: query, sinks, bias, streams, parameters of `keys_of`, and
        parameters of a rule for score biases."""
        q, sinks, bias, *rest = values
        cut = self.streams + self.parameters
        parts = rest[: self.streams], rest[self.streams : cut], rest[cut:]
        return Given(q, sinks, bias, *map(tuple, parts))

    @property
    def slots(self) -> Runs:
        """The slots of this rank's tokens."""
        return slots_of(self.exchange.needs.shards, self.exchange.ranks.rank)


def forward_pass(task: Task, given: Given) -> tuple[Partial, Tokens]:
    """The output and the log-sum-exp of this rank's queries, and the tokens of other ranks
    that the backward pass reads again: all of them in a gather, none in a ring."""
    exchange, own = task.exchange, Tokens(task.slots, given.streams)
    kept = Tokens([], ())
    q, found = given.q, _nothing(task, given)
    with without_autocast(task.scoring.device):
        for _, tokens in exchange.arrivals(own):
            if exchange.kind == "gather":
                kept = tokens
            if not tokens.runs or not q.shape[2]:
                continue
            k, v = task.expansion.keys(tokens.streams, given.parameters)
            for place in rectangles(own.runs, tokens.runs):
                attend_rectangle(task.scoring, place, q, k, v, given.bias, found)
    if given.sinks is not None:
        found = merge(found, Partial.of_sinks(given.sinks))
    return found, kept


def _nothing(task: Task, given: Given) -> Partial:
    """Attention to no key, of all queries."""
    none = tuple(x[:, :, :0] for x in given.streams)
    width = task.expansion.keys(none, given.parameters)[1].shape[3]
    q, dtype = given.q, accumulating_dtype(given.q.dtype)
    out = q.new_zeros(*q.shape[:3], width, dtype=dtype)
    return Partial(out, q.new_full(q.shape[:3], -torch.inf, dtype=dtype))


def backward_pass(
    task: Task, given: Given, wanted: Given, found: Partial, kept: Tokens, slope: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradients of all tensors of a call, in their order; None for those not wanted."""
    run = _Backward(task, given, wanted, found, slope)
    exchange, own = task.exchange, Tokens(task.slots, given.streams)
    with without_autocast(task.scoring.device):
        again = [(exchange.rounds[0], kept)] if exchange.kind == "gather" else None
        for step, tokens in again or exchange.arrivals(own):
            run.step(step, tokens)
        run.collect()
    return run.gradients()


class _Backward:
    """The sums of a backward pass, and the gradients that are on their way to this rank."""

    def __init__(
        self, task: Task, given: Given, wanted: Given, found: Partial, slope: Tensor
    ) -> None:
        self.task, self.given, self.wanted = task, given, wanted
        q, slope = given.q, slope.to(found.out.dtype)
        delta = (found.out * slope).sum(-1)
        self.known = Attended(q, *found, slope, delta, given.bias, given.learned)
        self.sums = Sums(
            self._zeros(q),
            self._zeros(given.bias) if wanted.bias else None,
            tuple(map(self._zeros, given.learned)),
        )
        streams = (x for x, needed in zip(given.streams, wanted.streams, strict=True) if needed)
        self.total = Tokens(task.slots, tuple(map(self._zeros, streams)))
        self.of_parameters = [self._zeros(x) for x in given.parameters]
        self.returning: Arriving | None = None

    def _zeros(self, x: Tensor) -> Tensor:
        dtype = accumulating_dtype(self.given.q.dtype)
        return torch.zeros_like(x, dtype=dtype, memory_format=torch.contiguous_format)

    def step(self, step: Round, tokens: Tokens) -> None:
        """Add the contributions of a step's tokens, and return their gradients to their ranks."""
        found = self._found(tokens)
        if not found.streams:
            return
        if self.task.exchange.ranks.rank in step.sources:
            self.total.add(found, self.total.runs)
        self.collect()
        self.returning = self.task.exchange.return_gradients(step, found)

    def collect(self) -> None:
        """Add the gradients that other ranks have sent."""
        if self.returning is not None:
            for part in self.returning.wait():
                self.total.add(part, part.runs)
            self.returning = None

    def _found(self, tokens: Tokens) -> Tokens:
        """The gradients of a step's tokens."""
        number = length_of(tokens.runs)
        queries = self.given.q.shape[2]
        if not number or not queries:
            shapes = ((*x.shape[:2], number, x.shape[3]) for x in self.total.streams)
            return Tokens(tokens.runs, tuple(self.known.out.new_zeros(shape) for shape in shapes))
        task, given, wanted = self.task, self.given, self.wanted
        tensors = (*tokens.streams, *given.parameters)
        needed = (*wanted.streams, *wanted.parameters)
        recorded = Recorded.of(task.expansion, tensors, needed, task.streams)
        k, v = (x.detach() for x in recorded.made)
        of_keys = self._zeros(k), self._zeros(v)
        backward = OfKeys(task.scoring, self.known, (k, v), self.sums, of_keys)
        for place in rectangles(task.slots, tokens.runs):
            backward.add(place)
        found = recorded.gradients(of_keys)
        for total, grad in zip(self.of_parameters, found[task.streams :], strict=True):
            if grad is not None:
                total.add_(grad)
        of_streams = [
            self._zeros(x) if grad is None else grad.to(self.known.out.dtype)
            for x, grad, flag in zip(
                tokens.streams, found[: task.streams], wanted.streams, strict=True
            )
            if flag
        ]
        return Tokens(tokens.runs, tuple(of_streams))

    def gradients(self) -> tuple[Tensor | None, ...]:
        """All gradients, in the order and the dtypes of the tensors."""
        given, wanted = self.given, self.wanted
        of_streams = iter(self.total.streams)
        streams = [next(of_streams) if needed else None for needed in wanted.streams]
        sinks = of_sinks(given.sinks, self.known) if wanted.sinks else None
        first = (self.sums.q, sinks, self.sums.bias)
        found = (*first, *streams, *self.of_parameters, *self.sums.learned)
        flat = (*given[:3], *given.streams, *given.parameters, *given.learned)
        flags = (*wanted[:3], *wanted.streams, *wanted.parameters, *wanted.learned)
        return tuple(
            x.to(like.dtype) if x is not None and needed else None
            for x, like, needed in zip(found, flat, flags, strict=True)
        )
