"""Random calls of `attend`, each written twice: for the library, and for the loops of `oracle`.

A mask is drawn together with a Python predicate on slots that shares no code with it; a layout is a
view that no kernel expects. Everything follows from one integer seed.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

import oracle
from regard import (
    EVERYTHING,
    NOTHING,
    Alibi,
    Causal,
    Chunked,
    Dense,
    Documents,
    Mask,
    Padding,
    Prefix,
    RelativeBias,
    SlidingWindow,
    Span,
    Where,
)

Sees = Callable[[int, int, int, int], bool]  # (b, h, query slot, key slot) -> may look
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
BACKENDS = ("auto", "eager", "sdpa", "grouped", "blocked")  # `fused` wants wide heads: test_fused


@dataclass
class Sizes:
    """How large a call is and where in the sequence it lies."""

    batch: int
    heads: int
    kv_heads: int
    dim: int
    v_dim: int
    starts: list[int]  # the first query's slot, by row
    queries: int
    kv_start: int
    keys: int

    @property
    def ragged(self) -> bool:
        return len(set(self.starts)) > 1

    @property
    def last_slot(self) -> int:
        return max(max(self.starts) + self.queries, self.kv_start + self.keys)

    def span(self) -> Span:
        stop = self.kv_start + self.keys
        if not self.ragged:
            return Span(self.starts[0], self.starts[0] + self.queries, self.kv_start, stop)
        return Span.ragged(
            torch.tensor(self.starts),
            queries=self.queries,
            kv_start=self.kv_start,
            kv_stop=stop,
            bounds=(min(self.starts), max(self.starts)),
        )


@dataclass
class Case:
    """One call: `given` is what `attend` gets beside q, k, v; `sees` and `bias` are its twins."""

    seed: int
    sizes: Sizes
    q: Tensor
    k: Tensor
    v: Tensor
    given: dict = field(default_factory=dict)
    sees: Sees = lambda b, h, q, kv: True
    bias: Callable[[int, int, int, int], float] | None = None

    def judge(self, v: Tensor | None = None, *, sinks: bool = True) -> oracle.Judged:
        """What the loops say; the values may be replaced, the sinks left out."""
        sizes = self.sizes
        sink = self.given.get("sinks") if sinks else None
        return oracle.attention(
            self.q.double().tolist(),
            self.k.double().tolist(),
            (self.v if v is None else v).double().tolist(),
            visible=lambda b, h, i, j: self.sees(b, h, sizes.starts[b] + i, sizes.kv_start + j),
            scale=self.given.get("scale"),
            bias=self.bias,
            softcap=self.given.get("softcap"),
            sinks=None if sink is None else sink.double().tolist(),
        )

    def __repr__(self) -> str:
        shapes = " ".join(f"{n}{list(getattr(self, n).shape)}" for n in "qkv")
        return f"Case {self.seed}: {shapes} {self.q.dtype} {self.sizes} {self.given}"


def table(case: Case) -> Tensor:
    """Which cells are visible by the plain predicate, [B, H, L, S]."""
    s = case.sizes
    cells = [
        [
            [
                [bool(case.sees(b, h, s.starts[b] + i, s.kv_start + j)) for j in range(s.keys)]
                for i in range(s.queries)
            ]
            for h in range(s.heads)
        ]
        for b in range(s.batch)
    ]
    return torch.tensor(cells).reshape(s.batch, s.heads, s.queries, s.keys)


def unit(dtype: torch.dtype) -> float:
    """The unit roundoff."""
    return torch.finfo(dtype).eps / 2


def bound(dtype: torch.dtype, vmax: float, largest: float) -> float:
    """The numeric contract: what an output may differ from float64 by."""
    if dtype in (torch.float16, torch.bfloat16):
        return 1.5 * unit(dtype) * vmax
    return 2 * unit(dtype) * vmax * (1 + largest)


def is_objection(error: ValueError, backend: str) -> bool:
    """Whether a backend said that it cannot run this call; the definition never may."""
    named = backend not in ("auto", "eager") and repr(backend) in str(error)
    return named and "cannot run this call" in str(error)


def draw_case(seed: int, dtype: torch.dtype | None = None, width: int | None = None) -> Case:
    """The call that this seed stands for; `width` is that of keys and values where it matters."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    dtype = dtype or rng.choice(DTYPES)
    sizes = draw_sizes(rng)
    if width is not None:
        sizes.dim = sizes.v_dim = width
    s = sizes
    q = draw_tensor(rng, s.batch, s.heads, s.queries, s.dim, dtype=dtype)
    q = q * rng.choice((0.1, 0.5, 1, 1, 2, 4, 16))
    k = draw_tensor(rng, s.batch, s.kv_heads, s.keys, s.dim, dtype=dtype)
    v = torch.randn(s.batch, s.kv_heads, s.keys, s.v_dim).to(dtype)
    q, k, v = lay_out(rng, q, "one key"), lay_out(rng, k, "one key"), lay_out(rng, v)
    mask, sees = draw_mask(rng, sizes)
    case = Case(seed, sizes, q, k, v, {"mask": mask}, sees)
    square = sizes.starts == [0] * s.batch and s.kv_start == 0 and s.queries == s.keys
    if not (square and rng.random() < 0.5):
        case.given["span"] = sizes.span()
    if rng.random() < 0.3:
        case.given["scale"] = rng.choice((1.0, 0.25, 0.7, 2.0))
    if rng.random() < 0.25:
        case.given["softcap"] = rng.choice((0.5, 3.0, 30.0))
    if rng.random() < 0.25:
        case.given["sinks"] = (torch.randn(s.heads) * 2).to(dtype)
    if rng.random() < 0.35:
        case.given["score_bias"], case.bias = draw_bias(rng, sizes, dtype)
    if rng.random() < 0.25:
        for x in (case.q, case.k, case.v, *case.given.values()):
            if isinstance(x, Tensor):
                x.requires_grad_()
    return case


