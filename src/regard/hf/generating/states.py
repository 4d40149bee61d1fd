"""Layers of a cache that hold recurrent and convolutional states, as transformers has them.

A state is a sum over all tokens so far, so it cannot be cut: it returns to a recorded copy, or not
at all. In a hybrid model some layers have states, others keys and values, some both.
"""

import sys
from collections.abc import Callable, Mapping
from copy import copy, deepcopy
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import LinearAttentionLayer

from regard.cache import Cache
from regard.cache.files import is_naturals
from regard.cache.saving import Record
from regard.cache.stored import Stored
from regard.hf.generating.caches import CacheLayer, Layer, LayerState
from regard.hf.packages import CACHES, name_of_cache
from regard.words import counted

_NAMES = tuple(vars(LinearAttentionLayer()))  # attributes of a layer of transformers with states
_TENSORS = ("conv_states", "recurrent_states")  # of them, those that hold tensors, by number
StateDict = dict[str, Any]


def map_tensors(states: StateDict, change: Callable[[Tensor], Tensor]) -> StateDict:
    """The attributes of a layer with states, with a function applied to each tensor."""

    def of(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: of(each) for key, each in value.items()}
        return change(value) if isinstance(value, Tensor) else value

    return {name: of(value) for name, value in states.items()}


class StateLayer(Layer, LinearAttentionLayer):  # type: ignore[misc]
    """The states of one layer, with the number of their tokens: copies of earlier states by number
    of tokens, `marks`, to which `truncate` can return, and the states before the last call,
    `before`."""

    is_compileable = False  # the number of tokens is counted by hooks, which compiled code has not

    def __init__(self, number_of_states: int = 1) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)
        self.tokens, self.marks = 0, dict[int, StateDict]()
        self.before: tuple[int, StateDict] | None = None

    @property
    def is_croppable(self) -> bool:  # to before the last call, whose first tokens are run again
        return True

    @property
    def stored(self) -> tuple[Any, ...]:
        return (States(self),)

    def copy_states(self) -> StateDict:
        """A copy of the states: models write to the tensors in place."""
        return map_tensors({name: vars(self)[name] for name in _NAMES}, Tensor.clone)

    def put(self, tokens: int, states: StateDict) -> None:
        """Take a copy of states that are of so many tokens."""
        self.__dict__.update(map_tensors(states, Tensor.clone))
        self.tokens = tokens

    def follow(self, tokens: int, before: LayerState) -> None:
        """Count the tokens after a call of the model, before which the layer was `before`."""
        self.tokens, self.before = tokens, before.caches[-1][1]

    def mark(self) -> None:
        """Let `truncate` return to the present states."""
        self.marks[self.tokens] = self.copy_states()

    def reset(self) -> None:
        StateLayer.__init__(self, self.number_of_states)

    def activate_past_recording(self) -> None:
        """States of single tokens are not recorded: the tokens are computed again."""

    def __deepcopy__(self, memo: Any) -> "StateLayer":
        new = copy(self)
        new.__dict__.update(self.copy_states())
        new.marks = dict(self.marks)  # the copies in it never change
        return new

    def __repr__(self) -> str:
        return repr(States(self))


class HybridLayer(CacheLayer, StateLayer):
    """The cache of one layer that has attention and recurrent states, such as a convolution's."""

    def __init__(self, make: Callable[[], Cache], number_of_states: int = 1) -> None:
        StateLayer.__init__(self, number_of_states)
        CacheLayer.__init__(self, make)
        self.is_compileable = False

    @property
    def stored(self) -> tuple[Any, ...]:
        return self.cache, States(self)

    def lazy_initialization(self, *args: Any, **given: Any) -> None:
        """Allocate the states, if transformers gives any by name; keys need nothing."""
        if given:
            LinearAttentionLayer.lazy_initialization(self, **given)

    def reset(self) -> None:
        StateLayer.reset(self)
        CacheLayer.reset(self)

    def __deepcopy__(self, memo: Any) -> "HybridLayer":
        new = StateLayer.__deepcopy__(self, memo)
        assert isinstance(new, HybridLayer)
        new.cache = deepcopy(self.cache, memo)
        return new


