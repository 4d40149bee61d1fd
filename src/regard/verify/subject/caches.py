"""A cache behind four verbs: append, cut back, reorder, count. Whatever it calls them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.verify.law import Trial
from regard.verify.subject.mask_forms import parameters_of
from regard.verify.subject.subject import Subject, SubjectError, called

CUTS = ("truncate", "crop", "trim", "rollback")
REORDERS = ("reorder", "reorder_cache", "select", "batch_select_indices")
LENGTHS = ("length", "get_seq_length", "seq_len", "offset", "size", "current_length", "__len__")
HEADS, DIM = 2, 4


@dataclass
class Store:
    """One cache, and the names it gives to what it does."""

    held: Any
    cut: str | None
    reorder_name: str | None
    by_amount: bool = False

    def append(self, k: Tensor, v: Tensor, *, copied: bool = True) -> tuple[Tensor, Tensor]:
        """Add [B, G, L, D], or copies of them; all keys and values that may be attended."""
        names = list(parameters_of(self.held.update))
        given: list[Any] = [k.clone(), v.clone()] if copied else [k, v]
        if "layer_idx" in names:
            given.append(0)
        elif names and names[0] in ("input_pos", "pos", "positions"):
            given.insert(0, torch.arange(self.length, self.length + k.shape[2]))
        return _both(called(self.held.update, *given))

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens."""
        assert self.cut is not None
        amount = self.length - length if self.by_amount else length
        called(getattr(self.held, self.cut), amount)

    def reorder(self, rows: Tensor) -> None:
        """Become the cache of these rows."""
        assert self.reorder_name is not None
        called(getattr(self.held, self.reorder_name), rows)

    @property
    def length(self) -> int:
        """Tokens it says it has seen."""
        for name in LENGTHS:
            if hasattr(self.held, name):
                found = getattr(self.held, name)
                return int(called(found) if callable(found) else found)
        raise SubjectError("it does not say how many tokens it has seen")

    def storage(self) -> int:
        """Bytes of all tensors it holds, counted once each, storage and not view."""
        return sum(_storages(self.held, set()).values())


def _both(result: Any) -> tuple[Tensor, Tensor]:
    """Keys and values in what `update` gave: two tensors, or parts with streams."""
    if isinstance(result, (tuple, list)) and result and hasattr(result[0], "streams"):
        k, v = (torch.cat([part.streams[i] for part in result], 2) for i in range(2))
        return k, v
    if isinstance(result, (tuple, list)) and len(result) >= 2:
        k, v = result[0], result[1]
        if isinstance(k, Tensor) and isinstance(v, Tensor):
            return k, v
    raise SubjectError("its update gave back no keys and values")


def _storages(held: Any, seen: set[int]) -> dict[int, int]:
    found: dict[int, int] = {}
    if id(held) in seen:
        return found
    seen.add(id(held))
    if isinstance(held, Tensor):
        storage = held.untyped_storage()
        return {storage.data_ptr(): storage.nbytes()}
    inside = list(held) if isinstance(held, (list, tuple)) else []
    inside += list(held.values()) if isinstance(held, dict) else []
    inside += list(getattr(held, "__dict__", {}).values())
    for each in inside:
        if not callable(each):
            found.update(_storages(each, seen))
    return found


def new_store(subject: Subject) -> Store:
    """A fresh cache behind the four verbs."""
    return Store(called(subject.thing), *subject.other["verbs"])


def probe_store(subject: Subject, beside: Any) -> None:
    """Find out what it calls its verbs, and whether cutting back takes a length or an amount."""
    held = called(subject.thing)
    cut = next((n for n in CUTS if hasattr(held, n)), None)
    reorder = next((n for n in REORDERS if hasattr(held, n)), None)
    subject.other["verbs"] = (cut, reorder, False)
    trial = Trial("store")
    store = new_store(subject)
    k, v = (trial.randn(2, HEADS, 5, DIM) for _ in "kv")
    got, _ = store.append(k, v)
    subject.other["coarse"] = _coarse(got, k)
    if subject.other["coarse"]:
        subject.inferred["rounding"] = f"{subject.other['coarse']:.1%} of the largest number"
    subject.has |= {"store length"} if _counts(store) else set()
    if reorder:
        subject.has.add("store reorder")
    if cut and "store length" in subject.has:
        subject.other["verbs"] = (cut, reorder, _by_amount(store, cut))
        subject.has.add("store cut")
        said = "the number of tokens to drop" if subject.other["verbs"][2] else "a length to keep"
        subject.inferred["cutting back"] = f"{cut}({said})"
    subject.inferred["verbs"] = ", ".join(filter(None, ("update", cut, reorder)))


def _coarse(got: Tensor, k: Tensor) -> float:
    """How far off a rounding cache may be: twice what it was, of the largest number; 0 if exact."""
    if got.shape != k.shape:
        return 0.0
    error = float((got - k).abs().max() / k.abs().max())
    return 2 * error if error < 0.1 else 0.0


def _counts(store: Store) -> bool:
    try:
        return store.length >= 0
    except SubjectError:
        return False


def _by_amount(store: Store, cut: str) -> bool:
    """5 tokens are held: after `cut(1)`, 4 are left if it takes an amount."""
    try:
        called(getattr(store.held, cut), 1)
    except SubjectError:
        return False
    return store.length == 4
