"""Small GGUF files with the keys and the tensors of attention that a test gives."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np


def plain_block(
    hidden: int, heads: int, kv_heads: int, head_dim: int, **more: tuple[int, ...]
) -> dict[str, tuple[int, ...]]:
    """The tensors of a block of MHA, GQA or MQA, as [outputs, inputs]; `more` by `name_bias`."""
    found = {
        "attn_q.weight": (heads * head_dim, hidden),
        "attn_k.weight": (kv_heads * head_dim, hidden),
        "attn_v.weight": (kv_heads * head_dim, hidden),
        "attn_output.weight": (hidden, heads * head_dim),
    }
    return found | more


def write_header(
    file: Path,
    architecture: str,
    keys: Mapping[str, Any],
    blocks: list[Mapping[str, tuple[int, ...]]],
    others: tuple[str, ...] = (),
) -> Path:
    """Write a GGUF; `keys` go without the architecture's name. Returns the file."""
    writer = gguf.GGUFWriter(file, architecture)
    for name, value in ({"block_count": len(blocks)} | dict(keys)).items():
        _add(writer, f"{architecture}.{name}", value)
    writer.add_array("tokenizer.ggml.tokens", [f"token {number}" for number in range(40)])
    for index, block in enumerate(blocks):
        for name, shape in block.items():
            writer.add_tensor(f"blk.{index}.{name}", np.zeros(shape, np.float32))
    for name in others:
        writer.add_tensor(name, np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        writer.add_string(key, value)
