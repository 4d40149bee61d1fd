"""Maps of a model's attention, computed beside its kernels while it runs."""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from regard.hf.families.finding import find, unknown_attention
from regard.hf.families.recognising import family_of
from regard.hf.running import heads, latent
from regard.hf.running.binding import all_bound
from regard.hf.running.installing import is_readable
from regard.hf.running.registering import NAME as REGISTERED
from regard.layers.attention import Attention
from regard.layers.latent import LatentKVAttention, MultiHeadLatentAttention
from regard.ops.observed import calls_run
from regard.see.looking import Looking, MapChoice, indices, padding_of
from regard.see.maps import AttentionMaps

CACHES = ("past_key_values", "layer_past", "cache", "caches")  # arguments that may hold a cache
OWN = (Attention, MultiHeadLatentAttention, LatentKVAttention)
CHEAPER = {"use_cache": False, "logits_to_keep": 1}  # arguments that leave attention as it is


def attention(
    model: nn.Module,
    tokens: Any,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    queries: Sequence[int] | None = None,
    *,
    keys: tuple[int, int] | None = None,
    row: int = 0,
    names: Sequence[str] | None = None,
    **given: Any,
) -> AttentionMaps:
    """Run a model once, and see where its heads look.

    The kernels that the model would run do run: its output has the same bits. Beside them the
    weights are computed from the same queries and keys by the definition, in float32, a block of
    rows at a time. Statistics and an overview are of all heads; maps are of the chosen ones.
    Caches that are given, the random state and the training mode do not change.

    Args:
        model: a model of transformers with attention that regard knows, with or without
            `regard.hf.install`; or a module with layers of regard.
        tokens: ids `[L]` or `[B, L]`; what a tokenizer returns; or hidden states `[B, L, E]`.
        layers: layers whose maps are returned, counted from 0. If only `heads` or `queries` are
            given, of all; if none of the three is, no map is returned.
        heads: heads whose maps are returned; of all if None.
        queries: rows of the maps, as indices into the tokens of cache and call; of all if None.
        keys: columns of the maps, from the first up to the second; of all if None.
        row: the row of the batch.
        names: names of the tokens; their ids if None.
        **given: further arguments of the model, such as `attention_mask` or `past_key_values`.

    Raises:
        TypeError: if the tokens are text.
        ValueError: if the model's attention is unknown or compiled, or reads another sequence; and
            as the model.
        IndexError: if there is no such layer, head, query or row.

    Examples:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from regard.see import attention
        >>> config = LlamaConfig(hidden_size=16, num_attention_heads=2, vocab_size=20,
        ...     num_hidden_layers=3, intermediate_size=16)
        >>> model = LlamaForCausalLM(config).eval()
        >>> maps = attention(model, torch.tensor([5, 6, 7, 8]), layers=[0, 2], queries=[-1])
        >>> maps.weights.shape, maps.entropy.shape
        (torch.Size([2, 2, 1, 4]), torch.Size([3, 2]))
        >>> round(maps.weights[0, 0, 0].sum().item(), 4)
        1.0
    """
    tokens, given = _arguments(model, tokens, given)
    (row,) = indices("row", [row], 0, tokens.shape[0])
    found = attention_layers(model)
    past = _past(given)
    total = past + tokens.shape[1]
    named = _names(names, tokens, past, row)
    choice = MapChoice(layers, heads, queries, keys).among(len(found), past, total)
    looking = Looking(choice, row, past, total, padding_of(given, row))
    given = {**given, **{name: copy.deepcopy(given[name]) for name in CACHES if name in given}}
    with (
        torch.no_grad(),
        _random_state_kept(model),
        on_regard(found),
        looking.at(found),
        calls_run(looking.seen),
    ):
        model(tokens, **given)
    return looking.maps(tuple(found), named)


