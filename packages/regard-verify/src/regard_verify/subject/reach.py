"""Reaching the heads of a module: where attention begins and ends in it, and what its channels are.

A layout is trusted only if the module, run on new inputs with its own projections put back channel
by channel, gives what it gave by itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regard_verify.law import Trial
from regard_verify.subject.channels import LENGTH, Roles, Run, changes, find_roles
from regard_verify.subject.layouts import natural_roles
from regard_verify.subject.projections import (
    Attention,
    Key,
    Product,
    Products,
    placed,
)
from regard_verify.subject.subject import SubjectError


@dataclass
class ProjectedHeads:
    """The module as a function of heads: chosen values replace the outputs of its projections.

    Attributes:
        attention: the module between its projections.
        roles: what each channel is.
        known: conventions that were found together with the roles.
        pools: for each source, the place of its channels in the pool of all values.
    """

    attention: Attention
    roles: Roles
    known: dict[str, Any] = field(default_factory=dict)
    pools: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pools = self._indices()

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
        found, first = {}, 0
        for place in self.attention.sources:
            made = {letters.get(first + at) for at in range(place.channels)}
            first += place.channels
            if len(made) == 1 and None not in made and place.key[0] in names:
                found[names[place.key[0]]] = str(made.pop())
        return found

    def copied_queries(self) -> str:
        """The parameter that makes the queries of several heads, each time anew; or ""."""
        queries = {c for head in self.roles.queries for c in head}
        first, makers = 0, []
        for place in self.attention.sources:
            if queries & set(range(first, first + place.channels)):
                makers.append(place.key[0])
            first += place.channels
        names = {id(x): name for name, x in self.call.module.named_parameters()}
        return next((names.get(each, "?") for each in makers if makers.count(each) > 1), "")

    def shared_keys(self) -> "ProjectedHeads | None":
        """The module as a function of the keys that all heads share, as in MLA, or None."""
        queries, keys = self.roles.other_queries, self.roles.other_keys
        if not (self.roles.others and keys):
            return None
        return replace(self, roles=replace(self.roles, queries=queries, keys=[keys]))

    def _indices(self) -> list[Tensor]:
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
        found, first = [], 0
        for size in self.attention.channels():
            found.append(torch.tensor([place.get(first + at, zero) for at in range(size)]))
            first += size
        return found

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        batch, length, keys = q.shape[0], q.shape[2], k.shape[2]
        heads, _, _, width = self.roles.sizes
        self._refuse_other_dtypes(q.dtype)
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

    def normalizes(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether three times larger queries and keys give the same output: it normalises them."""
        with torch.no_grad():
            one, other = (self(n * q, n * k, v, bare=False) for n in (1.0, 3.0))
        return bool(torch.allclose(one, other, atol=1e-3))

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

    def _refuse_other_dtypes(self, dtype: torch.dtype) -> None:
        """The products with weights are left out here, and would refuse another dtype."""
        known = {x.dtype for x in self.call.module.parameters() if x.is_floating_point()}
        if known and dtype not in known:
            raise SubjectError(
                f"its weights are {known.pop()}, and it is called in {dtype}"
            ) from NotImplementedError("another dtype")


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
    shared = _shared_by_heads(run, parts, sum(attention.channels()), trial)
    roles = replace(found.roles, other_keys=shared if found.roles.others else [])
    known = {"causal": found.causal, "window": 0, "pairing": found.pairing}
    return ProjectedHeads(attention, roles, known)


def _shared_by_heads(run: Run, parts: list[list[int]], channels: int, trial: Trial) -> list[int]:
    """Channels that change the output beside those of `parts`: keys that all heads share."""
    rest = sorted(set(range(channels)) - {c for part in parts for c in part})
    found = changes(run, trial.randn(LENGTH, channels), rest, 1.0) if rest else ()
    return [c for c, each in zip(rest, found, strict=True) if bool(each.any())]


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
