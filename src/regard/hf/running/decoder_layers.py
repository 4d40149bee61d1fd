"""Decoder layers of Llama's form: the products of few tokens in two calls of compiled code, the MLP
of many some tokens at a time.

A decoder layer of transformers calls a dozen modules and starts some thirty operators; for a few
tokens of a small model that takes longer than to read the weights. Here one call norms the tokens
and projects queries, keys and values. After attention one call projects the outputs of the heads,
norms, and runs the gated MLP. Hidden states between the products of a call stay float32.

The MLP of a prompt computes several numbers for each one of the hidden states. Those of all tokens
at once would take much memory, and be written to it and read from it several times.
"""

from functools import cache
from importlib import import_module
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from regard.hf.families.recognising import known_family
from regard.hf.families.sources import text_of
from regard.hf.families.table import Family, is_placed
from regard.hf.running import heads, latent
from regard.hf.running.binding import bind, function_of
from regard.hf.running.calls import arrive, weights_wanted
from regard.hf.running.facts import NO_FACTS, Facts
from regard.hf.running.products import forward as product
from regard.hf.running.products import most_rows
from regard.hf.running.steps import repeated_step
from regard.layers.latent_kv import LatentKVAttention
from regard.layers.query_scale import UNSCALED
from regard.ops.backends.fused import is_installed
from regard.tracing import is_immediate

FIRST, SECOND = "input_layernorm", "post_attention_layernorm"
# Classes with the source of these are known, each in its folder of transformers. Of norms: the
# attribute that is added to the mean square, and the number that is added to the weight.
LAYER, GATED = ("llama", "LlamaDecoderLayer"), ("llama", "LlamaMLP")
NORMS = {
    ("llama", "LlamaRMSNorm"): ("variance_epsilon", 0.0),
    ("gemma", "GemmaRMSNorm"): ("eps", 1.0),
}
EPS = [name for name, _ in NORMS.values()]
TOGETHER = 512  # tokens whose MLP is computed at once: the numbers between its products stay in the
# processor's caches, and weights are read seldom enough
ACTIVATIONS = {"SiLU": "SILU", "SiLUActivation": "SILU", "GELUActivation": "GELU",
               "GELUTanh": "GELU_TANH"}  # fmt: skip


def bind_layers(model: nn.Module) -> int:
    """Bind `forward` to the decoder layers of the known form, and return how many have it."""
    layers = [each for each in model.modules() if _is_known(each)] if is_installed() else []
    for layer in layers:
        bind(layer, forward)
    return len(layers)


def forward(self: Any, hidden_states: Tensor, *args: Any, **given: Any) -> Any:
    """The forward of the layer's class; on a CPU, without gradients, quicker."""
    if not args and _runs_now(hidden_states) and (plan := plan_of(self)).mlp is not None:
        if _are_few(hidden_states):
            return _step(self, plan, hidden_states, given)
        if hidden_states.numel() > TOGETHER * hidden_states.shape[-1]:
            return _prompt(self, hidden_states, given)
    return type(self).forward(self, hidden_states, *args, **given)


def _runs_now(x: Tensor) -> bool:
    """Whether nothing traces, differentiates or casts tokens on a CPU."""
    if torch.is_grad_enabled() or not is_immediate(x) or torch._C._is_any_autocast_enabled():
        return False
    return x.is_cpu and x.numel() > 0 and most_rows(x.dtype, x.shape[-1]) > 0


def _are_few(x: Tensor) -> bool:
    return x.numel() <= most_rows(x.dtype, x.shape[-1]) * x.shape[-1]


def _prompt(layer: Any, x: Tensor, given: dict[str, Any]) -> Tensor:
    """The layer's output for the hidden states `[B, L, E]` of many tokens."""
    attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(x), **given)
    states = x + attended
    for rows in states.view(-1, x.shape[-1]).split(TOGETHER):
        rows += layer.mlp(layer.post_attention_layernorm(rows))
    return states


