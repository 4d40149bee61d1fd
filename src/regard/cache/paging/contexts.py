"""What cached keys and values depend on besides their tokens: weights, dtype, format, RoPE, tenant.

A prefix that was stored under one context is never found under another.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from regard.cache.paging.fingerprints import Modules, fingerprint, framed, tensor_digest, whole
from regard.cache.paging.formats import BY_CHANNEL_FROM, GROUP, PageFormat, format_of

_WITHOUT_EFFECT = {  # config entries and attributes that no key or value depends on
    *("dtype", "output_attentions", "output_hidden_states", "return_dict", "torch_dtype"),
    *("transformers_version", "use_cache", "training", "gradient_checkpointing"),
}
_HOW = {
    "backend",
    "dropout",
    "form",
    "precision",
}  # arguments of layers: how, not what, is computed
_NOT_ROTATED, _FROM = "not rotated", "by channel from "  # of a format, where that is not usual
_BY_LENGTH = {"dynamic", "longrope"}  # rope types of transformers whose frequencies change


@dataclass(frozen=True)
class Context:
    """What the keys and values of a prefix depend on, besides its tokens.

    Contexts are compared by their digests. Nothing is shared between tenants: a search finds what
    was stored under its own tenant. With `shared=True` it also finds what was stored under the
    empty tenant, such as a system prompt; what it stores stays its own tenant's.

    Args:
        weights: fingerprint of the model's weights.
        dtype: of the keys and values, a `torch.dtype` or its name.
        format: of sealed pages: a name such as `"K8V4"`, or a `PageFormat`.
        rope: description of the rotary position embedding.
        adapter: name of the adapter that is active; "" for none.
        tenant: to whom the prefix belongs; "" for all that ask with `shared=True`.
        settings: whatever else the model computes by, such as masks and numbers of heads.
        shared: whether prefixes of the empty tenant are found too.

    Raises:
        TypeError: if a field is not text.
        ValueError: if the format is unknown.

    Examples:
        >>> from regard.cache.paging.contexts import Context
        >>> one = Context("5e1f", "float32", "plain", "Rotary(64)", tenant="a")
        >>> one.digest == Context("5e1f", "float32", "plain", "Rotary(64)", tenant="b").digest
        False
        >>> one.public.tenant
        ''
    """

    weights: str
    dtype: str | torch.dtype
    format: str | PageFormat
    rope: str
    adapter: str = ""
    tenant: str = ""
    settings: str = ""
    shared: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "format", format_text(self.format))
        object.__setattr__(self, "dtype", _dtype_name(self.dtype))
        for name, value in self._typed():
            if not isinstance(value, str):
                raise TypeError(f"Context: {name} is text, got {value!r}")

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 over the fields, each with its name, its type and its length before it."""
        digest = hashlib.sha256()
        for name, value in self._typed():
            for part in (name.encode(), b"str", value.encode()):
                digest.update(len(part).to_bytes(8, "big"))
                digest.update(part)
        return digest.digest()

    @cached_property
    def public(self) -> "Context":
        """The same context of the empty tenant."""
        return replace(self, tenant="", shared=False)

    def _typed(self) -> Iterator[tuple[str, Any]]:
        """The fields that are hashed: all but `shared`, which is about a search."""
        return ((each.name, getattr(self, each.name)) for each in fields(self)[:-1])


def format_text(form: str | PageFormat) -> str:
    """The name of a format, and what is not usual: `"K8V4/32"` with groups of 32 channels.

    Raises:
        ValueError: if the format is unknown.
    """
    if isinstance(form, str):
        name, *unusual = form.split("/")
        return "/".join([format_of(name).name, *unusual])
    found = format_of(form)
    unusual = [str(found.group)] if found.group != GROUP else []
    unusual += [] if found.rotates else [_NOT_ROTATED]
    if found.by_channel_from != BY_CHANNEL_FROM:
        unusual.append(f"{_FROM}{found.by_channel_from}")
    return "/".join([found.name, *unusual])


def _dtype_name(dtype: Any) -> Any:
    return str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype


def context_of(
    module: Modules,
    *,
    dtype: torch.dtype | None = None,
    format: str | PageFormat = "plain",
    rope: str | None = None,
    adapter: str = "",
    tenant: str = "",
    settings: str | None = None,
    shared: bool = False,
) -> Context:
    """The context of a model, or of its layers.

    Args:
        module: a model, or its layers in order.
        dtype: of the keys and values; by default that of the first floating-point weight. Give it
            where autocast changes it.
        format: of sealed pages.
        rope: a description; by default the ropes of regard's layers, and the frequencies and
            `rope_parameters` of a transformers model.
        adapter: its name; by default the active adapters of a PEFT model.
        tenant: to whom prefixes belong.
        settings: a description of whatever else is computed; by default a digest of the modules'
            types and arguments, and of a transformers model's config.
        shared: whether prefixes of the empty tenant are found too.

    Returns:
        The context, under which `PagePool.prefix` finds and `PagePool.store` stores.

    Raises:
        ValueError: if weights have no data (device "meta"), if RoPE's frequencies change with the
            length of a call, or if an argument of a layer cannot be described.

    Examples:
        >>> from regard import Attention, Rotary
        >>> from regard.cache.paging.contexts import context_of
        >>> layer = Attention(64, 4, rope=Rotary(16))
        >>> context_of(layer).rope, context_of(layer, format="K8V4").format
        ("Rotary(dim=16, theta=10000.0, pairing='halves', scaling=None)", 'K8V4')
        >>> other = Attention(64, 4, rope=Rotary(16, theta=500.0))
        >>> _ = other.load_state_dict(layer.state_dict())
        >>> context_of(other).weights == context_of(layer).weights
        True
        >>> context_of(other).digest == context_of(layer).digest
        False
    """
    model = whole(module)
    if dtype is None:
        floating = (p.dtype for p in model.parameters() if p.is_floating_point())
        dtype = next(floating, torch.get_default_dtype())
    return Context(
        weights=fingerprint(model),
        dtype=dtype,
        format=format,
        rope=_ropes(model) if rope is None else rope,
        adapter=adapter or _active_adapters(model),
        tenant=tenant,
        settings=_settings(model) if settings is None else settings,
        shared=shared,
    )


