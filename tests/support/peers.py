"""Other people's attention modules, run in float32 as they are and in float64 as they are meant.

transformers computes norms, softmax and rotary angles in float32 whatever it is given. Its own code
becomes a judge to the last digit where, while it runs, the name float32 means float64.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from regard import KVCache

transformers = pytest.importorskip("transformers", reason="pip install regard[hf]")

BATCH, LENGTH = 2, 11


class Theirs(NamedTuple):
    """A peer's answer: as it runs, and in float64."""

    single: Tensor
    double: Tensor


@contextlib.contextmanager
def float32_means_float64() -> Iterator[None]:
    with (
        mock.patch.object(torch, "float", torch.float64),
        mock.patch.object(torch, "float32", torch.float64),
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        yield


@torch.no_grad()
def answers(peer: nn.Module, *given: Tensor, of: Callable[..., Tensor]) -> Theirs:
    """`of(peer, *given)`, twice."""
    single = of(peer, *given)
    with float32_means_float64():
        double = of(copy.deepcopy(peer).double(), *(x.double() for x in given))
    assert (single.dtype, double.dtype) == (torch.float32, torch.float64)
    return Theirs(single, double)


@torch.no_grad()
def close(layer: nn.Module, theirs: Theirs, *given: Tensor, of: Callable[..., Tensor]) -> None:
    """In float64 the same to the last digits; in float32 no further off than twice the peer, and
    two units in the last place of the largest output, since a peer may be lucky."""
    top = theirs.double.abs().max().item()
    double = of(copy.deepcopy(layer).double(), *(x.double() for x in given))
    assert double.dtype == torch.float64
    assert (double - theirs.double).abs().max() <= 1e-13 * top
    error = (of(layer, *given).double() - theirs.double).abs().max().item()
    allowed = 2 * (theirs.single.double() - theirs.double).abs().max().item()
    assert error <= allowed + 2 * torch.finfo(torch.float32).eps * top


def agree(layer: nn.Module, theirs: Theirs, x: Tensor) -> None:
    """Whole, in chunks, token by token."""
    close(layer, theirs, x, of=lambda layer, x: layer(x))
    for sizes in ([4, 1, 1, 5], [1] * LENGTH, [LENGTH]):
        close(layer, theirs, x, of=lambda layer, x, sizes=sizes: in_chunks(layer, x, sizes))


def in_chunks(layer: nn.Module, x: Tensor, sizes: list[int]) -> Tensor:
    cache = KVCache()
    return torch.cat([layer(chunk, cache=cache) for chunk in x.split(sizes, dim=1)], dim=1)


def randomised(module: nn.Module) -> nn.Module:
    """All parameters random, norms around one."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            around = 1.0 if "norm" in name else 0.0
            parameter.copy_(around + 0.3 * torch.randn_like(parameter))
    return module.eval()


def load(layer: nn.Module, peer: nn.Module, renames=()) -> nn.Module:
    """The peer's state dict, strictly: names differ only where `renames` says."""
    state = peer.state_dict()
    for old, new in renames:
        state = {name.replace(old, new): value for name, value in state.items()}
    layer.load_state_dict(state, strict=True)
    return layer.eval()


def decoder(family, config_class, size, **options):
    """One attention module of a decoder, its rotary module, and random input."""
    module = import_module(f"transformers.models.{family}.modeling_{family}")
    config = getattr(transformers, config_class)(**size, **options)
    config._attn_implementation = "eager"
    name = config_class.removesuffix("Config")
    peer = randomised(getattr(module, f"{name}Attention")(config, 0))
    rotary = getattr(module, f"{name}RotaryEmbedding")(config)
    return peer, rotary, torch.randn(BATCH, LENGTH, size["hidden_size"])


def run(peer: nn.Module, rotary: nn.Module, x: Tensor, mask: Tensor) -> Theirs:
    """With cosines and sines of their own making; the rotary module is built anew for float64."""

    def attend(peer, x, mask):
        embeddings = type(rotary)(rotary.config)(x, torch.arange(LENGTH)[None])
        return peer(x, position_embeddings=embeddings, attention_mask=mask)[0]

    return answers(peer, x, mask, of=attend)


def additive(visible: Callable[[int, int], bool]) -> Tensor:
    rows = [[0.0 if visible(q, k) else -1e30 for k in range(LENGTH)] for q in range(LENGTH)]
    return torch.tensor(rows)[None, None]


def causal(window: int | None = None) -> Tensor:
    return additive(lambda q, k: k <= q and (window is None or q - k < window))
