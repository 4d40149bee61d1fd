"""Laws of shared heads: which query head reads which key head."""

import torch

from regard.verify.law import NotApplicable, Sizes, Trial, compare, fail, insist, law
from regard.verify.subject.probe_functions import read_head_order
from regard.verify.subject.subject import Subject, SubjectError


@law(
    "With as many key heads as query heads it is MHA; with copies of one it is MQA.",
    "bounded",
    "heads repeated along the wrong axis, a wrong divisor",
    "gqa",
)
def gqa_limits(subject: Subject, trial: Trial) -> None:
    if "G" in subject.fixed:
        raise NotApplicable("its number of key heads cannot be changed")
    for heads, groups in ((4, 4), (4, 1), (6, 2), (6, 3)):
        sizes = subject.fit(Sizes(2, heads, groups, 5, 5, 4, 4))
        q, k, v = subject.inputs(sizes, trial)
        many = heads // groups
        tiled = subject.conventions.head_order == "tiled"
        whole = [x.repeat(1, many, 1, 1) if tiled else x.repeat_interleave(many, 1) for x in (k, v)]
        expected = subject.run(q, *whole)
        got = subject.run(q, k, v)
        insist(
            compare(
                sizes,
                got,
                expected,
                1e-4 * float(1 + v.abs().max()),
                f"{groups} key heads are not the same as {heads} copies of them",
            )
        )


@law(
    "Query head h reads key head h // (H / G).",
    "exact",
    "key heads tiled where neighbours should share one",
    "gqa",
)
def gqa_order(subject: Subject, trial: Trial) -> None:
    sizes = subject.fit(Sizes(1, 6, 2))
    got = read_head_order(subject, trial)
    tiled = subject.conventions.head_order == "tiled"
    many = sizes.H // sizes.G
    right = [h % sizes.G if tiled else h // many for h in range(sizes.H)]
    if got != right:
        wrong = [h % sizes.G if not tiled else h // many for h in range(sizes.H)]
        cause = "key heads are tiled (repeat) where neighbours should share (repeat_interleave)"
        cause = cause if got == wrong else "key heads are matched to query heads in another way"
        fail(sizes, "key head of each query head", right, got, cause)


@law(
    "Heads split over ranks, each with the key head it reads, are the heads of the whole.",
    "bounded",
    "a head count kept from another call, more ranks than key heads",
    "gqa",
)
def shards_agree(subject: Subject, trial: Trial) -> None:
    if "G" in subject.fixed or "H" in subject.fixed:
        raise NotApplicable("its numbers of heads cannot be changed")
    for heads, groups, ranks in ((8, 4, 2), (4, 2, 4)):
        sizes = subject.fit(Sizes(1, heads, groups, 5, 5, 4, 4))
        q, k, v = subject.inputs(sizes, trial)
        whole = subject.run(q, k, v)
        tiled = subject.conventions.head_order == "tiled"
        reads = [h % groups if tiled else h // (heads // groups) for h in range(heads)]
        shards = []
        for mine in torch.arange(heads).chunk(ranks):
            own = sorted({reads[head] for head in mine.tolist()})
            if tiled and len(own) * 2 == len(mine):  # neighbours of a rank share in another order
                own = [reads[head] for head in mine.tolist()]
            shards.append(subject.run(q[:, mine], k[:, own], v[:, own]))
        insist(compare(sizes, torch.cat(shards, 1), whole, 1e-4 * float(1 + v.abs().max()),
                       f"{ranks} ranks with {heads // ranks} of {heads} heads each do not give "
                       "what one gives with all"))  # fmt: skip


@law(
    "Calls that cannot mean anything are refused, with an error and not with an output.",
    "exact",
    "broadcasting that hides a wrong shape",
    "heads",
    advised=True,
)
def error_messages(subject: Subject, trial: Trial) -> None:
    if subject.module is not None:
        raise NotApplicable("its shapes are its own")
    sizes = subject.fit(Sizes(2, 4, 4, 3, 3, 4, 4))
    q, k, v = subject.inputs(sizes, trial)
    bad = {
        "keys with fewer channels": (q, k[..., :3], v),
        "values of another length": (q, k, v[:, :, :2]),
        "keys of another batch": (q, torch.cat([k, k]), torch.cat([v, v])),
        "3 key heads for 4 query heads": (q, k[:, :3], v[:, :3]),
        "fewer value heads than key heads": (q, k, v[:, :2]),
    }
    for said, given in bad.items():
        if given[1].shape == k.shape and given[2].shape == v.shape:
            continue
        try:
            out = subject.run(*given)
        except SubjectError:
            continue
        fail(sizes, said, "an error", f"an output of shape {list(out.shape)}",
             "shapes that do not fit were broadcast or cut")  # fmt: skip


LAWS = (
    gqa_limits,
    gqa_order,
    shards_agree,
    error_messages,
)
