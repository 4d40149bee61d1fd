"""Observes each call of attention while a model runs: statistics of all heads, chosen maps."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.cache import Part
from regard.masks import Mask, Padding
from regard.masks.algebra import AllOf
from regard.ops.prepared import Prepared
from regard.see.maps import AttentionMaps
from regard.see.row_weights import OneRow, RowBlock, one_row
from regard.see.statistics import Statistics, Totals

CONTEXTS = ("context", "key_value_states", "encoder_hidden_states")  # arguments with other tokens


@dataclass(frozen=True)
class MapChoice:
    """The layers, heads, queries and keys whose weights are returned; None for all of them."""

    layers: Sequence[int] | None = None
    heads: Sequence[int] | None = None
    queries: Sequence[int] | None = None
    keys: tuple[int, int] | None = None

    def among(self, layers: int, past: int, tokens: int) -> "MapChoice":
        """The choice with indices from 0, of so many layers and of the tokens from `past`.

        Raises:
            IndexError, ValueError: if there are no such layers, queries or keys.
        """
        none = self.layers is None and self.heads is None and self.queries is None
        asked = range(layers) if self.layers is None else self.layers
        rows = range(past, tokens) if self.queries is None else self.queries
        start, stop, _ = slice(*(self.keys or (0, tokens))).indices(tokens)
        return MapChoice(
            () if none else indices("layers", asked, 0, layers),
            self.heads,
            () if none else indices("queries", rows, past, tokens),
            (start, max(start, stop)),
        )


def indices(what: str, asked: Sequence[int], first: int, stop: int) -> tuple[int, ...]:
    """Indices from `first` up to `stop`, of which negative ones count from the end.

    Raises:
        IndexError: for one that is not there.
    """
    found = tuple(each + stop if each < 0 else each for each in asked)
    for each, given in zip(found, asked, strict=True):
        if not first <= each < stop:
            raise IndexError(f"{what}={given} is not among {first} to {stop - 1}")
    return found


class Looking:
    """Statistics of every layer that runs, and maps of the chosen ones."""

    def __init__(
        self, choice: MapChoice, row: int, past: int, tokens: int, padding: Tensor | None
    ) -> None:
        self._choice, self._row, self._past, self._tokens = choice, row, past, tokens
        real = torch.ones(tokens, dtype=torch.bool) if padding is None else padding
        self._real = torch.nn.functional.pad(real[-tokens:], (0, tokens - len(real[-tokens:])))
        self._current: int | None = None
        self._statistics: dict[int, Statistics] = {}
        self._maps: dict[int, Tensor] = {}
        self._backends: dict[int, str] = {}

    @contextmanager
    def at(self, layers: Mapping[str, nn.Module]) -> Iterator[None]:
        """A context in which hooks tell in which of these layers a call is."""
        handles = []
        for index, module in enumerate(layers.values()):
            handles.append(
                module.register_forward_pre_hook(self._entering(index), with_kwargs=True)
            )
            handles.append(module.register_forward_hook(self._leaving, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _entering(self, index: int) -> Any:
        def enter(module: nn.Module, args: Any, given: Mapping[str, Any]) -> None:
            other = next((name for name in CONTEXTS if given.get(name) is not None), None)
            if other is not None:
                raise ValueError(
                    f"layer {index} reads another sequence, given as {other}; give the part of "
                    "the model that reads one, as model.get_encoder()"
                )
            self._current = index

        return enter

    def _leaving(self, *given: Any) -> None:
        self._current = None

    def seen(self, prepared: Prepared, q: Tensor, parts: tuple[Part, ...]) -> None:
        """Add one call that ran to the statistics, and store the chosen rows of its maps."""
        layer = self._current
        if layer is None:
            return
        if layer in self._statistics:
            raise ValueError(
                f"layer {layer} ran twice in one call of the model, got two maps of it"
            )
        call = one_row(prepared, q, parts, self._row, self._past)
        if call.last_key >= self._tokens:
            raise ValueError(
                f"layer {layer} reads key {call.last_key} where the cache and the call have "
                f"{self._tokens} tokens: it reads another sequence"
            )
        real = self._real.to(q.device)
        first = int(real.int().argmax())
        sinks = prepared.call.sinks is not None
        totals = Totals(call.call.num_heads, real[self._past :], first, self._tokens, sinks=sinks)
        kept = self._room(layer, call)
        for block in call.blocks():
            totals.add(block)
            if kept is not None:
                self._keep(kept, block)
        self._statistics[layer] = totals.means()
        self._backends[layer] = prepared.name

    def _room(self, layer: int, call: OneRow) -> Tensor | None:
        """Zeros for the maps of a layer; None if it is not chosen."""
        choice = self._choice
        assert choice.layers is not None
        assert choice.queries is not None
        assert choice.keys is not None
        if layer not in choice.layers:
            return None
        start, stop = choice.keys
        shape = len(self._heads(call.call.num_heads)), len(choice.queries), stop - start
        self._maps[layer] = torch.zeros(shape, dtype=torch.float32)
        return self._maps[layer]

    def _heads(self, count: int) -> tuple[int, ...]:
        asked = range(count) if self._choice.heads is None else self._choice.heads
        return indices("heads", asked, 0, count)

    def _keep(self, kept: Tensor, block: RowBlock) -> None:
        """Copy the chosen rows and columns of the chosen heads."""
        assert self._choice.queries is not None
        assert self._choice.keys is not None
        count, width = block.weights.shape[1:]
        rows = [
            (at, query - block.query)
            for at, query in enumerate(self._choice.queries)
            if 0 <= query - block.query < count
        ]
        start, stop = self._choice.keys
        first, last = max(start, block.key), min(stop, block.key + width)
        if not rows or first >= last:
            return
        into, of = (torch.tensor(each) for each in zip(*rows, strict=True))
        heads = list(self._heads(block.weights.shape[0]))
        chosen = block.weights[heads][:, of.to(block.weights.device)]
        columns = chosen[..., first - block.key : last - block.key]
        kept[:, into, first - start : last - start] = columns.float().cpu()

    def maps(self, names: tuple[str, ...], tokens: tuple[str, ...]) -> AttentionMaps:
        """The maps and statistics of all layers.

        Raises:
            ValueError: if a layer did not run, or layers have different numbers of heads.
        """
        missing = [name for at, name in enumerate(names) if at not in self._statistics]
        if missing:
            raise ValueError(
                f"{len(missing)} of {len(names)} attention layers did not run, the first is "
                f"{missing[0]}; give the part of the model that reads these tokens"
            )
        each = [self._statistics[at] for at in range(len(names))]
        counts = {len(one.entropy) for one in each}
        if len(counts) > 1:
            raise ValueError(f"layers have {sorted(counts)} heads; a map has one number of heads")
        choice, (heads,) = self._choice, counts
        assert choice.layers is not None
        assert choice.queries is not None
        assert choice.keys is not None
        kept = [self._maps[layer] for layer in choice.layers]
        start, stop = choice.keys
        return AttentionMaps(
            weights=torch.stack(kept) if kept else torch.zeros(0, 0, 0, stop - start),
            tokens=tokens,
            layers=tuple(choice.layers),
            heads=self._heads(heads) if kept else (),
            queries=tuple(choice.queries),
            keys=tuple(range(start, stop)),
            past=self._past,
            backends=tuple(self._backends[at] for at in range(len(names))),
            names=names,
            **{
                name: torch.stack([getattr(one, name) for one in each])
                for name in Statistics.__dataclass_fields__
            },
        )


def padding_of(given: Mapping[str, Any], row: int) -> Tensor | None:
    """The tokens of a row that are no padding, `[tokens]`; None if no argument says it."""
    mask = given.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2:
        return mask[row].bool().cpu()
    rules = _rules(given.get("mask"))
    valid = next((rule.valid for rule in rules if isinstance(rule, Padding)), None)
    return None if valid is None else valid[row].cpu()


def _rules(mask: object) -> tuple[Mask, ...]:
    if isinstance(mask, AllOf):
        return mask.parts
    return (mask,) if isinstance(mask, Mask) else ()
