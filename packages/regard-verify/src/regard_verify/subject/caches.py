"""A cache behind four methods: append, truncate, reorder, length."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard_verify.law import Trial
from regard_verify.subject.guesses import role_of
from regard_verify.subject.signatures import parameters_of, required_of
from regard_verify.subject.subject import CacheMethods, Subject, SubjectError, called

TRUNCATES = ("truncate", "crop", "trim", "rollback")
BY_AMOUNT = ("trim", "rollback")  # how many tokens are dropped, not how many are kept
REORDERS = ("reorder", "reorder_cache", "select", "batch_select_indices")
UPDATES = ("update", "append", "extend", "add", "store", "push", "put", "concat")
LENGTHS = ("length", "get_seq_length", "seq_len", "offset", "size", "current_length", "__len__")
POSITIONS = ("input_pos", "pos", "positions", "cache_position", "start_pos", "position_ids")
HEADS, DIM = 2, 4  # of the keys and values that a cache is tested with


@dataclass
class Store:
    """One cache, the names of its methods, and the number of tokens that were appended."""

    held: Any
    methods: CacheMethods
    tokens: int = 0

    def append(self, k: Tensor, v: Tensor, *, copied: bool = True) -> tuple[Tensor, Tensor]:
        """Add keys and values [B, G, L, D], or copies of them; returns all visible ones."""
        if copied:
            k, v = k.clone(), v.clone()
        update = getattr(self.held, self.methods.update)
        got = _both(called(update, *self._given(update, k, v)))
        self.tokens += k.shape[2]
        if self.methods.padded:
            length = self._counted()
            return got[0][:, :, :length], got[1][:, :, :length]
        return got

    def _counted(self) -> int:
        """The number of tokens, by its own count if it has one."""
        try:
            return self.length
        except SubjectError:
            return self.tokens

    def _given(self, update: Any, k: Tensor, v: Tensor) -> list[Any]:
        """The arguments of its update in their order: keys, values, the layer, positions."""
        given: list[Any] = []
        pairs = [k, v]
        for name, each in parameters_of(update).items():
            if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD, each.KEYWORD_ONLY):
                break
            if name in POSITIONS:
                start = self._counted()
                by_number = "start" in name or each.annotation in (int, "int")
                given.append(start if by_number else torch.arange(start, start + k.shape[2]))
            elif role_of(name) in ("layer index", "layers"):
                given.append(0)
            elif pairs:
                given.append(pairs.pop(0))
            elif each.default is each.empty:
                given.append({} if "kwargs" in name else None)
            else:
                break
        return [*given, *pairs]

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens."""
        assert self.methods.truncate is not None
        amount = self.length - length if self.methods.by_amount else length
        amount = -amount if self.methods.negative else amount
        called(getattr(self.held, self.methods.truncate), amount)
        self.tokens = length

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
                layer = [0] if callable(found) and required_of(found) else []
                return int(called(found, *layer) if callable(found) else found)
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
    storages = [x.untyped_storage() for x in _tensors(held, set())]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def content_of(held: Any) -> float:
    """The sum of all values in an object: it changes when keys and values are stored."""
    return float(sum(float(x.detach().double().abs().sum()) for x in _tensors(held, set())))


def _tensors(held: Any, visited: set[int]) -> list[Tensor]:
    if id(held) in visited:
        return []
    visited.add(id(held))
    if isinstance(held, Tensor):
        return [held]
    inside = list(held) if isinstance(held, (list, tuple)) else []
    inside += list(held.values()) if isinstance(held, dict) else []
    inside += list(getattr(held, "__dict__", {}).values())
    return [x for each in inside if not callable(each) for x in _tensors(each, visited)]


def new_store(subject: Subject) -> Store:
    """A new cache behind the four methods."""
    return Store(called(subject.thing), subject.cache_methods)


def new_tokens(trial: Trial, length: int, batch: int = 1) -> list[Tensor]:
    """Random keys and values [B, G, L, D] of `length` tokens."""
    return [trial.randn(batch, HEADS, length, DIM) for _ in "kv"]


