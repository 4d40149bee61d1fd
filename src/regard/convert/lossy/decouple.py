"""GQA as DeepSeek's MLA: a few shared components turn with position, the rest goes into a latent.

MLA can be absorbed only if what its latent holds does not turn. So the keys are first written in a
basis that turns as they do: for every frequency the heads' complex numbers are mixed until they are
uncorrelated over the calibration text. Mixing within a frequency commutes with rotation, and the
queries undo it, so nothing is lost yet. Then the components whose turning matters most are kept as
the shared rotary key, and the others stop turning: each is multiplied by what its turning is on
average, and joins the values in the latent.

The outline is TransMLA's (arXiv:2502.07864); the mixing is complex, not real, and components are
chosen by energy times what is lost if they rest, not by their rank in the mixing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from regard.convert.linear import linear_of, refuse_unheld, rows_of
from regard.convert.lossy.balance import gain_of
from regard.convert.lossy.complex_rope import join_turning, split_turning
from regard.convert.lossy.principal import directions_of
from regard.convert.lossy.selection import RULES, Components
from regard.layers.attention import Attention
from regard.layers.latent import MultiHeadLatentAttention
from regard.rope import Rotary
from regard.rope.scaling import Frequencies


@dataclass(frozen=True, eq=False)
class Decoupled:
    """A layer in DeepSeek's form, and what was lost: shares of energy, 0.01 is 1 %.

    `stilled` is what the scores lose because components stop turning, by the estimate that chose
    them; `lost` is what keys and values lose in the latent.
    """

    layer: MultiHeadLatentAttention
    stilled: float
    lost: float


def decouple(
    layer: Attention,
    *,
    rank: int,
    rope_dim: int,
    covariance: Float[Tensor, "E E"],
    counts: Sequence[int] | None = None,
    rule: Literal["harm", "TransMLA", "MHA2MLA"] = "harm",
) -> Decoupled:
    """The attention as MLA with a latent of `rank` and a rotary key of `rope_dim` channels.

    Args:
        layer: MHA, GQA or MQA with a rotary embedding.
        rank: width of the latent; `rank + rope_dim` numbers a token are cached.
        rope_dim: channels of the rotary key, even.
        covariance: `E[x x^T]` of the layer's inputs over some text (`watch`, `Moments`).
        counts: how many components of each frequency turn, `rope_dim / 2` in all, so that several
            layers share one list (`common_counts`); the layer's own best if None.
        rule: how components are selected; the papers' are here to compare with.

    Raises:
        ValueError: if the layer has no plain rotary embedding, norms its keys, gates or has sinks,
            or the sizes do not fit.
    """
    refuse_unheld(layer, "DeepSeek's MLA")
    found = RULES[rule].components(layer, covariance)
    chosen = _chosen(found, rope_dim, counts)
    asking, still_asking = _queries(layer, found, chosen)
    rotary, resting = _divide(layer, found, chosen)
    gain = gain_of(rotary, asking.transpose(0, 1).flatten(1))
    stacked = torch.cat([resting, rows_of(layer, "v_proj")])
    if not 1 <= rank <= min(stacked.shape):
        raise ValueError(f"rank={rank} is not in 1..{min(stacked.shape)}, keys and values together")
    up, down, lost = directions_of(stacked[:, :-1], RULES[rule].metric(covariance), rank)
    queries = _beside(still_asking, asking / gain[:, None])
    shared = _pair(gain[:, None] * rotary, 0)
    made = _build(layer, queries=queries, rotary=shared, down=down, up=up, bias=stacked[:, -1])
    made.rope = Rotary(rope_dim, scaling=Frequencies(_frequencies(found, chosen)))
    stilled = float(found.harm[~chosen].sum() / found.harm.sum())
    return Decoupled(made, stilled, lost)


def common_counts(harms: Sequence[Float64[Tensor, "freq heads"]], rope_dim: int) -> tuple[int, ...]:
    """How many components of each frequency should turn in all layers alike.

    Each layer's harm counts as a share of its own, so that loud layers do not decide alone.
    """
    shared = sum(harm / harm.sum() for harm in harms)
    assert isinstance(shared, Tensor)
    best = torch.zeros_like(shared).flatten().index_fill(0, _largest(shared, rope_dim), 1.0)
    return tuple(best.unflatten(0, shared.shape).sum(1).int().tolist())


def _largest(harm: Float64[Tensor, "freq heads"], rope_dim: int) -> Tensor:
    if rope_dim % 2 or not 2 <= rope_dim <= 2 * harm.numel():
        raise ValueError(f"rope_dim={rope_dim} is not an even number in 2..{2 * harm.numel()}")
    return harm.flatten().topk(rope_dim // 2).indices


def _chosen(found: Components, rope_dim: int, counts: Sequence[int] | None) -> Tensor:
    """Which components turn: `[freq, heads]`, bool."""
    if counts is None:
        best = torch.zeros_like(found.score, dtype=torch.bool).flatten()
        return best.index_fill(0, _largest(found.score, rope_dim), True).view_as(found.harm)
    if len(counts) != len(found.frequencies) or 2 * sum(counts) != rope_dim:
        raise ValueError(
            f"counts={tuple(counts)} must have one number for each of {len(found.frequencies)} "
            f"frequencies, and add up to rope_dim / 2 = {rope_dim // 2}"
        )
    order = torch.arange(found.harm.shape[1])  # within a frequency, the most harmful come first
    return order < torch.tensor(counts)[:, None]


def _divide(layer: Attention, found: Components, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of the shared rotary key, and those of every head's keys that no longer turn."""
    assert isinstance(layer.rope, Rotary)
    rotary = found.rows[chosen]
    _, resting = split_turning(rows_of(layer, "k_proj"), layer.head_dim, layer.rope)
    still = found.mixing @ (found.rows * ~chosen[..., None]) * found.average[:, None, None]
    return rotary, join_turning(still.transpose(0, 1), resting, layer.rope)