def draw_sizes(rng: random.Random) -> Sizes:
    """Small and odd, dividing nothing; what lies before the queries and after them varies."""
    kv_heads = rng.choice((1, 1, 2, 3))
    heads = kv_heads * rng.choice((1, 1, 2, 3, 4))
    batch, queries = rng.randint(1, 3), rng.randint(1, 7)
    # 16 is the width for which compiled code has whole vectors; other tests compile the same
    dim, v_dim = rng.choice((1, 2, 3, 5, 16)), rng.choice((1, 2, 3, 4, 7, 16))
    if rng.random() < 0.5:
        v_dim = dim
    past = rng.randint(1, 5)
    kv_start, start, keys = 0, 0, queries
    match rng.choice(("full", "full", "chunk", "decode", "static", "late", "free", "ragged")):
        case "chunk":
            start, keys = past, past + queries
        case "decode":
            start, queries, keys = past, 1, past + 1
        case "static":
            start, keys = past, past + queries + rng.randint(1, 4)
        case "late":
            kv_start, start = past, past + rng.randint(0, 3)
            keys = start + queries - kv_start
        case "free":
            kv_start, start, keys = rng.randint(0, 6), rng.randint(0, 6), rng.randint(1, 9)
        case "ragged":
            starts = [rng.randint(0, 5) for _ in range(batch)]
            keys = max(starts) + queries
            return Sizes(batch, heads, kv_heads, dim, v_dim, starts, queries, 0, keys)
    return Sizes(batch, heads, kv_heads, dim, v_dim, [start] * batch, queries, kv_start, keys)


def draw_tensor(rng: random.Random, *shape: int, dtype: torch.dtype) -> Tensor:
    """Zero-mean or not, of one sign or both."""
    x = torch.randn(shape)
    match rng.choice(("zero-mean", "zero-mean", "positive", "shifted")):
        case "positive":
            x = x.abs()
        case "shifted":
            x = x + 3
    return x.to(dtype)


