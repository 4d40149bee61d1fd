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
from typing import Any

import torch
from torch import Tensor

from regard.compare.candidates import Candidate
from regard.convert.targets import Target
from regard.layers.attention import Attention
from regard.layers.latent import MultiHeadLatentAttention
from regard.masks import Causal
from regard.ops.observed import calls_run
from regard.rope import Rotary


@contextmanager
def kernels_ahead(
    model: Path,
    candidates: Sequence[Candidate],
    *,
    context: int,
    dtype: str | None = None,
    device: str = "cpu",
) -> Iterator[None]:
    """While the block runs, a forked process compiles the kernels that rows decode with, in their
    order, by the heads in the config.json of a folder. A kernel that is not stored when it is
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
    """Multiply one token by a weight; run a layer of each row with its cache: a prefill, a step,
    and a step that is repeated."""
    from regard.hf.generating.caches import KINDS, NAMES
    from regard.ops.kernels.chaining import linear  # imports numba

    config = json.loads((model / "config.json").read_text())
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    width = config.get("head_dim") or config["hidden_size"] // heads
    sizes: dict[str, Any] = {"num_kv_heads": kv_heads, "head_dim": width}
    own = Attention(config["hidden_size"], heads, **sizes, rope=Rotary(width), mask=Causal())
    x = torch.zeros(1, context, own.hidden_size, dtype=getattr(torch, dtype or "float32"))
    linear(x[:, 0], x.new_zeros(1, own.hidden_size))
    for each in candidates:
        if isinstance(each.cache, str):
            kind, options = NAMES[each.cache]
            with suppress(ValueError):  # the model cannot have this row
                layer = _layer(own, each.choose([own], x.dtype)).to(x.dtype)
                _run(layer, KINDS[kind](**options)(None), x)


def _layer(own: Attention, target: Target | None) -> Any:
    """The layer whose kernels a row decodes with: that of the model, or DeepSeek's MLA."""
    if target is None or target.kind != "deepseek":
        return own
    return MultiHeadLatentAttention(
        own.hidden_size,
        own.num_heads,
        kv_lora_rank=target.rank - target.portable,
        qk_nope_head_dim=own.head_dim,
        qk_rope_head_dim=target.rope_dim,
        v_head_dim=own.head_dim,
        rope=Rotary(target.rope_dim),
        mask=own.mask,
    )


def _run(layer: Any, cache: Any, x: Tensor) -> None:
    """Fill a cache and decode; then, if an installed model would, repeat that in compiled code."""
    from regard.hf.running.steps import in_buffers, is_quickest

    layer(x, cache=cache)
    prepared: list[Any] = []
    with calls_run(lambda call, *given: prepared.append(call)):
        layer(x[:, :1], cache=cache)
    if not isinstance(layer, Attention) or not is_quickest(prepared[-1]):
        return
    run_one = in_buffers(prepared[-1], cache)
    if run_one is not None:
        counts = layer.num_heads, layer.num_kv_heads
        q, k = (x.new_zeros(1, count, 1, layer.head_dim) for count in counts)
        run_one(cache, q, k, k, signed=False, scale=1.0)
