"""Context parallel of a transformers model: every rank calls it with the tokens of its shard.

The model's own code runs on them, as all but attention reads one token at a time. Before a call,
its arguments are completed: positions of tokens, the sequence's mask, labels in the whole batch.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, Literal, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from regard.distributed.context.agreement import agree
from regard.distributed.context.layers import heads_objection
from regard.distributed.context.plan import (
    ContextParallel,
    Exchange,
    agree_on_plan,
    on_removal,
    replace,
)
from regard.distributed.context.sending import Call, widths_of
from regard.distributed.context.summing import whole_of
from regard.distributed.models_attention import ShardedCall, forward
from regard.distributed.ranks import Ranks
from regard.distributed.shards import Layout, Shards, shards_of
from regard.distributed.tensor.heads import split_of
from regard.hf.families import rotating
from regard.hf.families.finding import find, unknown_attention
from regard.hf.families.recognising import known_family
from regard.hf.families.table import is_placed
from regard.masks import EVERYTHING, Documents, Mask, Padding

IGNORED = -100  # the label of a token without one, as torch's cross_entropy has it
PER_TOKEN = ("Model", "ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForTokenClassification")
WITH_LOSS = ("ForCausalLM", "LMHeadModel")
BY_LENGTH = ("dynamic", "longrope")  # ropes whose frequencies change with the length of a call


@dataclass(frozen=True, eq=False, repr=False)
class ModelContextParallel(ContextParallel):
    """The plan of a transformers model. Its arguments are completed before each of its calls."""

    @property
    def _agreements(self) -> int:
        return 1

    def _sends(self, layer: Any) -> tuple[Mask, tuple[int, int]]:
        return known_family(layer).pattern_of(layer), _widths_of(layer)


def context_parallel_of_model(
    model: Any, mesh: DeviceMesh, exchange: Exchange, layout: Layout | Literal["auto"]
) -> ModelContextParallel:
    """`context_parallel` of a transformers model."""
    find = partial(sharded_modules, model)
    plan = agree_on_plan(ModelContextParallel, mesh, exchange, layout, find)
    _run_on_shards(plan, model)
    return plan


def _widths_of(module: Any) -> tuple[int, int]:
    """Elements of a token's differentiable streams, and bytes of its integer streams."""
    family, split = known_family(module), split_of(module)
    if is_placed(module):
        return widths_of(module)
    if family.latent:
        return module.kv_lora_rank + module.qk_rope_head_dim, 0
    _, kv_heads, head_dim = family.sizes(module)
    return 2 * head_dim * (kv_heads if split is None else split.local_kv_heads), 0


def sharded_modules(model: Any, ranks: Ranks) -> list[tuple[nn.Module, Mask]]:
    """The attention modules of a model that shards can run. Raises a ValueError if there is none,
    or the model needs something that shards do not have."""
    found = find(model)
    if found.unknown or not found.known:
        raise ValueError(f"{unknown_attention(model, found)}; there is no context parallel for it")
    _check_model(model)
    for name, module in found.known.items():
        if (objection := _objection(module, ranks)) is not None:
            raise ValueError(f"{name} ({type(module).__name__}) {objection}")
    return [(each, known_family(each).pattern_of(each)) for each in found.known.values()]


def _check_model(model: Any) -> None:
    """Raise unless the model returns one output for each token and takes `position_ids`."""
    kind = type(model).__name__
    if model.config.is_encoder_decoder or model.config.get_text_config() is not model.config:
        raise ValueError(
            f"{kind} has two sequences, of which a rank would hold shards; context_parallel takes "
            "a model of one, such as its decoder"
        )
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        raise ValueError(
            f"{kind} takes no position_ids, and would count the tokens of each shard from 0"
        )
    pooled = any(name.endswith("pooler") for name, _ in model.named_modules())
    if pooled or not kind.endswith(PER_TOKEN):
        raise ValueError(
            f"{kind} computes more than an output for each token, which a shard is not enough "
            f"for; give its base model, or one whose class ends in {', '.join(PER_TOKEN)}"
        )
    if (rope := _rope_by_length(model.config)) is not None:
        raise ValueError(
            f"the frequencies of rope_type={rope!r} change with the length of a call, and "
            "transformers reads that from one shard; set another rope_type"
        )


