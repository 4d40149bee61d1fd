"""Reaching the heads of a module: where attention begins and ends in it, and what its channels are.

A layout is trusted only if the module, run on new inputs with its own projections put back channel
by channel, gives what it gave by itself.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regard_verify.law import Trial
from regard_verify.subject.channels import Roles, find_roles
from regard_verify.subject.natural import natural_roles
from regard_verify.subject.projected_heads import ProjectedHeads, run_channels
from regard_verify.subject.projections import (
    Attention,
    Key,
    Product,
    Products,
    placed,
)
from regard_verify.subject.subject import SubjectError

SIZES = ({"B": 2, "L": 3, "S": 3}, {"B": 3, "L": 5, "S": 5})
CROSS = ({"B": 2, "L": 3, "S": 4}, {"B": 3, "L": 5, "S": 7})


def sizes_of(call: Any, *, cross: bool = False) -> tuple[dict[str, int], ...]:
    """Two sets of sizes that differ in rows and tokens, with lengths that the module takes."""
    multiple = call.own.multiple or 1
    return tuple(
        {name: size if name == "B" else size * multiple for name, size in each.items()}
        for each in (CROSS if cross else SIZES)
    )


MIXED = 1e-6  # of the largest value: a smaller change is rounding
CLOSE = 1e-4  # of the largest value: what float32 may differ by when the same is computed twice


def find_attention(call: Any, trial: Trial) -> Attention | None:
    """Where attention lies between the projections of a module; None if it has no projections."""
    both = call.inputs == 3 or call.context
    for cross in (True, False) if both else (False,):
        try:
            found = _between(call, sizes_of(call, cross=cross), trial)
        except SubjectError:
            continue
        if found is not None:
            return replace(found, cross=cross)
    return None


def _between(call: Any, sizes: Sequence[dict[str, int]], trial: Trial) -> Attention | None:
    runs = [recorded(call, _tokens(call, each, trial)) for each in sizes]
    keys = [product.key for product in runs[0]]
    if not keys or keys != [product.key for product in runs[1]]:
        return None
    places = {
        key: placed(key, [(run[at].out.shape, each) for run, each in zip(runs, sizes, strict=True)])
        for at, key in enumerate(keys)
    }
    after = _after(call, sizes[0], keys, trial)
    last = next((at for at, key in enumerate(keys) if key in after), None)
    first = keys if last is None else keys[:last]
    sources = [places[key] for key in first]
    tokens_first = _tokens_first(call, sizes[0], trial)
    found = [
        replace(place, tokens_first=place.key in tokens_first[0])
        for place in sources
        if place is not None
    ]
    if not found or len(found) != len(sources):
        return None
    sink = None
    if last is not None:
        given = [(run[last].given.shape, each) for run, each in zip(runs, sizes, strict=True)]
        sink = placed(keys[last], given)
        if sink is None:
            return None
        sink = replace(sink, tokens_first=sink.key in tokens_first[1])
    return Attention(call, tuple(found), sink)


def _tokens_first(call: Any, sizes: dict[str, int], trial: Trial) -> tuple[set[Key], set[Key]]:
    """Projections whose outputs, and whose inputs, have rows and tokens in one axis, tokens first.

    There, a change of row 0 of the batch changes every second of two rows, not the first half.
    """
    given = _tokens(call, sizes, trial)
    other = {name: _moved(x, (0,)) for name, x in given.items()}
    outs: set[Key] = set()
    inputs: set[Key] = set()
    for one, two in zip(recorded(call, given), recorded(call, other), strict=True):
        for found, before, after in ((outs, one.out, two.out), (inputs, one.given, two.given)):
            changed = (before != after).flatten(1).any(-1)
            if len(changed) > sizes["B"] and bool(changed[:: sizes["B"]].all()):
                found.add(one.key)
    return outs, inputs


def _tokens(call: Any, sizes: dict[str, int], trial: Trial) -> dict[str, Any]:
    width = call.own.width or 1
    given: dict[str, Any] = {"x": trial.randn(sizes["B"], sizes["L"], width)}
    if call.inputs == 3:
        given["others"] = tuple(trial.randn(sizes["B"], sizes["S"], width) for _ in "kv")
    elif call.context:
        given["context"] = trial.randn(sizes["B"], sizes["S"], width)
    return given


def recorded(call: Any, given: dict[str, Any]) -> list[Product]:
    """The projections of one run."""
    with torch.no_grad(), Products() as products:
        call.result(given["x"], **{n: x for n, x in given.items() if n != "x"})
    return products.found


def _after(call: Any, sizes: dict[str, int], keys: list[Key], trial: Trial) -> set[Key]:
    """Keys of the projections after attention: their input at a token depends on other tokens."""
    given = _tokens(call, sizes, trial)
    base = recorded(call, given)
    found: set[Key] = set()
    for token in (0, -1):
        changed = {name: _moved(x, (slice(None), token)) for name, x in given.items()}
        for one, other in zip(base, recorded(call, changed), strict=True):
            if one.given.shape != other.given.shape:
                continue
            differs = (one.given - other.given).abs() > MIXED * (1 + one.given.abs().max())
            tokens = _tokens_changed(differs, sizes)
            if tokens > 1:
                found.add(one.key)
    return found


def _moved(x: Any, at: tuple[Any, ...]) -> Any:
    """x, or each of several, with other values in one place."""
    if isinstance(x, tuple):
        return tuple(_moved(each, at) for each in x)
    x = x.clone()
    x[at] = 0.3 - 0.7 * x[at]
    return x


def _tokens_changed(differs: Tensor, sizes: dict[str, int]) -> int:
    """How many tokens of one row changed, at most: over the axis as long as the sequence."""
    most = 0
    for axis, size in enumerate(differs.shape):
        rows = next((n for n in (1, sizes["B"]) if size in (n * sizes["L"], n * sizes["S"])), 0)
        if rows:
            others = tuple(i for i in range(differs.ndim) if i != axis)
            changed = differs.any(dim=others) if others else differs
            most = max(most, -(-int(changed.sum()) // rows))
    return most


def reach(call: Any, trial: Trial) -> ProjectedHeads | None:
    """The module as a function of heads, found from what its channels change."""
    attention = find_attention(call, trial)
    if attention is None:
        return None
    try:
        roles = find_roles(partial(run_channels, attention), sum(attention.channels()), trial)
        if roles is None or not replays(attention, roles, trial):
            return None
    except SubjectError:
        return None
    return ProjectedHeads(attention, roles)


def reach_by_layout(call: Any, heads: int | None, trial: Trial) -> ProjectedHeads | None:
    """The module as a function of heads, if a usual layout and a common mistake give its values."""
    attention = find_attention(call, trial)
    if attention is None:
        return None
    try:
        run = partial(run_channels, attention)
        parts = _read_by_attention(attention, trial)
        found = natural_roles(run, parts, sum(attention.channels()), heads, trial)
    except SubjectError:
        return None
    if found is None:
        return None
    known = {"causal": found.causal, "window": 0, "pairing": found.pairing}
    return ProjectedHeads(attention, found.roles, known)


def _read_by_attention(attention: Attention, trial: Trial) -> list[list[int]]:
    """The channels of each projection, without those that only feed another projection."""
    given = _tokens(attention.call, sizes_of(attention.call)[0], trial)
    base = {product.key: product.out for product in recorded(attention.call, given)}
    found, first = [], 0
    for place in attention.sources:
        size = place.channels
        with torch.no_grad(), Products({place.key: base[place.key] + 1.0}, rest=True) as products:
            attention.call.result(given["x"], **{n: x for n, x in given.items() if n != "x"})
        feeds = any(
            product.key in {other.key for other in attention.sources}
            and not torch.equal(product.out, base[product.key])
            for product in products.found
        )
        if not feeds:
            found.append(list(range(first, first + size)))
        first += size
    return found


def replays(attention: Attention, roles: Roles, trial: Trial) -> bool:
    """Whether channels with a role reproduce the module's own merged heads on new inputs."""
    call, sizes = attention.call, sizes_of(attention.call, cross=attention.cross)[1]
    given = _tokens(call, sizes, trial)
    own = recorded(call, given)
    by_key = {product.key: product for product in own}
    known = _with_a_role(attention, roles)
    values, first = [], 0
    for place in attention.sources:
        x = place.read(by_key[place.key].out, sizes["B"], sizes[place.tokens])
        keep = known[first : first + x.shape[-1]]
        values.append(torch.where(keep, x, 0.0))
        first += x.shape[-1]
    with torch.no_grad():
        got = attention(values, bare=False, given=given)
        if attention.sink is None:
            right = call(given["x"], **{n: x for n, x in given.items() if n != "x"})
        else:
            merged = by_key[attention.sink.key].given
            right = attention.sink.read(merged, sizes["B"], sizes[attention.sink.tokens])
    return bool((got - right).abs().max() <= CLOSE * (1 + right.abs().max()))


def _with_a_role(attention: Attention, roles: Roles) -> Tensor:
    """Channels that enter attention: those that were found, and query and key pairs left out."""
    known = torch.zeros(sum(attention.channels()), dtype=torch.bool)
    parts = (*roles.queries, *roles.keys, *roles.values, roles.gates, roles.left_out)
    known[[c for part in parts for c in part]] = True
    return known