def lay_out(rng: random.Random, x: Tensor, *also: str) -> Tensor:
    """The same numbers (or, expanded, some of them) in an unusual order in memory."""
    match rng.choice(("plain", "plain", "heads last", "columns first", "every other", "offset")):
        case "heads last":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        case "columns first":
            return x.mT.contiguous().mT
        case "every other":
            wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), math.nan, dtype=x.dtype)
            wide[..., ::2] = x
            return wide[..., ::2]
        case "offset":
            wide = torch.full((*x.shape[:2], x.shape[2] + 3, x.shape[3] + 1), math.nan).to(x.dtype)
            wide[:, :, 2:-1, 1:] = x
            return wide[:, :, 2:-1, 1:]
    match rng.choice(("as it is",) * 4 + ("one row", "one head", *also)):
        case "one row":
            return x[:1].expand_as(x)
        case "one head":
            return x[:, :1].expand_as(x)
        case "one key":
            return x[:, :, :1].expand_as(x)
    return x


def draw_mask(rng: random.Random, sizes: Sizes, depth: int = 0) -> tuple[Mask, Sees]:
    """A mask and its twin; compositions up to three deep."""
    kind = rng.random()
    if depth == 3 or kind < 0.55:
        return draw_leaf(rng, sizes)
    mask, sees = draw_mask(rng, sizes, depth + 1)
    if kind < 0.65:
        return ~mask, lambda b, h, q, kv: not sees(b, h, q, kv)
    other, also = draw_mask(rng, sizes, depth + 1)
    if kind < 0.85:
        return mask & other, lambda b, h, q, kv: sees(b, h, q, kv) and also(b, h, q, kv)
    return mask | other, lambda b, h, q, kv: sees(b, h, q, kv) or also(b, h, q, kv)


LEAVES = (
    "everything",
    "nothing",
    "causal",
    "causal",
    "causal",
    "window",
    "window",
    "chunked",
    "chunked_start",
    "prefix",
    "prefix_start",
    "documents",
    "padding",
    "dense",
    "where",
)


def draw_leaf(rng: random.Random, sizes: Sizes, kind: str | None = None) -> tuple[Mask, Sees]:
    """One kind of mask: as a rule of the library, and as a Python predicate."""
    size, batch = rng.randint(1, 5), sizes.batch
    starts = [rng.randint(0, 3) for _ in range(batch)]
    lengths = [rng.randint(0, 6) for _ in range(batch)]
    match kind or rng.choice(LEAVES):
        case "everything":
            return EVERYTHING, lambda b, h, q, kv: True
        case "nothing":
            return NOTHING, lambda b, h, q, kv: False
        case "causal":
            return Causal(), lambda b, h, q, kv: kv <= q
        case "window":
            return SlidingWindow(size), lambda b, h, q, kv: q - kv < size
        case "chunked":
            return Chunked(size), lambda b, h, q, kv: q // size == kv // size
        case "chunked_start":
            return (
                Chunked(size, start=torch.tensor(starts)),
                lambda b, h, q, kv: (q - starts[b]) // size == (kv - starts[b]) // size,
            )
        case "prefix":
            if rng.random() < 0.5:
                return Prefix(size), lambda b, h, q, kv: kv < size
            return Prefix(torch.tensor(lengths)), lambda b, h, q, kv: kv < lengths[b]
        case "prefix_start":
            return (
                Prefix(torch.tensor(lengths), start=torch.tensor(starts)),
                lambda b, h, q, kv: 0 <= kv - starts[b] < lengths[b],
            )
        case "documents":
            return draw_documents(rng, sizes)
        case "padding":
            known = rng.randint(1, sizes.last_slot + 2)
            valid = torch.rand(batch, known) < 0.7
            here = valid.tolist()
            return Padding(valid), lambda b, h, q, kv: kv >= known or here[b][kv]
        case "dense":
            return draw_dense(rng, sizes)
        case "where":
            return Where(lambda b, h, q, kv: (q + 2 * kv + h + b) % 3 != 0), (
                lambda b, h, q, kv: (q + 2 * kv + h + b) % 3 != 0
            )
    raise AssertionError(kind)


