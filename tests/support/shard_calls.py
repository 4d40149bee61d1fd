"""Calls of attention over several ranks, by seed: each rank draws the same, and so does the oracle,
which is the definition over the whole sequence, written out."""

import itertools
import random
from dataclasses import dataclass, field

import torch

import cases
from cases import Sizes
from regard import (
    EVERYTHING,
    Causal,
    Chunked,
    Dense,
    Documents,
    Padding,
    Prefix,
    RelativeBias,
    SlidingWindow,
)
from regard.distributed.context.attending import attend_shards
from regard.distributed.context.needed import bytes_sent, needs_of
from regard.distributed.ranks import Ranks, counted
from regard.distributed.shards import Shards

BATCH, HEADS, KV_HEADS, DIM, V_DIM = 2, 4, 2, 6, 5
LATENT = 3  # columns of a stream that keys and values are made of


@dataclass
class Case:
    """The tensors are of the whole sequence; `sees` is the mask's twin, (b, h, query, key)."""

    shards: Shards
    exchange: str
    mask: object
    sees: object
    q: torch.Tensor
    streams: list
    slope: torch.Tensor
    scale: float = DIM**-0.5
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    rule: RelativeBias | None = None
    expanded: list = field(default_factory=list)  # what `expand` reads

    @property
    def leaves(self) -> list:
        """What has gradients: first what each rank has tokens of, then what ranks share."""
        shared = [self.sinks, self.bias, *self.expanded]
        if self.rule is not None:
            shared += self.rule.parameters()
        return [self.q, *self.streams], [x for x in shared if x is not None]

    def __repr__(self) -> str:
        named = ("shards", "exchange", "mask", "softcap", "sinks", "bias", "rule")
        return " ".join(f"{name}={getattr(self, name)}" for name in named)


