"""install: the same model, the same weights, the same caches, with its attention run by regard.

Only `forward` of each attention module is rebound. Rotation uses the model's own cosines, and the
past lives in transformers' own caches, so `generate` works as before.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.attend import prepare
from regard.cache import Part
from regard.heads import merge_heads, split_heads
from regard.hf.binding import bind, is_bound, unbind
from regard.hf.families import Family, family_of
from regard.hf.layers import attention_modules
from regard.hf.visible import visible
from regard.masks import Causal, Mask, SlidingWindow, Span

READABLE = ("sdpa", "eager")  # the attn_implementations whose masks are tensors or None
PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "position_bias", "softcap", "s_aux", "indices")


@dataclass(frozen=True)
class InstalledLayer:
    """What runs in one layer: its shape, its window, and which backend reads it when."""

    name: str
    kind: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    prefill: str
    decode: str

    def __str__(self) -> str:
        window = "" if self.window is None else f", window {self.window:,}"
        heads = f"{self.kind} {self.num_heads} heads on {self.num_kv_heads} of {self.head_dim}"
        return f"{heads}{window}; prefill: {self.prefill}, decode: {self.decode}"


@dataclass(frozen=True)
class Installation:
    """Layer by layer, what `install` made of a model; `str` of it is for reading."""

    model: str
    layers: tuple[InstalledLayer, ...]

    def __str__(self) -> str:
        groups: dict[str, list[str]] = {}
        for layer in self.layers:
            groups.setdefault(str(layer), []).append(layer.name)
        lines = [f"{self.model}: {len(self.layers)} attention layers run on regard"]
        for text, names in groups.items():
            where = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)})"
            lines.append(f"  {where}: {text}")
        return "\n".join(lines)


def install(model: nn.Module) -> Installation:
    """Run the attention of a Llama-family model on regard. Installing twice is installing once.

    Classes, children, parameters and hooks stay; `uninstall` restores. Attention weights are not
    returned: `output_attentions=True` is refused, `regard.attention_weights` computes them.

    Raises:
        ValueError: if the model has attention that regard does not know, or reads masks that are
            not tensors (`attn_implementation` must be "sdpa" or "eager"). Nothing is then changed.
    """
    modules = attention_modules(model)
    for module in modules.values():
        implementation = getattr(module.config, "_attn_implementation", None)
        if implementation not in READABLE:
            raise ValueError(
                f"attn_implementation={implementation!r} hands out masks that regard does not "
                'read; call model.set_attn_implementation("sdpa") first'
            )
    layers = tuple(_describe(name, module) for name, module in modules.items())
    for module in modules.values():
        bind(module, _forward)
    return Installation(type(model).__name__, layers)


def uninstall(model: nn.Module) -> None:
    """Give every attention module back its own `forward`; does nothing where none was changed."""
    for module in model.modules():
        if is_bound(module):
            unbind(module)


def _forward(
    self: Any,
    hidden_states: Float[Tensor, "B L E"],
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Any = None,
    past_key_values: Any = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """What the attention module's own forward does, with `attend` in the middle."""
    _refuse(options)
    family = family_of(self)
    assert family is not None
    q, k, v = _project(self, family, hidden_states)
    q, k = rotate(q, *position_embeddings), rotate(k, *position_embeddings)
    if past_key_values is not None:
        k, v = past_key_values.update(k, v, self.layer_idx)
    mask, bias, span = visible(
        self,
        attention_mask,
        q.shape[2],
        k.shape[2],
        window=family.window_of(self),
        is_causal=is_causal,
    )
    dropout = self.attention_dropout if self.training else 0.0
    call = prepare(
        q, k, v, mask=mask, span=span, scale=self.scaling, score_bias=bias, dropout=dropout
    )
    out = call.run(q, (Part(0, k.shape[2], (k, v)),))
    return self.o_proj(merge_heads(out)), None


def rotate(
    x: Float[Tensor, "B H L D"], cos: Float[Tensor, "#B L D"], sin: Float[Tensor, "#B L D"]
) -> Float[Tensor, "B H L D"]:
    """Turn halves by the angles that the model computed, operation by operation as it does."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


def _project(module: Any, family: Family, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    projections = (module.q_proj, module.k_proj, module.v_proj)
    q, k, v = (split_heads(projection(x), module.head_dim) for projection in projections)
    return (module.q_norm(q), module.k_norm(k), v) if family.qk_norm else (q, k, v)


def _refuse(options: dict[str, Any]) -> None:
    for name in PACKED:
        if options.get(name) is not None:
            raise ValueError(
                f"{name}= would change the result and is not supported by regard.hf yet; "
                "uninstall(model) to run transformers' own attention"
            )
    if options.get("output_attentions"):
        raise ValueError(
            "output_attentions=True: weights are not kept; uninstall(model), or compute the rows "
            "you want with regard.attention_weights(q, k, heads=, queries=)"
        )


def _describe(name: str, module: Any) -> InstalledLayer:
    family = family_of(module)
    assert family is not None
    heads = module.q_proj.out_features // module.head_dim
    kv_heads = module.k_proj.out_features // module.head_dim
    kind = "MHA" if kv_heads == heads else "MQA" if kv_heads == 1 else "GQA"
    window = family.window_of(module)
    mask: Mask = Causal() if window is None else Causal() & SlidingWindow(window)
    weight = module.q_proj.weight

    def backend(span: Span) -> str:
        shape = (1, heads, span.num_queries, module.head_dim)
        q = weight.new_empty(1).expand(shape)  # one number: a call is made from shapes
        k = weight.new_empty(1).expand(1, kv_heads, span.num_keys, module.head_dim)
        return prepare(q.detach(), k, k, mask=mask, span=span).name

    prefill, decode = Span(0, 1024, 0, 1024), Span(1024, 1025, 0, 1025)
    with torch.no_grad():
        return InstalledLayer(
            name, kind, heads, kv_heads, module.head_dim, window, backend(prefill), backend(decode)
        )
