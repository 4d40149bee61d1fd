"""Laws of pages, of who owns them, and of prefixes that are found again.

A paged function is `(q [B, H, D], k_pool [N, T, G, D], v_pool, block_table [B, M], lengths [B])` to
`[B, H, D]`. An allocator has `allocate(n) -> ids`, `free(ids)`, and maybe `share(ids)` and
`num_free`. A prefix cache has `insert(tokens, value, salt=...)` and `lookup(tokens, salt=...)`.
"""

from typing import Any

import torch
from torch import Tensor

from regard.verify.law import NotApplicable, Trial, compare, fail, insist, law
from regard.verify.oracle import attention
from regard.verify.subject.mask_forms import parameters_of
from regard.verify.subject.subject import Subject, SubjectError, called

BLOCK, BLOCKS, TABLE = 4, 12, 3


def _pages(trial: Trial, heads: int, groups: int) -> tuple[Tensor, ...]:
    """Pools full of NaN but where a row's tokens are, and a table whose tail points nowhere."""
    lengths = torch.tensor([1, BLOCK, BLOCK * 2 - 1, BLOCK * TABLE])
    pools = [torch.full((BLOCKS, BLOCK, groups, 8), float("nan")) for _ in "kv"]
    table = torch.full((len(lengths), TABLE), BLOCKS * 1000, dtype=torch.int64)
    free = torch.randperm(BLOCKS, generator=trial.dice).tolist()
    for row, length in enumerate(lengths.tolist()):
        for at in range(-(-length // BLOCK)):
            table[row, at] = free.pop()
            here = min(BLOCK, length - at * BLOCK)
            for pool in pools:
                pool[table[row, at], :here] = trial.randn(here, groups, 8)
    return trial.randn(len(lengths), heads, 8), *pools, table, lengths


@law(
    "Pages give what the same keys give in one piece; what lies beside them is never read.",
    "bounded",
    "stale slots, a table read past its end, a page counted twice",
    "paged",
)
def paged_equals_dense(subject: Subject, trial: Trial) -> None:
    for heads, groups in ((2, 2), (4, 2), (4, 1)):
        q, k, v, table, lengths = _pages(trial, heads, groups)
        with torch.no_grad():
            out = called(subject.thing, q.clone(), k.clone(), v.clone(), table.clone(), lengths)
        for row, length in enumerate(lengths.tolist()):
            used = table[row, : -(-length // BLOCK)]
            keys, values = (x[used].flatten(0, 1)[:length].movedim(0, 1)[None] for x in (k, v))
            expected = attention(q[row, :, None][None], keys, values).out[0, :, 0]
            insist(
                compare(
                    f"H={heads} G={groups}, {length} tokens in pages of {BLOCK}",
                    out[row].double(),
                    expected,
                    1e-4,
                    "a slot that is not the row's own was read, or one was missed",
                )
            )


@law(
    "A row longer than its table is refused.",
    "exact",
    "a read past the end of the table",
    "paged",
    advised=True,
)
def paged_bounds(subject: Subject, trial: Trial) -> None:
    q, k, v, table, lengths = _pages(trial, 2, 2)
    lengths[-1] = BLOCK * TABLE + 1
    try:
        with torch.no_grad():
            called(subject.thing, q, k, v, table, lengths)
    except SubjectError:
        return
    fail(f"{TABLE} pages of {BLOCK}, {BLOCK * TABLE + 1} tokens", "", "an error", "an output",
         "it reads past its table, or leaves tokens out")  # fmt: skip


def _free(allocator: Any) -> int | None:
    for name in ("num_free", "free_blocks", "available", "num_free_blocks"):
        if hasattr(allocator, name):
            found = getattr(allocator, name)
            found = called(found) if callable(found) else found
            return len(found) if hasattr(found, "__len__") else int(found)
    return None


@law(
    "No block has two owners, free and used add up, a failed request takes nothing, and in the end "
    "all come back.",
    "exact",
    "a double free, a leak, a partial allocation that is not undone",
    "allocator",
)
def allocator_invariants(subject: Subject, trial: Trial) -> None:
    allocator = called(subject.thing)
    total = subject.conventions.capacity or _free(allocator)
    if not total:
        raise NotApplicable("it does not say how many blocks it has")
    owned: list[list[int]] = []
    done: list[str] = []
    for _ in range(60 if trial.quick else 400):
        _allocator_step(allocator, owned, done, trial, total)
        used = len({block for blocks in owned for block in blocks})
        free = _free(allocator)
        if free is not None and free + used != total:
            cause = "blocks leaked" if free + used < total else "a block is free and in use"
            fail("; ".join(done[-6:]), "free and used", total, f"{free} + {used}", cause)
    for blocks in owned:
        called(allocator.free, blocks)
    got = list(called(allocator.allocate, total))
    if len(set(got)) != total:
        fail("all freed, then all asked for", "different blocks", total, len(set(got)),
             "after all is freed, not all blocks come back once")  # fmt: skip


def _allocator_step(
    allocator: Any, owned: list[list[int]], done: list[str], trial: Trial, total: int
) -> None:
    verb = int(trial.integers(0, 4, 1))
    if owned and (verb == 0 or len(owned) > 6):  # or nothing would ever be free again
        blocks = owned.pop(int(trial.integers(0, len(owned), 1)))
        done.append(f"free {blocks}")
        called(allocator.free, blocks)
    elif verb == 1 and owned and hasattr(allocator, "share"):
        blocks = owned[int(trial.integers(0, len(owned), 1))]
        done.append(f"share {blocks}")
        called(allocator.share, blocks)
        owned.append(list(blocks))
    else:
        _allocate(allocator, owned, done, int(trial.integers(1, total // 2 + 2, 1)))


def _allocate(allocator: Any, owned: list[list[int]], done: list[str], many: int) -> None:
    used = {block for blocks in owned for block in blocks}
    before = _free(allocator)
    done.append(f"allocate {many}")
    try:
        got = called(allocator.allocate, many)
    except SubjectError:
        got = None
    if got is None:
        if before is not None and _free(allocator) != before:
            fail("; ".join(done[-4:]), "free after a request that failed", before, _free(allocator),
                 "a request that fails keeps what it had taken")  # fmt: skip
        if before is not None and many <= before:
            fail("; ".join(done[-4:]), f"a request for {many} of {before}", "blocks", "none",
                 "it refuses what it could give")  # fmt: skip
        return
    got = [int(block) for block in got]
    if len(set(got)) != many or used & set(got):
        both = sorted(used & set(got)) or got
        fail("; ".join(done[-4:]), f"blocks {both}", "blocks of one owner", "two owners",
             "a block was given away while in use: it was freed twice")  # fmt: skip
    owned.append(got)


@law(
    "A prefix is found by its tokens and its salt alone, and what is found is what was put in.",
    "exact",
    "keys that ignore the salt or the type, a hit for a longer or other prefix",
    "prefix",
)
def prefix_isolation(subject: Subject, trial: Trial) -> None:
    prefixes = called(subject.thing)
    salted = "salt" in parameters_of(prefixes.lookup)

    def put(tokens: list[Any], value: Any, salt: Any) -> None:
        called(prefixes.insert, tokens, value, **({"salt": salt} if salted else {}))

    def get(tokens: list[Any], salt: Any) -> Any:
        return called(prefixes.lookup, tokens, **({"salt": salt} if salted else {}))

    put([1, 2, 3], "ours", "a")
    put([9, 23], "other", "a")
    cases: list[tuple[list[int], Any, Any, str]] = [
        ([1, 2, 3], "a", "ours", "what was put in is not found"),
        ([1, 2, 4], "a", None, "another's tokens hit"),
        ([3, 2, 1], "a", None, "the order of the tokens does not count"),
        ([92, 3], "a", None, "tokens are joined without a border between them"),
        ([1, 2], "a", None, "a shorter prefix hits the longer one's value"),
        ([], "a", None, "nothing hits something"),
    ]
    if salted:
        cases += [
            ([1, 2, 3], "b", None, "another salt hits: tenants see each other's cache"),
            ([1, 2, 3], None, None, "no salt hits what was salted"),
            ([2, 3], "a1", None, "salt and tokens are joined without a border"),
            ([2, 3], "a,1", None, "salt and tokens are joined by what may be in both"),
        ]
    for tokens, salt, expected, cause in cases:
        got = get(tokens, salt)
        if got != expected:
            fail(f"lookup {tokens} with salt {salt!r}", "", expected, got, cause)


LAWS = (
    paged_equals_dense,
    paged_bounds,
    allocator_invariants,
    prefix_isolation,
)
