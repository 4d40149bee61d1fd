"""Converted layers cached on disk, so that a second comparison does not convert again.

A file holds the attention of one conversion, as safetensors. Its name is a digest of all that
determines the conversion: the attention weights, the text, the target and the version of the code.
"""

import hashlib
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.cache.files import open_tensors, write_tensors
from regard.cache_folder import FOLDER, cache_folder, remove_oldest
from regard.convert.linear import linear_of, with_kv_heads
from regard.convert.targets import Target
from regard.hf.loading.descriptions import described, layer_from
from regard.layers.attention import Attention

VERSION = 5  # of the conversions: one more whenever a change gives converted layers other weights
MOST = 1 << 30  # bytes on disk; beyond it the oldest files are removed


def folder() -> Path:
    """The folder of the files, in the user's cache."""
    return cache_folder() / "compare"


def name_of(target: Target, shipped: Sequence[Attention], tokens: Tensor) -> str:
    """The digest of all that determines a conversion."""
    digest = hashlib.sha256(repr((VERSION, target, len(shipped))).encode())
    for layer in shipped:
        digest.update(repr(layer).encode())
        for parameter in layer.parameters():
            digest.update(str(parameter.dtype).encode())
            flat = parameter.detach().flatten()
            some = flat[:: max(1, len(flat) // 4096)].float().cpu().contiguous()
            digest.update(some.numpy().tobytes())
    digest.update(tokens.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:32]


def store(name: str, layers: Sequence[nn.Module]) -> None:
    """Write the layers, unless one cannot be described as data."""
    try:
        entries = [_described(layer) for layer in layers]
    except ValueError:
        return
    tensors = {
        f"{index}.{key}": value.detach()
        for index, layer in enumerate(layers)
        for key, value in layer.state_dict().items()
    }
    path = folder() / f"{name}.safetensors"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(path, {"layers": json.dumps(entries)}, tensors)
        remove_oldest(folder().glob("*.safetensors"), MOST, keep=path)
    except (OSError, ValueError) as error:  # a full or read-only disk
        warnings.warn(
            f"converted layers are not stored for the next comparison: {error}; set {FOLDER} to a "
            "folder that can be written",
            stacklevel=2,
        )


def find(name: str, shipped: Sequence[Attention]) -> list[nn.Module] | None:
    """The stored layers of that name; None if there are none."""
    try:
        path = folder() / f"{name}.safetensors"
        device = next(shipped[0].parameters()).device
        with open_tensors(path) as file:
            entries = json.loads(file.metadata["layers"])
            state = {key: file.read(key).to(device) for key in file.entries}
        return _layers(entries, state, shipped, path)
    except (OSError, ValueError, KeyError, RuntimeError):
        return None  # not there, of another version, or incomplete: it is converted again


def _layers(
    entries: list[Any], state: dict[str, Tensor], shipped: Sequence[Attention], path: Path
) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for index, (entry, own) in enumerate(zip(entries, shipped, strict=True)):
        start = f"{index}."
        mine = {key.removeprefix(start): v for key, v in state.items() if key.startswith(start)}
        if entry["kind"] == "heads":
            projections = {
                name: linear_of(mine[f"{name}.weight"], mine.get(f"{name}.bias"))
                for name in ("q_proj", "k_proj", "v_proj", "o_proj")
            }
            layers.append(with_kv_heads(own, entry["num_kv_heads"], projections))
            continue
        with torch.device("meta"):
            layer = layer_from(entry, path)
        layer.load_state_dict(mine, assign=True)
        layers.append(layer.train(own.training))
    return layers


def _described(layer: Any) -> dict[str, Any]:
    if isinstance(layer, Attention):
        return {"kind": "heads", "num_kv_heads": layer.num_kv_heads}
    return described(layer)
