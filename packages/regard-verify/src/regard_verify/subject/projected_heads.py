"""A module as a function of heads: chosen queries, keys and values in place of its projections."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from regard_verify.subject.channels import Roles
from regard_verify.subject.projections import Attention
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
