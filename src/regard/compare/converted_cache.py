"""Converted layers kept between runs, so that a second comparison need not convert again.

A file holds one conversion's attention, as safetensors; its name is a digest of everything that the
conversion came of: the model's attention weights, the text, the target and the code that converts.
"""

import hashlib
import json
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import regard
from regard import convert
from regard.convert.linear import linear_of
from regard.convert.lossy.regroup import outline
from regard.convert.targets import Target
from regard.hf.loading.gguf_copies import FOLDER, cache_folder
from regard.hf.placing.describing import described, layer_from
from regard.layers.attention import Attention

CODE = Path(convert.__file__).parent
MOST = 1 << 30  # bytes kept at most: the oldest files go first


def folder() -> Path:
    """Where they are kept, in the user's cache."""
    return cache_folder() / "compare"


def name_of(target: Target, shipped: Sequence[Attention], tokens: Tensor) -> str:
    """The digest of everything that a conversion comes of."""
    digest = hashlib.sha256(repr((regard.__version__, target, len(shipped))).encode())
    for source in sorted(CODE.rglob("*.py")):
        digest.update(source.read_bytes())
    for layer in shipped:
        digest.update(repr(layer).encode())
        for parameter in layer.parameters():
            flat = parameter.detach().flatten()
            some = flat[:: max(1, len(flat) // 4096)].float().contiguous()
            digest.update(some.numpy().tobytes())
    digest.update(tokens.contiguous().numpy().tobytes())
    return digest.hexdigest()[:32]


def keep(name: str, layers: Sequence[nn.Module]) -> None:
    """Write the layers; what cannot be described is not kept."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        said = [_said(layer) for layer in layers]
    except ValueError:
        return
    tensors = {
        f"{index}.{key}": value.detach().clone().contiguous()
        for index, layer in enumerate(layers)
        for key, value in layer.state_dict().items()
    }
    try:
        folder().mkdir(parents=True, exist_ok=True)
        path = folder() / f"{name}.safetensors"
        beside = path.with_suffix(f".{os.getpid()}")
        save_file(tensors, beside, metadata={"layers": json.dumps(said)})
        beside.rename(path)
        _forget_the_oldest()
    except (OSError, RuntimeError, SafetensorError) as error:  # a full disk, one that is read-only
        warnings.warn(
            f"converted layers are not kept for the next comparison: {error}; set {FOLDER} to a "
            "folder that can be written",
            stacklevel=2,
        )


def find(name: str, shipped: Sequence[Attention]) -> list[nn.Module] | None:
    """The layers of that name, if they are kept."""
    from safetensors import SafetensorError, safe_open

    try:
        path = folder() / f"{name}.safetensors"
        if not path.exists():
            return None
        with safe_open(path, framework="pt") as file:
            said = json.loads(file.metadata()["layers"])
            state = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        return _layers(said, state, shipped, path)
    except (OSError, SafetensorError, ValueError, KeyError, RuntimeError):
        return None  # another version's, or half a file: it is made again


def _layers(
    said: list[Any], state: dict[str, Tensor], shipped: Sequence[Attention], path: Path
) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for index, (entry, own) in enumerate(zip(said, shipped, strict=True)):
        start = f"{index}."
        mine = {key.removeprefix(start): v for key, v in state.items() if key.startswith(start)}
        if entry["kind"] == "heads":
            layers.append(_heads(outline(own, entry["num_kv_heads"]), mine))
            continue
        with torch.device("meta"):
            layer = layer_from(entry, path)
        layer.load_state_dict(mine, assign=True)
        layers.append(layer.train(own.training))
    return layers


def _heads(layer: Attention, state: dict[str, Tensor]) -> Attention:
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        made = linear_of(state[f"{name}.weight"], state.get(f"{name}.bias"))
        setattr(layer, name, made)
    return layer


def _said(layer: Any) -> dict[str, Any]:
    if isinstance(layer, Attention):
        return {"kind": "heads", "num_kv_heads": layer.num_kv_heads}
    return described(layer)


def _forget_the_oldest() -> None:
    files = sorted(folder().glob("*.safetensors"), key=lambda file: file.stat().st_mtime)
    held = sum(file.stat().st_size for file in files)
    for file in files[:-1]:
        if held <= MOST:
            return
        held -= file.stat().st_size
        file.unlink(missing_ok=True)