def _ropes(module: nn.Module) -> str:
    """The ropes of a model: a run of equal ones once, with their number."""
    runs = ((text, len([*same])) for text, same in groupby(_each_rope(module)))
    texts = [text if count == 1 else f"{count} x {text}" for text, count in runs]
    parameters = getattr(getattr(module, "config", None), "rope_parameters", None)
    if parameters:
        texts.append(json.dumps(parameters, sort_keys=True, default=str))
    return ", ".join(texts)


def _each_rope(module: nn.Module) -> Iterator[str]:
    for each in module.modules():
        rope = vars(each).get("rope")
        if callable(getattr(rope, "rotate", None)):
            _refuse_length(getattr(getattr(rope, "scaling", None), "uses_length", False), rope)
            yield _described(rope)
        for name, buffer in each.named_buffers(recurse=False):
            if name.endswith("inv_freq") and "original" not in name:
                kinds: Any = getattr(each, "rope_type", "")  # of each type of layer, or one
                for kind in kinds.values() if isinstance(kinds, Mapping) else [kinds]:
                    _refuse_length(kind in _BY_LENGTH, kind)
                factor = getattr(each, name.replace("inv_freq", "attention_scaling"), 1.0)
                yield f"{name} {tensor_digest(name, buffer).hex()} {factor}"


def _refuse_length(uses_length: bool, rope: Any) -> None:
    if uses_length:
        raise ValueError(
            f"the frequencies of {rope!r} change with the length of a call, so that the keys of a "
            "prefix depend on what followed it; if no call is longer than the original context, "
            "give context_of(..., rope=...) a description of your own"
        )


def _active_adapters(module: nn.Module) -> str:
    """The active adapters of PEFT's modules; "" where there are none."""
    states = {
        (str(each.active_adapters), bool(each.disable_adapters))
        for each in module.modules()
        if isinstance(getattr(each, "disable_adapters", None), bool)  # elsewhere it is a method
    }
    return ", ".join(f"{names}{' disabled' * off}" for names, off in sorted(states))


def _settings(module: nn.Module) -> str:
    """A digest of what a model computes besides its weights: arguments, and config."""
    digest = hashlib.sha256()
    for name, each in module.named_modules():
        arguments = vars(each).get("arguments")
        if isinstance(arguments, dict):
            what = {key: value for key, value in arguments.items() if key not in _HOW}
            described = _described(what)
        else:
            described = f"{each.extra_repr()} {_numbers_of(each)}"
        digest.update(framed(name.encode(), type(each).__name__.encode(), described.encode()))
    config: Any = getattr(module, "config", None)
    if hasattr(config, "to_dict"):
        entries = _effective(config.to_dict())
        digest.update(json.dumps(entries, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def _numbers_of(module: nn.Module) -> dict[str, int | float]:
    """The numbers among a module's attributes, such as a scale, which may be changed."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, int | float) and name[:1] != "_" and name not in _WITHOUT_EFFECT
    }


def _effective(entries: Any) -> Any:
    """The entries of a config that keys and values may depend on."""
    if not isinstance(entries, Mapping):
        return entries
    names = (each for each in entries if str(each)[:1] != "_" and each not in _WITHOUT_EFFECT)
    return {str(each): _effective(entries[each]) for each in names}


def _described(value: Any) -> str:
    """Text that determines a value: a rope, a mask, an argument of a layer."""
    if isinstance(value, Tensor):
        return tensor_digest("argument", value).hex()
    if isinstance(value, nn.Module):
        return type(value).__name__  # its tensors are among the weights
    if is_dataclass(value) and not isinstance(value, type):
        parts = (f"{each.name}={_described(getattr(value, each.name))}" for each in fields(value))
        return f"{type(value).__name__}({', '.join(parts)})"
    if isinstance(value, Mapping):
        pairs = (f"{_described(key)}: {_described(each)}" for key, each in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, tuple | list | set | frozenset):
        return f"[{', '.join(_items(value))}]"
    if callable(value) and "<" not in getattr(value, "__qualname__", "<"):
        return f"{value.__module__}.{value.__qualname__}"
    text = repr(value)
    if " at 0x" in text:
        raise ValueError(
            f"{text} has a description that holds for this process only; give it a __repr__ that "
            "determines it, or give context_of(..., rope=..., settings=...) descriptions"
        )
    return text


def _items(values: Iterable[Any]) -> list[str]:
    texts = [_described(each) for each in values]
    return sorted(texts) if isinstance(values, set | frozenset) else texts
