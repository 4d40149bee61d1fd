"""A case as a whole layer, by the modules of transformers, torch and x-transformers.

They hold the weights that regard's layer holds. A peer's cache is put back to the same length
before every step, at no cost worth measuring.
"""

from collections.abc import Callable
from typing import Any

import torch
from common import Cold
from decode_mla import Sizes, ours, paired, theirs
from problems import Contest, Run
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, StaticCache
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

from cases import Case
from regard import Causal, GroupedQueryAttention, KVCache, MultiHeadAttention, Rotary


def layer_contest(case: Case, *, cold: int) -> Contest:
    """Every module that can run a case, regard's first."""
    make: Callable[[Case, int], tuple[dict[str, Run], nn.Module, Cold]] = {
        "MLA layer": _latent,
        "layer decode": _decode,
        "layer prefill": _prefill,
        "layer without positions": _without_positions,
    }[case.kind]
    runs, layer, held = make(case, cold)
    weights = sum(weight.numel() for weight in layer.parameters())
    cells = case.length * case.keys - case.length * (case.length - 1) // 2
    width = 2 * (512 + 32) if case.latent else 2 * case.head_dim
    return Contest(runs, 2 * (weights * case.length + case.heads * cells * width), held)


def weights_nbytes(case: Case) -> int:
    """What a layer reads besides its cache."""
    hidden, of_keys = case.heads * case.head_dim, case.kv_heads * case.head_dim
    if case.latent:
        hidden = _sizes(case).hidden
        numbers = hidden * (case.heads * 320 + 576) + 512 * case.heads * 256
    else:
        numbers = 2 * hidden * (hidden + of_keys)
    return numbers * case.torch_dtype.itemsize


def _llama(case: Case) -> tuple[LlamaAttention, GroupedQueryAttention, Any, LlamaConfig]:
    config = LlamaConfig(
        hidden_size=case.heads * case.head_dim,
        num_attention_heads=case.heads,
        num_key_value_heads=case.kv_heads,
        head_dim=case.head_dim,
        num_hidden_layers=1,
        max_position_embeddings=1 << 17,
        attn_implementation="sdpa",
    )
    dtype = case.torch_dtype
    peer = LlamaAttention(config, 0).to(dtype).eval()
    layer = GroupedQueryAttention(
        config.hidden_size,
        case.heads,
        case.kv_heads,
        head_dim=case.head_dim,
        rope=Rotary(case.head_dim),
        mask=Causal(),
    )
    layer.load_state_dict(peer.state_dict())
    return peer, layer.to(dtype).eval(), LlamaRotaryEmbedding(config), config


def _decode(case: Case, cold: int) -> tuple[dict[str, Run], nn.Module, Cold]:
    """One step with one more token than `past`, from each library's own caches."""
    peer, layer, rotary, config = _llama(case)
    past, shape = case.keys - 1, (1, case.kv_heads, case.keys - 1, case.head_dim)
    new = torch.randn(1, 1, config.hidden_size).to(case.torch_dtype)
    angles = rotary(new, torch.tensor([[past]]))

    def held() -> tuple[KVCache, DynamicCache, StaticCache, Tensor, Tensor]:
        k, v = torch.randn(2, *shape).to(case.torch_dtype).unbind()
        mine, grows = KVCache(), DynamicCache()
        static = StaticCache(config=config, max_cache_len=case.keys)
        _fill(mine, k, v)
        grows.update(k, v, 0)
        static.update(k, v, 0)
        return mine, grows, static, k, v

    caches = Cold(held, case.nbytes(), cold)

    def regard() -> Tensor:
        cache = caches()[0]
        cache.truncate(past)
        return layer(new, cache=cache)

    def transformers() -> Tensor:
        _, cache, _, k, v = caches()
        cache.layers[0].keys, cache.layers[0].values = k, v
        return peer(new, angles, None, past_key_values=cache)[0]

    def transformers_static() -> Tensor:
        cache = caches()[2]
        cache.layers[0].cumulative_length.fill_(past)
        return peer(new, angles, None, past_key_values=cache)[0]

    runs = {
        "regard": regard,
        "transformers": transformers,
        "transformers, static cache": transformers_static,
    }
    return runs, layer, caches


def _fill(cache: KVCache, *streams: Tensor) -> None:
    """A cache of these with room for one more token: growing is not part of the step."""
    length = streams[0].shape[2]
    cache.update(*(torch.cat([each, each[:, :, :1]], dim=2) for each in streams))
    cache.truncate(length)


