"""GQA as DeepSeek's MLA: a few shared key components keep RoPE, the others go into a latent.

MLA can be absorbed only if keys that come from its latent are not rotated. So keys are first
written in a basis that commutes with rotation: at every frequency, the heads' complex numbers are
mixed into components that are uncorrelated over the calibration text. The queries are mixed
inversely, so nothing is lost yet. The components for which rotation matters most become the shared
rotary key. The others are not rotated any more: each is multiplied by the mean of its rotation over
distances, and joins the values in the latent. Distances count by how much the layer's outputs
depend on scores over them, measured on text (`reactions`): attention to near tokens and to far ones
depends on different frequencies, and each head has its own distances.

The outline is TransMLA's (arXiv:2502.07864); here the mixing is complex, not real, and components
are chosen by the energy that is lost without rotation, not by their order within a frequency.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Complex128, Float, Float64
from torch import Tensor

from regard.convert.linear import (
    common_arguments,
    linear_of,
    rebuilt,
    refuse_unsupported,
    rows_of,
    weight_and_bias,
)
from regard.convert.lossy.directions import (
    Lossy,
    directions_of,
    energy_of,
    frequencies_of,
    gain_of,
    join_rotary,
    split_rotary,
)
from regard.convert.lossy.sensitivity import sensitivity
from regard.layers.attention import Attention
from regard.layers.latent import MultiHeadLatentAttention
from regard.rope import Rotary
from regard.rope.scaling import Frequencies

DISTANCES = 512  # tokens between query and key over which rotation is averaged without text
WINDOWS = 8  # of text: reactions are sums over millions of scores, and differ little after a few
LEAST = 1e-12  # of the mean weight of a key: its least weight, so that none is zero


@dataclass(frozen=True, eq=False)
class Components:
    """The rotated keys of all heads in uncorrelated complex components, `heads` per frequency.

    Head g's key at frequency f is the sum over c of `mixing[f, g, c] * rows[f, c] @ x`.

    Attributes:
        rows: of the components, `[freq, heads, E]`.
        mixing: `[freq, heads, heads]`.
        harm: `[freq, heads]`, the energy that the scores of all heads lose if a component is not
            rotated.
        average: `[freq, heads]`, the best constant factor in place of a head's rotation; heads may
            be 1.
        frequencies: `[freq]`, radians per position.
    """

    rows: Complex128[Tensor, "freq heads E"]
    mixing: Complex128[Tensor, "freq heads heads"]
    harm: Float64[Tensor, "freq heads"]
    average: Complex128[Tensor, "freq #heads"]
    frequencies: Float64[Tensor, " freq"]


def components(
    layer: Attention,
    covariance: Float[Tensor, "E E"],
    inputs: Float[Tensor, "*N L E"] | None = None,
) -> Components:
    """The keys of a layer in components that are uncorrelated over the calibration text.

    A component's harm is the energy of the scores that no constant in place of its rotation
    preserves, weighted by the `reactions` over `inputs`; without them, by the energy of queries,
    over distances of up to 512 tokens alike.

    Raises:
        ValueError: if the layer has no rotary embedding, or its frequencies change with the length.
    """
    keys, frequencies = rotary_keys(layer)
    if inputs is None:
        average = average_rotation(frequencies)[:, None]
        energy = query_energy(layer, covariance).mT
    else:
        found = reactions(layer, inputs)
        turns = rotation(frequencies, torch.arange(found.shape[-1], device=found.device))
        energy = found.sum(-1).mT.clamp_min(1e-300)
        average = torch.einsum("gfd, df -> fg", found.to(turns.dtype), turns) / energy
    weight = energy * (1.0 - average.abs().square())
    weight = (weight / weight.mean()).nan_to_num(1.0).clamp_min(LEAST).sqrt()[..., None]
    weighted = weight * keys  # [freq, heads, E1]
    harm, basis = torch.linalg.eigh(energy_of(weighted, covariance))
    harm, basis = harm.flip(-1).clamp_min(0.0), basis.flip(-1)
    return Components(basis.mH @ weighted, basis / weight, harm, average, frequencies)


def reactions(layer: Attention, inputs: Float[Tensor, "*N L E"]) -> Float64[Tensor, "heads freq L"]:
    """For each key head, frequency and distance, how much outputs react to an error of a key.

    Sums of `|q|^2 g^2` over pairs of tokens: g is the gradient of the outputs' sum with random
    signs by a score, and q the query's complex number at that frequency.

    Args:
        layer: MHA, GQA or MQA with a rotary embedding.
        inputs: of the layer over some text; some windows of it are enough.
    """
    assert isinstance(layer.rope, Rotary)
    windows = inputs.reshape(-1, *inputs.shape[-2:])
    windows = windows[:: max(1, len(windows) // WINDOWS)][:WINDOWS]
    chance, places = torch.Generator("cpu").manual_seed(0), torch.arange(windows.shape[1])
    before = ((places[:, None] - places) % len(places)).to(windows.device)  # key, by distance
    found: Tensor = windows.new_zeros(())
    for window in windows:
        signs = torch.randint(2, window.shape, generator=chance, device="cpu").to(window) * 2 - 1
        slopes = score_gradients(layer, window, signs).square().tril()  # not of later keys
        rows = layer.q_proj(window).mT.double()
        queries, _ = split_rotary(rows, layer.head_dim, layer.rope)
        moved = slopes.gather(-1, before.expand_as(slopes)).double()
        found = found + queries.abs().square() @ moved
    return found.unflatten(0, (layer.num_kv_heads, -1)).sum(1)


def score_gradients(
    layer: Attention, window: Float[Tensor, "L E"], by: Float[Tensor, "L E"]
) -> Float[Tensor, "H L L"]:
    """The gradient of `(by * outputs).sum()` by the scores of each head, which have no softcap."""
    copies = layer.num_heads // layer.num_kv_heads
    read = (by @ weight_and_bias(layer, "o_proj")[0]).unflatten(-1, (layer.num_heads, -1))
    values = layer.v_proj(window).unflatten(-1, (layer.num_kv_heads, -1)).transpose(0, 1)
    gains = read.transpose(0, 1) @ values.repeat_interleave(copies, dim=0).mT
    weights = layer.weights(window[None])[0]
    return weights * (gains - (weights * gains).sum(-1, keepdim=True))


def rotary_keys(
    layer: Attention,
) -> tuple[Complex128[Tensor, "freq heads E1"], Float64[Tensor, " freq"]]:
    """The rows of the rotated channels of the keys, and their frequencies."""
    rope = layer.rope
    if not isinstance(rope, Rotary):
        raise ValueError(f"rope={rope} rotates nothing, so no component can keep it; use latentize")
    rotary, _ = split_rotary(rows_of(layer, "k_proj"), layer.head_dim, rope)
    return rotary.transpose(0, 1), frequencies_of(rope).to(rotary.device)


def query_energy(layer: Attention, covariance: Tensor) -> Float64[Tensor, "heads freq"]:
    """The energy of the queries that read each key head, at each frequency."""
    assert isinstance(layer.rope, Rotary)
    queries, _ = split_rotary(rows_of(layer, "q_proj"), layer.head_dim, layer.rope)
    energy = energy_of(queries[..., None, :], covariance).real[..., 0, 0]
    return energy.unflatten(0, (layer.num_kv_heads, -1)).sum(1)


def rotation(frequencies: Tensor, distances: Tensor) -> Complex128[Tensor, "distances freq"]:
    """The rotation between a query and a key at each of these distances."""
    angles = distances[:, None].double() * frequencies
    return torch.polar(torch.ones_like(angles), -angles)


def average_rotation(frequencies: Tensor) -> Complex128[Tensor, " freq"]:
    """The mean of the rotation over distances: the best constant in its place."""
    return rotation(frequencies, torch.arange(1, DISTANCES + 1).to(frequencies.device)).mean(0)


def common_counts(harms: Sequence[Float64[Tensor, "freq heads"]], rope_dim: int) -> tuple[int, ...]:
    """How many components of each frequency to rotate, equally in all layers.

    Each layer's harm counts as a share of its sum, since layers differ in energy.

    Examples:
        >>> harm = torch.tensor([[9.0, 4.0], [3.0, 1.0]]).double()  # [frequencies, heads]
        >>> common_counts([harm, harm], rope_dim=6)
        (2, 1)
    """
    shared = sum(harm / harm.sum() for harm in harms)
    assert isinstance(shared, Tensor)
    return tuple(largest(shared, rope_dim).sum(1).tolist())


def decouple(
    layer: Attention,
    *,
    rank: int,
    rope_dim: int,
    covariance: Float[Tensor, "E E"],
    counts: Sequence[int] | None = None,
    inputs: Float[Tensor, "*N L E"] | None = None,
    gradients: Float[Tensor, "T R"] | None = None,
) -> Lossy[MultiHeadLatentAttention]:
    """The attention as DeepSeek's MLA: a latent of `rank`, a rotary key of `rope_dim` channels.

    The outline is TransMLA's (Meng et al. 2025, arXiv:2502.07864), with complex mixing.

    Args:
        layer: MHA, GQA or MQA with a rotary embedding.
        rank: width of the latent; `rank + rope_dim` elements a token are cached.
        rope_dim: channels of the rotary key, even.
        covariance: `E[x x^T]` of the layer's inputs over some text (`watch`, `Moments`).
        counts: how many components of each frequency are rotated, `rope_dim / 2` in all, so that
            several layers share one list; those with the most harm if None.
        inputs: windows of the inputs themselves. They improve the fit as in `latentize`, and the
            choice of components: distances count by what outputs depend on.
        gradients: as `latentize` takes them.

    Raises:
        ValueError: if the layer has no plain rotary embedding, norms its keys, has a gate or sinks,
            or the sizes do not fit.

    Examples:
        >>> import torch
        >>> from regard import GroupedQueryAttention, Rotary
        >>> from regard.convert import decouple, watch
        >>> gqa, x = GroupedQueryAttention(16, 4, 2, rope=Rotary(4)), torch.randn(1, 64, 16)
        >>> with watch([gqa]) as (moments,):
        ...     _ = gqa(x)
        >>> mla = decouple(gqa, rank=16, rope_dim=8, covariance=moments.covariance).layer
        >>> mla.kind, torch.allclose(mla(x), gqa(x), atol=1e-5)  # nothing is left out at this size
        ('MLA', True)
    """
    refuse_unsupported(layer, "DeepSeek's MLA")
    found = components(layer, covariance, inputs)
    if counts is None:
        rotated = largest(found.harm, rope_dim)
    else:
        rotated = _by_counts(found, rope_dim, counts)
    metric = None
    if inputs is not None:
        metric, covariance = sensitivity(layer, inputs, gradients)
    return from_components(layer, found, rotated, rank=rank, covariance=covariance, metric=metric)


def largest(score: Float64[Tensor, "freq heads"], rope_dim: int) -> Tensor:
    """The `rope_dim / 2` components with the largest score, as a boolean mask `[freq, heads]`."""
    if rope_dim % 2 or not 2 <= rope_dim <= 2 * score.numel():
        raise ValueError(f"rope_dim={rope_dim} is not an even number in 2..{2 * score.numel()}")
    best = score.flatten().topk(rope_dim // 2).indices
    rotated = torch.zeros_like(score, dtype=torch.bool).flatten()
    return rotated.index_fill(0, best, True).view_as(score)


def _by_counts(found: Components, rope_dim: int, counts: Sequence[int]) -> Tensor:
    if len(counts) != len(found.frequencies) or 2 * sum(counts) != rope_dim:
        raise ValueError(
            f"counts={tuple(counts)} must have one number for each of {len(found.frequencies)} "
            f"frequencies, and add up to rope_dim / 2 = {rope_dim // 2}"
        )
    wanted = torch.tensor(counts, device=found.harm.device)
    order = torch.arange(found.harm.shape[1], device=wanted.device)  # the most harmful come first
    return order < wanted[:, None]


def from_components(
    layer: Attention,
    found: Components,
    rotated: Tensor,
    *,
    rank: int,
    covariance: Tensor,
    metric: Tensor | None = None,
) -> Lossy[MultiHeadLatentAttention]:
    """MLA whose rotary key is the components in the boolean mask `rotated`, `[freq, heads]`.

    The latent holds the directions of the rest with the most energy under `covariance`, where
    errors count by the `metric`.
    """
    rotary_queries, plain_queries = _queries(layer, found, rotated)
    rotary, plain = found.rows[rotated], _plain_keys(layer, found, rotated)
    gain = gain_of(rotary, rotary_queries.transpose(0, 1).flatten(1))
    stacked = torch.cat([plain, rows_of(layer, "v_proj")])
    if not 1 <= rank <= min(stacked.shape):
        raise ValueError(f"rank={rank} is not in 1..{min(stacked.shape)}, keys and values together")
    up, down, lost = directions_of(stacked[:, :-1], covariance, rank, metric)
    paired = _real(rotary_queries / gain[:, None], 1)
    queries = torch.cat([plain_queries, paired], dim=1).flatten(0, 1)
    shared = _real(gain[:, None] * rotary, 0)
    frequencies = found.frequencies[:, None].expand_as(rotated)[rotated]
    rope = Rotary(len(shared), scaling=Frequencies(tuple(frequencies.tolist())))
    made = _build(
        layer, rope, queries=queries, rotary=shared, down=down, up=up, bias=stacked[:, -1]
    )
    return Lossy(made, lost, float(found.harm[~rotated].sum() / found.harm.sum()))


def _plain_keys(layer: Attention, found: Components, rotated: Tensor) -> Tensor:
    """The rows of every head's keys without the rotated components."""
    assert isinstance(layer.rope, Rotary)
    _, plain = split_rotary(rows_of(layer, "k_proj"), layer.head_dim, layer.rope)
    mixed = found.mixing @ (found.rows * ~rotated[..., None]) * found.average[..., None]
    return join_rotary(mixed.transpose(0, 1), plain, layer.rope)