def draw_documents(rng: random.Random, sizes: Sizes) -> tuple[Mask, Sees]:
    """Documents of random lengths, by row; beyond the data the row's last one goes on."""
    known = rng.randint(1, sizes.last_slot + 2)
    ids = (torch.rand(sizes.batch, known) < 0.3).cumsum(-1)
    table = ids.tolist()
    document = lambda b, slot: table[b][min(slot, known - 1)]  # noqa: E731
    return Documents(ids), lambda b, h, q, kv: document(b, q) == document(b, kv)


def draw_dense(rng: random.Random, sizes: Sizes) -> tuple[Mask, Sees]:
    """A rectangle of this call, of any shape that broadcasts to [B, H, L, S]."""
    s = sizes
    shape = rng.choice(
        (
            (s.queries, s.keys),
            (1, s.keys),
            (s.batch, 1, s.queries, 1),
            (s.batch, 1, s.queries, s.keys),
            (1, s.heads, s.queries, s.keys),
            (s.batch, s.heads, s.queries, s.keys),
        )
    )
    keep = torch.rand(shape) < 0.6
    table = keep.expand(s.batch, s.heads, s.queries, s.keys).tolist()
    return Dense(keep), lambda b, h, q, kv: table[b][h][q - s.starts[b]][kv - s.kv_start]


def draw_bias(rng: random.Random, sizes: Sizes, dtype: torch.dtype):
    """What is added to the scores: a tensor that broadcasts, or a rule."""
    s = sizes
    slots = lambda b, i, j: (s.starts[b] + i, s.kv_start + j)  # noqa: E731
    match rng.choice(("tensor", "tensor", "alibi", "relative")):
        case "alibi":
            slopes = torch.rand(s.heads)
            steep = slopes.double().tolist()

            def alibi(b: int, h: int, i: int, j: int) -> float:
                q, kv = slots(b, i, j)
                return -steep[h] * abs(q - kv)

            return Alibi(slopes), alibi
        case "relative":
            both = rng.random() < 0.5
            rule = RelativeBias(s.heads, num_buckets=8, max_distance=6, bidirectional=both)
            torch.nn.init.normal_(rule.relative_attention_bias.weight)
            rule.requires_grad_(False)
            table = rule.relative_attention_bias.weight.double().tolist()

            def relative(b: int, h: int, i: int, j: int) -> float:
                q, kv = slots(b, i, j)
                return table[t5_bucket(kv - q, 8, 6, both)][h]

            return rule, relative
    shape = [size if rng.random() < 0.7 else 1 for size in (s.batch, s.heads, s.queries, s.keys)]
    bias = lay_out(rng, (torch.randn(shape) * 2).to(dtype))
    table = bias.double().expand(s.batch, s.heads, s.queries, s.keys).tolist()
    return bias, lambda b, h, i, j: table[b][h][i][j]


def t5_bucket(distance: int, buckets: int, furthest: int, bidirectional: bool) -> int:
    """T5's bucket of a key `distance` slots after its query, one number at a time."""
    bucket = 0
    if bidirectional:
        buckets //= 2
        bucket = buckets if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = max(-distance, 0)
    exact = buckets // 2
    if distance < exact:
        return bucket + distance
    far = math.log(distance / exact) / math.log(furthest / exact) * (buckets - exact)
    return bucket + min(exact + int(far), buckets - 1)


def cut(case: Case, rng: random.Random) -> list[tuple[int, int]]:
    """Where the keys are split: up to four pieces, some of them empty."""
    stop = case.sizes.keys
    cuts = sorted(rng.randint(0, stop) for _ in range(rng.randint(0, 3)))
    return list(zip([0, *cuts], [*cuts, stop], strict=True))
