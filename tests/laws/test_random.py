"""Random calls against the loops of `oracle`, within the numeric contract and nothing more.

    half precision      error <= 1.5 u vmax
    float32, float64    error <= 2 u vmax (1 + S)

u is half the dtype's epsilon, vmax the largest |V|, S the largest visible sum of
|scale * q_i * k_i| (plus |bias|). The worst error seen, as a share of its bound, is printed last.
"""

import random

import numpy as np
import pytest
import torch

from cases import BACKENDS, DTYPES, Case, bound, cut, draw_case, is_objection
from contract import assert_within, compare
from covering import covering
from oracle import wide_attention
from regard import (
    Causal,
    Dense,
    Partial,
    SlidingWindow,
    Span,
    attend,
    attend_partial,
    attention_weights,
    merge,
)
from session import LONG, worst

EACH = 50
BATCHES = 400 if LONG else 16


def attempt(case: Case, backend: str) -> torch.Tensor | None:
    """The output, or None where a named backend objects in a sentence."""
    try:
        return attend(case.q, case.k, case.v, **case.given, backend=backend)
    except ValueError as error:
        if not is_objection(error, backend):
            raise
        return None


@pytest.mark.parametrize("batch", range(BATCHES))
def test_attend_is_the_definition_within_the_contract(batch):
    """50 accepted calls a batch: 2,000 in a normal run, 20,000 in a long one."""
    accepted = 0
    for seed in range(batch * 1_000, batch * 1_000 + 1_000):
        case = draw_case(seed)
        backend = random.Random(f"backend {seed}").choice(BACKENDS)
        out = attempt(case, backend)
        if out is None:
            continue
        assert out.dtype == case.q.dtype
        assert out.shape == (*case.q.shape[:3], case.v.shape[-1])
        compare(out, case, what=f"attend {backend}")
        accepted += 1
        if accepted == EACH:
            return
    pytest.fail(f"only {accepted} of 1,000 calls were accepted")


@pytest.mark.parametrize("backend", BACKENDS)
def test_outputs_beside_sinks_are_rounded_once(backend):
    """A call of float16 whose largest output lies just above a power of two."""
    case = draw_case(195_038)
    out = attempt(case, backend)
    if out is not None:
        compare(out, case, what=f"attend {backend}")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_backend_takes_its_share_of_plain_calls(backend, dtype):
    """A backend that objected to everything would pass every comparison."""
    outs = [attempt(draw_case(seed, dtype), backend) for seed in range(60)]
    assert sum(out is not None for out in outs) >= 8


def part_of(case: Case, start: int, stop: int) -> dict:
    """What `attend_partial` is given for the keys start..stop of a call."""
    given = {key: value for key, value in case.given.items() if key != "sinks"}
    bias = given.get("score_bias")
    if isinstance(bias, torch.Tensor) and bias.shape[-1] != 1:
        given["score_bias"] = bias[..., start:stop]
    return given


def sliceable(case: Case) -> bool:
    """Whether the call can be made on pieces of its keys: `Dense` is of all keys."""
    return "Dense" not in repr(case.given["mask"])


