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

from regard.compare.candidates import Candidate
from regard.compare.runner import Runner
from regard.hf import attention_modules, attention_of
from regard.layers.attention import Attention
from regard.layers.latent import MultiHeadLatentAttention
from regard.rope import Rotary

SIZES = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")


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
    """Run a model of one such layer as each row runs: a prefill, a step, and the step repeated."""
    from transformers import LlamaConfig, LlamaForCausalLM

    given = json.loads((model / "config.json").read_text())
    sizes = {name: given[name] for name in SIZES if given.get(name)}
    config = LlamaConfig(**sizes, num_hidden_layers=1, intermediate_size=8, vocab_size=8)
    small = LlamaForCausalLM(config).to(getattr(torch, dtype or "float32")).eval()
    (own,) = map(attention_of, attention_modules(small).values())
    tokens = torch.zeros(1, context, dtype=torch.int64)
    for each in candidates:
        with suppress(ValueError):  # the model cannot have this row
            target = each.choose([own], small.dtype)
            latent = target is not None and target.kind == "deepseek"
            runner = Runner(small, [_latent(own, target)] if latent else None, cache=each.cache)
            runner.hidden(tokens)
            for _ in range(2):
                runner.step(tokens[:, :1])


def _latent(own: Attention, target: Any) -> MultiHeadLatentAttention:
    """DeepSeek's MLA in the sizes of a conversion."""
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
