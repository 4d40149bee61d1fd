"""A cache whose tokens are spread over ranks, in pages."""

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from regard.cache import Cache, KVCache, Part, SlidingCache
from regard.cache.stored import Stored
from regard.cache.streams import Lengths, check_streams, check_whole, needs_derivatives
from regard.distributed.context.sending import KINDS
from regard.distributed.decode.attending import attend_locally
from regard.distributed.decode.heads import Heads, heads_of
from regard.distributed.decode.slots import Piece, Slots
from regard.distributed.ranks import Ranks
from regard.distributed.shards import Shards
from regard.layers.attending import Attending, Keys
from regard.layers.inputs import Arrival
from regard.ops.attend import prepare
from regard.ops.prepared import Prepared
from regard.span import Span


class ShardedCache(Stored, Attending):
    """A cache of which each rank stores a share of the tokens: each token is stored once.

    Pages of tokens go round the ranks. Every rank projects the new tokens, stores its own, attends
    to what it stores, and the ranks exchange outputs and log-sum-exps: Helix parallelism (Bhatia
    et al. 2025, arXiv:2507.07120), decode context parallel in vLLM. All ranks must call the layer
    with the same arguments. `update` returns this rank's tokens, and a layer attends through
    `attend`. Without gradients.

    Args:
        mesh: of one dimension.
        page_size: tokens that follow one another on one rank.
        storage: a function that makes the cache of this rank's tokens, `KVCache`, `lambda:
            StaticCache(1024)`, `lambda: QuantizedCache(8)`.
        layer: the layer that fills it, if `tensor_parallel` has split its heads.

    Raises:
        TypeError: if `mesh` is no mesh or `storage` does not make a cache.
        ValueError: if the mesh has several dimensions or one rank, `page_size` is below 1, or the
            storage drops tokens, or the heads of the layer are split in a way that has no plan.

    Examples:
        >>> from regard.distributed import ShardedCache
        >>> try:
        ...     ShardedCache(mesh=None)
        ... except TypeError:
        ...     print('a mesh: init_device_mesh("cpu", (2,))')
        a mesh: init_device_mesh("cpu", (2,))
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        page_size: int = 64,
        storage: Callable[[], Cache] = KVCache,
        *,
        layer: nn.Module | None = None,
    ) -> None:
        check_whole("page_size", page_size, least=1)
        self._ranks = Ranks(mesh)
        self._heads: Heads = heads_of(layer, self._ranks)
        self._slots = Slots(self._ranks.size, page_size)
        self._storage = _make_storage(storage)

    @property
    def length(self) -> int:
        """The number of tokens so far, of all ranks."""
        return self._slots.length

    @property
    def lengths(self) -> Lengths:
        """The number of tokens of each row, of all ranks."""
        return Lengths(self.length, self.length)

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of tokens that each rank stores."""
        return tuple(self._slots.counts)

    @property
    def nbytes(self) -> int:
        """Bytes that this rank stores for its tokens."""
        nbytes: int = self._storage.nbytes
        return nbytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes of this rank's buffers, which have room for more tokens."""
        nbytes: int = self._storage.allocated_bytes
        return nbytes

    @property
    def all_heads(self) -> bool:
        """Whether the cache attends for the heads of all ranks, between which they are split."""
        return self._heads.split is not None

    def check_layer(self, layer: Any) -> None:
        """Raise if the heads of a layer are split otherwise than the cache was made for.

        Raises:
            ValueError: if they are.
        """
        self._heads.check(layer)

    def prepare(self, layer: Any, q: Tensor, keys: Keys, at: Arrival) -> Prepared:
        """The call of a layer over the tokens of all ranks, with a log-sum-exp and without sinks.

        The layer fills the cache; `keys` are those of this rank's tokens.

        Raises:
            ValueError: as `check_layer` and `prepare`.
        """
        self.check_layer(layer)
        q, k, v = self._heads.outlines(q, *keys.outlines)
        options = layer.options(at) | {"sinks": None}
        return prepare(q, k, v, span=at.span, partial=True, **options)

    def span(self, new: int) -> Span:
        """The slots of the queries and keys of a call with `new` more tokens.

        Raises:
            ValueError: if there is no room for them on some rank.
        """
        self._check_room(self._slots.following(new))
        return Span(self.length, self.length + new, 0, self.length + new)

    def update(self, *new: Tensor) -> tuple[Part, ...]:
        """Append `[B, G, L, W]` streams of all new tokens; return the tokens that this rank stores.

        Their slots are counted in its storage, from 0.

        Raises:
            ValueError: if the streams do not fit each other or those held, do not fit the storage
                of some rank, or require gradients.
        """
        return self._append(*self._placed(new))

    def store(self, shards: Shards, *new: Tensor) -> tuple[Part, ...]:
        """Append tokens of which each rank has a shard; return the tokens that this rank stores.

        So a prefill in context parallel fills the cache.

        Args:
            shards: which of the new tokens each rank has.
            *new: streams `[B, G, Lr, W]` of this rank's, with all key heads.

        Raises:
            ValueError: as `update`, or if the streams are not as long as this rank's shard.
        """
        if shards.ranks != self._ranks.size:
            raise ValueError(
                f"shards are of {shards.ranks} ranks, the mesh of the cache has "
                f"{self._ranks.size}; make both for one mesh"
            )
        want, got = shards.lengths[self._ranks.rank], check_streams(new, ())
        if got != want:
            raise ValueError(
                f"this rank's shard has {want} tokens, the streams {got}; give those of "
                "shards.take(x, rank)"
            )
        pieces = self._slots.placed(shards.pieces(rank) for rank in self._ranks)
        self._check(pieces, new)
        return self._append(pieces, list(new))

    def peek(self, *new: Tensor) -> tuple[Part, ...]:
        """The result of `update`, without changing the cache: tokens that this rank would store.

        Raises:
            ValueError: as `update`.
        """
        _, mine = self._placed(new)
        parts: tuple[Part, ...] = self._storage.peek(*mine)
        return parts

    def attend(
        self, prepared: Prepared, q: Tensor, parts: Iterable[Part], sinks: Tensor | None
    ) -> Tensor:
        """Attention of `q` to the tokens of all ranks, `[B, H, L, Dv]`.

        The call over all slots is prepared with `partial=True` and without sinks, scores for each
        head that are merged once; `parts` are those that `update` returned, or keys and values made
        of them.

        Raises:
            ValueError: if the call has dropout.
            RankError: if a rank does not answer.
        """
        call = prepared.call
        if call.dropout:
            raise ValueError(
                f"a ShardedCache is for inference, got dropout={call.dropout}; call layer.eval()"
            )
        (part,) = parts
        queries = self._heads.queries(q)
        found = attend_locally(prepared, queries, part, self._slots, self._ranks.rank)
        return self._heads.merge(found, sinks).to(call.dtype)

    def truncate(self, length: int | Tensor) -> None:
        """Keep the first `length` tokens; every rank drops its later ones.

        Raises:
            ValueError: if `length` is a tensor, negative or above the tokens so far.
        """
        length = self._checked(length)
        self._storage.truncate(self._slots.held_below(length, self._ranks.rank))
        self._slots.truncate(length)

    def can_truncate(self, length: int | Tensor) -> bool:
        """Whether `truncate(length)` would not raise."""
        try:
            self._checked(length)
        except ValueError:
            return False
        return True

    def reorder(self, rows: Tensor) -> None:
        """Keep these batch rows, `[N]` integers, in this order, on every rank."""
        self._storage.reorder(rows)

    def snapshot(self) -> object:
        """The present state."""
        return self.length, self._storage.snapshot()

    def restore(self, snapshot: object) -> None:
        """Undo the updates since `snapshot` was called; nothing else may have happened."""
        assert isinstance(snapshot, tuple)
        length, stored = snapshot
        self._slots.truncate(length)
        self._storage.restore(stored)

    @property
    def empty_streams(self) -> tuple[Tensor, ...]:
        """Tensors of no tokens, with the other sizes and the dtypes of this rank's streams."""
        found: tuple[Tensor, ...] = self._storage.empty_streams
        return found

    @property
    def arguments(self) -> dict[str, Any]:
        """Refuse a file: no rank has all tokens.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "ShardedCache stores a share of the tokens on each rank, so that no rank could write "
            "or read a file of them all; store the text, and prefill it again"
        )

    def _checked(self, length: int | Tensor) -> int:
        if isinstance(length, Tensor):
            raise ValueError(
                "ShardedCache has rows of one length, got a tensor; truncate to a whole number, "
                "or use KVCache() or StaticCache(max_length)"
            )
        return self.lengths.truncated(length).longest

    def _check(self, pieces: list[Piece], new: Sequence[Tensor]) -> None:
        """Raise on every rank alike, before anything is sent or changed."""
        _refuse_gradients(new)
        self._check_room(pieces)

    def _placed(self, new: Sequence[Tensor]) -> tuple[list[Piece], list[Tensor]]:
        """The pieces of the next tokens, and the streams of the tokens that this rank stores."""
        pieces = self._slots.following(check_streams(new, ()))
        mine = [
            (piece.start - self.length, piece.stop - self.length)
            for piece in pieces
            if piece.rank == self._ranks.rank
        ]
        self._check(pieces, new)
        return pieces, [_take(each, mine) for each in self._heads.streams(new)]

    def _append(self, pieces: list[Piece], own: list[Tensor]) -> tuple[Part, ...]:
        """Store this rank's streams."""
        parts: tuple[Part, ...] = self._storage.update(*own)
        self._slots.add(pieces)
        return parts

    def _check_room(self, pieces: list[Piece]) -> None:
        """Raise on every rank if the storage of one has no room for its pieces."""
        if not pieces:
            return
        fullest = max(piece.at + piece.stop - piece.start for piece in pieces)
        mine = self._slots.counts[self._ranks.rank]
        try:
            self._storage.span(max(0, fullest - mine))
        except ValueError as error:
            raise ValueError(
                f"a rank would store {fullest} of {pieces[-1].stop} tokens: {error}"
            ) from error

    def __copy__(self) -> "ShardedCache":
        new = object.__new__(ShardedCache)
        vars(new).update(vars(self))
        new._slots, new._storage = copy(self._slots), copy(self._storage)
        return new

    def __repr__(self) -> str:
        ranks, page = self._ranks.size, self._slots.page_size
        return f"ShardedCache({ranks} ranks, page_size={page}, storage={self._storage!r})"


