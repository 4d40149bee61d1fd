"""Layers whose heads are split: subclasses that compute with the heads of this rank.

Each rank reads the input of a layer for its own heads, so that the gradient of the input is the sum
over the ranks. Mask, score bias and sinks are of these heads; the sizes of the layer do not change.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from regard.cache import NO_CACHE, Cache
from regard.distributed.decode.sharded import ShardedCache
from regard.distributed.tensor.weights import Split
from regard.layers.inputs import Arrival
from regard.layers.latent_forms import Form, choose_form
from regard.masks import Span


class SplitLayer(Split):
    """A layer whose heads are split; dropout differs between ranks.

    In a compiled model it runs uncompiled: its messages would break the graph at every sum.
    """

    @torch.compiler.disable(reason="sends to other ranks")  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor, **options: Any) -> Tensor:
        """The layer's forward: every rank gives the same input, and gets the same output."""
        if isinstance(cache := options.get("cache"), ShardedCache):
            cache.check_layer(self)  # before anything is sent
        with _own_random_numbers(self):
            result: Tensor = super().forward(x, **options)  # type: ignore[misc]
            return result

    def options(self, at: Arrival) -> dict[str, Any]:
        """The settings of the layer for the heads of this rank; for the heads of all ranks, if the
        cache attends for all of them."""
        options: dict[str, Any] = super().options(at)  # type: ignore[misc]
        if not attends_for_all_heads(at.cache):
            options["mask"] = self.split.mask(options["mask"])
            options["score_bias"] = self.split.score_bias(options["score_bias"])
        if options["sinks"] is not None:
            options["sinks"] = self.local("sinks")
        return options

    def gated(self, x: Tensor, out: Tensor) -> Tensor:
        """The output of this rank's heads times their gates."""
        return super().gated(self._shared(x), out)  # type: ignore[misc]

    def _shared(self, x: Any) -> Any:
        return self.split.shared(x) if isinstance(x, Tensor) else x


class SplitAttention(SplitLayer):
    """`Attention` with the heads of this rank."""

    def project(self, x: Tensor, context: Any = None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of this rank's heads."""
        q, k, v = super().project(self._shared(x), self._shared(context))  # type: ignore[misc]
        return q, k, v

    def remember(self, context: Tensor) -> Any:
        """The memory of this rank's key heads."""
        return super().remember(self._shared(context))  # type: ignore[misc]

    @property
    def memory_heads(self) -> int:
        """Key heads of this rank."""
        return self.split.local_kv_heads


class SplitLatent(SplitLayer):
    """`MultiHeadLatentAttention` with the heads of this rank; its latents are replicated."""

    def join(self, latent: Tensor, k_rope: Tensor) -> Tensor:
        """The stream that is cached, of which each rank reads all for its heads."""
        return self.split.shared(super().join(latent, k_rope))  # type: ignore[misc]

    def choose(self, span: Span, cache: Cache = NO_CACHE) -> Form:
        """The form; absorbed, if the cache attends for the heads of all ranks: no rank can rebuild
        all keys. Raises a ValueError as on one device, or if it must be absorbed and
        `form="expanded"`."""
        own: Any = self
        if not attends_for_all_heads(cache):
            return super().choose(span)  # type: ignore[misc]
        if own.form == "expanded":
            raise ValueError(
                "form='expanded' rebuilds the keys of this rank's heads, and the cache attends for "
                "the heads of all ranks; use form='auto'"
            )
        return choose_form(own, span, "absorbed")


def attends_for_all_heads(cache: Cache) -> bool:
    """Whether a cache attends for the heads of all ranks."""
    return isinstance(cache, ShardedCache) and cache.all_heads


@contextmanager
def _own_random_numbers(layer: Any) -> Iterator[None]:
    """A block in which this rank drops other weights than the others do: each has its own heads.

    Ranks with the same state of the random number generator leave with the same state, and
    recomputing with the state of before draws the same numbers.
    """
    if not (layer.training and layer.dropout):
        yield
        return
    device = next(layer.parameters()).device
    drawn = int(torch.randint(1 << 62, (), device="cpu"))
    with torch.random.fork_rng([] if device.type == "cpu" else [device]):
        torch.manual_seed(drawn + layer.split.ranks.rank)
        yield