def _queries(layer: Attention, found: Components, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """Every head's queries for the shared rotary key, `[heads, rotated, E]`, and for keys without
    rotation, `[heads, D, E]`."""
    rope = layer.rope
    assert isinstance(rope, Rotary)
    rotary, plain = split_rotary(rows_of(layer, "q_proj"), layer.head_dim, rope)
    rotary = rotary * rope.attention_factor**2  # of cosines and sines, for queries and keys
    unrotated = join_rotary(rotary, plain, rope).unflatten(0, (layer.num_heads, -1))
    copies = layer.num_heads // layer.num_kv_heads
    mixed = found.mixing.repeat_interleave(copies, dim=1).conj()  # [freq, query heads, heads]
    products = mixed[..., None] * rotary.transpose(0, 1)[:, :, None]
    return products.transpose(1, 2)[rotated].transpose(0, 1), unrotated


def _real(rows: Tensor, axis: int) -> Tensor:
    """Complex rows as real ones: real parts, then imaginary parts."""
    return torch.cat([rows.real, rows.imag], dim=axis)


def _build(
    layer: Attention,
    rope: Rotary,
    *,
    queries: Tensor,
    rotary: Tensor,
    down: Tensor,
    up: Tensor,
    bias: Tensor,
) -> MultiHeadLatentAttention:
    copies, dim = layer.num_heads // layer.num_kv_heads, layer.head_dim

    def each_head(rows: Tensor) -> Tensor:
        """Keys, then values, of one query head after the other."""
        heads = rows.unflatten(0, (2, layer.num_kv_heads, dim)).repeat_interleave(copies, dim=1)
        return heads.transpose(0, 1).flatten(0, 2)

    first = torch.cat([torch.cat([down, down.new_zeros(len(down), 1)], 1), rotary])
    projections = {
        "q_proj": (queries[:, :-1], queries[:, -1]),
        "kv_a_proj_with_mqa": (first[:, :-1], first[:, -1]),
        "kv_b_proj": (each_head(up), each_head(bias)),
    }
    dtype = layer.q_proj.weight.dtype
    children = {
        name: linear_of(weight.to(dtype).contiguous(), offset.to(dtype) if offset.any() else None)
        for name, (weight, offset) in projections.items()
    } | {"o_proj": layer.o_proj}
    arguments = common_arguments(layer) | {
        "kv_lora_rank": len(down),
        "qk_nope_head_dim": dim,
        "qk_rope_head_dim": len(rotary),
        "v_head_dim": dim,
        "bias": {n for n, child in children.items() if getattr(child, "bias", None) is not None},
        "latent_norm": False,
        "rope": rope,
    }
    return rebuilt(MultiHeadLatentAttention, arguments, children).train(layer.training)
