"""A transformers model run with given attention layers, each with its own cache; and with those of
each candidate, which are converted when a row first needs them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.cache import Cache
from regard.compare import converted_cache
from regard.compare.candidates import Candidate
from regard.convert.converting import convert
from regard.convert.targets import Target
from regard.hf.families.finding import attention_modules
from regard.hf.families.layers import attention_of
from regard.hf.generating.cache_of_model import cache as cache_for
from regard.hf.generating.condensing import condense
from regard.hf.generating.watching import argument_of
from regard.hf.placing.place import place, sharing
from regard.hf.running.installing import install
from regard.layers.attention import Attention

Progress = Callable[[str, int, int], None]  # the present step, the work done, all of it

# Seconds on two cores with a model of 135M parameters, about: their ratios make the share of work.
ROW = 6
CONVERTING = 12
PREFILLING = 8


class Work:
    """Calls `progress` with the present step, the seconds of work before it, and of all work."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total = progress, total
        self._done = self._present = 0

    def begin(self, what: str, seconds: int) -> None:
        """The next step begins, and those before it are done."""
        self._done += self._present
        self._present = seconds
        self._progress(what, self._done, self._total)

    def part(self, what: str, done: int, total: int) -> None:
        """So many parts of the present step are done."""
        share = round(self._present * done / total)
        self._progress(f"{what}: {done} of {total}", self._done + share, self._total)

    def end(self) -> None:
        """All steps are done."""
        self._progress("done", self._total, self._total)


class Runner:
    """Runs a causal language model as its users do: with regard installed, and one of its caches.

    The model is not changed: a copy that shares its weights runs, in which `layers` are placed.

    Args:
        model: a transformers model of a known family.
        layers: one for each attention module, in order; the model's own attention if None.
        cache: as `regard.hf.cache` takes it: a name, or a function that builds one layer's cache.
        rollback: tokens that can be taken back from the windows of a cache with a name.
        condense: the share of the tokens that stay after `read`.

    Raises:
        ValueError: if the layers cannot be placed in a model of this class (`regard.hf.place`).

    Examples:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from regard import QuantizedCache
        >>> from regard.compare import Runner
        >>> config = LlamaConfig(hidden_size=16, num_attention_heads=2, vocab_size=20,
        ...     num_hidden_layers=2, intermediate_size=16)
        >>> runner = Runner(LlamaForCausalLM(config).eval(), cache=QuantizedCache)
        >>> with torch.no_grad():
        ...     hidden = runner.hidden(torch.tensor([[3, 4, 5]]))
        ...     logits = runner.step(torch.tensor([[6]]))
        >>> logits.shape, runner.caches[0].length
        (torch.Size([1, 1, 20]), 4)
    """

    def __init__(
        self,
        model: Any,
        layers: Sequence[nn.Module] | None = None,
        *,
        cache: str | Callable[[], Cache],
        rollback: int = 0,
        condense: float | None = None,
    ) -> None:
        self.model, self._condense = sharing(model), condense
        if layers is not None:
            place(self.model, layers)
        self.layers = list(layers or map(attention_of, attention_modules(model).values()))
        install(self.model)
        options = {"rollback": rollback} if rollback and isinstance(cache, str) else {}
        self._new_cache = partial(cache_for, self.model.base_model, cache, **options)
        self.reset()

    def reset(self) -> None:
        """Empty the caches."""
        self._cache = self._new_cache()
        self._given = argument_of(self.model, self._cache) | {"use_cache": True}

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens in the caches."""
        self._cache.truncate(length)

    def hidden(self, tokens: Int[Tensor, "B L"]) -> Float[Tensor, "B L E"]:
        """The last hidden states of these tokens, which follow those in the caches."""
        hidden: Tensor = self.model.base_model(input_ids=tokens, **self._given).last_hidden_state
        return hidden

    def read(self, tokens: Int[Tensor, "B L"]) -> Float[Tensor, "B L E"]:
        """`hidden` of a text that begins in empty caches, which are then condensed."""
        hidden = self.hidden(tokens)
        if self._condense is not None:
            condense(self._cache, tokens, self._condense)
        return hidden

    def step(self, token: Int[Tensor, "B 1"]) -> Float[Tensor, "B 1 V"]:
        """One decoding step: the logits after one more token."""
        logits: Tensor = self.model(input_ids=token, **self._given).logits
        return logits

    @property
    def caches(self) -> list[Cache]:
        """The caches of the attention layers."""
        return [layer.cache for layer in self._cache.layers if hasattr(layer, "cache")]

    @property
    def cache_bytes(self) -> int:
        """Bytes in the caches of all layers."""
        return sum(cache.nbytes for cache in self.caches)


class Runners:
    """A runner for each candidate, or the reason why the model cannot have that attention.

    All conversions are made in one pass over the text `[M, K]`, when the first of them is needed;
    those of an earlier comparison are read from disk. `dtype` is that of the checkpoint; `rollback`
    tokens can be taken back from windows.
    """

    def __init__(
        self,
        model: Any,
        shipped: Sequence[Attention],
        candidates: Sequence[Candidate],
        tokens: Int[Tensor, "M K"],
        dtype: torch.dtype,
        rollback: int,
    ) -> None:
        self._model, self._tokens, self._rollback = model, tokens, rollback
        self._targets = {each.name: _target(each, shipped, dtype) for each in candidates}
        wanted = (each for each in self._targets.values() if isinstance(each, Target))
        self._names = {each: converted_cache.name_of(each, shipped, tokens) for each in wanted}
        self._made: dict[Target | None, Sequence[nn.Module] | str | None] = {None: None}
        for target, name in self._names.items():
            if (layers := converted_cache.find(name, shipped)) is not None:
                self._made[target] = layers

    @property
    def missing(self) -> list[Target]:
        """Targets to which the layers are not converted yet."""
        return [target for target in self._names if target not in self._made]

    @property
    def seconds(self) -> int:
        """The work of the conversions that are missing, in the seconds of `Work`."""
        return CONVERTING * len(self.missing)

    def of(self, candidate: Candidate, work: Work) -> Runner | str:
        """The runner of a candidate, or why there is none."""
        target = self._targets[candidate.name]
        if isinstance(target, str):
            return target
        if target not in self._made:
            self._convert(work)
        layers = self._made[target]
        if isinstance(layers, str):
            return layers
        try:
            cache, share = candidate.cache, candidate.condense
            return Runner(self._model, layers, cache=cache, rollback=self._rollback, condense=share)
        except ValueError as objection:
            if layers is None:  # no row can run
                raise
            return str(objection)

    def _convert(self, work: Work) -> None:
        missing = self.missing
        work.begin("converting", self.seconds)

        def progress(what: str, done: int, total: int) -> None:
            work.part(f"converting, {what}", done, total)

        try:
            converted = convert(self._model, missing, self._tokens, progress=progress)
        except ValueError as objection:
            self._made |= dict.fromkeys(missing, str(objection))
            return
        for each in converted:
            converted_cache.store(self._names[each.target], each.layers)
            self._made[each.target] = each.layers


def _target(
    candidate: Candidate, shipped: Sequence[Attention], dtype: torch.dtype
) -> Target | str | None:
    try:
        return candidate.choose(shipped, dtype)
    except ValueError as objection:
        return str(objection)
