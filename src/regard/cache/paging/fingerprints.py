"""Fingerprints of models: digests of every byte of their weights."""

import ctypes
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

Modules = nn.Module | Sequence[nn.Module]

_SAMPLES = 64  # bytes of a tensor that find writes through `.data`, which no version counter sees


def fingerprint(module: Modules) -> str:
    """SHA-256 over names, shapes, dtypes and bytes of a model's parameters and persistent buffers.

    It does not depend on the device, nor on how tensors are split over ranks: of a `DTensor` the
    full tensor is read, so every rank must call this. Digests are memoised for each tensor until
    it is written. A write that leaves its version counter as it was (through `.data`) is found by
    comparing some of the tensor's bytes.

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


class _Known(NamedTuple):
    """The digest of a tensor, and what changes when the tensor is written."""

    storage: StorageWeakRef  # neither it nor the tensor is held: torch swaps and frees both
    written: tuple[int, int]  # version, address
    samples: bytes
    digest: bytes

    def holds(self, tensor: Tensor, written: tuple[int, int] | None) -> bool:
        """Whether nothing was written since."""
        if written != self.written or self.storage.expired():
            return False
        return _samples(tensor) == self.samples


_DIGESTS: dict[int, _Known] = {}  # by the tensor's id
_MOST = 4096  # records, after which those of freed tensors are removed


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
    known = _DIGESTS.get(id(tensor))
    written = None if tensor.is_inference() else (tensor._version, tensor.data_ptr())
    if known is not None and known.holds(tensor, written):
        return known.digest
    header = f"{tensor.dtype} {list(tensor.shape)}".encode()
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    digest = sha256(header, _memory(plain))
    if written is not None:
        storage = StorageWeakRef(tensor.untyped_storage())
        _DIGESTS[id(tensor)] = _Known(storage, written, _samples(tensor), digest)
        _remove_expired()
    return digest


def _remove_expired() -> None:
    if len(_DIGESTS) > _MOST:
        for key, known in list(_DIGESTS.items()):
            if known.storage.expired():
                _DIGESTS.pop(key, None)


def _inner_entries(tensor: Tensor) -> Sequence[Any] | None:
    """The tensors that a quantised tensor or a wrapper consists of; None for a plain tensor."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, about = tensor.__tensor_flatten__()
        return (*(entry for each in names for entry in (each, getattr(tensor, each))), repr(about))
    if tensor.is_quantized:
        return (str(tensor.dtype), str(tensor.qscheme()), tensor.dequantize())
    return None


def _samples(tensor: Tensor) -> bytes:
    """Some bytes at regular distances; the step is odd, so that all bytes of an element occur."""
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        whole = _memory(tensor)
        return bytes(whole[:: len(whole) // _SAMPLES | 1])
    few = tensor.detach().flatten()[:: tensor.numel() // _SAMPLES | 1].cpu().contiguous()
    return bytes(_memory(few))


def _memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in main memory, of any dtype, without a copy."""
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