def _make_storage(storage: object) -> Any:
    """The cache of a rank's tokens."""
    cache = storage() if callable(storage) else None
    if not isinstance(cache, Stored) or isinstance(cache, Attending):
        raise TypeError(
            "storage is a function that makes a cache of a rank's tokens, such as KVCache or "
            f"lambda: StaticCache(1024), got {storage!r}"
        )
    if isinstance(cache, SlidingCache):
        raise ValueError(
            "storage=SlidingCache drops tokens by their number in the storage, not by their slot; "
            "use KVCache, under a SlidingWindow mask"
        )
    return cache


def _take(x: Tensor, ranges: list[tuple[int, int]]) -> Tensor:
    """Some tokens of a stream."""
    if len(ranges) == 1:
        start, stop = ranges[0]
        return x.narrow(2, start, stop - start)
    pieces = [x.narrow(2, start, stop - start) for start, stop in ranges]
    return torch.cat(pieces, 2) if pieces else x.narrow(2, 0, 0)


def _refuse_gradients(new: Sequence[Tensor]) -> None:
    if torch.compiler.is_compiling() or needs_derivatives(new, ()):
        raise ValueError(
            "ShardedCache is for inference: gradients do not flow through it, and it runs outside "
            "of compiled graphs; use torch.no_grad(), or context_parallel for training"
        )


