"""Ways to quantise a page of keys or values, and a cache that shows what they do to a model.

A page is a tensor `[B, G, tokens, W]`. A method returns the values that its codes stand for; its
`overhead` is the bits a number that scales, zeros and equalisation take, in bfloat16.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from regard import Part, Span
from regard.cache.codes import dequantize, quantize
from regard.cache.rotation import blocks_of, hadamard

PAGE = 64  # tokens
ITERATIONS = 16  # of equalisation, as KVarN has them
WORD = 16  # bits of a bfloat16

Quantise = Callable[[Tensor], Tensor]


class Method(NamedTuple):
    """How one stream is stored: a function of its bits, and its overhead for heads of a width."""

    make: Callable[[int], Quantise]
    overhead: Callable[[int], float]


def by_token(group: int) -> Callable[[int], Quantise]:
    """A scale and a zero for each token and group of channels."""

    def make(bits: int) -> Quantise:
        return lambda x: dequantize(*quantize(x, bits, group), bits, group, x.shape[-1])

    return make


def by_channel(bits: int) -> Quantise:
    """A scale and a zero for each channel of the page."""
    return lambda x: by_token(x.shape[-2])(bits)(x.mT.contiguous()).mT


def rotated(make: Callable[[int], Quantise]) -> Callable[[int], Quantise]:
    """The same with rotated channels."""

    def turned(bits: int) -> Quantise:
        def quantise(x: Tensor) -> Tensor:
            blocks = blocks_of(x.shape[-1])
            return hadamard(make(bits)(hadamard(x, blocks)), blocks)

        return quantise

    return turned


def equalised(make: Callable[[int], Quantise]) -> Callable[[int], Quantise]:
    """The same of numbers whose rows and columns were divided by their standard deviations, in
    turns, as KVarN does (arXiv:2606.03458)."""

    def balanced(bits: int) -> Quantise:
        def quantise(x: Tensor) -> Tensor:
            size = deviations(x)
            return make(bits)(x / size) * size

        return quantise

    return balanced


def deviations(x: Tensor) -> Tensor:
    """A product of one factor for each row and one for each column, which equalises both."""
    logs = {-1: torch.zeros(()), -2: torch.zeros(())}
    for _ in range(ITERATIONS):
        for axis in (-1, -2):
            y = x * torch.exp(-logs[-1] - logs[-2])
            found = y.std(axis, keepdim=True, correction=0).clamp(min=1e-8)
            logs[axis] = logs[axis] + found.log()
    rows, columns = (each.exp().bfloat16().float() for each in (logs[-1], logs[-2]))
    return rows * columns


def centred(make: Callable[[int], Quantise]) -> Callable[[int], Quantise]:
    """The same of the differences from the page's mean."""

    def around(bits: int) -> Quantise:
        def quantise(x: Tensor) -> Tensor:
            mean = x.mean(-2, keepdim=True).bfloat16().float()
            return make(bits)(x - mean) + mean

        return quantise

    return around


PAIR = 2 * WORD  # a scale and a zero
KEYS = {
    "token": Method(by_token(64), lambda width: PAIR / min(width, 64)),
    "token, rotated": Method(rotated(by_token(64)), lambda width: PAIR / min(width, 64)),
    "token of 32, rotated": Method(rotated(by_token(32)), lambda width: PAIR / 32),
    "token, rotated, centred": Method(
        rotated(centred(by_token(64))), lambda width: PAIR / min(width, 64) + WORD / PAGE
    ),
    "channel": Method(by_channel, lambda width: PAIR / PAGE),
    "channel, rotated": Method(rotated(by_channel), lambda width: PAIR / PAGE),
    "equalised": Method(rotated(equalised(by_channel)), lambda width: PAIR / PAGE + WORD / width),
}
VALUES = {
    **{name: KEYS[name] for name in ("token", "token, rotated", "token of 32, rotated")},
    "equalised": Method(
        rotated(equalised(by_token(64))), lambda width: PAIR / min(width, 64) + WORD / PAGE
    ),
}


class SealedPages:
    """A cache whose full pages, but the first, are replaced by what their codes stand for.

    The tokens of an update are returned as they came. So in updates of whole pages every query
    reads what it would in updates of single tokens.
    """

    def __init__(self, keys: Quantise, values: Quantise) -> None:
        self.methods = keys, values
        self.held: list[Tensor] = []
        self.length, self.sealed = 0, PAGE

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.held)

    def span(self, new: int) -> Span:
        return Span(self.length, self.length + new, 0, self.length + new)

    def peek(self, *new: Tensor) -> tuple[Part, ...]:
        whole = [torch.cat(pair, 2) for pair in zip(self.held, new, strict=True)]
        return (Part(0, whole[0].shape[2], tuple(whole or new)),)

    def update(self, *new: Tensor) -> tuple[Part, ...]:
        """Append keys and values; return all of them, then quantise the pages that are full."""
        held = self.held or [each[:, :, :0] for each in new]
        whole = [torch.cat(pair, 2) for pair in zip(held, new, strict=True)]
        self.length = whole[0].shape[2]
        self.held = [each.clone() for each in whole]
        while self.sealed + PAGE <= self.length:
            for each, quantise in zip(self.held, self.methods, strict=True):
                page = each.narrow(2, self.sealed, PAGE)
                page.copy_(quantise(page.clone()))
            self.sealed += PAGE
        return (Part(0, self.length, tuple(whole)),)

    def truncate(self, length: int) -> None:
        raise NotImplementedError

    def reorder(self, rows: Tensor) -> None:
        raise NotImplementedError
