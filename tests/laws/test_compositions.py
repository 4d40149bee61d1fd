"""Every storage with every attention and backend: token by token, in chunks and at once alike.

Low-bit pages are held to the bound that follows from the errors of their codes, at every length.
"""

import itertools
import math
import pickle
import re

import pytest
import torch

import regard
from cases import is_objection
from layers import CACHES, PAIRS, ROUNDING, assert_same, inputs, make, run_in_pieces, scattered
from listed import FINEST, hadamard
from pages import read
from pool_world import poison
from regard import (
    EVERYTHING,
    Attention,
    Causal,
    KVCache,
    LatentKVAttention,
    MultiHeadLatentAttention,
    PagedCache,
    PagePool,
    QuantizedCache,
    Rotary,
    SlidingCache,
    SlidingWindow,
    Span,
    attend,
)
from regard.cache import Context, format_of
from regard.cache.paging.offloading import Offload
from regard.ops.backends import BACKENDS
from session import LONG

TOKENS = 128
STEPS = list(range(1, TOKENS))
CHUNKS = [1, 2, 5, 37, 64, 65, 101]  # where chunks end: around pages, and inside them


FEW = ("GQA", "window", "MLA absorbed", "latent KV")


@pytest.mark.parametrize(
    ("layer", "cache"),
    [
        (layer, cache)
        for layer, cache in PAIRS
        if cache not in ROUNDING and (LONG or (layer in FEW and cache.startswith("pages")))
    ],
)
@pytest.mark.usefixtures("unchecked")  # the other laws check annotations of the same calls
def test_one_forward_is_chunks_is_token_by_token(layer, cache):
    layer, x = make(layer), inputs(2, TOKENS)
    with torch.no_grad():
        whole = layer(x)
        assert_same(run_in_pieces(layer, x, CACHES[cache](), CHUNKS), whole)
        assert_same(run_in_pieces(layer, x, CACHES[cache](), STEPS), whole)


WIDE = {  # sizes that every backend takes
    "GQA": lambda **with_: Attention(
        32, 4, num_kv_heads=2, head_dim=16, rope=Rotary(16), mask=Causal(), **with_
    ),
    "MQA, sinks": lambda **with_: Attention(
        32, 4, num_kv_heads=1, head_dim=32, sinks=True, mask=Causal(), **with_
    ),
    "window": lambda **with_: Attention(
        32, 4, num_kv_heads=2, head_dim=16, mask=Causal() & SlidingWindow(20), **with_
    ),
    "MLA absorbed": lambda **with_: latent("absorbed", **with_),
    "MLA expanded": lambda **with_: latent("expanded", **with_),
    "latent KV": lambda **with_: LatentKVAttention(
        32, 4, num_kv_heads=2, head_dim=16, kv_lora_rank=16, rope=Rotary(16), mask=Causal(),
        **with_,
    ),
}  # fmt: skip


def latent(form, **with_):
    return MultiHeadLatentAttention(
        32, 2, kv_lora_rank=48, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16,
        rope=Rotary(16), mask=Causal(), form=form, **with_,
    )  # fmt: skip


def scattered_pages(layer):
    """A cache over a pool whose free pages lie apart, and hold NaN."""
    pool = PagePool(999, page_size=16)
    others = [PagedCache(pool) for _ in range(3)]
    for piece in torch.randn(2, 90, 32).split(10, 1):
        for each in others:
            layer(piece, cache=each)
    others[1].release()
    cache = PagedCache(pool)
    cache.neighbours = others  # they stay where they are
    poison(pool)
    return cache


OVER_POOLS = {
    "pages": lambda layer: PagedCache(PagePool(999, page_size=16)),
    "scattered pages": scattered_pages,
    "pages, window": lambda layer: PagedCache(PagePool(999, page_size=16), window=20),
}
SEVERAL = ("window",)  # in a normal run, on every backend that takes milliseconds
COMPILED = tuple(layer for layer in WIDE if LONG or layer != "MLA expanded")  # kernel by kernel
CASES = [
    (layer, backend)
    for layer in WIDE
    for backend in ("auto", *BACKENDS)
    if LONG
    or backend == "eager"
    or (backend == "auto" and layer in COMPILED)
    or (backend != "flex" and layer in SEVERAL)
]