def _step(layer: Any, plan: "Plan", x: Tensor, given: dict[str, Any]) -> Tensor:
    """The layer's output for hidden states `[B, L, E]`."""
    merged = None if plan.before is None else _heads(layer, plan, x, given)
    if merged is not None:
        if (out := plan.after.run(merged, x)) is not None:
            return out[0]
        states = x + layer.self_attn.o_proj(merged)
    else:
        attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(x), **given)
        states = x + attended
        if (out := plan.mlp.run(states)) is not None:
            return out[0]
    _plans.pop(layer, None)  # a parameter was moved: the next call has another plan
    return states + layer.mlp(layer.post_attention_layernorm(states))


def _heads(layer: Any, plan: "Plan", x: Tensor, given: dict[str, Any]) -> Tensor | None:
    """The merged outputs of the heads `[B, L, H Dv]`: of a joint latent, or in a decoding step like
    the one before; None, and the cache is as before, in other calls."""
    attention = layer._modules["self_attn"]
    family, given = arrive(attention, (), given)
    if _is_joint(attention):
        projected = None if weights_wanted(given) else plan.before.run(x)
        if projected is None:
            return None
        return latent.merged_joint(family, attention, x, projected, given)[0]
    same, children = repeated_step(family, attention, x, given), family.project.children
    projected = None if same is None else plan.before.run(x)
    if same is None or children is None or projected is None:
        return None
    out = same.run(family, attention, children.of_products(attention, projected), given)
    return None if out is None else out.view(*x.shape[:-1], -1)


class Plan(NamedTuple):
    """The chains of a layer's products. All are None of a layer with a module that is not plain."""

    facts: Facts = NO_FACTS  # a layer with others has another plan
    mlp: Any = None  # the gated MLP of hidden states, added to them
    # the projections of hidden states to queries, keys and values; the projection of merged heads,
    # and the MLP after it. None of an attention that computes more before and after its heads
    before: Any = None
    after: Any = None
    after_wide: Any = None  # the same of merged heads in float32


_plans: "WeakKeyDictionary[nn.Module, Plan]" = WeakKeyDictionary()


def plan_of(layer: nn.Module) -> Plan:
    """The plan of a layer, as it is now."""
    if _has_any_global_hook():
        return Plan()
    plan = _plans.get(layer)
    if plan is None or not plan.facts.hold():
        plan = _plans[layer] = _new_plan(layer)
    return plan


def _facts(layer: Any) -> Facts:
    """The children, forwards, parameters, constants and hooks that a plan is made of."""
    entries = [(layer._modules, name) for name in (FIRST, SECOND, "self_attn", "mlp")]
    for parent in (layer.self_attn, layer.mlp):
        entries += [(parent._modules, name) for name in parent._modules]
    hooks: list[Any] = []
    for module in [home[name] for home, name in entries]:
        own, parameters = vars(module), module._parameters
        constants = ("forward", *(eps for eps in EPS if eps in own))
        entries += [(own, name) for name in constants]
        entries += [(parameters, name) for name in parameters]
        hooks += module._forward_hooks, module._forward_pre_hooks
    return Facts.of(entries, hooks)


def _new_plan(layer: Any) -> Plan:
    from regard.ops.kernels.chaining import Matrix, Product, prepare  # imports numba

    parts, facts = _parts(layer), _facts(layer)
    if parts is None:
        return Plan(facts)
    first, norm, up, gate, down = parts
    gated = Product(1, up, 3, norm=norm, gate=gate), Product(3, down, 2, added=1, waits=True)
    mlp = prepare(1, 1, *gated)
    if mlp is None:
        return Plan(facts)
    before = after = after_wide = None
    if projections := _projections(layer.self_attn):
        *into, out = (Matrix(each.weight, each.bias) for each in projections)
        products = (Product(1, x, i, norm=first) for i, x in enumerate(into, 2))
        before = prepare(1, len(into), *products)
        widened = Product(4, up, 5, norm=norm, gate=gate, waits=True)
        after, after_wide = (
            prepare(inputs, 1, Product(merged, out, 4, added=x), widened,
                    Product(5, down, result, added=4, waits=True))
            for inputs, merged, x, result in ((2, 1, 2, 3), (1, 3, 1, 2))
        )  # fmt: skip
    if before is None or after is None:
        return Plan(facts, mlp)
    return Plan(facts, mlp, before, after, after_wide)


