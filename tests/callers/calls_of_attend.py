"""The table of calls of `attend`: each kind of mask, feature and shape, by each backend's name."""

from collections.abc import Callable

import torch
from torch import Tensor

from callers.programs import Attend, Rule, Sizes
from regard import (
    EVERYTHING,
    Causal,
    Chunked,
    Dense,
    Documents,
    Padding,
    Prefix,
    SlidingWindow,
    Where,
)
from regard.ops.backends import tiled

# Where `fused` runs, query rows are in tiles of two, with vectors of 8 lanes: every shape has the
# kernels of the others and of test_fused.py, each of which takes seconds to compile.
STEP = Sizes(2, 4, 2, 1, 40)
CHUNK = Sizes(2, 4, 2, 5, 23)
SQUARE = Sizes(2, 4, 2, 11, 11)
LONG = Sizes(1, 2, 1, 300, 300)  # two blocks of queries
ALONE = Sizes(1, 6, 1, 1, 2100)  # one key head, whose keys `grouped` cuts into pieces

FLOATS = (torch.float32, torch.bfloat16, torch.float64)
BACKENDS = ("auto", "sdpa", "grouped", "fused", "blocked", "eager")


def valid(sizes: Sizes) -> Tensor:
    """Left and right padding; the first row of the batch hides its first slots."""
    real = torch.ones(sizes.batch, sizes.keys, dtype=torch.bool, device="cpu")
    real[:1, : sizes.keys // 3] = False
    real[-1:, -2:-1] = False
    return real


def ids(sizes: Sizes) -> Tensor:
    """Two documents in a row, another border in each."""
    slots = torch.arange(sizes.keys, device="cpu")
    borders = torch.tensor([sizes.keys // 2 - 1 - row for row in range(sizes.batch)], device="cpu")
    return (slots >= borders[:, None]).long()


def scattered(sizes: Sizes) -> Tensor:
    """A mask without structure, `[B, 1, L, S]`; the first query of the last row is fully masked."""
    slots = torch.arange(sizes.batch * sizes.queries * sizes.keys, device="cpu")
    keep = (slots * 7919 % 101 < 60).view(sizes.batch, 1, sizes.queries, sizes.keys)
    keep[-1:, :, :1] = False
    return keep


def causal(sizes: Sizes, data: Tensor) -> Tensor:
    queries, keys = sizes.slots()
    return keys <= queries


def window(size: int) -> Callable[[Sizes, Tensor], Tensor]:
    def keep(sizes: Sizes, data: Tensor) -> Tensor:
        queries, keys = sizes.slots()
        return (keys <= queries) & (queries - keys < size)

    return keep


def thirds(sizes: Sizes, data: Tensor) -> Tensor:
    queries, keys = sizes.slots()
    return (queries + 2 * keys) % 3 != 0


def chunked(sizes: Sizes, data: Tensor) -> Tensor:
    queries, keys = sizes.slots()
    return (keys <= queries) & (queries // 4 == keys // 4)


def prefixed(sizes: Sizes, data: Tensor) -> Tensor:
    return causal(sizes, data) | (sizes.slots()[1] < 5)


def everything(sizes: Sizes, data: Tensor) -> Tensor:
    return torch.ones(sizes.queries, sizes.keys, dtype=torch.bool, device="cpu")


def padded(sizes: Sizes, data: Tensor) -> Tensor:
    """`[B, 1, 1, S]`"""
    return data[:, None, None]


def padded_causal(sizes: Sizes, data: Tensor) -> Tensor:
    return causal(sizes, data) & padded(sizes, data)


def same_document(sizes: Sizes, data: Tensor) -> Tensor:
    """Documents that a query and a key have in common, `[B, 1, L, S]`."""
    queries = data[:, None, sizes.keys - sizes.queries :, None]
    return (queries == data[:, None, None]) & causal(sizes, data)


RULES = {
    "everything": Rule(lambda data: EVERYTHING, everything),
    "causal": Rule(lambda data: Causal(), causal),
    "window": Rule(lambda data: Causal() & SlidingWindow(3), window(3)),
    "wide window": Rule(lambda data: Causal() & SlidingWindow(40), window(40)),
    "chunked": Rule(lambda data: Causal() & Chunked(4), chunked),
    "prefix": Rule(lambda data: Causal() | Prefix(5), prefixed),
    "padding": Rule(lambda data: Padding(data), padded, valid),
    "causal padding": Rule(lambda data: Causal() & Padding(data), padded_causal, valid),
    "documents": Rule(lambda data: Causal() & Documents(data), same_document, ids),
    "dense": Rule(lambda data: Dense(data), lambda sizes, data: data, scattered),
    "where": Rule(lambda data: Where(lambda b, h, q, kv: (q + 2 * kv) % 3 != 0), thirds),
}
FEATURES = {
    "": {},
    "softcap": {"given": {"softcap": 20.0}},
    "scale 0": {"given": {"scale": 0.0}},
    "negative scale": {"given": {"scale": -0.5}},
    "sinks": {"sinks": True},
    "bias": {"bias": "whole"},
    "bias of a key": {"bias": "keys"},
    "alibi": {"bias_rule": "alibi"},
    "relative": {"bias_rule": "relative"},
    "all": {"given": {"softcap": 30.0}, "sinks": True, "bias": "whole"},
    "parts": {"parts": True},
}
KINDS = [
    ("step", STEP, "everything", ""),
    ("step", STEP, "padding", ""),
    ("step", STEP, "window", "sinks"),
    ("step", STEP, "everything", "bias"),
    ("step", STEP, "causal padding", "bias of a key"),
    ("step", STEP, "causal", "softcap"),
    ("step", STEP, "everything", "parts"),
    ("step", STEP, "padding", "alibi"),
    ("chunk", CHUNK, "causal", ""),
    ("chunk", CHUNK, "documents", "bias"),
    ("chunk", CHUNK, "dense", ""),
    ("chunk", CHUNK, "where", ""),
    ("chunk", CHUNK, "prefix", "all"),
    ("chunk", CHUNK, "window", "relative"),
    ("square", SQUARE, "everything", "scale 0"),
    ("square", SQUARE, "causal", ""),
    ("square", SQUARE, "causal", "scale 0"),
    ("square", SQUARE, "causal", "negative scale"),
    ("square", SQUARE, "causal padding", ""),
    ("square", SQUARE, "dense", "sinks"),
    ("square", SQUARE, "chunked", "softcap"),
    ("square", SQUARE, "window", "all"),
    ("square", SQUARE, "causal", "parts"),
    ("square", SQUARE, "documents", "relative"),
    ("long", LONG, "wide window", ""),
    ("long", LONG, "documents", ""),
    ("long", LONG, "wide window", "softcap"),
    ("alone", ALONE, "everything", ""),
    ("alone", ALONE, "everything", "bias"),
    ("alone", ALONE, "padding", ""),
]


def cannot(backend: str, sizes: Sizes, feature: str, dtype: torch.dtype) -> bool:
    """Whether a backend says so itself: these calls are left out, so that the others must run."""
    group = sizes.heads // sizes.kv_heads
    thin = group * sizes.queries <= 256
    match backend:
        case "sdpa":
            return feature in ("softcap", "sinks", "all", "parts")
        case "grouped":
            return not thin
        case "fused":
            return feature in ("softcap", "all") or dtype == torch.float64 or not thin
        case "blocked":
            return feature == "parts"
    return False


def bias_shape(sizes: Sizes, which: str | None) -> tuple[int, int, int, int] | None:
    if which is None:
        return None
    return (
        (1, sizes.heads, sizes.queries, sizes.keys) if which == "whole" else (1, 1, 1, sizes.keys)
    )


def rows() -> dict[str, Attend]:
    """Every call of `attend`, by a name that describes it."""
    table = {}
    for backend in BACKENDS:
        for dtype in FLOATS:
            for shape, sizes, mask, feature in KINDS:
                if cannot(backend, sizes, feature, dtype):
                    continue
                options = dict(FEATURES[feature])
                options["bias"] = bias_shape(sizes, options.get("bias"))
                words = [backend, shape, mask, feature, str(dtype).removeprefix("torch.")]
                name = " ".join(filter(None, words))
                table[name] = Attend(sizes, RULES[mask], backend, dtype, **options)
    return {**table, **mixed(), **fast(), **tiled_prefills(), **empty()}


def mixed() -> dict[str, Attend]:
    """A score bias of another dtype than the queries."""
    pairs = [(torch.float64, torch.float32), (torch.float32, torch.float64)]
    pairs += [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]
    table = {}
    for backend in BACKENDS:
        for shape, sizes in (("step", STEP), ("chunk", CHUNK), ("alone", ALONE)):
            for dtype, other in pairs:
                if cannot(backend, sizes, "bias", dtype):
                    continue
                words = [str(each).removeprefix("torch.") for each in (other, dtype)]
                name = f"{backend} {shape} bias of {words[0]} in {words[1]}"
                bias = bias_shape(sizes, "whole")
                rule = RULES["everything" if shape == "alone" else "causal"]
                table[name] = Attend(sizes, rule, backend, dtype, bias=bias, bias_dtype=other)
    return table


def fast() -> dict[str, Attend]:
    """`precision="fast"`, which only `blocked` makes use of."""
    table = {}
    for mask, feature in (("causal", ""), ("wide window", ""), ("causal padding", "softcap")):
        for backend in ("auto", "blocked"):
            options = dict(FEATURES[feature])
            name = " ".join(filter(None, [backend, "long fast", mask, feature]))
            table[name] = Attend(
                LONG, RULES[mask], backend, torch.bfloat16, precision="fast", **options
            )
    return table


def tiled_prefills() -> dict[str, Attend]:
    """`tiled`, on machines that have its instructions; without numba it is refused."""
    objection = tiled._machine_objection(torch.bfloat16)
    if objection is not None and "numba" not in objection:
        return {}
    masks = ("everything", "causal", "window")
    return {
        f"tiled long {mask}": Attend(LONG, RULES[mask], "tiled", torch.bfloat16) for mask in masks
    }


def empty() -> dict[str, Attend]:
    """No batch, no queries, no keys."""
    sizes = {"batch": Sizes(0, 4, 2, 5, 9), "queries": Sizes(2, 4, 2, 0, 9)}
    sizes["keys"] = Sizes(2, 4, 2, 0, 0)
    table = {}
    for backend in ("auto", "eager"):
        for what, each in sizes.items():
            for mask in ("causal", "everything"):
                table[f"{backend} no {what} {mask}"] = Attend(each, RULES[mask], backend)
    return table