class EmptyLayer(Layer):
    """A layer without attention and states, or one that reads the keys of another layer."""

    supports_early_init = is_sliding = False
    is_compileable = is_croppable = True

    def reset(self) -> None:
        """Nothing is stored."""

    def get_max_length(self) -> int:
        return -1


class States(Stored):
    """The states of a layer with the methods of a cache: cut only to where a copy is."""

    def __init__(self, layer: StateLayer) -> None:
        self.layer = layer

    @property
    def length(self) -> int:
        return self.layer.tokens

    @property
    def tensors(self) -> dict[tuple[str, int], Tensor]:
        """The tensors of the states, by the name of their attribute and their number in it."""
        held = {(name, i): x for name in _TENSORS for i, x in vars(self.layer)[name].items()}
        return {key: x for key, x in held.items() if x is not None}

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.tensors.values())

    @property
    def allocated_bytes(self) -> int:
        copies = [*self.layer.marks.values()]
        copies += [self.layer.before[1]] if self.layer.before else []
        tensors = (x for each in copies for name in _TENSORS for x in each[name].values())
        return self.nbytes + sum(each.nbytes for each in tensors if each is not None)

    @property
    def empty_streams(self) -> tuple[Tensor, ...]:
        return ()

    def snapshot(self) -> Any:
        return self.layer.tokens, self.layer.copy_states()

    def restore(self, snapshot: Any) -> None:
        self.layer.put(*snapshot)

    def reorder(self, rows: Tensor) -> None:
        def chosen(each: Tensor) -> Tensor:
            return each.index_select(0, rows.to(each.device))

        layer = self.layer
        layer.__dict__.update(map_tensors({name: vars(layer)[name] for name in _NAMES}, chosen))
        layer.marks = {tokens: map_tensors(each, chosen) for tokens, each in layer.marks.items()}
        if layer.before is not None:
            layer.before = layer.before[0], map_tensors(layer.before[1], chosen)

    def reachable_states(self) -> dict[int, StateDict]:
        """By number of tokens: the states that `truncate` can return to, but for the present."""
        before = dict([self.layer.before]) if self.layer.before else {}
        empty = StateLayer(self.layer.number_of_states).copy_states()
        return {0: empty} | before | self.layer.marks

    def can_truncate(self, length: int | Tensor) -> bool:
        if isinstance(length, Tensor):
            return False
        return length == self.length or (length < self.length and length in self.reachable_states())

    def truncate(self, length: int | Tensor) -> None:
        """Return to the states that were recorded after so many tokens. Raises a ValueError if none
        were."""
        if not self.can_truncate(length):
            lengths = sorted({*self.reachable_states(), self.length})
            got = length.tolist() if isinstance(length, Tensor) else length
            raise ValueError(
                f"recurrent and convolutional states of {counted(self.length, 'token')} cannot be "
                f"cut, and return to {', '.join(map(str, lengths))} alone, got length={got}; call "
                "mark() on the cache where it shall return to, or make a new cache"
            )
        layer, found = self.layer, self.reachable_states()
        if length != self.length:
            layer.put(int(length), found[int(length)])
        layer.marks = {tokens: each for tokens, each in layer.marks.items() if tokens <= length}
        if layer.before is not None and layer.before[0] > length:
            layer.before = None

    @property
    def arguments(self) -> dict[str, Any]:
        return {"number_of_states": self.layer.number_of_states}

    def record(self) -> Record:
        past = [index for index, each in self.layer.has_previous_state.items() if each]
        state = {"length": self.length, "tensors": [[*each] for each in self.tensors], "past": past}
        return Record(state, [each.detach() for each in self.tensors.values()])

    def fill(self, record: Record) -> None:
        """Take the states of a file into this layer, which has none. Raises a ValueError if it
        could not be the record of such a layer."""
        state: Any = record.state
        length, names, past = map(state.get, ("length", "tensors", "past"))
        count = self.layer.number_of_states
        every = [[name, index] for name in _TENSORS for index in range(count)]
        if (
            not is_naturals([length])
            or not is_naturals(past)
            or any(index >= count for index in past)
            or not isinstance(names, list)
            or any(each not in every or names.count(each) > 1 for each in names)
            or len(names) != len(record.streams)
            or any(x.dim() < 2 or x.shape[0] != record.streams[0].shape[0] for x in record.streams)
        ):
            raise ValueError(
                f"{count} states have tensors of [B, ..., W] each and a number of tokens, got "
                f"{record.state!r:.200}"
            )
        for (name, index), tensor in zip(names, record.streams, strict=True):
            given = {name: tensor, "state_idx": index}
            self.layer.lazy_initialization(**given)
            vars(self.layer)[name][index].copy_(tensor)
        self.layer.has_previous_state |= dict.fromkeys(past, True)
        self.layer.tokens = length

    def describe(self) -> str:
        shapes = ", ".join(
            f"{[*x.shape]} {str(x.dtype).removeprefix('torch.')}" for x in self.tensors.values()
        )
        return f"{self!r}: {counted(self.length, 'token')}, {self.nbytes:,} bytes held\n  {shapes}"

    def __repr__(self) -> str:
        return f"States({self.layer.number_of_states})"