def _parts(layer: Any) -> tuple[Any, ...] | None:
    """Both norms, and of the MLP the product, its gate, and the product after them, as the kernel
    takes them; None if one of them is not plain."""
    from regard.ops.kernels.chaining import Gate, Matrix  # imports numba

    mlp = layer.mlp
    kind: Any = type(mlp)  # typed: mypy takes no class of modules for hashable
    if not is_like(kind, GATED) or _is_changed(mlp):
        return None
    linears = mlp.gate_proj, mlp.up_proj, mlp.down_proj
    first, second = norm_of(layer.input_layernorm), norm_of(layer.post_attention_layernorm)
    activation = _number(mlp.act_fn)
    if activation is None or None in (first, second) or not all(map(_is_plain, linears)):
        return None
    gate, up, down = (Matrix(each.weight, each.bias) for each in linears)
    return first, second, up, Gate(gate, activation), down


def _projections(attention: Any) -> tuple[nn.Linear, ...]:
    """The linear layers of queries, keys, values and outputs, if they are plain and all that the
    attention computes before and after its heads, but for norms of them; else none."""
    own = attention._modules
    if not only_captures(attention):
        return ()
    if _is_joint(attention) and "forward" not in vars(attention):
        children = tuple(own[name] for name in ("q_proj", "kv_a_proj", "o_proj"))
        return children if all(map(_is_plain, children)) else ()
    if function_of(attention, "forward") is not heads.forward:
        return ()
    family, default = known_family(attention), Family("")
    names = family.project.children
    if names is None or names.clip is not None or family.query_scale(attention) is not UNSCALED:
        return ()
    if family.gate is not default.gate or family.output is not default.output:
        return ()
    children = tuple(own[name] for name in (names.q, names.k, names.v, "o_proj"))
    return children if all(map(_is_plain, children)) else ()


# ---- which layers ----


def _is_joint(attention: Any) -> bool:
    return is_placed(attention) and isinstance(attention, LatentKVAttention)


def _is_known(layer: nn.Module) -> bool:
    if not {FIRST, SECOND, "self_attn", "mlp"} <= {*layer._modules}:
        return False
    kind: Any = type(layer)
    if not is_like(kind, LAYER) or (parts := _parts(layer)) is None:
        return False
    own = "forward" not in vars(layer) or function_of(layer, "forward") is forward
    return own and bool(parts[2].weight.is_cpu)


def _is_plain(layer: Any) -> bool:
    if type(layer) is not nn.Linear or _has_hooks(layer):
        return False
    return "forward" not in vars(layer) or function_of(layer, "forward") is product


def _is_changed(module: nn.Module) -> bool:
    return "forward" in vars(module) or _has_hooks(module)


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def only_captures(module: nn.Module) -> bool:
    """Whether a module has no hooks but transformers' own, which collects outputs where a caller
    wants them."""
    homes = {hook.__module__ for hook in module._forward_hooks.values()}
    return not homes - {"transformers.utils.output_capturing"} and not module._forward_pre_hooks


def is_plain_layer(layer: nn.Module) -> bool:
    """Whether calling a layer runs `forward` and nothing else."""
    return function_of(layer, "forward") is forward and only_captures(layer)


@cache
def is_like(kind: Any, known: tuple[str, str]) -> bool:
    """Whether a class has the source of a known one, but for names."""
    folder, name = known
    file = import_module(f"transformers.models.{folder}.modeling_{folder}")
    text = text_of(kind)
    return bool(text) and text == text_of(getattr(file, name))


def norm_of(module: Any) -> Any:
    """A norm as the kernel takes it; None if its class has another source, or it has hooks or a
    forward of its own."""
    from regard.ops.kernels.chaining import Norm  # imports numba

    kind: Any = type(module)
    for known, (eps, shift) in NORMS.items():
        if is_like(kind, known) and not _is_changed(module):
            return Norm(module.weight, getattr(module, eps), shift)
    return None


def _number(activation: Any) -> int | None:
    """The number that the kernel has for an activation; None if it has none."""
    from regard.ops.kernels import row_products  # imports numba

    kind = type(activation)
    name = ACTIVATIONS.get(kind.__name__)
    if name is None or not kind.__module__.startswith(("torch.nn.", "transformers.")):
        return None
    return None if _is_changed(activation) else int(getattr(row_products, name))