def _rope_by_length(config: Any) -> str | None:
    rope = getattr(config, "rope_parameters", None) or {}
    every = [rope, *(each for each in rope.values() if isinstance(each, dict))]
    return next((each["rope_type"] for each in every if each.get("rope_type") in BY_LENGTH), None)


def _objection(module: Any, ranks: Ranks) -> str | None:
    """Why a module cannot run on shards; None if it can."""
    family = known_family(module)
    if getattr(vars(module).get("forward"), "__func__", None) is forward:
        return "is context-parallel already; remove() the former plan first"
    lacking = "which has no context parallel; tensor_parallel splits heads instead of tokens"
    if words := family.beyond_heads(module):
        return f"{words}, {lacking}"
    if family.returns_bias:
        return f"adds a bias for each pair of tokens to its scores, {lacking}"
    if family.rotate is rotating.halves_without_alibi and module.config.alibi:
        return f"adds an ALiBi to its scores that the model makes of its mask, {lacking}"
    if family.attention.endswith("CrossAttention") or getattr(module, "is_cross_attention", False):
        return f"attends to another sequence, {lacking}"
    if family.window_of(module) is not None and not getattr(module, "is_causal", True):
        return f"has a window on both sides, {lacking}"
    return heads_objection(module, ranks)


def _run_on_shards(plan: ModelContextParallel, model: Any) -> None:
    """Let a model and its attention modules take shards, until `plan.remove()`."""

    def complete(model: Any, args: Any, given: Any) -> tuple[tuple[()], dict[str, Any]]:
        return (), complete_arguments(plan, model, args, given)

    on_removal(plan, model.register_forward_pre_hook(complete, with_kwargs=True).remove)
    for module in plan.layers:
        replace(plan, module, "forward", MethodType(forward, module))
    if hasattr(model, "generate"):
        replace(plan, model, "generate", MethodType(_refuse_to_generate, model))


def _refuse_to_generate(model: Any, *args: Any, **options: Any) -> NoReturn:
    raise ValueError(
        f"a context-parallel {type(model).__name__} does not generate: its calls take shards and "
        "fill no cache; remove() the plan first, or split heads with tensor_parallel"
    )


def complete_arguments(
    plan: ContextParallel, model: Any, args: Any, given: dict[str, Any]
) -> dict[str, Any]:
    """The arguments of a call of a context-parallel model, by name, as its own forward takes them.

    A TypeError or ValueError is raised, on every rank, if an argument of one has no meaning on
    shards, or the arguments of the ranks are not shards of one sequence.
    """
    names = list(inspect.signature(type(model).forward).parameters)[1:]
    given = {**dict(zip(names, args, strict=False)), **given}
    shards, labels = _agreed(plan, given, _refusal(plan, model, given))
    whole = partial(whole_of, plan.ranks, shards)
    positions = given.pop("position_ids", None)
    mask = _mask(whole, positions, given.pop("attention_mask", None), given.pop("documents", None))
    if positions is None:
        positions = shards.positions(plan.ranks.rank, _tokens(given).device)[None]
    last = shards.length - 1  # ropes whose frequencies depend on it are refused
    call = ShardedCall(plan, Call(mask, shards, positions, last))
    given |= {"position_ids": positions, "attention_mask": call.as_mask()}
    given |= {"use_cache": False} if "use_cache" in names else {}
    if given.get("shift_labels") is not None:
        given = {"num_items_in_batch": labels} | given | {"labels": given["shift_labels"]}
    return given


def _tokens(given: Mapping[str, Any]) -> Tensor:
    """The ids or embeddings of this rank's tokens."""
    ids = given.get("input_ids")
    tokens: Tensor = given["inputs_embeds"] if ids is None else ids
    return tokens


