"""Context parallel: every rank has its share of a sequence's tokens, in all layers of a model."""

from functools import partial
from types import MethodType
from typing import Any, Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from regard.distributed.context.layers import forward, heads_objection, refuse
from regard.distributed.context.plan import ContextParallel, Exchange, agree_on_plan, replace
from regard.distributed.context.sending import KINDS, uses_length
from regard.distributed.ranks import Ranks
from regard.distributed.shards import Layout
from regard.distributed.tensor.heads import split_of
from regard.distributed.tensor.parallel import is_of_transformers
from regard.layers.latent_kv import LatentKVAttention
from regard.masks import Mask
from regard.matrices import has_own_forward

REPLACED: dict[str, Any] = {"forward": forward, "weights": refuse, "explain": refuse}


def context_parallel(
    model_or_layer: nn.Module,
    mesh: DeviceMesh,
    *,
    exchange: Exchange = "ring",
    layout: Layout | Literal["auto"] = "auto",
) -> ContextParallel:
    """Let the attention layers of a model attend to the tokens of all ranks.

    Each rank calls the model with its own tokens, `plan.shard(x)`, and with masks about the whole
    sequence. Keys and values that another rank's queries may attend to are sent to it, and partial
    results merged (ring attention: Liu et al. 2023, arXiv:2310.01889; gathered keys: Llama 3,
    arXiv:2407.21783). Gradients of parameters are those of a rank's own tokens: `sum_gradients`
    adds them up, or FSDP2 on the same mesh does.

    Every rank makes the same calls and the same backward passes, a rank without tokens, too. Calls
    that differ raise the same error on every rank, before keys are sent. Whole sequences given on
    every rank are not recognised: they are the shards of a longer one. Heads may be split as well,
    by `tensor_parallel` over another dimension of the mesh.

    A model of transformers is called with shards of its usual arguments: `input_ids` (or
    `inputs_embeds`), `attention_mask`, `position_ids`, and `documents`, the document of each token;
    by default tokens have the positions of their slots. `shift_labels` are the shards of labels
    that were shifted in the whole sequence; then `loss` is this rank's share, and the sum over the
    ranks that of the batch. Every rank needs a token. Cached keys and `generate` are refused. A
    program for `torchrun --nproc-per-node 2`:

        model, tokenizer = regard.hf.smollm2()
        mesh = init_device_mesh("cpu", (2,))
        plan = context_parallel(model, mesh)
        ids = tokenizer("The quick brown fox jumps", return_tensors="pt").input_ids
        labels = F.pad(ids[:, 1:], (0, 1), value=-100)  # the next token of each
        loss = model(plan.shard(ids), shift_labels=plan.shard(labels)).loss
        loss.backward()
        sum_gradients(model, mesh)
        print(plan, plan.ranks.all_reduce(loss.detach(), "loss"))

    Args:
        model_or_layer: regard's layers, a module that contains some, or a model of transformers
            whose attention `regard.hf` knows, whatever runs it.
        mesh: of one dimension, the ranks that share the tokens.
        exchange: `"ring"` passes shards round, `"gather"` sends all of them at once.
        layout: which tokens a rank has: `"zigzag"`, `"contiguous"`, or `"auto"`: contiguous, unless
            a layer's own mask is causal and does not bound how far back a query sees.

    Returns:
        The plan; the layers are changed in place, until `plan.remove()`.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if there is no attention layer, or one that cannot be shared out; on every
            rank, before anything is changed.

    Examples:
        >>> from regard.distributed import context_parallel
        >>> from regard import Attention
        >>> try:
        ...     context_parallel(Attention(8, 2), mesh=None)
        ... except TypeError:
        ...     print('a mesh: init_device_mesh("cpu", (2,))')
        a mesh: init_device_mesh("cpu", (2,))
    """
    if is_of_transformers(model_or_layer):  # imported here, as it imports this module
        from regard.distributed.models_context import context_parallel_of_model

        return context_parallel_of_model(model_or_layer, mesh, exchange, layout)
    find = partial(_layers_of, model_or_layer)
    plan = agree_on_plan(ContextParallel, mesh, exchange, layout, find)
    for layer in plan.layers:
        replace(plan, layer, "context_parallel", plan)
        for name, function in REPLACED.items():  # bound: a deep copy of the layer calls itself
            replace(plan, layer, name, MethodType(function, layer))
    return plan


def _layers_of(model: object, ranks: Ranks) -> list[tuple[Any, Mask]]:
    """The attention layers of a model; raises if the tokens of one cannot be split."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model_or_layer is a module, got {type(model).__name__}")
    named = [(name, each) for name, each in model.named_modules() if isinstance(each, KINDS)]
    if not named:
        raise ValueError(
            f"{type(model).__name__} has no attention layer of regard, so that nothing would be "
            "sent; give the model or layer that attends"
        )
    for name, layer in named:
        if (objection := _objection(layer, ranks)) is not None:
            raise ValueError(f"{name or type(layer).__name__} {objection}")
    return [(layer, layer.mask) for _, layer in named]


def _objection(layer: Any, ranks: Ranks) -> str | None:
    """Why a layer cannot be shared out; None if it can."""
    kind: Any = next(kind for kind in KINDS if isinstance(layer, kind))
    if "context_parallel" in vars(layer):
        return "is context parallel already; plan.remove() of the former plan comes first"
    own = getattr(type(layer), "one_device_class", type(layer))  # of a layer whose heads are split
    if own.forward is not kind.forward or "forward" in vars(layer):
        return (
            "has a forward of its own, which would not run; derive from "
            f"{kind.__name__} without one"
        )
    if isinstance(layer, LatentKVAttention) and uses_length(layer.rope):
        return (
            f"rebuilds keys with rope={layer.rope}, whose frequencies depend on the length, which "
            "a part of the keys does not tell; give a rope with fixed frequencies, such as Yarn's"
        )
    if split_of(layer) is not None and isinstance(layer, LatentKVAttention) and layer.norm_width:
        return (
            "norms the keys of all heads at once, which lie on several ranks, wherever they are "
            "rebuilt; give qk_norm='head', or split its heads or its tokens alone"
        )
    return heads_objection(layer, ranks) or _up_objection(layer)


def _up_objection(layer: Any) -> str | None:
    """Why keys cannot be rebuilt from the latents of other ranks; None if they can."""
    for name in ("kv_b_proj", "k_norm"):
        module = getattr(layer, name, None)
        if module is None:
            continue
        hooks = module._forward_hooks or module._forward_pre_hooks
        if hooks or has_own_forward(module):
            return (
                f"has hooks on {name}, which would run for each message, and again in the "
                "backward pass; remove them"
            )
    return None
