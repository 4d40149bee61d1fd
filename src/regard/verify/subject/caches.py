"""A cache behind four methods: append, truncate, reorder, length."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.verify.law import Trial
from regard.verify.subject.mask_forms import parameters_of
from regard.verify.subject.subject import CacheMethods, Subject, SubjectError, called

TRUNCATES = ("truncate", "crop", "trim", "rollback")
REORDERS = ("reorder", "reorder_cache", "select", "batch_select_indices")
LENGTHS = ("length", "get_seq_length", "seq_len", "offset", "size", "current_length", "__len__")
HEADS, DIM = 2, 4  # of the keys and values that a cache is tested with


@dataclass
class Store:
    """One cache, and the names of its methods."""

    held: Any
    methods: CacheMethods

    def append(self, k: Tensor, v: Tensor, *, copied: bool = True) -> tuple[Tensor, Tensor]:
        """Add keys and values [B, G, L, D], or copies of them; returns all visible ones."""
        names = list(parameters_of(self.held.update))
        given: list[Any] = [k.clone(), v.clone()] if copied else [k, v]
        if "layer_idx" in names:
            given.append(0)
        elif names and names[0] in ("input_pos", "pos", "positions"):
            given.insert(0, torch.arange(self.length, self.length + k.shape[2]))
        return _both(called(self.held.update, *given))

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens."""
        assert self.methods.truncate is not None
        amount = self.length - length if self.methods.by_amount else length
        called(getattr(self.held, self.methods.truncate), amount)

    def reorder(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order."""
        assert self.methods.reorder is not None
        called(getattr(self.held, self.methods.reorder), rows)

    @property
    def length(self) -> int:
        """The number of tokens, by its own count."""
        for name in LENGTHS:
            if hasattr(self.held, name):
                found = getattr(self.held, name)
                return int(called(found) if callable(found) else found)
        raise SubjectError("it has no count of its tokens")

    def storage(self) -> int:
        """Bytes of all storages that it refers to."""
        return storage_bytes(self.held)


def _both(result: Any) -> tuple[Tensor, Tensor]:
    """Keys and values in what `update` returned: two tensors, or parts with streams."""
    if isinstance(result, (tuple, list)) and result and hasattr(result[0], "streams"):
        k, v = (torch.cat([part.streams[i] for part in result], 2) for i in range(2))
        return k, v
    if isinstance(result, (tuple, list)) and len(result) >= 2:
        k, v = result[0], result[1]
        if isinstance(k, Tensor) and isinstance(v, Tensor):
            return k, v
    raise SubjectError("its update returned no keys and values")


def storage_bytes(held: Any) -> int:
    """Bytes of all tensors in an object, each storage counted once and whole."""
    return sum(_storages(held, set()).values())


def _storages(held: Any, visited: set[int]) -> dict[int, int]:
    found: dict[int, int] = {}
    if id(held) in visited:
        return found
    visited.add(id(held))
    if isinstance(held, Tensor):
        storage = held.untyped_storage()
        return {storage.data_ptr(): storage.nbytes()}
    inside = list(held) if isinstance(held, (list, tuple)) else []
    inside += list(held.values()) if isinstance(held, dict) else []
    inside += list(getattr(held, "__dict__", {}).values())
    for each in inside:
        if not callable(each):
            found.update(_storages(each, visited))
    return found


def new_store(subject: Subject) -> Store:
    """A new cache behind the four methods."""
    return Store(called(subject.thing), subject.cache_methods)


def new_tokens(trial: Trial, length: int, batch: int = 1) -> list[Tensor]:
    """Random keys and values [B, G, L, D] of `length` tokens."""
    return [trial.randn(batch, HEADS, length, DIM) for _ in "kv"]


def probe_store(subject: Subject) -> None:
    """Find out the names of its methods, and whether truncation takes a length or an amount."""
    held = called(subject.thing)
    truncate = next((n for n in TRUNCATES if hasattr(held, n)), None)
    reorder = next((n for n in REORDERS if hasattr(held, n)), None)
    store = Store(called(subject.thing), CacheMethods(truncate, reorder))
    k, v = new_tokens(Trial("store"), 5, batch=2)
    got, _ = store.append(k, v)
    subject.rounding = _rounding(got, k)
    if subject.rounding:
        subject.inferred["rounding"] = f"{subject.rounding:.1%} of the largest value"
    has = subject.has
    has.cache_length, has.cache_reorder = _counts(store), reorder is not None
    has.cache_truncate = truncate is not None and has.cache_length
    if truncate and has.cache_truncate:
        store.methods = store.methods._replace(by_amount=_by_amount(store, truncate))
        amount = "the number of tokens to drop" if store.methods.by_amount else "a length to keep"
        subject.inferred["truncation"] = f"{truncate}({amount})"
    subject.cache_methods = store.methods
    subject.inferred["methods"] = ", ".join(filter(None, ("update", truncate, reorder)))


def _rounding(got: Tensor, k: Tensor) -> float:
    """The allowed error of a cache that rounds: twice the error here, as a share; 0 if exact."""
    if got.shape != k.shape:
        return 0.0
    error = float((got - k).abs().max() / k.abs().max())
    return 2 * error if error < 0.1 else 0.0


def _counts(store: Store) -> bool:
    try:
        return store.length >= 0
    except SubjectError:
        return False


def _by_amount(store: Store, truncate: str) -> bool:
    """Whether, of 5 tokens, 4 are left after `truncate(1)`."""
    try:
        called(getattr(store.held, truncate), 1)
    except SubjectError:
        return False
    return store.length == 4