def _arguments(
    model: nn.Module, tokens: Any, given: dict[str, Any]
) -> tuple[Tensor, dict[str, Any]]:
    """The tokens `[B, L]` or hidden states, and the other arguments of the model."""
    if isinstance(tokens, Mapping):
        given = {**{name: tokens[name] for name in tokens if name != "input_ids"}, **given}
        tokens = tokens["input_ids"]
    if isinstance(tokens, str) or (isinstance(tokens, list) and str in map(type, tokens)):
        raise TypeError("tokens are ids, got text; give tokenizer(text, return_tensors='pt')")
    tokens = torch.as_tensor(tokens)
    if tokens.dim() == 1:
        tokens = tokens.unsqueeze(0)
    if tokens.dim() != (3 if tokens.is_floating_point() else 2):
        raise ValueError(
            f"tokens are ids [L] or [B, L], or hidden states [B, L, E], got {tuple(tokens.shape)}"
        )
    known = inspect.signature(model.forward).parameters
    if _held(given) is None:
        given = {name: value for name, value in CHEAPER.items() if name in known} | given
    parameter = next(model.parameters(), tokens)
    return tokens.to(parameter.device), given


def _held(given: Mapping[str, Any]) -> Any:
    """The cache among the arguments: that of the first layer, where there is one a layer."""
    held = next((given[name] for name in CACHES if given.get(name) is not None), None)
    return held[0] if isinstance(held, list | tuple) and held else held


def _past(given: Mapping[str, Any]) -> int:
    """The tokens that the given cache holds."""
    held = _held(given)
    if held is None:
        return 0
    return int(held.get_seq_length() if hasattr(held, "get_seq_length") else held.length)


def _names(names: Sequence[str] | None, tokens: Tensor, past: int, row: int) -> tuple[str, ...]:
    """A name for every token of the cache and of the call."""
    new = tokens.shape[1]
    if names is not None:
        if len(names) not in (new, past + new):
            raise ValueError(
                f"names are of the {new} tokens, or of all {past + new} with those of the cache, "
                f"got {len(names)}"
            )
        own = [str(name) for name in names]
    elif tokens.is_floating_point():
        own = [str(past + at) for at in range(new)]
    else:
        own = [str(each) for each in tokens[row].tolist()]
    return (*(f"[{at}]" for at in range(past + new - len(own))), *own)


@contextmanager
def _random_state_kept(model: nn.Module) -> Iterator[None]:
    """The generators of torch as before, on the CPU and where the model is."""
    devices = {each.device for each in model.parameters() if each.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(devices, key=str)):
        yield


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The attention layers of a model by their names, in order: of transformers, or of regard.

    Raises:
        ValueError: if there is none, one is of an unknown family, or the model is compiled or has
            masks that regard does not read.
    """
    if any(_is_compiled(module) for module in model.modules()):
        raise ValueError("a compiled model does not show its calls; give it before torch.compile")
    own: dict[str, nn.Module] = {
        name: each for name, each in model.named_modules() if isinstance(each, OWN)
    }
    if own:
        return own
    found = find(model)
    if not found.known and not found.unknown:
        raise ValueError(unknown_attention(model, found))
    if found.unknown and not all(_is_registered(module) for module in found.unknown.values()):
        raise ValueError(
            f"{unknown_attention(model, found)}; if it goes through transformers' "
            "AttentionInterface, call regard.hf.register() and "
            f'model.set_attn_implementation("{REGISTERED}") first'
        )
    for module in found.known.values():
        if not is_readable(module):
            raise ValueError(
                f"{type(model).__name__} has masks that regard does not read; call "
                'model.set_attn_implementation("sdpa") first'
            )
    both = {**found.known, **found.unknown}
    return {name: module for name, module in model.named_modules() if name in both}


@contextmanager
def on_regard(layers: dict[str, nn.Module]) -> Iterator[None]:
    """A block in which regard runs a transformers model's attention; an installed one stays so."""
    with all_bound([(m, _forward_of(m)) for m in layers.values() if _is_others(m)]):
        yield


def _is_others(module: nn.Module) -> bool:
    """Whether transformers' own attention might run in this module; a placed layer is regard's."""
    return not isinstance(module, OWN) and not _is_registered(module)


def _forward_of(module: nn.Module) -> Callable[..., Any]:
    """The forward that `regard.hf.install` would bind to the module."""
    family = family_of(module)
    return latent.forward if family is not None and family.latent else heads.forward


def _is_registered(module: nn.Module) -> bool:
    """Whether the module gets its attention function from `regard.hf.register`."""
    config = getattr(module, "config", None)
    return getattr(config, "_attn_implementation", None) == REGISTERED


def _is_compiled(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