def _queries(layer: Attention, found: Components, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Every head's queries for the shared rotary key, `[heads, turning, E]`, and for keys at rest,
    `[heads, D, E]`."""
    rope = layer.rope
    assert isinstance(rope, Rotary)
    turning, resting = split_turning(rows_of(layer, "q_proj"), layer.head_dim, rope)
    turning = turning * rope.attention_factor**2  # of cosines and sines, on both sides
    still = join_turning(turning, resting, rope).unflatten(0, (layer.num_heads, -1))
    copies = layer.num_heads // layer.num_kv_heads
    mixed = found.mixing.repeat_interleave(copies, dim=1).conj()  # [freq, query heads, heads]
    asking = (mixed[..., None] * turning.transpose(0, 1)[:, :, None]).transpose(1, 2)[chosen]
    return asking.transpose(0, 1), still


def _beside(still: Tensor, asking: Tensor) -> Float64[Tensor, "R E"]:
    """The queries of every head, at rest and turning, head after head."""
    return torch.cat([still, _pair(asking, 1)], dim=1).flatten(0, 1)


def _pair(turning: Tensor, axis: int) -> Tensor:
    """Complex rows as real ones, and then imaginary ones."""
    return torch.cat([turning.real, turning.imag], dim=axis)


def _frequencies(found: Components, chosen: Tensor) -> tuple[float, ...]:
    return tuple(found.frequencies[:, None].expand_as(chosen)[chosen].tolist())


def _build(
    layer: Attention, *, queries: Tensor, rotary: Tensor, down: Tensor, up: Tensor, bias: Tensor
) -> MultiHeadLatentAttention:
    copies, dim = layer.num_heads // layer.num_kv_heads, layer.head_dim

    def each_head(rows: Tensor) -> Tensor:
        """Keys, then values, of one query head after the other."""
        heads = rows.unflatten(0, (2, layer.num_kv_heads, dim)).repeat_interleave(copies, dim=1)
        return heads.transpose(0, 1).flatten(0, 2)

    first = torch.cat([torch.cat([down, down.new_zeros(len(down), 1)], 1), rotary])
    children = {
        "q_proj": (queries[:, :-1], queries[:, -1]),
        "kv_a_proj_with_mqa": (first[:, :-1], first[:, -1]),
        "kv_b_proj": (each_head(up), each_head(bias)),
    }
    biased = {name for name, (_, bias) in children.items() if bias.any()}
    output = layer.o_proj
    with torch.device("meta"):  # all of it is replaced
        made = MultiHeadLatentAttention(
            layer.hidden_size,
            layer.num_heads,
            kv_lora_rank=len(down),
            qk_nope_head_dim=dim,
            qk_rope_head_dim=len(rotary),
            v_head_dim=dim,
            bias=biased | ({"o_proj"} if output.bias is not None else set()),
            latent_norm=False,
            rope=Rotary(len(rotary)),
            mask=layer.mask,
            scale=layer.scale,
            score_bias=layer.score_bias,
            dropout=layer.dropout,
            backend=layer.backend,
            precision=layer.precision,
        )
    dtype = layer.q_proj.weight.dtype
    for name, (weight, offset) in children.items():
        numbers = weight.to(dtype).contiguous()
        setattr(made, name, linear_of(numbers, offset.to(dtype) if name in biased else None))
    made.o_proj = output  # type: ignore[assignment]
    return made.train(layer.training)
