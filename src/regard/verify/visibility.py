"""Who sees whom: read off an attention from outside, exactly, and said in words."""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.verify.law import Counterexample
from regard.verify.oracle import pattern


def read_weights(
    attend: Callable[..., Tensor],
    q: Float[Tensor, "B H L D"],
    k: Float[Tensor, "B G S D"],
    *,
    width: int | None = None,
) -> Float[Tensor, "B H L S"]:
    """The weight matrix [B, H, L, S]: each value picks one key, so that outputs are weights.

    `width` is how many channels a value may have; several calls are made where keys are more.
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


def read_sight(layer: Callable[[Tensor], Tensor], x: Float[Tensor, "B L E"]) -> Bool[Tensor, "L L"]:
    """Which token [L, L] each output depends on: one token is changed, and rows that move are seen.

    Its own row always moves, so the diagonal says nothing and is True.
    """
    length = x.shape[1]
    base = layer(x.clone())[0]
    seen = torch.eye(length, dtype=torch.bool)
    for j in range(length):
        other = x.clone()
        other[:, j] = other[:, j] * -0.7 + 0.3
        moved = layer(other)[0]
        same = (moved == base) | (moved.isnan() & base.isnan())
        seen[:, j] |= ~same.all(-1)
    return seen


def explain(expected: Bool[Tensor, "L S"], actual: Bool[Tensor, "L S"]) -> str:
    """The likely mistake behind a wrong set of visible keys [L, S], in words."""
    queries, keys = expected.shape
    cell = _cell(expected, actual)
    for said, would in _mistakes(expected, queries, keys):
        if torch.equal(would, actual):
            return f"{cell}: {said}."
    return f"{cell}."


def _mistakes(expected: Tensor, queries: int, keys: int) -> list[tuple[str, Tensor]]:
    """What each usual mistake would show; those that fit the expected rule best come first."""
    j = torch.arange(keys)[None]
    rule = _rule(expected, queries, keys)
    found = _window_slips(expected, queries, keys)
    for alignment in ("top-left", "bottom-right"):
        i = torch.arange(queries)[:, None] + (keys - queries if alignment != "top-left" else 0)
        causal = pattern(queries, keys, causal=True, alignment=alignment)
        if rule == "causal rule":
            found.append((f"the causal rule is counted from the {alignment} corner", causal))
        found += [
            (f"only the causal rule is kept, the {rule} is ignored", causal),
            ("the causal rule hides each query's own key", j < i),
            ("the causal rule shows one key of the future", j <= i + 1),
            ("the causal rule looks forward, its triangle is the wrong one", j >= i),
            ("the causal rule shows the future and hides the present and past", j > i),
            ("the causal rule is added to what the mask shows", causal | expected),
        ]
        for size in range(1, keys + 2):
            window = pattern(queries, keys, causal=True, window=size, alignment=alignment)
            found.append((f"it sees a window of {size} keys", window))
            if rule == "window":
                found.append((f"it sees {size} keys to either side", (j - i).abs() < size))
    return [
        (f"the {rule} is ignored", torch.ones_like(expected)),
        ("the mask is read the wrong way round", ~expected),
        *found,
        ("queries and keys change places in the mask", _flipped(expected)),
    ]


def _rule(expected: Tensor, queries: int, keys: int) -> str:
    """What the expected set is made by, as far as it shows."""
    for alignment in ("top-left", "bottom-right"):
        if torch.equal(expected, pattern(queries, keys, causal=True, alignment=alignment)):
            return "causal rule"
        for size in range(1, keys):
            window = pattern(queries, keys, causal=True, window=size, alignment=alignment)
            if torch.equal(expected, window):
                return "window"
    return "mask"


def _window_slips(expected: Tensor, queries: int, keys: int) -> list[tuple[str, Tensor]]:
    for size in range(1, keys):
        if torch.equal(expected, pattern(queries, keys, causal=True, window=size)):
            more = pattern(queries, keys, causal=True, window=size + 1)
            less = pattern(queries, keys, causal=True, window=max(size - 1, 1))
            return [
                ("the window keeps one key too many", more),
                ("the window keeps one key too few", less),
            ]
    return []


def _flipped(expected: Tensor) -> Tensor:
    return expected.T if expected.shape[0] == expected.shape[1] else expected


def _cell(expected: Tensor, actual: Tensor) -> str:
    row = int((expected != actual).any(-1).nonzero()[0])
    more = _keys(actual[row] & ~expected[row])
    less = _keys(expected[row] & ~actual[row])
    said = [f"{more} visible to query {row}"] if more else []
    return " and ".join([*said, f"{less} hidden from query {row}"] if less else said)


def _keys(which: Tensor) -> str:
    found = [int(j) for j in which.nonzero().flatten()]
    if not found:
        return ""
    if len(found) == 1:
        return f"key {found[0]} is"
    if found == list(range(found[0], found[-1] + 1)):
        return f"keys {found[0]}..{found[-1]} are"
    return f"keys {', '.join(map(str, found))} are"


def differs(shape: object, expected: Tensor, actual: Tensor) -> Counterexample | None:
    """A counter-example if the visible sets [L, S] are not the same."""
    if torch.equal(expected, actual):
        return None
    i, j = (int(x) for x in (expected != actual).nonzero()[0])
    said = {True: "visible", False: "hidden"}
    return Counterexample(
        str(shape),
        f"query {i}, key {j}",
        said[bool(expected[i, j])],
        said[bool(actual[i, j])],
        explain(expected, actual),
        expected.tolist(),
        actual.tolist(),
    )


def nearest_pattern(sight: Tensor, *, diagonal: bool = True) -> tuple[dict[str, object], int]:
    """The simplest pattern of a square sight [L, L], and in how many cells it is wrong.

    `diagonal` is whether the diagonal was read.
    """
    length = sight.shape[0]
    options: list[dict[str, object]] = [{"causal": False, "window": 0}]
    options.append({"causal": True, "window": 0})
    options += [{"causal": True, "window": size} for size in range(1, length)]
    off = ~torch.eye(length, dtype=torch.bool) if not diagonal else torch.ones_like(sight)

    def wrong(option: dict[str, object]) -> int:
        would = pattern(length, length, causal=bool(option["causal"]), window=_int(option))
        return int(((would != sight) & off).sum())

    best = min(options, key=wrong)  # the first of equals: the simplest
    return best, wrong(best)


def _int(option: dict[str, object]) -> int:
    size = option["window"]
    return size if isinstance(size, int) else 0