def update_of(made_by: Any) -> str:
    """The method of a class that takes keys and values and returns all of them; "" if none does.

    Examples:
        >>> class Memory:
        ...     def update(self, keys, values, layer): ...
        >>> update_of(Memory)
        'update'
    """
    for name in UPDATES:
        method = getattr(made_by, name, None)
        names = [n for n in parameters_of(method) if n != "self" and n not in POSITIONS]
        first = [n.lower().removeprefix("new_").removeprefix("x")[:1] for n in names[:2]]
        if callable(method) and first == ["k", "v"]:
            return name
    return ""


def probe_store(subject: Subject) -> None:
    """Find the names of the cache's methods, and what the argument of its truncation means."""
    held = called(subject.thing)
    truncate = next((n for n in TRUNCATES if hasattr(held, n)), None)
    reorder = next((n for n in REORDERS if hasattr(held, n)), None)
    update = update_of(type(held)) or "update"
    store = Store(called(subject.thing), CacheMethods(truncate, reorder, update=update))
    k, v = new_tokens(Trial("store"), 5, batch=2)
    got, _ = store.append(k, v)
    if got.shape[2] > 5 and (store.length == 5 if _counts(store) else _is_empty(got[:, :, 5:])):
        store.methods = store.methods._replace(padded=True)
        subject.inferred["capacity"] = f"{got.shape[2]} places, of which the first are used"
        got = got[:, :, :5]
    subject.rounding = _rounding(got, k)
    if subject.rounding:
        subject.inferred["rounding"] = f"{subject.rounding:.1%} of the largest value"
    has = subject.has
    has.cache_length, has.cache_reorder = _counts(store), reorder is not None
    has.cache_truncate = truncate is not None and has.cache_length
    if truncate and has.cache_truncate:
        methods = _truncation(store.methods, subject)
        has.cache_truncate, store.methods = methods is not None, methods or store.methods
    subject.cache_methods = store.methods
    subject.inferred["methods"] = ", ".join(filter(None, (update, truncate, reorder)))


def _rounding(got: Tensor, k: Tensor) -> float:
    """The allowed error of a cache that rounds: twice the error here, as a share; 0 if exact."""
    if got.shape != k.shape:
        return 0.0
    error = float((got - k).abs().max() / k.abs().max())
    return 2 * error if error < 0.1 else 0.0


def _is_empty(places: Tensor) -> bool:
    """Whether the places after the first five hold nothing yet."""
    return not bool(places.any())


def _counts(store: Store) -> bool:
    try:
        return store.length >= 0
    except SubjectError:
        return False


def _truncation(methods: CacheMethods, subject: Subject) -> CacheMethods | None:
    """The meaning of the argument of `truncate`: the number of tokens to keep, or to drop, perhaps
    with a minus sign; None if the cache cannot be truncated.

    Tried on 5 tokens: after `truncate(1)`, 1 or 4 of them are left.
    """
    ways = {
        "a length to keep": (methods, 1, 1),
        "the number of tokens to drop": (methods._replace(by_amount=True), 1, 4),
        "the number of tokens to drop, with a minus": (
            methods._replace(by_amount=True, negative=True), -1, 4,
        ),
    }  # fmt: skip
    refused, left = [], dict[str, int]()
    for words, (_, argument, _) in ways.items():
        store = Store(called(subject.thing), methods)
        store.append(*new_tokens(Trial("store"), 5, batch=2))
        try:
            called(getattr(store.held, str(methods.truncate)), argument)
            left[words] = store.length
        except SubjectError:
            refused.append(words)
    found = next((words for words, each in ways.items() if left.get(words) == each[2]), None)
    if found is None and "a length to keep" in refused:
        return None
    found = found or "a length to keep"  # it keeps another number: laws report that
    subject.inferred["truncation"] = f"{methods.truncate}({found})"
    return ways[found][0]
