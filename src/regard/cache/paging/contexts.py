"""Fingerprints of the model and of the name under which cached keys and values are found.

A prefix that was stored under one context is never found under another.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from regard.cache.files import memory_of
from regard.cache.paging.checksums import digest_once, gains

Modules = nn.Module | Sequence[nn.Module]
_WITHOUT_EFFECT = {  # config entries and attributes that no key or value depends on
    *("dtype", "output_attentions", "output_hidden_states", "return_dict", "torch_dtype"),
    *("transformers_version", "use_cache", "training", "gradient_checkpointing"),
}
_HOW = {"backend", "dropout", "form", "precision"}  # how a layer computes, not what
_BY_LENGTH = {"dynamic", "longrope"}  # rope types of transformers whose frequencies change


@dataclass(frozen=True)
class Context:
    """The model and the name on which the keys and values of a prefix depend, besides tokens.

    A search finds what was stored under an equal context, and nothing else.

    Args:
        weights: fingerprint of the model's weights; a pool holds pages of one fingerprint.
        key: a text that tells apart whatever else differs: the computation, adapters, users.

    Raises:
        TypeError: if one of them is not text.

    Examples:
        >>> from regard.cache import Context
        >>> Context("5e1f", "user a") == Context("5e1f", "user b")
        False
    """

    weights: str
    key: str = ""

    def __post_init__(self) -> None:
        for name, value in (("weights", self.weights), ("key", self.key)):
            if not isinstance(value, str):
                raise TypeError(f"Context: {name} is text, got {value!r}")


def context_of(module: Modules, *, name: str = "") -> Context:
    """The context of a model, or of its layers: its weights, its computation, and a name.

    The key is made of the name and of a digest of the modules' types and arguments, the active
    adapters of a PEFT model, the frequencies of RoPE, and the config of a transformers model.

    Args:
        module: a model, or its layers in order.
        name: any text that tells prefixes apart: of a user, say, or of an adapter.

    Returns:
        The context, under which `PagePool.prefix` finds and `PagePool.store` stores.

    Raises:
        ValueError: if weights have no data (device "meta"), if RoPE's frequencies change with the
            length of a call, or if an argument of a layer cannot be described.

    Examples:
        >>> from regard import Attention, Rotary
        >>> from regard.cache import context_of
        >>> layer = Attention(64, 4, rope=Rotary(16))
        >>> other = Attention(64, 4, rope=Rotary(16, theta=500.0))
        >>> _ = other.load_state_dict(layer.state_dict())
        >>> context_of(other).weights == context_of(layer).weights
        True
        >>> context_of(other).key == context_of(layer).key
        False
    """
    model = _whole(module)
    return Context(fingerprint(model), json.dumps((name, _computation(model).hex())))


def _computation(model: nn.Module) -> bytes:
    """A digest of a model without its weights: arguments, adapters, ropes, configuration."""
    config: Any = getattr(model, "config", None)
    entries = _effective(getattr(config, "to_dict", dict)())
    modules = (
        (name, type(module).__name__, _arguments_of(module), list(_ropes_of(module)))
        for name, module in model.named_modules()
    )
    digests = (_digest_of(name, (name, *rest)) for name, *rest in modules)
    text = json.dumps((_active_adapters(model), entries), sort_keys=True, default=str)
    return sha256(*digests, text.encode())


def _arguments_of(module: nn.Module) -> Any:
    """The arguments of a layer of regard; of another module its description, and the numbers in its
    attributes, such as a scale, or PEFT's of each adapter: they may be changed."""
    arguments = vars(module).get("arguments")
    if isinstance(arguments, dict):
        return {key: value for key, value in arguments.items() if key not in _HOW}
    names = (each for each in vars(module) if each[:1] != "_" and each not in _WITHOUT_EFFECT)
    numbers = [*_numbers_in({each: vars(module)[each] for each in names})]
    return module.extra_repr(), repr(numbers)  # one text: a model has thousands of numbers


def _numbers_in(value: Any) -> Iterator[Any]:
    """A number, or those in a container and the containers in it, after their keys or places."""
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from ((str(key), number) for number in _numbers_in(each))


def _ropes_of(module: nn.Module) -> Iterator[Any]:
    """The rope of a module, and the frequencies of transformers' ropes."""
    rope = vars(module).get("rope")
    if callable(getattr(rope, "rotate", None)):
        _refuse_length(getattr(getattr(rope, "scaling", None), "uses_length", False), rope)
        yield rope
    for name, buffer in module.named_buffers(recurse=False):
        if name.endswith("inv_freq") and "original" not in name:
            kinds: Any = getattr(module, "rope_type", "")  # of each type of layer, or one
            for kind in kinds.values() if isinstance(kinds, Mapping) else [kinds]:
                _refuse_length(kind in _BY_LENGTH, kind)
            factor = getattr(module, name.replace("inv_freq", "attention_scaling"), 1.0)
            yield name, buffer, factor


def _refuse_length(uses_length: bool, rope: Any) -> None:
    if uses_length:
        raise ValueError(
            f"the frequencies of {rope!r} change with the length of a call, so that the keys of a "
            "prefix depend on what followed it; if no call is longer than the original context, "
            "give Context(fingerprint(model), 'a text of yours'), or regard.hf.cache prefixes=False"
        )


def _active_adapters(module: nn.Module) -> str:
    """The active adapters of PEFT's modules; "" where there are none."""
    states = {
        (str(each.active_adapters), bool(each.disable_adapters))
        for each in module.modules()
        if isinstance(getattr(each, "disable_adapters", None), bool)  # elsewhere it is a method
    }
    return ", ".join(f"{names}{' disabled' * off}" for names, off in sorted(states))