def sharded_caches(
    module: nn.Module, mesh: DeviceMesh, page_size: int = 64, storage: Callable[[], Cache] = KVCache
) -> dict[str, ShardedCache]:
    """A new `ShardedCache` for every layer of regard inside a module, by the name of the layer.

    Where `tensor_parallel` has split the heads over the same ranks, the queries are gathered, and
    every rank attends to its tokens for all heads (Helix, Bhatia et al. 2025, arXiv:2507.07120). So
    keys shared by several heads, and latents, which tensor parallelism stores on several ranks, are
    stored once. Where the heads are split over another dimension of the mesh, tokens are spread
    over the ranks that have the same heads.

    Args:
        module: a layer of regard, whose name is `""`, or a model that contains some.
        mesh: of one dimension.
        page_size: tokens that follow one another on one rank.
        storage: a function that makes the cache of a rank's tokens.

    Raises:
        TypeError: as `ShardedCache`.
        ValueError: as `ShardedCache`, or if there is no layer of regard.

    Examples:
        >>> from torch import nn
        >>> from regard.distributed import sharded_caches
        >>> try:
        ...     sharded_caches(nn.Linear(8, 8), mesh=None)
        ... except (TypeError, ValueError):
        ...     print("a layer of regard, and a mesh: init_device_mesh('cpu', (2,))")
        a layer of regard, and a mesh: init_device_mesh('cpu', (2,))
    """
    modules = module.named_modules()
    layers: dict[str, nn.Module] = {name: x for name, x in modules if isinstance(x, KINDS)}
    if not layers:
        raise ValueError(
            f"{type(module).__name__} contains no attention layer of regard that could fill a "
            "cache; transformers models take regard.hf.cache(model, 'made', make=...)"
        )
    return {
        name: ShardedCache(mesh, page_size, storage, layer=layer) for name, layer in layers.items()
    }