REFUSED = {
    **dict.fromkeys(("past_key_values", "cache", "use_cache"), "calls with shards fill no cache"),
    "output_attentions": "no rank has the weights of a whole row",
    "output_router_logits": "the loss of a router would be that of one shard",
    "encoder_hidden_states": "a shard attends to its own sequence",
}
OF_TOKENS = ("attention_mask", "documents", "position_ids", "shift_labels")  # [B, L] each


def _refusal(plan: ContextParallel, model: Any, given: Mapping[str, Any]) -> Exception | None:
    """The error of the first argument that has no meaning on shards, or is none of tokens."""
    for name, reason in REFUSED.items():
        asked = given.get(name)
        if asked is None and name.startswith("output_"):
            asked = getattr(model.config, name, None)
        if asked is not None and asked is not False:
            return ValueError(
                f"a context-parallel {type(model).__name__} takes no {name}: {reason}; leave it out"
            )
    if given.get("labels") is not None and given.get("shift_labels") is None:
        return ValueError(
            "labels= would be shifted inside each shard, where the next token may be on "
            "another rank; shift those of the whole sequence, and give their shard, shift_labels="
        )
    if given.get("shift_labels") is not None and not type(model).__name__.endswith(WITH_LOSS):
        return ValueError(f"{type(model).__name__} computes no loss of shift_labels=")
    if (given.get("input_ids") is None) is (given.get("inputs_embeds") is None):
        return ValueError("one of input_ids= and inputs_embeds= is this rank's tokens")
    dropped = (known_family(module).dropout(module) for module in plan.layers if module.training)
    if any(dropped):
        return ValueError(
            "dropout of attention weights in training: those of a query are spread over the ranks; "
            "set the attention dropout in the model's config to 0.0, or call model.eval()"
        )
    rows, length = _tokens(given).shape[:2]
    for name in OF_TOKENS:
        x = given.get(name)
        if x is not None and (x.ndim != 2 or x.shape[0] not in (1, rows) or x.shape[1] != length):
            return ValueError(
                f"{name} is [{rows}, {length}] here, a value for each token of this rank, got "
                f"shape {list(x.shape)}; plan.shard(x) takes them of the whole sequence"
            )
    return None


def _agreed(
    plan: ContextParallel, given: Mapping[str, Any], refusal: Exception | None
) -> tuple[Shards, int]:
    """The shards of the sequence whose tokens the ranks have, and how many labels all have. Raises
    a ValueError, on every rank, if they are not those of one sequence, or one rank refuses."""
    facts: dict[str, int | str] = {}
    length = labels = 0
    if refusal is None:
        facts["rows"], length = _tokens(given).shape[:2]
        for name in OF_TOKENS:
            facts[name] = "none" if given.get(name) is None else f"{given[name].shape[0]} rows"
        if given.get("shift_labels") is not None:
            labels = int((given["shift_labels"] != IGNORED).sum())
    lengths, counts = agree(plan.ranks, facts, [length, labels], refusal)
    shards = shards_of(lengths, plan.layout)
    if 0 in lengths:
        raise ValueError(
            f"rank {lengths.index(0)} has none of the {shards.length} tokens, and the code of some "
            f"models (GPT-2) takes no empty sequence; give {2 * len(lengths)} tokens or more"
        )
    return shards, sum(counts)


def _mask(
    whole: Callable[[Tensor, str], Tensor],
    positions: Tensor | None,
    valid: Tensor | None,
    documents: Tensor | None,
) -> Mask:
    """The mask of the sequence: padding, and documents that do not attend to each other.

    As in transformers, positions that do not go up by one begin another document, unless there is
    an attention mask.
    """
    mask: Mask = EVERYTHING
    if documents is not None:
        mask = Documents(whole(documents, "documents"))
    elif positions is not None and valid is None:
        steps = whole(positions, "positions").diff()
        if bool((steps != 1).any()):
            mask = Documents(F.pad((steps != 1).cumsum(1), (1, 0)))
    return mask if valid is None else mask & Padding(whole(valid.to(torch.uint8), "padding"))
