"""Laws of heads: their number and names, which key head each reads, and that they do not mix."""

import re

import torch

from regard_verify.law import (
    NotApplicable,
    Sizes,
    Trial,
    fail,
    law,
    require,
    tolerance,
    where_finite,
    worst,
)
from regard_verify.laws.cases import on_sizes
from regard_verify.mistakes import heads_of, mistakes, turned
from regard_verify.oracle import key_heads
from regard_verify.subject.conventions import THETA
from regard_verify.subject.modules import size_of
from regard_verify.subject.probe_weights import read_head_order, rotations
from regard_verify.subject.reach import ProjectedHeads
from regard_verify.subject.subject import Subject

WORDS = {"q": "queries", "k": "keys", "v": "values"}
FILLERS = re.compile(
    r"weights?|w|to|fc|c|lin|linear|proj|projection|layer|matrix|net|dense|up|expand|b|all|in|\d+"
)
LETTER = {
    **dict.fromkeys(("q", "query", "queries", "qs", "wq"), "q"),
    **dict.fromkeys(("k", "key", "keys", "ks", "wk"), "k"),
    **dict.fromkeys(("v", "value", "values", "vs", "wv"), "v"),
}


CUTS = {"blocked": ("part", "head", "channel"), "by head": ("head", "part", "channel")}


@law("exact", "module")
def named_heads(subject: Subject, trial: Trial) -> None:
    """A module has the heads that it names and that are declared, each projection makes the part
    that it is named after, and projections are cut as declared.
    """
    attend, module = subject.attend, subject.module
    if not isinstance(attend, ProjectedHeads) or module is None:
        raise NotApplicable("its heads were not reached")
    named, heads = size_of(module, "heads"), subject.fixed["H"]
    if named is not None and named != heads:
        fail("its projections", "number of heads", named, heads,
             f"it names {named} heads, and its query channels change the output as those of "
             f"{heads} would")  # fmt: skip
    _sizes_as_declared(subject, attend)
    _cut_as_declared(subject, attend)
    if copied := attend.copied_queries():
        fail(copied, "heads", "each its own queries", "copies of one",
             f"the projection {copied!r} makes the queries of several heads")  # fmt: skip
    found = attend.named_roles()
    letters = {name: _letter(name) for name in found}
    if set(found.values()) != set(WORDS) or sorted(map(str, letters.values())) != list("kqv"):
        return
    for name, letter in letters.items():
        assert letter is not None
        if letter != found[name]:
            fail(name, "what it makes", WORDS[letter], WORDS[found[name]],
                 f"the projection {name!r} makes {WORDS[found[name]]}")  # fmt: skip


def _sizes_as_declared(subject: Subject, attend: ProjectedHeads) -> None:
    """Raise if other sizes of heads are declared. In latent attention only queries have a number of
    heads that is beyond doubt, and the channels of keys may be counted with the shared ones.
    """
    own, others = subject.conventions, attend.roles.others
    heads, groups, dim, width = attend.roles.sizes
    found = {"heads": [heads], "head_dim": [dim, dim + others, width]}
    for name, made in (found if others else {**found, "kv_heads": [groups]}).items():
        declared = getattr(own, name)
        if declared not in (None, *made):
            fail(
                "its projections",
                name,
                declared,
                made[0],
                f"{name}={declared} is declared, and its channels are those of {made[0]}",
            )


def _cut_as_declared(subject: Subject, attend: ProjectedHeads) -> None:
    """Raise if `fused` is declared, and projections or merged heads have another order of axes."""
    declared = subject.conventions.fused
    if declared is None:
        return
    cut = attend.roles.cut
    right = ", ".join(axis for axis in CUTS[declared] if axis in cut.split(", "))
    first = attend.roles.outputs[0]
    merged = "head, channel" if first == list(range(len(first))) else "channel, head"
    if cut != right:
        fail("its projections", "order of axes", right, cut,
             f"{declared!r} is declared, and the projections are cut in another order")  # fmt: skip
    if merged != "head, channel":
        fail("its merged heads", "order of axes", "head, channel", merged,
             "the heads are merged channel by channel, and split head by head")  # fmt: skip


def _letter(name: str) -> str | None:
    """The one of "qkv" that the name of a parameter says; None if it says none.

    Examples:
        >>> _letter("attn.W_query.weight"), _letter("k_proj"), _letter("qkv.weight")
        ('q', 'k', None)
    """
    last = name.removesuffix(".weight").rpartition(".")[2].lower()
    words = [word for word in last.split("_") if word and not FILLERS.fullmatch(word)]
    return LETTER.get(words[0]) if len(words) == 1 else None


