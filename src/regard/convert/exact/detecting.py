"""Which rotary layout a model's weights were trained for: the model itself is asked, by its losses.

Nothing in a checkpoint says how its queries' and keys' rows are laid out, and the wrong layout
raises nothing: near tokens still look right, and the text is fluent. But it predicts worse.
"""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from regard.convert.exact.pairing import halves_to_pairs, pairs_to_halves
from regard.convert.linear import numbers_of
from regard.hf.families.finding import attention_modules
from regard.hf.families.layers import attention_of
from regard.hf.generating.predicting import hidden_states, losses_of
from regard.hf.running.binding import bound, calling
from regard.layers.attention import Attention
from regard.rope import Pairing, Rotary

MARGIN = 0.05  # nats a token
ERRORS = 5  # standard errors: neighbouring tokens are not independent


@dataclass(frozen=True)
class Detected:
    """How well a model predicts with each layout: nats a token, and the evidence.

    `error` is the standard error of the difference between the two losses, by tokens.
    """

    loss_halves: float
    loss_pairs: float
    error: float
    tokens: int

    @property
    def pairing(self) -> Pairing:
        """The layout that predicts better: that of the weights."""
        return "halves" if self.loss_halves <= self.loss_pairs else "pairs"

    @property
    def sure(self) -> bool:
        """Whether the difference is large: 0.05 nats a token, and five standard errors. A model
        that has learned nothing, or nothing that depends on positions, tells neither."""
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
    """Run a causal language model over text with its rotary channels read both ways.

    A few hundred tokens of ordinary text are enough. The model is left as it was. `repair_pairing`
    mends a model whose weights turn out to be laid out in pairs.

    Raises:
        ValueError: if regard does not know the model's attention as layers that turn by positions
            (`regard.hf.attention_of`), or the windows are too short to predict anything.

    >>> model, tokenizer = regard.hf.load("path/to/model")                # doctest: +SKIP
    >>> ids = tokenizer(open("some.txt").read(), return_tensors="pt").input_ids  # doctest: +SKIP
    >>> print(detect_pairing(model, ids[:, :512]))                        # doctest: +SKIP
    weights laid out in halves: 3.102 nats a token as halves, 7.541 as pairs, over 511 tokens
    """
    if tokens.shape[1] < 2:
        raise ValueError(f"windows of {tokens.shape[1]} token predict nothing; give longer ones")
    modules = list(attention_modules(model).values())
    layers = [attention_of(module) for module in modules]
    if not any(isinstance(layer.rope, Rotary) for layer in layers):
        raise ValueError(f"no layer of {type(model).__name__} has a rotary embedding")
    losses: dict[Pairing, Tensor] = {}
    for pairing in ("halves", "pairs"):
        with ExitStack() as stack:
            for module, layer in zip(modules, layers, strict=True):
                stack.enter_context(bound(module, calling(_read_as(layer, pairing))))
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
    """Lay the weights of a model of transformers out as its attention turns them: in halves.

    Changes `q_proj` and `k_proj` in place, and norms between them and the rotation.

    Args:
        model: of a family whose attention turns halves, loaded from weights laid out otherwise.
        weights: how they are laid out now. `"halves"` undoes a repair that was none.

    Raises:
        ValueError: if regard does not know the model's attention, or its projections are not plain
            linear layers. Nothing is then changed.
    """
    move = pairs_to_halves if weights == "pairs" else halves_to_pairs
    moves = []
    for module in attention_modules(model).values():
        layer = attention_of(module)
        if not isinstance(layer.rope, Rotary):
            continue
        for name, heads in (("q", layer.num_heads), ("k", layer.num_kv_heads)):
            numbers_of(layer, f"{name}_proj")  # objects where they are not plain
            linear, norm = (layer.get_submodule(f"{name}_proj"), getattr(layer, f"{name}_norm"))
            moves += [(each, heads, layer.rope.dim) for each in linear.parameters()]
            if norm is not None:
                width = heads if layer.norm_width else 1
                moves += [(each, width, layer.rope.dim) for each in norm.parameters()]
    for parameter, heads, dim in moves:
        parameter.copy_(move(parameter, heads, rotary_dim=dim))


def _read_as(layer: Attention, pairing: Pairing) -> Attention:
    """The layer with its very weights, turning other channels together: another attention."""
    if isinstance(layer.rope, Rotary):
        layer.rope = replace(layer.rope, pairing=pairing)
    return layer
