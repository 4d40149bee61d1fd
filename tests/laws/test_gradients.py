"""Gradients: finite differences in float64, rounding against plain attention, masked rows."""

import random
from functools import partial

import pytest
import torch
from torch import Tensor

from cases import BACKENDS, LEAVES, Sizes, draw_leaf, is_objection
from layers import LAYERS, WIDTH, attention, everything_at_once, inputs, make, scattered
from regard import (
    NO_CACHE,
    Alibi,
    Causal,
    Documents,
    KVCache,
    Padding,
    RelativeBias,
    SlidingWindow,
    Span,
    attend,
    attend_partial,
    merge,
)
from session import LONG, worst

# Each derivative by itself takes 20 times as long as all of them in one random direction.
are_derivatives = partial(torch.autograd.gradcheck, fast_mode=not LONG)
TINY = Sizes(2, 4, 2, 3, 2, [1, 1], 3, 0, 4)


def tiny(rows: int = 2, kv_heads: int = 2, v_dim: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v: three queries and four keys, by default of two rows, and four heads on two."""
    q, k = torch.randn(rows, 4, 3, 3), torch.randn(rows, kv_heads, 4, 3)
    v = torch.randn(rows, kv_heads, 4, v_dim)
    return tuple(x.double().requires_grad_() for x in (q, k, v))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", [*dict.fromkeys(LEAVES), "and or not"])
def test_gradients_are_the_derivatives_under_every_mask(kind, backend):
    rng = random.Random(kind)
    if kind == "and or not":
        parts = [draw_leaf(rng, TINY, each)[0] for each in ("causal", "padding", "where", "dense")]
        mask = (parts[0] & parts[1]) | ~(parts[2] | parts[3])
    else:
        mask, _ = draw_leaf(rng, TINY, kind)

    def f(q, k, v):
        return attend(q, k, v, mask=mask, span=TINY.span(), backend=backend)

    try:
        assert are_derivatives(f, tiny())
    except ValueError as error:
        if not is_objection(error, backend):
            raise


FEATURES = {
    "nothing": (),
    "softcap": ("softcap",),
    "sinks": ("sinks",),
    "bias": ("score_bias",),
    "everything": ("softcap", "sinks", "score_bias"),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("feature", FEATURES)
def test_gradients_are_the_derivatives_with_every_feature(feature, backend):
    """Of the sinks and the score bias too; fully masked rows among them."""
    masked = (Causal() & SlidingWindow(2)) & Padding(
        torch.tensor([[True] * 4, [False] * 3 + [True]])
    )
    options = {
        "softcap": 1.5,
        "sinks": torch.randn(4).double().requires_grad_(),
        "score_bias": torch.randn(4, 3, 4).double().requires_grad_(),
    }
    chosen = {name: options[name] for name in FEATURES[feature]}
    leaves = [name for name, value in chosen.items() if isinstance(value, Tensor)]

    def f(q, k, v, *extra):
        given = {**chosen, **dict(zip(leaves, extra, strict=True))}
        return attend(q, k, v, mask=masked, span=TINY.span(), backend=backend, **given)

    try:
        assert are_derivatives(f, (*tiny(), *(chosen[name] for name in leaves)))
    except ValueError as error:
        if not is_objection(error, backend):
            raise


@pytest.mark.parametrize("bias", ["alibi", "relative", "broadcast"])
def test_gradients_reach_the_rule_that_makes_the_bias(bias):
    given = {
        "alibi": lambda: Alibi(torch.tensor([0.5, 0.25, 0.1, 0.0])),
        "relative": lambda: RelativeBias(4, num_buckets=4, max_distance=4).double(),
        "broadcast": lambda: torch.randn(1, 4, 1, 4).double().requires_grad_(),
    }[bias]()
    leaf = given if isinstance(given, Tensor) else getattr(given, "relative_attention_bias", None)
    leaf = getattr(leaf, "weight", leaf)

    def f(q, k, v, *_):
        return attend(q, k, v, score_bias=given, span=TINY.span(), mask=Causal())

    extra = () if leaf is None else (leaf,)
    assert are_derivatives(f, (*tiny(), *extra))


@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 1, 3)], ids=["grouped", "one key head"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_flow_through_parts_and_their_merge(backend, sizes):
    """Through the log-sum-exp as well; a backend that cannot must object."""

    def f(q, k, v):
        spans = Span(1, 4, 0, 1), Span(1, 4, 1, 4)
        try:
            halves = [
                attend_partial(
                    q,
                    k[:, :, s.kv_start : s.kv_stop],
                    v[:, :, s.kv_start : s.kv_stop],
                    mask=Causal(),
                    span=s,
                    backend=backend,
                )
                for s in spans
            ]
        except ValueError as error:
            if not is_objection(error, backend):
                raise
            return None
        return tuple(merge(*halves))

    if f(*tiny(*sizes)) is not None:
        assert are_derivatives(f, tiny(*sizes))


@pytest.mark.parametrize("layer", LAYERS)
def test_gradients_are_the_derivatives_of_every_layer(layer):
    """By its input in full, by every parameter in a random direction; with a past in a cache."""
    layer = make(layer).train()
    past, x = inputs(1, 2), inputs(1, 2, seed=1).requires_grad_()
    named = dict(layer.named_parameters())

    def f(x, *parameters):
        cache, given = KVCache(), dict(zip(named, parameters, strict=True))
        torch.func.functional_call(layer, given, (past,), {"cache": cache})
        return torch.func.functional_call(layer, given, (x,), {"cache": cache})

    frozen = [p.detach() for p in named.values()]
    assert are_derivatives(lambda x: f(x, *frozen), (x,))
    assert torch.autograd.gradcheck(f, (x.detach(), *named.values()), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_sinks_softcap_bias_window_qk_norm_and_gqa_train_in_one_layer(dtype):
    """All of it at once, with fully masked rows: finite gradients everywhere, and none idle."""
    layer = scattered(everything_at_once()).to(dtype).train()
    x = inputs(3, 9).to(dtype).requires_grad_()
    valid = torch.ones(3, 9).bool()
    valid[0, :4] = False  # slots 0..3 of the first row see nothing at all
    mask = Padding(valid) & Documents(torch.tensor([[0] * 5 + [1] * 4]))
    layer(x, mask=mask).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert torch.isfinite(parameter.grad).all(), name
        assert (parameter.grad != 0).any(), name
    assert torch.isfinite(x.grad).all()
    before = [p.detach().clone() for p in layer.parameters()]
    torch.optim.SGD(layer.parameters(), lr=1e-2).step()
    assert all(not torch.equal(a, b) for a, b in zip(before, layer.parameters(), strict=True))


def plain(q, k, v, *, hidden, sinks=None, score_bias=None, softcap=None) -> Tensor:
    """Attention as it is written down, every step in the dtype of the inputs."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if score_bias is not None:
        scores = scores + score_bias
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        sink = sinks[None, :, None, None].expand(*scores.shape[:3], 1)
        return torch.cat([scores, sink], -1).softmax(-1)[..., :-1] @ v
    return scores.softmax(-1) @ v


def gradients(f, leaves: dict[str, Tensor], seed_of_out: Tensor) -> dict[str, Tensor]:
    """What flows back to each leaf, in float64."""
    fresh = {name: x.detach().clone().requires_grad_() for name, x in leaves.items()}
    out = f(**fresh)
    found = torch.autograd.grad(out, list(fresh.values()), seed_of_out.to(out.dtype))
    return {name: x.double() for name, x in zip(fresh, found, strict=True)}


ALLOWED = {torch.float32: 5.0, torch.bfloat16: 3.0, torch.float16: 3.0}
SHAPES = [(2, 4, 2, 37, 16, 16), (1, 6, 1, 64, 24, 8), (2, 3, 3, 19, 8, 32)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ALLOWED, ids=str)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_round_little_more_than_a_plain_implementation(shape, feature, dtype, backend):
    """At most 3 times its error in half precision, 5 times in float32; against float64.

    The largest error of a draw, averaged over several: one lucky draw of the plain one is none.
    """
    error, usual = {}, {}
    for seed in range(40 if LONG else 8):
        leaves, ours, naive, back = draw_training(seed, shape, feature, dtype, backend)
        truth = gradients(naive, {name: x.double() for name, x in leaves.items()}, back)
        try:
            found = gradients(ours, leaves, back)
        except ValueError as objection:
            if not is_objection(objection, backend):
                raise
            return
        rounded = gradients(naive, leaves, back)
        for name, true in truth.items():
            error[name] = error.get(name, 0) + (found[name] - true).abs().max().item()
            usual[name] = usual.get(name, 0) + (rounded[name] - true).abs().max().item()
    for name in error:
        share = error[name] / usual[name] / ALLOWED[dtype]
        kind = f"gradient {backend} {str(dtype).removeprefix('torch.')}"
        worst[kind] = max(worst.get(kind, 0), share)
        assert error[name] <= ALLOWED[dtype] * usual[name], (name, error[name] / usual[name])


def draw_training(seed: int, shape: tuple, feature: str, dtype: torch.dtype, backend: str):
    """Zero-mean leaves, the library's attention and the plain one, and what flows back."""
    torch.manual_seed(seed)
    b, h, g, n, d, dv = shape
    leaves = {
        "q": torch.randn(b, h, n, d).to(dtype),
        "k": torch.randn(b, g, n, d).to(dtype),
        "v": torch.randn(b, g, n, dv).to(dtype),
    }
    if "sinks" in FEATURES[feature]:
        leaves["sinks"] = torch.randn(h).to(dtype)
    if "score_bias" in FEATURES[feature]:
        leaves["score_bias"] = torch.randn(h, n, n).to(dtype)
    softcap = 5.0 if "softcap" in FEATURES[feature] else None
    hidden = torch.ones(n, n).bool().triu(1)
    ours = partial(attend, softcap=softcap, mask=Causal(), backend=backend)
    naive = partial(plain, hidden=hidden, softcap=softcap)
    return leaves, ours, naive, torch.randn(b, h, n, dv).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layer", LAYERS)
def test_layers_round_little_more_than_their_plain_selves(layer, dtype):
    """At most twice the error of the same layer, computed cell by cell in its dtype."""
    exact = make(layer)
    rounded = make(layer).to(dtype)
    exact.load_state_dict(rounded.state_dict())
    spelled = make(layer).to(dtype)
    spelled.load_state_dict(rounded.state_dict())
    spelled.backend = "eager"
    if hasattr(spelled, "form"):
        spelled.form = "expanded"
    x = inputs(4, 33).to(dtype)
    with torch.no_grad():
        truth = exact(x.double())
        error = (rounded(x).double() - truth).abs().max().item()
        usual = (spelled(x).double() - truth).abs().max().item()
    assert error <= 2 * usual


@pytest.mark.parametrize("cached", [False, True], ids=["no cache", "cache"])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_parameter_trained_alone_gets_the_gradient_it_gets_among_the_others(layer, cached):
    """With the rest frozen and an input that needs no gradient, no kernel may cut a corner."""
    layer = make(layer).float().train()
    past, x = inputs(2, 5).float(), inputs(2, 2, seed=1).float()
    named = dict(layer.named_parameters())

    def loss() -> Tensor:
        cache = KVCache() if cached else NO_CACHE
        if cached:
            with torch.no_grad():
                layer(past, cache=cache)
        return layer(x, cache=cache).square().sum()

    together = dict(zip(named, torch.autograd.grad(loss(), list(named.values())), strict=True))
    for name, parameter in named.items():
        layer.requires_grad_(False)
        parameter.requires_grad_(True)
        (alone,) = torch.autograd.grad(loss(), [parameter])
        torch.testing.assert_close(alone, together[name], rtol=1e-4, atol=1e-4, msg=name)


def test_a_layer_without_gradients_needs_none():
    """A frozen layer's input still gets its gradient; a frozen input's layer too."""
    layer = scattered(attention(num_kv_heads=2)).double()
    layer.requires_grad_(False)
    x = inputs(2, 5).requires_grad_()
    layer(x).sum().backward()
    assert torch.isfinite(x.grad).all()
    assert (x.grad != 0).any()
    assert x.shape[-1] == WIDTH