@pytest.mark.usefixtures("unchecked")  # the other laws check annotations of the same calls
@pytest.mark.parametrize(("layer", "backend"), CASES)
def test_every_backend_reads_every_storage(layer, backend):
    """Float32: at most twice the error of a plain forward, and one rounding of the largest."""
    torch.manual_seed(3)
    subject = scattered(WIDE[layer](backend=backend)).eval()
    exact = WIDE[layer](backend="eager").double().eval()
    exact.load_state_dict(subject.state_dict())
    plain = WIDE[layer](backend="eager").eval()
    plain.load_state_dict(subject.state_dict())
    x = torch.randn(2, 70, 32)
    with torch.no_grad():
        judged = exact(x.double())
        allowed = 2 * (plain(x) - judged).abs().max() + judged.abs().max() * 2**-22
        for name, fresh in OVER_POOLS.items():
            if name == "pages, window" and layer != "window":
                continue
            for cuts in ([40, 48], list(range(33, 70))):
                try:
                    out = run_in_pieces(subject, x, fresh(subject), cuts)
                except ValueError as refusal:
                    if not is_objection(refusal, backend):
                        raise
                    continue
                error = (out - judged).abs().max()
                assert error <= allowed, (name, cuts, float(error / allowed))


BY_CHANNEL = format_of("K4V4")._replace(by_channel_from=16)
FORMATS = ["K8V8", "K8V4", "K6V4", "K4V4", BY_CHANNEL]
WIDTH = 32