def named_masks(length: int) -> list:
    """Every kind of mask and its twin."""
    ids = (torch.rand(BATCH, length) < 0.15).cumsum(-1)
    valid = torch.rand(BATCH, length) < 0.7
    starts = [0, length // 2]
    left = torch.arange(length) >= torch.tensor(starts)[:, None]
    lengths = torch.tensor([2, min(6, length)])
    keep = torch.rand(length, length) < 0.4
    tables = [x.tolist() for x in (ids, valid, keep, lengths)]
    document, real, table, ends = tables
    causal = lambda b, h, q, k: k <= q  # noqa: E731

    def both(mask, sees):
        return Causal() & mask, lambda b, h, q, k: k <= q and sees(b, h, q, k)

    same = lambda b, h, q, k: document[b][q] == document[b][k]  # noqa: E731
    return [
        (EVERYTHING, lambda b, h, q, k: True),
        (Causal(), causal),
        both(SlidingWindow(5), lambda b, h, q, k: q - k < 5),
        (SlidingWindow(4), lambda b, h, q, k: q - k < 4),
        both(Chunked(6), lambda b, h, q, k: q // 6 == k // 6),
        (Causal() | Prefix(5), lambda b, h, q, k: k <= q or k < 5),
        (
            Causal() & SlidingWindow(3) | Prefix(lengths),
            lambda b, h, q, k: 0 <= q - k < 3 or k < ends[b],
        ),
        both(Documents(ids), same),
        (Documents(ids), same),
        both(Padding(valid), lambda b, h, q, k: real[b][k]),
        both(Padding(left), lambda b, h, q, k: k >= starts[b]),
        (
            Padding(left) & Chunked(5, start=Padding(left).start),
            lambda b, h, q, k: k >= starts[b] and (q - starts[b]) // 5 == (k - starts[b]) // 5,
        ),
        both(Dense(keep), lambda b, h, q, k: table[q][k]),
        (~Causal(), lambda b, h, q, k: k > q),
        (~(Causal() & SlidingWindow(3)), lambda b, h, q, k: not 0 <= q - k < 3),
    ]


def draw(seed: int, ranks: int, dtype=torch.float64, fused: bool = False) -> Case:
    """The call of a seed; `fused` ones have nothing that torch's kernel does not take."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    length = rng.choice((1, 2, 7, 8, 24, 33))
    shards = Shards(length, ranks, rng.choice(("zigzag", "contiguous")))
    named = named_masks(length)
    if seed % 4 < 3:
        mask, sees = named[seed % len(named)]
    else:
        sizes = Sizes(BATCH, HEADS, KV_HEADS, DIM, V_DIM, [0] * BATCH, length, 0, length)
        mask, sees = cases.draw_mask(rng, sizes)
    q = torch.randn(BATCH, HEADS, length, DIM).to(dtype)
    kind = rng.choice(("plain", "plain", "joined", "expanded"))
    widths = {"plain": (DIM, V_DIM), "joined": (DIM,), "expanded": (LATENT, 2)}[kind]
    heads = 1 if kind == "expanded" else KV_HEADS
    streams = [torch.randn(BATCH, heads, length, width).to(dtype) for width in widths]
    width = V_DIM if kind != "joined" else 4
    case = Case(
        shards, rng.choice(("ring", "gather")), mask, sees, q, streams,
        torch.randn(BATCH, HEADS, length, width).to(dtype),
    )  # fmt: skip
    if kind == "expanded":
        shapes = (KV_HEADS, LATENT, DIM), (KV_HEADS, 2, V_DIM)
        case.expanded = [torch.randn(shape).to(dtype) for shape in shapes]
    if rng.random() < 0.4:
        case.sinks = torch.randn(HEADS).to(dtype)
    if not fused and rng.random() < 0.2:
        case.softcap = 1.5
    if not fused and rng.random() < 0.3:
        shape = [n if rng.random() < 0.7 else 1 for n in (BATCH, HEADS, length, length)]
        case.bias = torch.randn(shape).to(dtype)
    elif not fused and rng.random() < 0.2:
        case.rule = RelativeBias(HEADS, num_buckets=8, max_distance=6).to(dtype)
        torch.nn.init.normal_(case.rule.relative_attention_bias.weight)
    for x in itertools.chain(*case.leaves):
        x.requires_grad_()
    return case


def expand(streams, parameters):
    """Keys and values of streams: one matrix a head."""
    return tuple(x @ w for x, w in zip(streams, parameters, strict=True))


def of_rank(mesh, case: Case):
    """A rank's output, and gradients: those of its tokens, and its share of those of the rest. Each
    pass sends the bytes of its plan."""
    ranks = Ranks(mesh)
    own, shared = case.leaves
    tokens = [case.shards.take(x.detach(), ranks.rank, 2).requires_grad_() for x in own]
    with counted() as forward:
        out = attend_shards(
            tokens[0],
            tokens[1:],
            ranks=ranks,
            shards=case.shards,
            mask=case.mask,
            keys_of=expand if case.expanded else None,
            parameters=case.expanded,
            v_head_dim=None if len(tokens) > 2 else case.slope.shape[3],
            scale=case.scale,
            score_bias=case.bias if case.rule is None else case.rule,
            softcap=case.softcap,
            sinks=case.sinks,
            exchange=case.exchange,
        )
    with counted() as backward:
        out.backward(case.shards.take(case.slope, ranks.rank, 2))
    assert (forward.bytes, backward.bytes) == planned_bytes(case, ranks.rank, tokens[1:])
    return out.detach(), [x.grad for x in tokens], [x.grad for x in shared]


def planned_bytes(case, rank, streams):
    """Bytes of both passes. Gradients are sent in float32, those of float64 in float64."""
    numbers = [x.shape[0] * x.shape[1] * x.shape[3] for x in streams]
    return bytes_sent(
        needs_of(case.mask, case.shards),
        rank,
        token_bytes=sum(n * x.itemsize for n, x in zip(numbers, streams, strict=True)),
        gradient_bytes=sum(n * max(4, x.itemsize) for n, x in zip(numbers, streams, strict=True)),
        exchange=case.exchange,
    )


def of_ranks(mesh, seeds, number, options):
    """The results of a rank for many seeds."""
    return [of_rank(mesh, draw(seed, number, **options)) for seed in seeds]


def joined(case: Case, results: list):
    """The output and all gradients of the whole sequence, of what the ranks have returned."""
    outs, tokens, shared = zip(*results, strict=True)
    whole = [case.shards.joined(list(x), 2) for x in (outs, *zip(*tokens, strict=True))]
    return whole + [sum(x.double() for x in each) for each in zip(*shared, strict=True)]


def definition(case: Case):
    """The output, all gradients, and the largest sum of |products| of a score, in float64."""
    groups = [[x.detach().double().requires_grad_() for x in group] for group in case.leaves]
    (q, *streams), shared = groups
    rest = list(shared)
    sinks = rest.pop(0) if case.sinks is not None else None
    bias = rest.pop(0) if case.bias is not None else torch.zeros((), dtype=torch.float64)
    if case.expanded:
        streams = [x @ rest.pop(0) for x in streams]
    if case.rule is not None:
        bias = relative(rest.pop(0), q.shape[2])
    k, v = (streams[0], streams[0][..., : case.slope.shape[3]]) if len(streams) == 1 else streams
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    scores = case.scale * q @ k.mT
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    keep = table(case)
    scores = (scores + bias).masked_fill(~keep, -torch.inf)
    column = q.new_full((*q.shape[:3], 1), -torch.inf)
    if sinks is not None:
        column = sinks[:, None, None].expand(column.shape)
    scores = torch.cat([scores, column], -1)
    top = scores.detach().amax(-1, keepdim=True).clamp(min=-1e300)
    powers = torch.exp(scores - top)
    out = powers[..., :-1] / powers.sum(-1, keepdim=True).clamp(min=1e-300) @ v
    out.backward(case.slope.double())
    sizes = case.scale * q.abs() @ k.abs().mT + bias.abs()
    largest = torch.where(keep, sizes, 0.0).max().item()
    return [out, *(x.grad for group in groups for x in group)], v, largest


def table(case: Case) -> torch.Tensor:
    """Which keys each query may attend to, [B, H, L, L]."""
    slots = range(case.shards.length)
    rows = [
        [[[bool(case.sees(b, h, i, j)) for j in slots] for i in slots] for h in range(HEADS)]
        for b in range(BATCH)
    ]
    return torch.tensor(rows)


def relative(weight: torch.Tensor, length: int) -> torch.Tensor:
    """T5's bias of every query and key, [H, L, L]."""
    slots = range(length)
    buckets = [[cases.t5_bucket(j - i, 8, 6, True) for j in slots] for i in slots]
    return weight[torch.tensor(buckets)].movedim(-1, 0)
