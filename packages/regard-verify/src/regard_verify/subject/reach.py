"""Reaching the heads of a module: where attention begins and ends in it, and what its channels are.

A layout is trusted only if the module, run on new inputs with its own projections put back channel
by channel, gives what it gave by itself.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from regard_verify.law import Trial
from regard_verify.subject.channels import LENGTH, Roles, changes, find_roles
from regard_verify.subject.layouts import natural_roles
from regard_verify.subject.projections import Attention, Key, Product, Products, placed, tokens_for
from regard_verify.subject.subject import SubjectError


@dataclass
class ProjectedHeads:
    """The module as a function of heads: chosen values replace the outputs of its projections.

    Attributes:
        attention: the module between its projections.
        roles: what each channel is.
        known: conventions that were found together with the roles.
    """

    attention: Attention
    roles: Roles
    known: dict[str, Any] = field(default_factory=dict)

    @property
    def call(self) -> Any:
        """The call of the module."""
        return self.attention.call

    @property
    def form(self) -> Any:
        """The form of its masks."""
        return self.call.form

    def masked(self, form: Any, own: Any) -> "ProjectedHeads":
        """The same with a form of mask and with conventions."""
        call = replace(self.call, form=form, own=own, heads=self.roles.sizes[0])
        return replace(self, attention=replace(self.attention, call=call))

    def named_roles(self) -> dict[str, str]:
        """The one of "qkv" that each projection makes, by the name of its parameter.

        A projection that makes several, or a gate, is left out.
        """
        names = {id(x): name for name, x in self.call.module.named_parameters()}
        parts = {"q": self.roles.queries, "k": self.roles.keys, "v": self.roles.values}
        letters = {c: letter for letter, part in parts.items() for head in part for c in head}
        found = {}
        for place, channels in self.attention.channels_by_source():
            made = {letters.get(channel) for channel in channels}
            if len(made) == 1 and None not in made and place.key[0] in names:
                found[names[place.key[0]]] = str(made.pop())
        return found

    def copied_queries(self) -> str:
        """The parameter that makes the queries of several heads, each time anew; or ""."""
        queries = {c for head in self.roles.queries for c in head}
        makers = [
            place.key[0]
            for place, channels in self.attention.channels_by_source()
            if queries.intersection(channels)
        ]
        names = {id(x): name for name, x in self.call.module.named_parameters()}
        return next((names.get(each, "?") for each in makers if makers.count(each) > 1), "")

    def shared_keys(self) -> "ProjectedHeads | None":
        """The module as a function of the keys that all heads share, as in MLA, or None."""
        queries, keys = self.roles.other_queries, self.roles.other_keys
        if not (self.roles.others and keys):
            return None
        return replace(self, roles=replace(self.roles, queries=queries, keys=[keys]))

    @cached_property
    def pools(self) -> list[Tensor]:
        """For each source, where each of its channels is in the pool of q, k, v, 0 and open."""
        heads, groups, dim, width = self.roles.sizes
        values = len(self.roles.values) * width
        flat = [
            [c for head in part for c in head]
            for part in (self.roles.queries, self.roles.keys, self.roles.values)
        ]
        starts = (0, heads * dim, heads * dim + groups * dim)
        zero = heads * dim + groups * dim + values
        place = dict.fromkeys(self.roles.gates, zero + 1)
        for start, channels in zip(starts, flat, strict=True):
            place.update({c: start + at for at, c in enumerate(channels)})
        return [
            torch.tensor([place.get(channel, zero) for channel in channels])
            for _, channels in self.attention.channels_by_source()
        ]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        batch, length, keys = q.shape[0], q.shape[2], k.shape[2]
        heads, _, _, width = self.roles.sizes
        dtypes = {x.dtype for x in self.call.module.parameters() if x.is_floating_point()}
        if dtypes and q.dtype not in dtypes:  # products with weights, left out here, refuse it
            raise SubjectError(
                f"its weights are {dtypes.pop()}, and it is called in {q.dtype}"
            ) from NotImplementedError("another dtype")
        if keys != length and not self.attention.cross:
            raise SubjectError("it takes as many keys as queries")
        parts = [x.transpose(1, 2).flatten(-2) for x in (q, k, v)]
        values = []
        for place, index in zip(self.attention.sources, self.pools, strict=True):
            tokens = length if place.tokens == "L" else keys
            pool = [
                x if x.shape[1] == tokens else x.new_zeros(batch, tokens, x.shape[2]) for x in parts
            ]
            constants = torch.tensor([0.0, self.roles.opened], dtype=q.dtype)
            pool.append(constants.expand(batch, tokens, 2))
            values.append(torch.cat(pool, -1)[..., index])
        merged = self.attention(values, **options)
        order = torch.tensor([c for head in self.roles.outputs for c in head])
        return merged[..., order].unflatten(-1, (heads, width)).transpose(1, 2)

    def learned(self, q: Tensor, k: Tensor, v: Tensor) -> list[str]:
        """The parameters that change the merged heads of chosen queries, keys and values.

        Such are temperatures, biases of positions, and mixtures of heads; projections are not.
        """
        named = {n: x for n, x in self.call.module.named_parameters() if x.requires_grad}
        with torch.enable_grad():
            out = self(q, k, v)
            push = torch.randn_like(out)
            if not out.requires_grad:
                return []
            grads = torch.autograd.grad(out, list(named.values()), push, allow_unused=True)
        return [n for n, g in zip(named, grads, strict=True) if g is not None and bool(g.any())]


def run_channels(attention: Attention, values: Tensor) -> Tensor:
    """Merged heads from the channels of all sources side by side [B, L, C].

    Where lengths must be multiples, tokens of zeros follow, and their outputs are left out.
    """
    length = values.shape[1]
    missing = -length % (attention.call.own.multiple or 1)
    values = torch.nn.functional.pad(values, (0, 0, 0, missing))
    with torch.no_grad():
        return attention(values.split(attention.channels(), -1))[:, :length]


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
    runs = [recorded(call, tokens_for(call, each, trial.randn)) for each in sizes]
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
    found = [replace(x, tokens_first=x.key in tokens_first[0]) for x in sources if x is not None]
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
    given = tokens_for(call, sizes, trial.randn)
    other = {name: _moved(x, (0,)) for name, x in given.items()}
    outs: set[Key] = set()
    inputs: set[Key] = set()
    for one, two in zip(recorded(call, given), recorded(call, other), strict=True):
        for found, before, after in ((outs, one.out, two.out), (inputs, one.given, two.given)):
            changed = (before != after).flatten(1).any(-1)
            if len(changed) > sizes["B"] and bool(changed[:: sizes["B"]].all()):
                found.add(one.key)
    return outs, inputs


def recorded(call: Any, given: dict[str, Any]) -> list[Product]:
    """The projections of one run."""
    with torch.no_grad(), Products() as products:
        call.result(given["x"], **{n: x for n, x in given.items() if n != "x"})
    return products.found


def _after(call: Any, sizes: dict[str, int], keys: list[Key], trial: Trial) -> set[Key]:
    """Keys of the projections after attention: their input at a token depends on other tokens."""
    given = tokens_for(call, sizes, trial.randn)
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


def reach(call: Any, trial: Trial, heads: int | None = None) -> ProjectedHeads | None:
    """The module as a function of heads, found from what its channels change, or by its layout.

    `heads` is their number, if the module names it.
    """
    attention = find_attention(call, trial)
    if attention is None:
        return None
    with suppress(SubjectError):
        roles = find_roles(partial(run_channels, attention), sum(attention.channels()), trial)
        if roles is not None and replays(attention, roles, trial):
            return ProjectedHeads(attention, roles)
    with suppress(SubjectError):
        return _reach_by_layout(attention, heads, trial)
    return None


def _reach_by_layout(
    attention: Attention, heads: int | None, trial: Trial
) -> ProjectedHeads | None:
    """The module as a function of heads, if a usual layout and a common mistake give its values."""
    run = partial(run_channels, attention)
    parts = _read_by_attention(attention, trial)
    found = natural_roles(run, parts, sum(attention.channels()), heads, trial)
    if found is None:
        return None
    roles = found.roles
    rest = sorted(set(range(sum(attention.channels()))) - {c for part in parts for c in part})
    if roles.others and rest:  # channels beside those of heads are keys that all heads share
        moved = changes(run, trial.randn(LENGTH, sum(attention.channels())), rest, 1.0)
        shared = [c for c, each in zip(rest, moved, strict=True) if bool(each.any())]
        roles = replace(roles, other_keys=shared)
    known = {"causal": found.causal, "window": 0, "pairing": found.pairing}
    return ProjectedHeads(attention, roles, known)


def _read_by_attention(attention: Attention, trial: Trial) -> list[list[int]]:
    """The channels of each projection, without those that only feed another projection."""
    given = tokens_for(attention.call, sizes_of(attention.call)[0], trial.randn)
    base = {product.key: product.out for product in recorded(attention.call, given)}
    found = []
    for place, channels in attention.channels_by_source():
        with torch.no_grad(), Products({place.key: base[place.key] + 1.0}, rest=True) as products:
            attention.call.result(given["x"], **{n: x for n, x in given.items() if n != "x"})
        feeds = any(
            product.key in {other.key for other in attention.sources}
            and not torch.equal(product.out, base[product.key])
            for product in products.found
        )
        if not feeds:
            found.append(list(channels))
    return found


def replays(attention: Attention, roles: Roles, trial: Trial) -> bool:
    """Whether channels with a role reproduce the module's own merged heads on new inputs."""
    call, sizes = attention.call, sizes_of(attention.call, cross=attention.cross)[1]
    given = tokens_for(call, sizes, trial.randn)
    own = recorded(call, given)
    by_key = {product.key: product for product in own}
    parts = (*roles.queries, *roles.keys, *roles.values, roles.gates, roles.left_out)
    known = {c for part in parts for c in part}
    values = []
    for place, channels in attention.channels_by_source():
        x = place.read(by_key[place.key].out, sizes["B"], sizes[place.tokens])
        values.append(torch.where(torch.tensor([c in known for c in channels]), x, 0.0))
    with torch.no_grad():
        got = attention(values, bare=False, given=given)
        if attention.sink is None:
            right = call(given["x"], **{n: x for n, x in given.items() if n != "x"})
        else:
            merged = by_key[attention.sink.key].given
            right = attention.sink.read(merged, sizes["B"], sizes[attention.sink.tokens])
    return bool((got - right).abs().max() <= CLOSE * (1 + right.abs().max()))