def _effective(entries: Any) -> Any:
    """The entries of a config that keys and values may depend on."""
    if not isinstance(entries, Mapping):
        return entries
    names = (each for each in entries if str(each)[:1] != "_" and each not in _WITHOUT_EFFECT)
    return {str(each): _effective(entries[each]) for each in names}


# ---- digests ----


def fingerprint(module: Modules) -> str:
    """SHA-256 over names, shapes, dtypes and bytes of a model's parameters and persistent buffers.

    It does not depend on the device, nor on how tensors are split over ranks: of a `DTensor` the
    full tensor is read, so every rank must call this. Every call reads all weights, so that every
    write is noticed, also through `.data`, numpy or another process; a tensor with the checksum of
    the last call is not digested again.

    Args:
        module: a model, or its layers in order.

    Returns:
        64 hexadecimal digits.

    Raises:
        ValueError: if a tensor has no data (device "meta", fake tensors), or an entry of the state
            cannot be read as bytes.

    Examples:
        >>> import torch
        >>> from regard.cache import fingerprint
        >>> layer = torch.nn.Linear(3, 2)
        >>> before = fingerprint(layer)
        >>> with torch.no_grad():
        ...     layer.weight[1, 2] += 1
        >>> len(before), fingerprint(layer) == before
        (64, False)
    """
    digest = hashlib.sha256()
    with torch.no_grad():
        entries = _whole(module).state_dict(keep_vars=True)
        known = _read_by_threads(entries)  # tied tensors are read once
        for name, entry in entries.items():
            found = known.setdefault(id(entry), known.get(id(entry)) or _digest_of(name, entry))
            _update(digest, name.encode(), found)
    return digest.hexdigest()


def _read_by_threads(entries: Mapping[str, Any]) -> dict[int, bytes]:
    """The digests of plain tensors on the CPU, by their identity: threads read them side by side,
    since hashing releases the interpreter's lock."""
    plain = {
        id(x): (name, x)
        for name, x in entries.items()
        if type(x) in (Tensor, nn.Parameter) and x.is_cpu and x.layout is torch.strided
    }
    with suppress(RuntimeError), ThreadPoolExecutor(torch.get_num_threads()) as pool:
        digests = pool.map(lambda each: _digest_of(*each), plain.values())
        return dict(zip(plain, digests, strict=True))
    return {}  # no thread can be started: the caller reads them


def _whole(module: Modules) -> nn.Module:
    """One module: of `torch.compile` the one that was compiled; of layers a `ModuleList`."""
    if isinstance(module, nn.Module):
        return getattr(module, "_orig_mod", module)
    return nn.ModuleList(module)


def _digest_of(name: str, value: Any) -> bytes:
    """The digest of an entry of a state dict, or of an argument of a layer."""
    match value:
        case Tensor():
            return tensor_digest(name, value)
        case nn.Module():
            return sha256(type(value).__name__.encode())  # its tensors are among the weights
        case tuple() | list():
            return sha256(b"list", *(_digest_of(name, each) for each in value))
        case set() | frozenset():
            return sha256(b"set", *sorted(_digest_of(name, each) for each in value))
        case Mapping():
            pairs = (_digest_of(name, each) for pair in value.items() for each in pair)
            return sha256(b"dict", *pairs)
        case bytes() | bytearray():
            return sha256(b"bytes", bytes(value))
    kind = type(value).__name__
    if is_dataclass(value) and not isinstance(value, type):
        arguments = {each.name: getattr(value, each.name) for each in fields(value)}
        return sha256(kind.encode(), _digest_of(name, arguments))
    if callable(value) and "<" not in getattr(value, "__qualname__", "<"):
        return sha256(f"{value.__module__}.{value.__qualname__}".encode())
    text = repr(value)
    if " at 0x" in text:
        raise ValueError(
            f"{name!r} of the model has {text}, whose description holds for this process only; "
            "give it a __repr__ that determines it, or give Context('a digest', 'a text of yours')"
        )
    return sha256(kind.encode(), text.encode())


def tensor_digest(name: str, tensor: Tensor) -> bytes:
    """SHA-256 of a tensor's dtype, shape and bytes."""
    if tensor.device.type == "meta" or isinstance(tensor, FakeTensor):
        raise ValueError(
            f"{name!r} is on device {str(tensor.device)!r} without data, and a fingerprint reads "
            "every byte; load the model's weights first"
        )
    tensor = getattr(tensor, "full_tensor", lambda: tensor)()  # of a DTensor
    inner = _inner_entries(tensor)
    if inner is not None:
        return sha256(type(tensor).__name__.encode(), *(_digest_of(name, each) for each in inner))
    if tensor.layout is not torch.strided:
        raise ValueError(
            f"{name!r} has the layout {tensor.layout}, and a fingerprint reads dense tensors; give "
            "Context(weights=...) a digest of your own"
        )
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()

    def digest() -> bytes:
        header = f"{tensor.dtype} {list(tensor.shape)}".encode()
        return sha256(header, memory_of(plain.cpu()))

    return digest_once(tensor, digest) if gains(tensor) else digest()


def _inner_entries(tensor: Tensor) -> Sequence[Any] | None:
    """The tensors that a quantised tensor or a wrapper consists of; None for a plain tensor."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        names, about = flatten()
        return (*(entry for each in names for entry in (each, getattr(tensor, each))), repr(about))
    if tensor.is_quantized:
        return (str(tensor.dtype), str(tensor.qscheme()), tensor.dequantize())
    return None


def sha256(*parts: Any) -> bytes:
    """SHA-256 over parts, each with its length before it."""
    digest = hashlib.sha256()
    _update(digest, *parts)
    return digest.digest()


def _update(digest: Any, *parts: Any) -> None:
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
