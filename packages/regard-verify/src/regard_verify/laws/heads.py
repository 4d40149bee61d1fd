"""Laws of shared key heads, and of shapes that do not fit."""

import torch

from regard_verify.law import NotApplicable, Sizes, Trial, fail, law, require, tolerance
from regard_verify.oracle import key_heads
from regard_verify.subject.probe_weights import read_head_order
from regard_verify.subject.subject import Subject, SubjectError


@law("bounded", "gqa")
def gqa_limits(subject: Subject, trial: Trial) -> None:
    """Shared key heads give what copies of them give, one for each query head."""
    if "G" in subject.fixed:
        raise NotApplicable("its number of key heads cannot be changed")
    for heads, groups in ((4, 4), (4, 1), (6, 2), (6, 3)):
        sizes = subject.fit(Sizes(2, heads, groups, 5, 5, 4, 4))
        q, k, v = subject.inputs(sizes, trial)
        copies = key_heads(heads, groups, subject.conventions.head_order == "tiled")
        expected = subject.run(q, k[:, copies], v[:, copies])
        cause = f"{groups} key heads are not the same as {heads} copies of them"
        require(sizes, subject.run(q, k, v), expected, tolerance(v), cause)


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


@law("bounded", "gqa")
def shards_agree(subject: Subject, trial: Trial) -> None:
    """Heads split over ranks, each with the key head that it reads, give the heads of the whole."""
    if "G" in subject.fixed or "H" in subject.fixed:
        raise NotApplicable("its numbers of heads cannot be changed")
    if subject.has.unknown_positions:
        raise NotApplicable("positions may change the scores of each head in another way")
    for heads, groups, ranks in ((8, 4, 2), (4, 2, 4)):
        sizes = subject.fit(Sizes(1, heads, groups, 5, 5, 4, 4))
        q, k, v = subject.inputs(sizes, trial)
        whole = subject.run(q, k, v)
        tiled = subject.conventions.head_order == "tiled"
        reads = key_heads(heads, groups, tiled)
        shards = []
        for mine in torch.arange(heads).chunk(ranks):
            own = sorted({reads[head] for head in mine.tolist()})
            if tiled and len(own) * 2 == len(mine):  # within a rank the order is another
                own = [reads[head] for head in mine.tolist()]
            shards.append(subject.run(q[:, mine], k[:, own], v[:, own]))
        cause = f"{ranks} ranks with {heads // ranks} heads each do not give what one rank gives"
        require(sizes, torch.cat(shards, 1), whole, tolerance(v), cause)


@law("exact", "heads", advised=True)
def error_messages(subject: Subject, trial: Trial) -> None:
    """Shapes that do not fit together are refused with an error."""
    if subject.module is not None:
        raise NotApplicable("a module makes its queries, keys and values itself")
    sizes = subject.fit(Sizes(2, 4, 4, 3, 3, 4, 4))
    q, k, v = subject.inputs(sizes, trial)
    bad = {
        "keys with fewer channels": (q, k[..., :3], v),
        "values of another length": (q, k, v[:, :, :2]),
        "keys of another batch": (q, torch.cat([k, k]), torch.cat([v, v])),
        "3 key heads for 4 query heads": (q, k[:, :3], v[:, :3]),
        "fewer value heads than key heads": (q, k, v[:, :2]),
    }
    for case, given in bad.items():
        if given[1].shape == k.shape and given[2].shape == v.shape:
            continue
        try:
            out = subject.run(*given)
        except SubjectError:
            continue
        fail(sizes, case, "an error", f"an output of shape {list(out.shape)}",
             "shapes that do not fit were broadcast or cut")  # fmt: skip
