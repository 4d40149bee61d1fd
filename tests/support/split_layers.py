"""Layers whose heads are split over ranks, compared with the same layers on one device."""

import torch
from torch.distributed.tensor import DTensor

from regard import (
    Alibi,
    Attention,
    Causal,
    LatentKVAttention,
    MultiHeadLatentAttention,
    Padding,
    RelativeBias,
    Rotary,
    SlidingWindow,
)
from regard.distributed import counted, tensor_parallel
from regard.masks import Dense, Where
from tensor_bytes import bytes_sent

WIDTH, LENGTH = 24, 5
ROPE = Rotary(4)


def mine(b, h, q_idx, kv_idx):
    """A mask that differs between heads."""
    return (q_idx >= kv_idx) & ((q_idx + h) % 3 != kv_idx % 2)


def keep(heads, batch=1, keys=LENGTH):
    """Booleans for each head; every query may attend to some key."""
    own = torch.Generator().manual_seed(1)
    kept = torch.rand(batch, heads, LENGTH, keys, generator=own) < 0.6
    kept[..., 0] = True
    return kept


def bias(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def attention(heads, kv_heads, **options):
    plain = {"head_dim": 4, "rope": ROPE, "mask": Causal()}
    return lambda: Attention(WIDTH, heads, num_kv_heads=kv_heads, **plain | options)


def latent(heads, **options):
    sizes = {"kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 6}
    plain = {"rope": ROPE, "mask": Causal()}
    return lambda: MultiHeadLatentAttention(WIDTH, heads, **sizes | plain | options)


def latent_kv(heads, kv_heads, **options):
    plain = {"head_dim": 4, "kv_lora_rank": 9, "rope": ROPE, "mask": Causal()}
    return lambda: LatentKVAttention(WIDTH, heads, num_kv_heads=kv_heads, **plain | options)


class Twice:
    """A user-defined rule for score biases."""

    def bias(self, span, *, device=None, dtype):
        whole = bias(1, 6, 9, 9).to(dtype)
        return whole[:, :, span.first_query : span.last_query + 1, span.kv_start : span.kv_stop]


MASKS = {  # of a call, for layers of 6 heads
    "heads": lambda: Dense(keep(6, 2)),
    "where": lambda: Where(mine) | Where(lambda b, h, q_idx, kv_idx: kv_idx == 0),
    "padding": lambda: Padding(torch.tensor([[0, 1, 1, 1, 1], [0, 0, 0, 1, 1]])),
    "not": lambda: ~Dense(~keep(6)) & SlidingWindow(4),
}
LAYERS = {  # a function that builds the layer, and the mask of the call
    "mha": (attention(4, 4, bias=True), None),
    "mha odd": (attention(5, 5, bias={"v_proj", "o_proj"}, sinks=True, qk_norm="head"), None),
    "gqa norm": (attention(6, 3, qk_norm="head", sinks=True), "padding"),
    "gqa width": (attention(6, 2, qk_norm="width", gate="channel", bias=True), "heads"),
    "gqa few": (attention(6, 2, sinks=True, gate="head", qk_norm=torch.nn.LayerNorm), "where"),
    "gqa of mask": (attention(6, 3, mask=Dense(keep(6)), softcap=3.0), "not"),
    "mqa": (attention(5, 1, qk_norm="width", gate="head", bias=True), None),
    "smol": (attention(9, 3, rope=Rotary(4, pairing="pairs")), None),
    "mqa many": (attention(9, 1, sinks=True, qk_norm="head", bias=True), None),
    "alibi": (attention(6, 2, score_bias=Alibi.for_heads(6)), None),
    "relative": (lambda: attention(6, 2, score_bias=RelativeBias(6))(), "padding"),
    "tensor bias": (
        lambda: attention(6, 3, score_bias=torch.nn.Parameter(bias(6, LENGTH, LENGTH)))(),
        None,
    ),
    "one bias": (
        lambda: attention(6, 3, score_bias=torch.nn.Parameter(bias(LENGTH, LENGTH)))(),
        None,
    ),
    "own bias": (attention(6, 6, score_bias=Twice()), None),
    "mla": (latent(5, bias=True), None),
    "mla absorbed": (latent(4, form="absorbed", score_bias=Alibi.for_heads(4)), None),
    "mla queries": (latent(6, q_lora_rank=7, form="absorbed", bias=True), "heads"),
    "mla expanded": (
        latent(6, q_lora_rank=7, form="expanded", latent_norm=False, bias={"kv_b_proj"}),
        "where",
    ),
    "latent kv": (latent_kv(6, 2, qk_norm="head", bias=True, out_bias=True), "where"),
    "latent kv width": (latent_kv(5, 1, qk_norm="width", bias=True), None),
    "latent kv odd": (latent_kv(6, 3, score_bias=Alibi.for_heads(6)), "padding"),
}


def drawn(build, dtype=torch.float64):
    """The layer that `build` makes, its parameters drawn: no zero or one hides a missing one."""
    torch.manual_seed(0)
    layer = build()
    for name, parameter in layer.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.4)
    return layer.to(dtype)


def whole(layer, name, value):
    """A parameter, or its gradient, in its shape on one device; padding is zero."""
    path, _, own = name.rpartition(".")
    if not isinstance(value, DTensor):
        return value.clone()
    share, stored = layer.get_submodule(path).shares[own], value.full_tensor()
    if share.order is not None:
        padding = (share.order < 0).nonzero().flatten()
        assert not stored.index_select(share.dim, padding).any(), f"padding of {name}"
    return share.of_one_device(stored).clone()


def gradients(layer):
    """The gradient of each parameter."""
    return {name: whole(layer, name, p.grad) for name, p in layer.named_parameters()}


def step(layer, x, **options):
    """The output, and the gradients of everything."""
    inputs = {"x": x.clone().requires_grad_()}
    if isinstance(options.get("context"), torch.Tensor):
        inputs["context"] = options["context"].clone().requires_grad_()
    out = layer(inputs["x"], **options | {k: v for k, v in inputs.items() if k == "context"})
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out.dtype))
    return out.detach(), {**gradients(layer), **{k: v.grad for k, v in inputs.items()}}


def split_step(mesh, layer, x, **options):
    """The same on the ranks of a mesh, the bytes that this rank sent, and those of the plan."""
    layer = tensor_parallel(layer, mesh)
    context = options.get("context")
    planned = bytes_sent(
        layer,
        ranks=mesh.size(),
        batch=x.shape[0],
        length=x.shape[1],
        context_length=None if context is None else context.shape[1],
        dtype=x.dtype,
    )
    with counted() as sent:
        out, grads = step(layer, x, **options)
    return out, grads, sent.bytes, sum(planned)


def inputs(batch=2, length=LENGTH, width=WIDTH, dtype=torch.float64):
    drawing = torch.Generator().manual_seed(3)
    return torch.randn(batch, length, width, generator=drawing, dtype=dtype)


def options_of(name):
    """The options of a case's call."""
    mask = LAYERS[name][1]
    return {} if mask is None else {"mask": MASKS[mask]()}


def largest_error(mine, judged):
    """The largest error of the output and of each gradient, relative to the largest value."""
    (out, grads), (expected, expected_grads) = mine, judged
    assert grads.keys() == expected_grads.keys()
    pairs = {"output": (out, expected)}
    pairs |= {name: (grads[name], expected_grads[name]) for name in grads}
    return {
        name: float((got.double() - want.double()).abs().max() / (1 + want.abs().max()))
        for name, (got, want) in pairs.items()
    }
