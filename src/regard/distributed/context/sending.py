"""The streams that each kind of layer sends, and the keys that a receiver makes of them."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from regard.cache import Part
from regard.distributed.shards import Shards
from regard.distributed.tensor.heads import share_of, split_of
from regard.layers.attention import Attention
from regard.layers.latent import MultiHeadLatentAttention
from regard.layers.latent_forms import Expanded, Form
from regard.layers.latent_kv import LatentKVAttention, RebuiltValues, as_stream
from regard.masks import Mask, Span
from regard.rope import Rope

KINDS = (Attention, MultiHeadLatentAttention, LatentKVAttention)
Parts = tuple[Part, ...]


class Call(NamedTuple):
    """A call on which the ranks agree."""

    mask: Mask  # about the whole sequence
    shards: Shards  # the tokens of each rank
    positions: Tensor  # rotary positions of this rank's tokens, `[L]` or `[B, L]`
    top: int  # the largest position of any rank, where frequencies depend on it

    @property
    def span(self) -> Span:
        """The queries of one rank by all keys of the sequence."""
        return Span(0, max(self.shards.lengths), 0, self.shards.length)


class Sending(NamedTuple):
    """This rank's queries, the streams that it sends, and how keys and outputs are made of them."""

    q: Tensor  # this rank's queries
    streams: tuple[Tensor, ...]  # of this rank's tokens, to be sent
    read: Callable[[Tensor], Tensor]  # from the result of attention to the outputs of the heads
    # how keys are made of received streams, as `attend_shards` takes it
    options: Mapping[str, Any] = {}


def widths_of(layer: Any) -> tuple[int, int]:
    """Elements of a token's differentiable streams, and bytes of its integer streams."""
    if isinstance(layer, MultiHeadLatentAttention):
        return layer.kv_lora_rank + layer.qk_rope_head_dim, 0
    if isinstance(layer, LatentKVAttention):
        return layer.kv_lora_rank, torch.int32.itemsize  # its position
    split = split_of(layer)
    heads = layer.num_kv_heads if split is None else split.local_kv_heads
    return 2 * heads * layer.head_dim, 0


def uses_length(rope: Rope) -> bool:
    """Whether the frequencies of a rope depend on the largest position of a call."""
    return bool(getattr(getattr(rope, "scaling", None), "uses_length", False))


def rotate(layer: Any, call: Call, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys rotated at this rank's positions, by the frequencies of the whole."""
    if not uses_length(layer.rope):
        q, k = layer.rope(q, k, call.positions)
        return q, k
    end = call.positions.new_full((*call.positions.shape[:-1], 1), call.top)
    wide = layer.rope(
        F.pad(q, (0, 0, 0, 1)), F.pad(k, (0, 0, 0, 1)), torch.cat([call.positions, end], -1)
    )
    return wide[0][:, :, :-1], wide[1][:, :, :-1]


def send(layer: Any, x: Tensor, call: Call) -> Sending:
    """The queries and the streams of this rank's tokens, for a layer of any kind."""
    if isinstance(layer, Attention):
        return _send_keys(layer, x, call)
    if isinstance(layer, MultiHeadLatentAttention):
        return _send_latent(layer, x, call)
    assert isinstance(layer, LatentKVAttention)
    return _send_latent_kv(layer, x, call)


def _send_keys(layer: Attention, x: Tensor, call: Call) -> Sending:
    q, k, v = layer.project(x)
    q, k = rotate(layer, call, q, k)
    q = layer.query_scale(q, call.positions)
    return Sending(q, (k, v), lambda out: layer.gated(x, out))


def _send_latent(layer: MultiHeadLatentAttention, x: Tensor, call: Call) -> Sending:
    q_nope, q_rope, latent, k_rope = layer.project(x)
    q_rope, k_rope = rotate(layer, call, q_rope, k_rope)
    form, joined = layer.choose(call.span), layer.join(latent, k_rope)
    q = layer.query_scale(form.queries(q_nope, q_rope), call.positions)
    options = reading_latents(layer, form)
    return Sending(q, (joined,), lambda out: layer.gated(x, form.output(out)), options)


def reading_latents(layer: Any, form: Form) -> dict[str, Any]:
    """How keys are made of latents and rotary keys, which serve all heads: the receiver expands
    them, or attends to them."""
    if isinstance(form, Expanded):
        return making_keys(layer, form.rebuild)
    return {"v_head_dim": layer.kv_lora_rank}


def _send_latent_kv(layer: LatentKVAttention, x: Tensor, call: Call) -> Sending:
    """Latents and their positions: the receiver rebuilds, norms and rotates the keys."""
    q, latent = layer.project(x)
    where = call.positions.to(torch.int32)
    streams = latent, as_stream(where, x.shape[0])
    made = making_keys(layer, RebuiltValues(layer).rebuild)
    q = layer.rope.rotate(q, where)
    return Sending(q, streams, lambda out: out, made)


def making_keys(layer: nn.Module, make: Callable[[Parts], Parts]) -> dict[str, Any]:
    """The function `keys_of(streams, parameters)`, which calls `make`, and the parameters."""
    making = _Making(layer, make)
    read = ("layer.kv_b_proj.", "layer.k_norm.")
    names = [name for name, _ in making.named_parameters() if name.startswith(read)]
    paths = [name.rpartition(".") for name in names]
    parameters = [share_of(making.get_submodule(path), name) for path, _, name in paths]

    def keys_of(streams: tuple[Tensor, ...], parameters: tuple[Tensor, ...]) -> Any:
        return functional_call(making, dict(zip(names, parameters, strict=True)), streams)

    return {"keys_of": keys_of, "parameters": tuple(parameters)}


class _Making(nn.Module):
    """A module around a layer, whose forward makes keys and values of streams."""

    def __init__(self, layer: nn.Module, make: Callable[[Parts], Parts]) -> None:
        super().__init__()
        self.layer = layer
        self.make = make

    def forward(self, *streams: Tensor) -> tuple[Tensor, ...]:
        (part,) = self.make((Part(0, streams[0].shape[2], streams),))
        return tuple(part.streams)