@pytest.mark.parametrize("batch", range(BATCHES // 4))
def test_parts_merge_to_the_whole(batch):
    accepted = 0
    for seed in range(10_000_000 + batch * 1_000, 10_000_000 + batch * 1_000 + 1_000):
        case, rng = draw_case(seed), random.Random(f"pieces {seed}")
        if not sliceable(case):
            continue
        pieces = []
        for start, stop in cut(case, rng):
            given = part_of(case, start, stop)
            first = case.sizes.kv_start
            whole = case.sizes.span()
            given["span"] = type(whole)(
                **{**vars(whole), "kv_start": first + start, "kv_stop": first + stop}
            )
            k, v = case.k[:, :, start:stop], case.v[:, :, start:stop]
            pieces.append(attend_partial(case.q, k, v, **given))
        if "sinks" in case.given:
            pieces.append(Partial.of_sinks(case.given["sinks"]))
        rng.shuffle(pieces)
        merged = merge(*pieces)
        compare(merged.out, case, what="merge")
        expected = torch.tensor(case.judge().lse, dtype=torch.float64)
        same = torch.isclose(merged.lse.double(), expected, rtol=1e-5, atol=1e-5)
        assert (same | (merged.lse == expected)).all(), case
        accepted += 1
        if accepted == EACH:
            return
    pytest.fail(f"only {accepted} calls were accepted")


@pytest.mark.parametrize("batch", range(BATCHES // 8))
def test_returned_weights_are_the_weights(batch):
    """All of them, or chosen heads and queries without the rest."""
    for seed in range(30_000_000 + batch * EACH, 30_000_000 + (batch + 1) * EACH):
        case, rng = draw_case(seed), random.Random(f"pieces {seed}")
        judged = case.judge()
        heads, queries = list(range(case.sizes.heads)), list(range(case.sizes.queries))
        chosen = {}
        if rng.random() < 0.5:
            heads = chosen["heads"] = sorted(rng.sample(heads, rng.randint(1, len(heads))))
        if rng.random() < 0.5:
            queries = chosen["queries"] = sorted(rng.sample(queries, rng.randint(1, len(queries))))
        weights = attention_weights(case.q, case.k, **case.given, **chosen)
        expected = torch.tensor(judged.weights, dtype=torch.float64)[:, heads][:, :, queries]
        assert weights.shape == expected.shape, case
        error = (weights.double() - expected).abs().max().item()
        assert_within(error, bound(case.q.dtype, 1.0, judged.largest), case, "weights")


SIZES = {
    "no queries": (2, 4, 2, 0, 5),
    "no keys": (2, 4, 2, 3, 0),
    "no batch": (0, 4, 2, 3, 5),
    "neither": (2, 4, 2, 0, 0),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_sizes_of_zero_are_sizes(size, dtype, backend):
    batch, heads, kv_heads, queries, keys = SIZES[size]
    q = torch.randn(batch, heads, queries, 3).to(dtype).requires_grad_()
    k = torch.randn(batch, kv_heads, keys, 3).to(dtype).requires_grad_()
    v = torch.randn(batch, kv_heads, keys, 2).to(dtype).requires_grad_()
    try:
        out = attend(q, k, v, backend=backend)
    except ValueError as error:
        if not is_objection(error, backend):
            raise
        return
    assert out.shape == (batch, heads, queries, 2)
    assert out.dtype == dtype
    assert (out == 0).all() or size == "no batch"
    out.sum().backward()
    assert all((x.grad == 0).all() for x in (q, k, v))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_visible_key_is_read_whole_whatever_its_score(dtype, backend):
    """A finite number in place of minus infinity is found out by a score below it."""
    q = torch.full((1, 2, 3, 4), 250.0).to(dtype)
    k = torch.full((1, 2, 3, 4), -250.0).to(dtype)
    k[:, :, 1] = 250.0
    v = torch.randn(1, 2, 3, 4).to(dtype)
    only_first = Dense(torch.tensor([[True, False, False]]).expand(3, 3))
    try:
        out = attend(q, k, v, mask=only_first, scale=1.0, backend=backend)
    except ValueError as error:
        if not is_objection(error, backend):
            raise
        return
    assert torch.equal(out, v[:, :, :1].expand_as(out))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_products_beyond_the_range_of_half_precision_do_not_overflow(dtype):
    q = torch.full((1, 2, 4, 16), 256.0).to(dtype)
    v = torch.randn(1, 2, 4, 8).to(dtype)
    out = attend(q, q.clone(), v)
    error = (out.double() - v.double().mean(2, keepdim=True)).abs().max().item()
    assert error <= bound(dtype, v.abs().max().item(), 0.0)


WINDOW = Causal() & SlidingWindow(200)
WIDE = [  # batch, heads, key heads, head dim, value dim, queries, keys: where kernels change form
    (1, 8, 1, 16, 16, 1, 1300),
    (1, 4, 1, 16, 16, 3, 1100),
    (2, 6, 2, 16, 8, 1, 700),
    (2, 4, 2, 8, 16, 65, 65),
    (1, 4, 2, 24, 24, 33, 600),
    (1, 2, 2, 16, 16, 300, 300),
]


@pytest.mark.parametrize(("size", "dtype", "backend"), covering(WIDE, DTYPES, BACKENDS), ids=str)
def test_large_calls_keep_the_contract_too(size, dtype, backend):
    """Blocks, splits and long sums, which small sizes never reach; plain, masked, and with all."""
    b, h, g, d, dv, n, s = size
    features = [{}, {"mask": WINDOW}, {"mask": Causal()}, {"sinks": True}, {"score_bias": True}]
    features += [{"softcap": 3.0, "sinks": True, "score_bias": True, "mask": WINDOW}]
    for seed, feature in enumerate(features):
        torch.manual_seed(seed)
        q = (torch.randn(b, h, n, d) * (1, 4)[seed % 2]).to(dtype)
        k, v = (torch.randn(b, g, s, width).to(dtype) for width in (d, dv))
        given = dict(feature)
        if "sinks" in given:
            given["sinks"] = torch.randn(h).to(dtype)
        if "score_bias" in given:
            given["score_bias"] = torch.randn(1, h, n, s).to(dtype)
        rows, columns = np.arange(s - n, s)[:, None], np.arange(s)
        keep = np.ones((n, s), dtype=bool)
        if "mask" in given:
            keep = columns <= rows
            keep &= (columns > rows - 200) | (given["mask"] == Causal())
        wide = {name: x.double().numpy() for name, x in given.items() if torch.is_tensor(x)}
        if "score_bias" in wide:
            wide["bias"] = wide.pop("score_bias")
        judged, largest = wide_attention(
            *(x.double().numpy() for x in (q, k, v)),
            keep=keep,
            softcap=given.get("softcap"),
            **wide,
        )
        try:
            out = attend(q, k, v, **given, span=Span(s - n, s, 0, s), backend=backend)
        except ValueError as error:
            if not is_objection(error, backend):
                raise
            continue
        mistake = (out.double() - torch.from_numpy(judged)).abs().max().item()
        allowed = bound(dtype, v.double().abs().max().item(), largest)
        kind = f"large {backend} {str(dtype).removeprefix('torch.')}"
        worst[kind] = max(worst.get(kind, 0.0), mistake / allowed)
        assert mistake <= allowed, feature