class ModelCall(NamedTuple):
    """A call of the model after `past` tokens, of which the first tokens can be computed again: its
    arguments without the cache, and whether gradients and the inference mode were on."""

    past: int
    given: dict[str, Any]
    grad: bool
    inference: bool

    def repeat(self, model: nn.Module, cache: Any, count: int) -> None:
        """Compute the first tokens again, after as many as before, into the cache."""
        given = {name: self._first(name, each, count) for name, each in self.given.items()}
        given |= {name_of_cache(model): cache}
        with torch.inference_mode(self.inference), torch.set_grad_enabled(self.grad):
            model(**given)

    def __deepcopy__(self, memo: Any) -> "ModelCall":
        return self  # its tensors are only read, and those that have gradients cannot be copied

    def _first(self, name: str, value: Any, count: int) -> Any:
        if name == "logits_to_keep":
            return 1
        if not isinstance(value, Tensor):
            return value
        if name == "attention_mask":
            return value[:, : self.past + count]
        return value[..., :count] if name in _LAST else value[:, :count]


def check_states_go_on(model: nn.Module, given: Mapping[str, Any], past: int) -> None:
    """Raise for several tokens after others, if the model's states begin anew with each such call:
    transformers' `mamba_selective_scan` takes no state to begin with."""
    tokens = given.get("input_ids")
    tokens = given.get("inputs_embeds") if tokens is None else tokens
    if not past or tokens is None or tokens.shape[1] == 1:
        return
    scan = getattr(sys.modules[type(model).__module__], "mamba_selective_scan", None)
    if scan is not None and not any("initial" in name for name in signature(scan).parameters):
        raise ValueError(
            f"the states of {type(model).__name__} forget earlier tokens in a call of several, as "
            f"transformers computes them, got {tokens.shape[1]} tokens after {past}; feed the "
            "whole prompt in the first call, then one token in each"
        )


_SECOND = ("input_ids", "inputs_embeds", "token_type_ids")  # arguments with tokens in dimension 1
_LAST = ("position_ids", "cache_position")  # with tokens in the last dimension


def call_of(model: nn.Module, given: Mapping[str, Any], past: int) -> ModelCall | None:
    """Record a call of a model, so that its first tokens can be computed again; None if the model
    trains, or the call has tensors that cannot be cut to these tokens."""
    kept = {name: value for name, value in given.items() if name not in CACHES}
    tensors = {name: value for name, value in kept.items() if isinstance(value, Tensor)}
    mask = tensors.pop("attention_mask", None)
    tensors.pop("logits_to_keep", None)
    if model.training or not {*tensors} <= {*_SECOND, *_LAST}:
        return None
    if mask is not None and mask.dim() != 2:
        return None
    return ModelCall(past, kept, torch.is_grad_enabled(), torch.is_inference_mode_enabled())
