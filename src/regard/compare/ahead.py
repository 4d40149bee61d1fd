"""Decoding kernels compiled in a second process, while the model loads.

A kernel takes seconds to compile, once on a machine: numba stores it, and the comparison finds it.
"""

import json
import logging
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from regard.compare.candidates import Candidate, as_shipped
from regard.layers.attention import Attention
from regard.masks import Causal


@contextmanager
def kernels_ahead(
    model: Path,
    candidates: Sequence[Candidate],
    *,
    context: int,
    dtype: str | None = None,
    device: str = "cpu",
) -> Iterator[None]:
    """While the block runs, a forked process compiles the kernels that rows without a conversion
    decode with, by the heads in the config.json of a folder. A kernel that is not stored when it is
    needed is compiled there. Call it before torch starts threads: a fork cannot use them.
    """
    if sys.platform != "linux" or device != "cpu":
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that numpy's threads are not forked
        child = os.fork()
    if not child:
        with suppress(BaseException):
            logging.disable()  # nobody waits for what is compiled here
            torch.set_num_threads(1)
            compile_kernels(model, candidates, context=context, dtype=dtype)
        os._exit(0)
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)  # numba replaces each file whole, or leaves it
        os.waitpid(child, 0)


@torch.no_grad()
def compile_kernels(
    model: Path, candidates: Sequence[Candidate], *, context: int, dtype: str | None = None
) -> None:
    """Decode one token of one layer, with the cache of each row without a conversion."""
    from regard.hf.generating.caches import maker_of

    config = json.loads((model / "config.json").read_text())
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    layer = Attention(head_dim, heads, num_kv_heads=kv_heads, head_dim=head_dim, mask=Causal())
    layer.to(getattr(torch, dtype or "float32"))
    keys = layer.q_proj.weight.new_zeros(1, kv_heads, context, head_dim)
    for each in candidates:
        if each.choose is as_shipped and isinstance(each.cache, str):
            cache = maker_of(each.cache)(None)
            cache.update(keys, keys)
            layer(keys[:, 0, :1], cache=cache)
