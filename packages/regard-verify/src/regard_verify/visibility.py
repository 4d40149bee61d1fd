"""The keys that each query attends to: measured from outputs, and differences in words."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from regard_verify.law import Counterexample
from regard_verify.oracle import pattern


def read_weights(
    attend: Callable[..., Tensor],
    q: Tensor,  # [B, H, L, D]
    k: Tensor,  # [B, G, S, D]
    *,
    width: int | None = None,
) -> Tensor:
    """The attention weights [B, H, L, S]: values are one-hot in their key, so outputs are weights.

    `width` is how many channels a value may have; with more keys than that, several calls are made.
    """
    keys = k.shape[2]
    size = keys if width is None else width
    eye = torch.eye(keys, dtype=q.dtype)
    pieces = []
    for first in range(0, keys, max(size, 1)):
        v = torch.zeros(*k.shape[:3], size, dtype=q.dtype)
        chosen = eye[:, first : first + size]
        v[..., : chosen.shape[1]] = chosen
        pieces.append(attend(q.clone(), k.clone(), v)[..., : chosen.shape[1]])
    return torch.cat(pieces, -1)


def read_dependence(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The tokens that each output depends on [L, L]: one token at a time is changed.

    An output always depends on its own token (through the query), so the diagonal is True.
    """
    length = x.shape[1]
    base = layer(x.clone())[0]
    depends = torch.eye(length, dtype=torch.bool)
    for j in range(length):
        other = x.clone()
        other[:, j] = other[:, j] * -0.7 + 0.3
        moved = layer(other)[0]
        same = (moved == base) | (moved.isnan() & base.isnan())
        depends[:, j] |= ~same.all(-1)
    return depends


def explain(expected: Tensor, actual: Tensor) -> str:
    """A wrong visibility [L, S] in words: its first wrong row, and the likely mistake."""
    queries, keys = expected.shape
    row = int((expected != actual).any(-1).nonzero()[0])
    more, less = _keys(actual[row] & ~expected[row]), _keys(expected[row] & ~actual[row])
    parts = [f"{more} visible to query {row}"] if more else []
    cell = " and ".join([*parts, f"{less} hidden from query {row}"] if less else parts)
    for cause, would in _mistakes(expected, queries, keys):
        if torch.equal(would, actual):
            return f"{cell}: {cause}."
    return f"{cell}."


def _mistakes(expected: Tensor, queries: int, keys: int) -> list[tuple[str, Tensor]]:
    """The visibility that each common mistake gives; those of the expected rule come first."""
    j = torch.arange(keys)[None]
    rule, found = _rule(expected, queries, keys)
    for alignment in ("top-left", "bottom-right"):
        i = torch.arange(queries)[:, None] + (keys - queries if alignment != "top-left" else 0)
        causal = pattern(queries, keys, causal=True, alignment=alignment)
        if rule == "causal rule":
            found.append((f"the causal rule is counted from the {alignment} corner", causal))
        found += [
            (f"only the causal rule is kept, the {rule} is ignored", causal),
            ("the causal rule hides each query's own key", j < i),
            ("the causal rule leaves one future key visible", j <= i + 1),
            ("the causal rule keeps the wrong triangle, that of the future", j >= i),
            ("the causal rule keeps the future and hides present and earlier keys", j > i),
            ("the causal rule adds to the visible keys of the mask", causal | expected),
        ]
        for size in range(1, keys + 2):
            kept = pattern(queries, keys, causal=True, window=size, alignment=alignment)
            found.append((f"a window of {size} keys is visible", kept))
            if rule == "window":
                found.append((f"{size} keys to either side are visible", (j - i).abs() < size))
    transposed = expected.T if queries == keys else expected
    return [
        (f"the {rule} is ignored", torch.ones_like(expected)),
        ("the mask is read the wrong way round", ~expected),
        *found,
        ("queries and keys change places in the mask", transposed),
    ]


def _rule(expected: Tensor, queries: int, keys: int) -> tuple[str, list[tuple[str, Tensor]]]:
    """The rule that gives the expected visibility, and the mistakes of a window's size."""
    for alignment in ("top-left", "bottom-right"):
        causal, *windows = (
            pattern(queries, keys, causal=True, window=size, alignment=alignment)
            for size in range(keys + 1)
        )
        if torch.equal(expected, causal):
            return "causal rule", []
        for less, window, more in zip([windows[0], *windows], windows, windows[1:], strict=False):
            if torch.equal(expected, window):
                too_many, too_few = (f"the window keeps one key too {x}" for x in ("many", "few"))
                return "window", [(too_many, more), (too_few, less)]
    return "mask", []


def _keys(which: Tensor) -> str:
    found = [int(j) for j in which.nonzero().flatten()]
    if not found:
        return ""
    if len(found) == 1:
        return f"key {found[0]} is"
    if found == list(range(found[0], found[-1] + 1)):
        return f"keys {found[0]}..{found[-1]} are"
    return f"keys {', '.join(map(str, found))} are"


def differs(shape: object, expected: Tensor, actual: Tensor) -> Counterexample:
    """The counter-example of two visibilities [L, S] that are not the same."""
    i, j = (int(x) for x in (expected != actual).nonzero()[0])
    words = {True: "visible", False: "hidden"}
    right, got = words[bool(expected[i, j])], words[bool(actual[i, j])]
    cause, grids = explain(expected, actual), (expected.tolist(), actual.tolist())
    return Counterexample(str(shape), f"query {i}, key {j}", right, got, cause, *grids)


def nearest_pattern(visible: Tensor, *, diagonal: bool = True) -> tuple[dict[str, Any], str]:
    """The simplest pattern nearest to a square visibility [L, L], as conventions and in words.

    `diagonal` is whether the diagonal was measured. Windows to both sides and patterns of blocks
    are found where they are exactly what is visible.
    """
    length = visible.shape[0]
    options: list[dict[str, Any]] = [{"causal": False, "window": 0}, {"causal": True, "window": 0}]
    options += [{"causal": True, "window": size} for size in range(1, length)]
    counted = torch.ones_like(visible) if diagonal else ~torch.eye(length, dtype=torch.bool)

    def wrong(option: dict[str, Any]) -> int:
        return int(((pattern(length, length, **option) != visible) & counted).sum())

    best = min(options, key=wrong)  # the first of equals: the simplest
    if wrong(best):
        exact = (option for option in _windows_and_blocks(length) if not wrong(option))
        best = next(exact, best)
    words = "earlier keys and its own" if best["causal"] else "all keys"
    words = f"a window of {best['window']} keys" if best["window"] else words
    if "after" in best:
        words = f"a window of {best['after']} keys to both sides of its own"
    if best.get("block"):
        before, after = best["blocks"]
        words += f", in blocks of {best['block']}: its own, {before} before and {after} after"
    if wrong(best):
        words = f"nearly {words}: {wrong(best)} cells differ"
    return best, words


def _windows_and_blocks(length: int) -> Iterator[dict[str, Any]]:
    """Windows to both sides, and patterns of at least two blocks, as conventions."""
    # As many keys before as after: other windows are mistakes of causal rules.
    for after in range(1, length - 1):
        yield {"causal": False, "window": after + 1, "after": after}
    for causal, size in product((False, True), range(2, length // 2 + 1)):
        for near in product(range(3), range(1 if causal else 3)):
            yield {"causal": causal, "window": 0, "block": size, "blocks": near}