@law("bounded", "heads")
def latent_positions(subject: Subject, trial: Trial) -> None:
    """In latent attention, the channels that carry positions are attention to one shared key
    head.
    """
    attend = subject.attend.shared_keys() if isinstance(subject.attend, ProjectedHeads) else None
    if attend is None:
        raise NotApplicable("it has no keys that all heads share beside keys of each head")
    heads, _, dim, width = attend.roles.sizes
    groups, length = subject.fixed["G"], 6
    q, k = trial.randn(2, heads, length, dim, times=2.0), trial.randn(2, 1, length, dim)
    v = trial.randn(2, groups, length, width)
    with torch.no_grad():
        out = attend(q, k, v).double()
    own, keep = subject.conventions, subject.visible(length, length)
    scale = own.scale or (subject.fixed["D"] + dim) ** -0.5
    plain = heads_of(q, k.expand(-1, groups, -1, -1), v, keep, scale)
    turns = list(rotations(own.theta)) if dim % 2 == 0 else []
    allowed = tolerance(v)
    for pairing, theta in [("none", THETA), *turns]:
        if worst(out, turned(plain, pairing, theta).out())[1] <= allowed:
            if own.theta and (pairing == "none" or theta != own.theta):
                fail(f"B=2 L={length}", "its rotation", f"base {own.theta:g}",
                     f"{pairing}, base {theta:g}", "another base of RoPE is declared")  # fmt: skip
            return
    for turn in turns:
        for sentence, would in mistakes(plain, *turn):
            if worst(out, would)[1] <= allowed:
                right = turned(plain, *turn).out()
                label = f"B=2 L={length}, {dim} shared channels"
                require(label, out, right, allowed, {sentence: would})
    raise NotApplicable("its positions enter the shared channels in a way that is not known")


@law("exact", "gqa")
def gqa_order(subject: Subject, trial: Trial) -> None:
    """Query head h reads key head h // (H / G)."""
    sizes = subject.fit(Sizes(1, 6, 2))
    got = read_head_order(subject, trial)
    tiled = subject.conventions.head_order == "tiled"
    right = key_heads(sizes.H, sizes.G, tiled)
    if got != right:
        cause = "key heads are matched to query heads in another way"
        if got == key_heads(sizes.H, sizes.G, not tiled):
            cause = "key heads are tiled (repeat) where neighbours should share (repeat_interleave)"
        fail(sizes, "key head of each query head", right, got, cause)


@law("bounded", "several_heads")
def head_permutation(subject: Subject, trial: Trial) -> None:
    """Heads do not mix: permuted heads give permuted outputs; where each head has positions or
    sinks of its own, values of one key head leave the others unchanged.
    """

    def attempt(sizes: Sizes) -> None:
        if sizes.G < 2 or sizes.H % sizes.G:
            return
        q, k, v = subject.inputs(sizes, trial)
        order = torch.roll(torch.arange(sizes.G), 1)
        many = sizes.H // sizes.G
        queries = (order[:, None] * many + torch.arange(many)).flatten()
        if subject.conventions.head_order == "tiled":
            queries = torch.cat([order + start for start in range(0, sizes.H, sizes.G)])
        expected = subject.run(q, k, v)[:, queries].double()
        got = subject.run(q[:, queries], k[:, order], v[:, order]).double()
        cause = (
            "the output of a head depends on its place among the heads: they were split, merged "
            "or shared by the wrong axis"
        )
        require(sizes, got, where_finite(expected, got), tolerance(v), cause)

    def apart(sizes: Sizes) -> None:
        q, k, v = subject.inputs(sizes, trial)
        expected = subject.run(q, k, v)
        reads = torch.tensor(key_heads(sizes.H, sizes.G, subject.conventions.head_order == "tiled"))
        for group in range(sizes.G if sizes.H % sizes.G == 0 else 0):
            other = v.clone()
            other[:, group] = 1.0 - other[:, group]
            got, others = subject.run(q, k, other), reads != group
            right = where_finite(expected, got)[:, others].double()
            cause = f"other values of key head {group} change a query head that does not read it"
            require(sizes, got[:, others].double(), right, tolerance(v), cause)

    by_head = subject.sinks is not None or subject.has.unknown_positions
    on_sizes(subject, trial, apart if by_head else attempt)
