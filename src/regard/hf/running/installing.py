"""install: the same model, the same weights, the same caches, with its attention run by regard.

Of each attention module, only `forward` is replaced, and `precision` is set. Rotation uses the
model's own angles; keys and values are in transformers' own caches or in one of `regard.hf.cache`,
so `generate` works as before.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import nn

from regard.hf.families.finding import Found, calls_the_interface, find, unknown_attention
from regard.hf.families.recognising import family_of, known_family, nearest
from regard.hf.families.table import Family, is_placed
from regard.hf.packages import check_version
from regard.hf.running import heads, latent, registering
from regard.hf.running.binding import bind, is_patched, method, replace, restore
from regard.hf.running.decoder_layers import bind_layers
from regard.hf.running.decoder_models import bind_models
from regard.hf.running.probing import disagreement
from regard.hf.running.products import bind_linear
from regard.layers.forms.tied_kv import TiedKeys
from regard.layers.latent_forms import Absorbed, choose_form
from regard.layers.query_scale import UNSCALED
from regard.masks import Span
from regard.matrices import MOST_ROWS
from regard.ops.attend import prepare
from regard.ops.check import check_options
from regard.words import counted

READABLE = ("sdpa", "eager", "regard")  # the attn_implementations whose masks are tensors or None
NO_WAY = "it does not go through transformers' AttentionInterface, so regard cannot run it"
PREFILL, DECODE = Span(0, 1024, 0, 1024), Span(1024, 1025, 0, 1025)


@dataclass(frozen=True)
class InstalledLayer:
    """One layer: its shape, its rules, and the backends that run its prefill and its decoding.

    Attributes:
        name: the module's name in the model.
        kind: `"MHA"`, `"GQA"`, `"MQA"` or `"MLA"`.
        num_heads: query heads.
        num_kv_heads: heads that are cached.
        head_dim: their size.
        window: the sliding window, or None.
        rules: what the layer does to its scores, such as `"softcap 50"`.
        prefill: the backend for 1,024 queries.
        decode: the backend for one query after 1,024 keys.

    Examples:
        >>> from regard.hf import InstalledLayer
        >>> print(InstalledLayer("layers.0", "GQA", 9, 3, 64, None, (), "tiled", "fused"))
        GQA 9 heads on 3 of 64; prefill: tiled, decode: fused
    """

    name: str
    kind: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    rules: tuple[str, ...]
    prefill: str
    decode: str

    def __str__(self) -> str:
        heads = f"{self.kind} {self.num_heads} heads on {self.num_kv_heads} of {self.head_dim}"
        rules = "".join(f", {rule}" for rule in self.rules)
        return f"{heads}{rules}; prefill: {self.prefill}, decode: {self.decode}"


@dataclass(frozen=True)
class Installation:
    """How regard runs each layer of a model; `str` of it is for reading.

    Attributes:
        model: the name of the model's class.
        layers: the attention layers that run on regard.
        left_alone: the names of other attention modules, and why regard does not run them.
        called: the names of attention modules that project and rotate in their own way and call
            regard for the attention alone, and the first difference from a known class.
        linear: linear layers that multiply few tokens by compiled code.
        decoder_layers: decoder layers of Llama's form that run few tokens by compiled code.

    Examples:
        >>> from regard.hf import Installation, InstalledLayer
        >>> layer = InstalledLayer("layers.0", "GQA", 9, 3, 64, None, (), "tiled", "fused")
        >>> print(Installation("LlamaForCausalLM", (layer,), {}))
        LlamaForCausalLM: 1 attention layer runs on regard
          layers.0: GQA 9 heads on 3 of 64; prefill: tiled, decode: fused
    """

    model: str
    layers: tuple[InstalledLayer, ...]
    left_alone: dict[str, str]
    called: dict[str, str] = field(default_factory=dict)
    linear: int = 0
    decoder_layers: int = 0

    def __str__(self) -> str:
        groups: dict[str, list[str]] = {}
        for layer in self.layers:
            groups.setdefault(str(layer), []).append(layer.name)
        for name, reason in self.called.items():
            groups.setdefault(f"its own forward, which calls regard; {reason}", []).append(name)
        for name, reason in self.left_alone.items():
            groups.setdefault(f"left alone: {reason}", []).append(name)
        count = len(self.layers) + len(self.called)
        run = "runs" if count == 1 else "run"
        lines = [f"{self.model}: {counted(count, 'attention layer')} {run} on regard"]
        for text, names in groups.items():
            where = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)})"
            lines.append(f"  {where}: {text}")
        if self.linear:
            what = counted(self.linear, "linear layer")
            lines.append(f"  {what} on a CPU: up to {MOST_ROWS} tokens by compiled code")
        if self.decoder_layers:
            what = counted(self.decoder_layers, "decoder layer")
            lines.append(f"  {what} on a CPU: few tokens by compiled code")
        return "\n".join(lines)


def install(model: nn.Module, *, precision: str = "strict", linear: bool = True) -> Installation:
    """Run the attention of a transformers model on regard. Installing twice is installing once.

    Decoding on a CPU spends most of its time reading the weights of linear layers. So `linear`
    layers of a model on a CPU multiply up to 8 tokens by compiled code, which reads each weight
    once, as one stream, where nothing wants gradients. In half precision on a processor with AVX2
    alone, more tokens are multiplied in float32, since torch has no quick kernels for them there.

    Classes, children, parameters and hooks stay, those of accelerate too; `uninstall` restores.
    Attention of an unknown family, or with a forward that was set on the module, runs by its own
    forward, and the report names it. `output_attentions=True` works under every implementation:
    weights are computed only then.

    Args:
        model: one with attention of a known family.
        precision: of `attend`: the attribute `precision` of every attention module until
            `uninstall`. `"fast"` keeps scores and weights in bfloat16 where hidden states are, on
            CPUs.
        linear: whether the plain layers of `nn.Linear` of the whole model do so. Sums are float32;
            up to 8 tokens, they have the same bits whatever the number of tokens.

    Raises:
        ValueError: if no attention of the model is of a known family, or it reads masks that are
            not tensors (`attn_implementation` must be "sdpa", "eager" or "regard"), or there is no
            such precision. Nothing is then changed.

    Examples:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from regard.hf import install
        >>> config = LlamaConfig(hidden_size=16, num_attention_heads=2, vocab_size=20,
        ...     num_hidden_layers=2, intermediate_size=16)
        >>> model = LlamaForCausalLM(config).eval()
        >>> tokens = torch.tensor([[3, 4, 5]])
        >>> before = model(tokens).logits
        >>> print(install(model).layers[0].kind)
        MHA
        >>> torch.allclose(model(tokens).logits, before, atol=1e-5)
        True
    """
    check_version()
    check_options(dropout=0.0, softcap=None, precision=precision, scale=None)
    found = find(model)
    for module in (*found.known.values(), *found.unknown.values()):
        if not is_readable(module):
            implementation = getattr(module.config, "_attn_implementation", None)
            raise ValueError(
                f"attn_implementation={implementation!r} has masks that regard does not "
                'read; call model.set_attn_implementation("sdpa") first'
            )
    agreeing = [name for name, each in found.known.items() if _agrees(each)]
    own = {n: m for n in agreeing if family_of(m := found.known[n]) and not is_patched(m)}
    others = {name: each for name, each in found.known.items() if name not in own} | found.unknown
    calling = {
        name: [x for x in m.modules() if calls_the_interface(x) or registering.can_attend(x)]
        for name, m in others.items()
    }
    if not own and not any(calling.values()):
        differences = sorted(set(map(_difference_of, others.values())))
        unknown = unknown_attention(model, Found(own, others))
        raise ValueError("; ".join([unknown, *differences, NO_WAY]))
    layers = tuple(_describe(name, module, precision) for name, module in own.items())
    for module in own.values():
        replace(module, "precision", precision)
        if not is_placed(module):  # a placed layer runs on regard already
            bind(module, forward_of(module))
    for module in chain.from_iterable(calling.values()):
        replace(module, "precision", precision)
        _call_regard(module)
    called = {name: _difference_of(each) for name, each in others.items() if calling[name]}
    none = "has no row in regard.hf.families"
    left = {name: _difference_of(m, none) for name, m in others.items() if name not in called}
    bound = (bind_linear(model), bind_layers(model)) if linear else (0, 0)
    if linear:
        bind_models(model)
    return Installation(type(model).__name__, layers, left, called, *bound)


def _difference_of(module: nn.Module, otherwise: str = "") -> str:
    """In words: why a module runs by its own forward."""
    kind: Any = type(module)
    why = "has a forward of its own, which stays" if is_patched(module) else otherwise
    return f"{kind.__name__} {why or nearest(kind)}"


def forward_of(module: nn.Module) -> Callable[..., Any]:
    """The forward that is bound to a module of a known family."""
    known = family_of(module)
    if known and known.tied(module) is not None:
        return heads.forward_tied
    return latent.forward if known and known.latent else heads.forward


def _agrees(module: nn.Module) -> bool:
    """Whether regard's forward computes what the module's own does, as far as a probe can say: if
    not, no module of its class is known any more."""
    family = family_of(module)
    if family is None or is_placed(module):
        return family is not None
    return disagreement(family, module, forward_of(module)) is None


def _call_regard(module: Any) -> None:
    """Let this module alone find regard where its config names the attention function, the config
    of the model stays; or in the place of its method."""
    if not calls_the_interface(module):
        replace(module, registering.METHOD, method(registering.attend, module))
    elif not isinstance(module.config, registering.NamingRegard):
        replace(module, "config", registering.NamingRegard(module.config))


def uninstall(model: nn.Module) -> None:
    """Restore every attention module's own `forward` and `precision`; else do nothing.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from regard.hf import install, uninstall
        >>> config = LlamaConfig(hidden_size=16, num_attention_heads=2, vocab_size=20,
        ...     num_hidden_layers=1, intermediate_size=16)
        >>> model = LlamaForCausalLM(config)
        >>> installed, attention = install(model), model.model.layers[0].self_attn
        >>> "forward" in vars(attention)
        True
        >>> uninstall(model)
        >>> "forward" in vars(attention)
        False
    """
    for module in model.modules():
        restore(module)


def is_readable(module: Any) -> bool:
    """Whether the model passes its masks to this attention as tensors, or as None."""
    config = getattr(module, "config", None)
    return config is None or getattr(config, "_attn_implementation", None) in READABLE


def _describe(name: str, module: Any, precision: str) -> InstalledLayer:
    family = known_family(module)
    rules, window = tuple(_rules(family, module)), family.window_of(module)
    runs = (_runs(family, module, span, precision) for span in (PREFILL, DECODE))
    return InstalledLayer(name, *_cached(family, module), window, rules, *runs)


def _cached(family: Family, module: Any) -> tuple[str, int, int, int]:
    """The kind of a layer, its query heads, and the number and width of the heads it caches."""
    heads, kv_heads, head_dim = family.sizes(module)
    if family.latent:
        return "MLA", heads, 1, module.kv_lora_rank + module.qk_rope_head_dim
    if is_placed(module):
        return module.kind, heads, 1, module.kv_lora_rank
    if (runs := family.tied(module)) is not None:
        head_dim = sum(TiedKeys(module.k_norm.weight, runs).pieces)
    kind = "MHA" if kv_heads == heads else "MQA" if kv_heads == 1 else "GQA"
    return kind, heads, kv_heads, head_dim


def _rules(family: Family, module: Any) -> list[str]:
    """What a layer does to its scores, besides the mask of a call."""
    rules = [] if getattr(module, "is_causal", True) else ["bidirectional"]
    if family.window_of(module) is not None:
        rules.append(f"window {family.window_of(module):,}")
    if family.softcap(module) is not None:
        rules.append(f"softcap {family.softcap(module):g}")
    if family.sinks(module) is not None:
        rules.append("sinks")
    if family.tied(module) is not None:
        rules.append("values cached as keys")
    if family.sharing(module)[0]:
        rules.append("keys of an earlier layer")
    if family.query_scale(module) is not UNSCALED:
        rules.append("queries scaled by position")
    if family.returns_bias:
        rules.append("relative bias")
    return rules


def _runs(family: Family, module: Any, span: Span, precision: str) -> str:
    """The backend that a call of this span would get, found from shapes alone."""
    heads, kv_heads, head_dim = family.sizes(module)
    key_width = value_width = head_dim
    form = "rebuilt by " if is_placed(module) else ""
    if family.latent:
        chosen, rank = choose_form(module, span), module.kv_lora_rank
        absorbed = (1, rank + module.qk_rope_head_dim, rank)
        rebuilt = (heads, module.qk_head_dim, module.v_head_dim)
        kv_heads, key_width, value_width = absorbed if isinstance(chosen, Absorbed) else rebuilt
        form = f"{chosen.name} by "
    kinds = (each.dtype for each in module.parameters() if each.is_floating_point())  # not codes
    dtype = next(kinds, torch.float32)
    one = next(module.parameters()).new_empty(1, dtype=dtype).detach()
    q = one.expand(1, heads, span.num_queries, key_width)
    k = one.expand(1, kv_heads, span.num_keys, key_width)
    v = one.expand(1, kv_heads, span.num_keys, value_width)
    with torch.no_grad():
        rules: dict[str, Any] = {"softcap": family.softcap(module), "sinks": family.sinks(module)}
        mask = family.pattern_of(module)
        call = prepare(q, k, v, mask=mask, span=span, precision=precision, **rules)
    return form + call.name