def _inputs(case: Case, hidden: int) -> Cold:
    """Tokens for a prefill; its keys are computed, so no buffers need to be cold."""
    x = torch.randn(case.batch, case.keys, hidden).to(case.torch_dtype)
    return Cold(lambda: x, 1, 1)


def _prefill(case: Case, cold: int) -> tuple[dict[str, Run], nn.Module, Cold]:
    peer, layer, rotary, config = _llama(case)
    x = _inputs(case, config.hidden_size)
    angles = rotary(x(), torch.arange(case.keys)[None])
    runs: dict[str, Run] = {
        "regard": lambda: layer(x()),
        "transformers": lambda: peer(x(), angles, None)[0],
    }
    return runs, layer, x


def _without_positions(case: Case, cold: int) -> tuple[dict[str, Run], nn.Module, Cold]:
    """Torch's own module: no rotation, and keys for every head."""
    hidden = case.heads * case.head_dim
    layer = MultiHeadAttention(hidden, case.heads, mask=Causal()).to(case.torch_dtype).eval()
    peer = nn.MultiheadAttention(hidden, case.heads, bias=False, batch_first=True)
    names = ("q_proj", "k_proj", "v_proj")
    weights = [layer.get_submodule(name).weight for name in names]
    peer = peer.to(case.torch_dtype).eval()
    peer.in_proj_weight.data.copy_(torch.cat([w.detach() for w in weights]))  # type: ignore[arg-type]
    peer.out_proj.weight.data.copy_(layer.o_proj.weight.detach())
    hidden_cells = torch.ones(case.keys, case.keys, dtype=torch.bool).triu(1)
    x = _inputs(case, hidden)

    def torchs() -> Tensor:
        given = x()
        return peer(
            given, given, given, need_weights=False, attn_mask=hidden_cells, is_causal=True
        )[0]

    runs: dict[str, Run] = {"regard": lambda: layer(x()), "nn.MultiheadAttention": torchs}
    other = _x_transformers(layer, case)
    if other is not None:
        runs["x-transformers"] = lambda: other(x())
    return runs, layer, x


def _x_transformers(layer: nn.Module, case: Case) -> nn.Module | None:
    try:
        from x_transformers.x_transformers import Attention
    except ImportError:  # not installed, or incomplete
        return None
    hidden = case.heads * case.head_dim
    other = Attention(dim=hidden, dim_head=case.head_dim, heads=case.heads, causal=True, flash=True)
    for mine, name in zip(("q", "k", "v", "o"), ("q", "k", "v", "out"), strict=True):
        weight = layer.get_submodule(f"{mine}_proj").weight
        other.get_submodule(f"to_{name}").weight.data.copy_(weight.detach())  # type: ignore[arg-type]
    return other.to(case.torch_dtype).eval()


def _sizes(case: Case) -> Sizes:
    return Sizes(hidden=min(2048, case.heads * case.head_dim), heads=case.heads)


def _latent(case: Case, cold: int) -> tuple[dict[str, Run], nn.Module, Cold]:
    """One step of a whole MLA layer; both libraries cache the latent."""
    dtype, past, sizes = case.torch_dtype, case.keys - 1, _sizes(case)
    peer, rotary = theirs(dtype, sizes)
    layer = ours(peer, dtype, sizes)
    new = torch.randn(1, 1, sizes.hidden).to(dtype)
    angles = rotary(new, torch.tensor([[past]]))

    def held() -> tuple[KVCache, DynamicCache, Tensor, Tensor]:
        latent = torch.randn(1, 1, past, sizes.rank).to(dtype)
        k_rope = torch.randn(1, 1, past, sizes.rope).to(dtype)
        mine, cache = KVCache(), DynamicCache()
        _fill(mine, torch.cat([latent, paired(k_rope)], dim=-1))
        cache.update(latent, k_rope, 0)
        return mine, cache, latent, k_rope

    caches = Cold(held, case.nbytes(), cold)

    def regard() -> Tensor:
        cache = caches()[0]
        cache.truncate(past)
        return layer(new, cache=cache)

    def transformers() -> Tensor:
        _, cache, latent, k_rope = caches()
        cache.layers[0].keys, cache.layers[0].values = latent, k_rope
        return peer(new, angles, None, past_key_values=cache)[0]

    return {"regard": regard, "transformers": transformers}, layer, caches
