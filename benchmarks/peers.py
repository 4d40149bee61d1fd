"""The implementations of attention itself, by name: regard's, torch's kernel called in each way.

Every peer gets what it wants beforehand: a mask as a tensor, lengths as numbers, a compiled kernel,
its own order in memory. regard gets the rule, and makes of it what it needs within the time that is
measured.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import peers_compiled
import peers_onnx
import peers_openvino
import torch
import torch.nn.functional as F
from problems import Contest, Problem, Run, cells, document_lengths, first_line, problem
from torch import Tensor

from cases import LATENT, Case
from regard import KVCache, Part, QuantizedCache, Span, attend, prepare

MOST_COPIES = 16  # heads: of a latent, torch copies one for each query head, which takes seconds


def contest(case: Case, *, cold: int, compiled: bool) -> Contest:
    """Everything that can run a case, regard first."""
    given = problem(case, cold)
    runs: dict[str, Run] = {}
    failed: list[str] = []
    for name, make in (PEERS | (peers_compiled.PEERS if compiled else {})).items():
        try:
            run = make(given)
        except Exception as error:  # each library has its own kinds
            if name.startswith("regard"):
                raise
            failed.append(first_line(name, error))
            continue
        if run is not None:
            runs[name] = _backward(given, run) if case.kind == "backward" else run
    width = 2 * LATENT[0] + LATENT[1] if case.latent else 2 * case.head_dim
    flops = 2 * cells(given) * width * (3 if case.kind == "backward" else 1)
    return Contest(runs, flops, given.cold, failed)


def _backward(given: Problem, forward: Run) -> Run:
    """Forward and backward; the result is the gradient of the queries."""
    for x in (given.q, *(each for pair in given.cold.buffers for each in pair)):
        x.requires_grad_(True)

    def run() -> Tensor:
        with torch.enable_grad():
            total = forward().sum()
        k, v = given.cold.buffers[given.cold.turn]
        return torch.autograd.grad(total, (given.q, k, v))[0]

    return run


def _regard(given: Problem) -> Run:
    case, q = given.case, given.q
    if case.bits:
        return _cached(given, partial(QuantizedCache, case.bits))
    if case.kind == "ragged":
        return _cached(given, KVCache)
    span = Span(case.keys - case.length, case.keys, 0, case.keys)
    if case.latent:

        def absorbed() -> Tensor:
            joined, v = given.cold()
            call = prepare(q, joined, v, mask=given.mask, span=span, **_scale(given))
            return call.run(q, (Part(0, case.keys, (joined,)),))

        return absorbed
    how = {"mask": given.mask, "span": span, "precision": case.precision}
    return lambda: attend(q, *given.cold(), **how)


def _regard_on(dtype: torch.dtype) -> Callable[[Problem], Run | None]:
    """The step of a quantised case on a cache in floating point."""
    return lambda given: _cached(given, KVCache, dtype) if given.case.bits else None


def _regard_int8(given: Problem) -> Run | None:
    return _cached(given, QuantizedCache) if 0 < given.case.bits < 8 else None


def _regard_strict(given: Problem) -> Run | None:
    strict = replace(given, case=replace(given.case, kind="prefill"))
    return _regard(strict) if given.case.precision == "fast" else None


def _cached(given: Problem, make: Callable[[], Any], dtype: torch.dtype | None = None) -> Run:
    """A step on the caller's caches: append one token's keys, attend, truncate."""
    case, q = given.case, given.q.to(dtype)
    before = torch.tensor([length - 1 for length in case.lengths()])
    start: Any = int(before) if case.batch == 1 else before

    def filled(k: Tensor, v: Tensor) -> tuple[Any, tuple[Tensor, ...]]:
        streams = [x.to(dtype) for x in ((k,) if case.latent else (k, v))]
        cache = make()
        cache.update(*streams)
        cache.truncate(start)
        last = before.view(-1, 1, 1, 1)
        return cache, tuple(x.take_along_dim(last.expand_as(x[:, :, :1]), 2) for x in streams)

    first = filled(*given.cold.buffers[0])
    caches = [copy.deepcopy(first) for _ in given.cold.buffers]

    def run() -> Tensor:
        given.cold()
        cache, new = caches[given.cold.turn]
        k, v = (new[0], new[0][..., : LATENT[0]]) if case.latent else new
        call = prepare(q, k, v, mask=given.mask, span=cache.span(1), **_scale(given))
        out = call.run(q, cache.update(*new))
        cache.truncate(start)
        return out

    return run


def _scale(given: Problem) -> dict[str, Any]:
    return {"scale": given.case.head_dim**-0.5} if given.case.latent else {}


def _sdpa(given: Problem) -> Run | None:
    """As in its manual: a flag makes query heads share key heads."""
    if given.case.latent and given.case.heads > MOST_COPIES:
        return None
    flags = {**given.flags, **_scale(given)}
    grouped = given.case.heads != given.case.kv_heads
    return lambda: F.scaled_dot_product_attention(
        given.q, *given.cold(), enable_gqa=grouped, **flags
    )


def _repeated(given: Problem) -> Run | None:
    """As most models do it: every key head copied for each query head that reads it."""
    case = given.case
    group = case.heads // case.kv_heads
    if group == 1 or case.latent or case.bits:
        return None

    def run() -> Tensor:
        k, v = (x.repeat_interleave(group, 1) for x in given.cold())
        return F.scaled_dot_product_attention(given.q, k, v, **given.flags)

    return run


def _packed(given: Problem) -> Run | None:
    """By hand: the queries that share a key head become its rows. Latents are their own values."""
    case = given.case
    if case.length != 1 or case.heads == case.kv_heads:
        return None
    group = case.heads // case.kv_heads
    flags = {**given.flags, **_scale(given)}

    def run() -> Tensor:
        k, v = given.cold()
        rows = given.q.view(case.batch, case.kv_heads, group, -1)
        out = F.scaled_dot_product_attention(rows, k, k if case.latent else v, **flags)
        return out[..., : v.shape[-1]].reshape(case.batch, case.heads, 1, -1)

    return run


def _piecewise(given: Problem) -> Run | None:
    """By hand: a call for each row of a ragged batch, or for each document."""
    case = given.case
    if case.kind == "ragged" and case.batch > 1:
        lengths = case.lengths()

        def by_rows() -> Tensor:
            k, v = given.cold()
            pieces = [
                (given.q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n])
                for b, n in enumerate(lengths)
            ]
            each = [F.scaled_dot_product_attention(*piece, enable_gqa=True) for piece in pieces]
            return torch.cat(each)

        return by_rows
    if case.mask != "documents":
        return None
    sizes = document_lengths(case)

    def by_documents() -> Tensor:
        pieces = zip(*(x.split(sizes, 2) for x in (given.q, *given.cold())), strict=True)
        each = [
            F.scaled_dot_product_attention(*piece, is_causal=True, enable_gqa=True)
            for piece in pieces
        ]
        return torch.cat(each, 2)

    return by_documents


PEERS: dict[str, Callable[[Problem], Run | None]] = {
    "regard": _regard,
    "regard, float32 keys": _regard_on(torch.float32),
    "regard, bfloat16 keys": _regard_on(torch.bfloat16),
    "regard, int8 keys": _regard_int8,
    "regard, strict": _regard_strict,
    "sdpa": _sdpa,
    "sdpa, repeated keys": _repeated,
    "sdpa, packed queries": _packed,
    "sdpa, piece by piece": _piecewise,
    **peers_onnx.PEERS,
    **peers_openvino.PEERS,
}
