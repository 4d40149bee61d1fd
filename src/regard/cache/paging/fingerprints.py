"""Fingerprints of models: digests of every byte of their weights."""

import ctypes
import hashlib
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

Modules = nn.Module | Sequence[nn.Module]


def fingerprint(module: Modules) -> str:
    """SHA-256 over names, shapes, dtypes and bytes of a model's parameters and persistent buffers.

    It does not depend on the device, nor on how tensors are split over ranks: of a `DTensor` the
    full tensor is read, so every rank must call this. The digest of a tensor is memoised with a
    checksum of all its bytes, which each call computes anew: so every write is noticed, also
    through `.data`, numpy or another process, and every call reads all weights.

    Args:
        module: a model, or its layers in order.

    Returns:
        64 hexadecimal digits.

    Raises:
        ValueError: if a tensor has no data (device "meta", fake tensors), or an entry of the state
            cannot be read as bytes.

    Examples:
        >>> import torch
        >>> from regard.cache.paging.fingerprints import fingerprint
        >>> layer = torch.nn.Linear(3, 2)
        >>> before = fingerprint(layer)
        >>> with torch.no_grad():
        ...     layer.weight[1, 2] += 1
        >>> len(before), fingerprint(layer) == before
        (64, False)
    """
    digest = hashlib.sha256()
    with torch.no_grad():
        for name, entry in whole(module).state_dict(keep_vars=True).items():
            digest.update(framed(name.encode(), _digest_of(name, entry)))
    return digest.hexdigest()


def whole(module: Modules) -> nn.Module:
    """One module: of `torch.compile`, the one that was compiled; layers become a `ModuleList`."""
    if isinstance(module, nn.Module):
        return getattr(module, "_orig_mod", module)
    return nn.ModuleList(module)


_ROW = 1024  # words of 32 bits that are summed up, each times a 64-bit integer of its own
_SECRET = secrets.token_bytes(8 * _ROW)  # these integers, drawn anew in every process
_WORDS = {"cpu": 1 << 15}  # of 32 bits in one operation: their products stay in L2, and torch
# starts no threads, whose barriers would wait for busy cores; threads of ours share a tensor
_MORE_WORDS = 1 << 23  # on other devices, where each operation has to be launched
_SHARED = 1 << 18  # words of a tensor from which on threads share it
_MOST = 1 << 16  # records
_DIGESTS: dict[int, tuple[bytes, bytes]] = {}  # by a tensor's id: its checksum and its digest


def _digest_of(name: str, entry: Any) -> bytes:
    """The digest of an entry of a state dict: a tensor, or what quantised modules have there."""
    if isinstance(entry, Tensor):
        return tensor_digest(name, entry)
    if isinstance(entry, tuple | list):
        return sha256(b"list", *(_digest_of(name, each) for each in entry))
    if isinstance(entry, Mapping):
        return sha256(b"dict", *(_digest_of(name, each) for pair in entry.items() for each in pair))
    if isinstance(entry, bytes | bytearray):
        return sha256(b"bytes", bytes(entry))
    if entry is None or isinstance(entry, bool | int | float | str | torch.dtype):
        return sha256(type(entry).__name__.encode(), repr(entry).encode())
    raise ValueError(
        f"{name!r} of the model's state is a {type(entry).__name__}, and a fingerprint reads "
        "tensors, numbers and text; give Context(weights=...) a digest of your own"
    )


def tensor_digest(name: str, tensor: Tensor) -> bytes:
    """SHA-256 of a tensor's dtype, shape and bytes."""
    if tensor.device.type == "meta" or isinstance(tensor, FakeTensor):
        raise ValueError(
            f"{name!r} is on device {str(tensor.device)!r} without data, and a fingerprint reads "
            "every byte; load the model's weights first"
        )
    if hasattr(tensor, "full_tensor"):  # a DTensor
        return tensor_digest(name, tensor.full_tensor())
    inner = _inner_entries(tensor)
    if inner is not None:
        return sha256(type(tensor).__name__.encode(), *(_digest_of(name, each) for each in inner))
    if tensor.layout is not torch.strided:
        raise ValueError(
            f"{name!r} has the layout {tensor.layout}, and a fingerprint reads dense tensors; give "
            "Context(weights=...) a digest of your own"
        )
    header = f"{tensor.dtype} {list(tensor.shape)}".encode()
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    checksum = _checksum(header, plain)
    known, digest = _DIGESTS.get(id(tensor), (b"", b""))
    if known != checksum:
        here = plain.cpu()
        digest = sha256(header, _memory(here))
        if len(_DIGESTS) >= _MOST:
            _DIGESTS.clear()
        _DIGESTS[id(tensor)] = checksum, digest
    return digest


def _checksum(header: bytes, tensor: Tensor) -> bytes:
    """A checksum of every byte, which takes less than half the time of SHA-256 on one core.

    The bytes are read as 32-bit words. Each 1,024 words are multiplied by secret random 64-bit
    integers and summed modulo 2^64. Two different contents have the same sum with a probability of
    at most 2^-33 (multilinear hashing), whatever the difference is.
    """
    flat = tensor.reshape(-1).view(torch.uint8)
    whole = flat.numel() // (4 * _ROW) * (4 * _ROW)
    checksum = hashlib.sha256(header + _bytes(flat[whole:]))
    if whole:
        aligned = flat[:whole] if flat.data_ptr() % 4 == 0 else flat[:whole].clone()
        words = aligned.view(torch.int32).view(-1, _ROW)
        keys = torch.frombuffer(bytearray(_SECRET), dtype=torch.int64).to(tensor.device)
        if tensor.device.type != "cpu" or words.numel() < _SHARED:
            checksum.update(_bytes(_sums(words, keys)))
            return checksum.digest()
        parts = words.chunk(torch.get_num_threads())
        with ThreadPoolExecutor(len(parts)) as threads:
            for sums in threads.map(partial(_sums, keys=keys), parts):
                checksum.update(_bytes(sums))
    return checksum.digest()


def _sums(words: Tensor, keys: Tensor) -> Tensor:
    some = _WORDS.get(words.device.type, _MORE_WORDS) // len(keys)
    return torch.cat([(each * keys).sum(1) for each in words.split(some)])


def _inner_entries(tensor: Tensor) -> Sequence[Any] | None:
    """The tensors that a quantised tensor or a wrapper consists of; None for a plain tensor."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, about = tensor.__tensor_flatten__()
        return (*(entry for each in names for entry in (each, getattr(tensor, each))), repr(about))
    if tensor.is_quantized:
        return (str(tensor.dtype), str(tensor.qscheme()), tensor.dequantize())
    return None


def _bytes(tensor: Tensor) -> bytes:
    """A copy of the bytes of a contiguous tensor on any device."""
    here = tensor.cpu()
    return bytes(_memory(here))


def _memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in main memory, of any dtype, without a copy: the caller
    holds the tensor while it reads them."""
    size = tensor.numel() * tensor.element_size()
    if not size:
        return memoryview(b"")
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


def framed(*parts: bytes | memoryview) -> bytes:
    """The parts, each with its length before it."""
    return b"".join(len(part).to_bytes(8, "big") + bytes(part) for part in parts)


def sha256(*parts: bytes | memoryview) -> bytes:
    """SHA-256 over parts, each with its length before it."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.digest()
