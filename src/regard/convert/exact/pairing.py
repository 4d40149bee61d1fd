"""Rotary layouts, "halves" and "pairs": converting weights between them, and detecting which it is.

RoPE rotates channels two by two. Hugging Face pairs channel `i` with `i + dim / 2` ("halves"),
Meta and DeepSeek `2i` with `2i + 1` ("pairs"); llama.cpp stores pairs. Only the order of the rows
of queries and keys differs: permuted alike, their scores do not change. A checkpoint does not say
which layout it has, and the wrong one raises no error: nearby tokens still get plausible scores and
the text is fluent. But the model predicts worse, which is how the layout is detected.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Int, Shaped
from torch import Tensor, nn

from regard.convert.linear import linear_of, shared_copy, weight_and_bias
from regard.hf.families.finding import attention_modules
from regard.hf.families.layers import attention_of
from regard.hf.generating.predicting import hidden_states, losses_of
from regard.hf.running.binding import all_bound, calling
from regard.layers.attention import Attention
from regard.layers.latent import LatentKVAttention, MultiHeadLatentAttention
from regard.rope import Pairing, Rotary

MARGIN = 0.05  # nats a token: the least difference between the two losses that is evidence
ERRORS = 5  # standard errors it must exceed too: losses of neighbouring tokens are correlated
Rows = Shaped[Tensor, "R *I"]
Rotating = Attention | MultiHeadLatentAttention | LatentKVAttention
Move = Callable[[Tensor], Tensor]  # a permutation of rows


def pairs_to_halves(
    rows: Rows, num_heads: int, *, rotary_dim: int | None = None, start: int = 0
) -> Rows:
    """The rows of `q_proj` or `k_proj`, or their biases, from the layout "pairs" to "halves".

    Args:
        rows: `[num_heads * head_dim, ...]`. A norm over one head is `num_heads=1`.
        num_heads: query heads for `q_proj`, key heads for `k_proj`.
        rotary_dim: how many channels of a head are rotated; all if None.
        start: the first of them. In MLA they are the last of a head.

    Raises:
        ValueError: if the heads do not divide the rows, or the channels are not in a head.

    Examples:
        >>> import torch
        >>> from regard.convert import pairs_to_halves
        >>> pairs_to_halves(torch.tensor([0, 1, 2, 3, 10, 11, 12, 13]), 2)
        tensor([ 0,  2,  1,  3, 10, 12, 11, 13])
    """
    return _reordered(rows, num_heads, rotary_dim, start, _evens_first)


def halves_to_pairs(
    rows: Rows, num_heads: int, *, rotary_dim: int | None = None, start: int = 0
) -> Rows:
    """The rows of `q_proj` or `k_proj` from "halves" to "pairs": the inverse of `pairs_to_halves`.

    Args:
        rows: `[num_heads * head_dim, ...]`. A norm over one head is `num_heads=1`.
        num_heads: query heads for `q_proj`, key heads for `k_proj`.
        rotary_dim: how many channels of a head are rotated; all if None.
        start: the first of them. In MLA they are the last of a head.

    Raises:
        ValueError: as `pairs_to_halves`.

    Examples:
        >>> import torch
        >>> from regard.convert import halves_to_pairs
        >>> halves_to_pairs(torch.tensor([0, 2, 1, 3, 9]), 1, rotary_dim=4)
        tensor([0, 1, 2, 3, 9])
    """
    return _reordered(rows, num_heads, rotary_dim, start, lambda n: _evens_first(n).argsort())


def _evens_first(width: int) -> Tensor:
    return torch.arange(width).unflatten(0, (-1, 2)).mT.flatten()


def _reordered(
    rows: Tensor, num_heads: int, dim: int | None, start: int, order: Callable[[int], Tensor]
) -> Tensor:
    if num_heads < 1 or rows.shape[0] % num_heads:
        raise ValueError(f"{rows.shape[0]} rows are not {num_heads} heads of one size")
    head_dim = rows.shape[0] // num_heads
    dim = head_dim - start if dim is None else dim
    if dim < 0 or dim % 2 or start < 0 or start + dim > head_dim:
        raise ValueError(
            f"{dim} channels from {start} on cannot be rotated two by two in heads of {head_dim}; "
            "rotary_dim is even, and start + rotary_dim at most the size of a head"
        )
    places = torch.arange(head_dim)
    places[start : start + dim] = start + order(dim)
    heads = rows.unflatten(0, (num_heads, head_dim))
    return heads[:, places.to(rows.device)].flatten(0, 1)


def with_pairing(layer: Rotating, pairing: Pairing) -> Rotating:
    """The same attention in the rotary layout `pairing`: equal outputs.

    The rows of queries, keys and their norms are permuted copies; the rest is shared. A layer that
    has this pairing is returned unchanged. Cached keys have the layer's layout, so a cache of one
    layer cannot be read by the other.

    Raises:
        ValueError: if the layer has no `Rotary`, or projections or norms that are not plain.

    Examples:
        >>> import torch
        >>> from regard import Attention, Rotary
        >>> from regard.convert import with_pairing
        >>> layer, x = Attention(16, 2, rope=Rotary(8, pairing="pairs")), torch.randn(1, 5, 16)
        >>> other = with_pairing(layer, "halves")
        >>> other.rope, torch.allclose(other(x), layer(x), atol=1e-6)
        (Rotary(8), True)
    """
    rope = layer.rope
    if not isinstance(rope, Rotary):
        raise ValueError(f"rope={rope} rotates nothing, so there is no layout to change")
    if rope.pairing == pairing:
        return layer
    move = pairs_to_halves if pairing == "halves" else halves_to_pairs
    moved = {name: _moved(layer, name, each) for name, each in _moves(layer, move).items()}
    made = shared_copy(layer, rope=replace(rope, pairing=pairing))
    for name, child in moved.items():
        setattr(made, name, child)
    return made


def _moves(layer: Rotating, move: Callable[..., Tensor]) -> dict[str, Move]:
    """The permutation for each child whose rows are rotated channels, or norm them."""
    rotated = partial(move, rotary_dim=layer.rope.dim)
    if isinstance(layer, MultiHeadLatentAttention):  # rotated channels are the last
        queries = "q_proj" if layer.q_lora_rank is None else "q_b_proj"
        return {
            queries: partial(rotated, num_heads=layer.num_heads, start=layer.qk_nope_head_dim),
            "kv_a_proj_with_mqa": partial(rotated, num_heads=1, start=layer.kv_lora_rank),
        }
    q = partial(rotated, num_heads=layer.num_heads)
    k = partial(rotated, num_heads=layer.num_kv_heads)
    if isinstance(layer, LatentKVAttention):
        width = layer.num_kv_heads * layer.head_dim
        return {
            "q_proj": q,
            "kv_b_proj": lambda rows: torch.cat([k(rows[:width]), rows[width:]]),  # then values
        }
    if layer.q_norm is None:
        return {"q_proj": q, "k_proj": k}
    one = partial(rotated, num_heads=1)
    norms = {"q_norm": q, "k_norm": k} if layer.norm_width else {"q_norm": one, "k_norm": one}
    return {"q_proj": q, "k_proj": k, **norms}


def _moved(layer: nn.Module, name: str, move: Move) -> nn.Module:
    if not name.endswith("norm"):
        weight, bias = weight_and_bias(layer, name)
        return linear_of(move(weight), None if bias is None else move(bias))
    norm = layer.get_submodule(name)
    if type(norm) is not nn.RMSNorm:
        raise ValueError(
            f"{name} is a {type(norm).__name__}, which may treat channels differently; only an "
            "nn.RMSNorm can be permuted"
        )
    made = nn.RMSNorm(norm.normalized_shape, eps=norm.eps, device="meta")
    made.weight = nn.Parameter(move(norm.weight.detach()))
    return made


@dataclass(frozen=True)
class Detected:
    """A model's mean loss over text with its rotary channels read in each layout.

    Attributes:
        loss_halves: nats a token, read as halves.
        loss_pairs: nats a token, read as pairs.
        error: the standard error of the difference between the two, over tokens.
        tokens: the number of predictions.

    Examples:
        >>> from regard.convert import Detected
        >>> detected = Detected(loss_halves=3.102, loss_pairs=7.541, error=0.2, tokens=511)
        >>> detected.pairing, detected.sure
        ('halves', True)
    """

    loss_halves: float
    loss_pairs: float
    error: float
    tokens: int

    @property
    def pairing(self) -> Pairing:
        """The layout with the lower loss: that of the weights."""
        return "halves" if self.loss_halves <= self.loss_pairs else "pairs"

    @property
    def sure(self) -> bool:
        """Whether the losses differ by more than 0.05 nats a token and five standard errors.

        Those of an untrained model, or of one that ignores positions, do not.
        """
        margin = abs(self.loss_halves - self.loss_pairs)
        return margin > MARGIN and margin > ERRORS * self.error

    def __str__(self) -> str:
        verdict = f"weights laid out in {self.pairing}" if self.sure else "not sure"
        return (
            f"{verdict}: {self.loss_halves:.3f} nats a token as halves, {self.loss_pairs:.3f} as "
            f"pairs, over {self.tokens:,} tokens"
        )


@torch.no_grad()
def detect_pairing(model: Any, tokens: Int[Tensor, "N L"]) -> Detected:
    """The loss of a causal language model over text, with its rotary channels read in each layout.

    A few hundred tokens of ordinary text are enough. The model is not changed; `repair_pairing`
    permutes the weights of one whose layout is "pairs".

    Args:
        model: a causal language model of transformers.
        tokens: windows of text, `[N, L]`.

    Raises:
        ValueError: if regard does not support the model's attention as layers with RoPE
            (`regard.hf.attention_of`), or the windows are too short to predict anything.

    Examples:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from regard.convert import detect_pairing
        >>> config = LlamaConfig(hidden_size=16, num_attention_heads=2, vocab_size=20,
        ...     num_hidden_layers=1, intermediate_size=16)
        >>> untrained = LlamaForCausalLM(config).eval()
        >>> detected = detect_pairing(untrained, torch.randint(20, (1, 32)))
        >>> detected.tokens, detected.sure
        (31, False)
    """
    if tokens.shape[1] < 2:
        raise ValueError(f"windows of {tokens.shape[1]} token predict nothing; give longer ones")
    modules = list(attention_modules(model).values())
    layers = [attention_of(module) for module in modules]
    if not any(isinstance(layer.rope, Rotary) for layer in layers):
        raise ValueError(f"no layer of {type(model).__name__} has a rotary embedding")
    losses: dict[Pairing, Tensor] = {}
    for pairing in ("halves", "pairs"):
        forwards = (calling(_read_as(layer, pairing)) for layer in layers)
        with all_bound(zip(modules, forwards, strict=True)):
            states = [hidden_states(model, window[None])[0] for window in tokens]
        pairs = zip(states, tokens, strict=True)
        losses[pairing] = torch.cat([losses_of(model, hidden, window) for hidden, window in pairs])
    difference = losses["halves"] - losses["pairs"]
    error = float(difference.std()) / len(difference) ** 0.5
    return Detected(
        float(losses["halves"].mean()), float(losses["pairs"].mean()), error, len(difference)
    )


@torch.no_grad()
def repair_pairing(model: Any, *, weights: Pairing = "pairs") -> None:
    """Permute the weights of a transformers model in place to the layout "halves".

    Changes `q_proj` and `k_proj`, and norms between them and the rotation.

    Args:
        model: of a family whose attention rotates halves, loaded from weights in another layout.
        weights: their present layout. `"halves"` undoes a repair.

    Raises:
        ValueError: if regard does not support the model's attention, or its projections are not
            plain linear layers. Nothing is then changed.

    Examples:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from regard.convert import repair_pairing
        >>> config = LlamaConfig(hidden_size=8, num_attention_heads=1, vocab_size=20,
        ...     num_hidden_layers=1, intermediate_size=16)
        >>> model = LlamaForCausalLM(config)
        >>> keys = model.model.layers[0].self_attn.k_proj.weight
        >>> before = keys.detach().clone()
        >>> repair_pairing(model)
        >>> torch.equal(keys, before[[0, 2, 4, 6, 1, 3, 5, 7]])
        True
    """
    move = pairs_to_halves if weights == "pairs" else halves_to_pairs
    moves: list[tuple[nn.Parameter, Move]] = []
    for module in attention_modules(model).values():
        layer = attention_of(module)
        if not isinstance(layer.rope, Rotary):
            continue
        for name, permute in _moves(layer, move).items():
            if not name.endswith("norm"):
                weight_and_bias(layer, name)  # raises if it is not plain
            moves += [(each, permute) for each in layer.get_submodule(name).parameters()]
    for parameter, permute in moves:
        parameter.copy_(permute(parameter))


def _read_as(layer: Attention, pairing: Pairing) -> Attention:
    """The layer with its weights read in another layout: another attention."""
    if isinstance(layer.rope, Rotary):
        layer.rope = replace(layer.rope, pairing=pairing)
    return layer