def steps_through(form: str, tokens: int):
    """Errors of attention to a low-bit cache, token by token, and their bound: `[tokens]` each.

    Scores that err by up to d change the weights by tanh(d / 2) in total variation at most.
    """
    torch.manual_seed(5)
    pool = PagePool(tokens // 16 + 2, page_size=16, format=form)
    cache, exact, errors, bounds = PagedCache(pool), KVCache(), [], []
    reach, key_step, value_step, latest = 0.0, 0.0, 0.0, []
    for at in range(tokens):
        q, k, v = torch.randn(3, 1, 2, 1, WIDTH)
        span = Span(at, at + 1, 0, at + 1)
        parts, (judged,) = cache.update(k, v), exact.update(k, v)
        keys, values = (torch.cat([part.streams[i] for part in parts], 2) for i in (0, 1))
        out = attend(q, keys, values, mask=Causal(), span=span)
        errors.append((out - attend(q, *judged.streams, mask=Causal(), span=span)).abs().max())
        latest = [*latest, k][-16:]
        grouped = torch.cat(latest, 2).mT if form is BY_CHANNEL else turned(k, pool.format.key_bits)
        key_step = max(key_step, half_step(grouped, pool.format.key_bits))
        values = turned(v, pool.format.value_bits)
        value_step = max(value_step, half_step(values, pool.format.value_bits))
        reach = max(reach, float(v.abs().max()))
        delta = float(q.norm(dim=-1).max()) * key_step  # |q| |error of k| / sqrt(width)
        bounds.append(value_step * WIDTH**0.5 + 2 * reach * math.tanh(delta / 2))
    return torch.stack(errors), torch.tensor(bounds)


def turned(x, bits):
    """Channels, which are rotated below 8 bits where tokens have scales."""
    return x @ hadamard(WIDTH) if bits < 8 else x


def half_step(x, bits):
    """The largest error of a code, of numbers with one scale in a row: half of it."""
    low, high = x.amin(-1), x.amax(-1)
    span = high - low + FINEST * low.abs()
    return float(span.max()) / (2**bits - 1) / 2 * (1 + 2 * FINEST)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("form", FORMATS if LONG else FORMATS[::2])
def test_low_bit_pages_keep_to_their_bound_at_every_length(form):
    tokens = 4096 if LONG else 512
    errors, bounds = steps_through(form, tokens)
    assert (errors[:16] < 1e-6).all()  # the first page is in full precision
    assert (errors <= bounds).all()
    assert errors[tokens // 2 :].max() > 0
    early, late = errors[: tokens // 4].square().mean(), errors[-tokens // 4 :].square().mean()
    assert late <= early


# ---- the table of compositions, in the guide ----

PAGE = "docs/guides/pages.md"


def rows_of(heading: str) -> list[list[str]]:
    """The rows of the table whose first column has this heading, without its two header lines."""
    lines = read(PAGE).splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith(f"| {heading} |"))
    table = itertools.takewhile(lambda line: line.startswith("|"), lines[start + 2 :])
    return [
        [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in table
    ]


def storage(code: str):
    """The cache that a cell of the table writes."""
    return eval(code.strip("`"), {**vars(regard), "Offload": Offload})


STORAGES = rows_of("storage")
OF_COLUMN = {1: ("MHA", "GQA", "MQA"), 2: ("MLA", "MLA absorbed"), 3: ("latent KV",)}


@pytest.mark.parametrize("row", STORAGES, ids=lambda row: row[0])
def test_the_table_of_compositions_is_true(row):
    code, windowed = row[0], row[4] == "yes"
    narrow = Causal() & SlidingWindow(5)
    x = inputs(2, 22)
    with torch.no_grad():
        for column, names in OF_COLUMN.items():
            assert row[column] == "yes"
            for name in names:
                layer = make(name)
                if windowed:
                    layer.mask = narrow
                near = run_in_pieces(layer, x, storage(code), [11, 12, 13])
                bits = getattr(storage(code), "bits", None) or "K" in code.replace("KV", "")
                error = (near - layer(x)).abs().max() / layer(x).abs().max()
                assert error < (0.5 if bits else 1e-11)
        cache = storage(code)
        layer = make("GQA")
        layer.mask = narrow
        run_in_pieces(layer, x, cache, [11, 21])
        assert (cache.span(1).kv_start > 0) == windowed
        ragged = storage(code)
        k = torch.randn(2, 2, 4, 6)
        ragged.update(k, k)
        assert is_done(lambda: ragged.truncate(torch.tensor([4, 3]))) == (row[5] == "yes")
        before = pages_of(cache)
        fork = cache.fork()
        assert row[7] == ("shares" if pages_of(fork) & before else "copies")
    needs = torch.randn(2, 2, 4, 6, requires_grad=True)
    assert is_done(lambda: storage(code).update(needs, needs)) == (row[6] == "yes")


def is_done(call) -> bool:
    """Whether a call is not refused."""
    try:
        call()
    except ValueError:
        return False
    return True


def pages_of(cache) -> set[int]:
    return {id(page) for table in getattr(cache, "rows", []) for page in table.pages}


def filled(cache, tokens=22):
    k = torch.randn(2, 2, tokens, 6)
    for piece in k.split(5, 2):
        cache.update(piece, piece)
    return cache


def over(**options):
    return PagedCache(PagePool(99, 4), **options)


MODEL = Context("a model")


def of_another_model():
    pool = PagePool(99, 4)
    pool.store(range(22), [filled(PagedCache(pool))], context=MODEL)
    pool.prefix([1, 2], context=Context("another"))


def twice_released():
    cache = over()
    cache.release()
    cache.release()


NEEDS = torch.randn(1, 2, 3, 6).requires_grad_()
PROVOKED = {
    "a storage with a window, under a wider mask": lambda: run_in_pieces(
        make("GQA"), inputs(2, 22), over(window=5), [11]
    ),
    "a mask that shows later keys": lambda: everything()(inputs(2, 5), cache=over()),
    "`truncate` into what a window dropped": lambda: filled(over(window=5)).truncate(9),
    "`[B]` lengths in a `SlidingCache`": lambda: filled(SlidingCache(5)).truncate(
        torch.tensor([22, 21])
    ),
    "gradients through pages": lambda: over().update(NEEDS, NEEDS),
    "gradients through codes": lambda: QuantizedCache(8).update(NEEDS, NEEDS),
    "more pages than the pool has": lambda: filled(PagedCache(PagePool(3, 4))),
    "caches of another pool in `store`": lambda: PagePool(9, 4).store(
        range(22), [filled(over())], context=MODEL
    ),
    "a pool of another model": of_another_model,
    "a cache that was released": twice_released,
    "a format that does not exist": lambda: PagePool(9, 4, format="K5V4"),
    "streams of another width": lambda: filled(over()).update(*torch.randn(2, 2, 2, 1, 7)),
    "pickling a pool": lambda: pickle.dumps(PagePool(9, 4)),
}  # fmt: skip


def everything():
    layer = make("GQA")
    layer.mask = EVERYTHING
    return layer


@pytest.mark.parametrize(("refused", "sentence"), rows_of("refused"))
@pytest.mark.usefixtures("unchecked")
def test_every_refusal_of_the_guide_is_provoked(refused, sentence):
    wanted = "gradients" in refused
    with torch.set_grad_enabled(wanted), pytest.raises((ValueError, TypeError)) as found:
        PROVOKED[refused]()
    assert sentence in str(found.value)


def test_every_provoked_refusal_is_in_the_guide():
    assert {refused for refused, _ in rows_of("refused")} == PROVOKED.keys()
