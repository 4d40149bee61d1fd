"""Laws of paged attention, of the allocator of its pages, and of prefix caches.

A paged function is `(q [B, H, D], k_pool [N, T, G, D], v_pool, block_table [B, M], lengths [B])` to
`[B, H, D]`. An allocator has `allocate(n) -> ids`, `free(ids)`, and maybe `share(ids)` and
`num_free`. A prefix cache has `insert(tokens, value, salt=...)` and `lookup(tokens, salt=...)`.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from regard_verify.law import NotApplicable, Trial, fail, law, require
from regard_verify.oracle import attention
from regard_verify.subject.mask_forms import parameters_of
from regard_verify.subject.subject import Subject, SubjectError, called

BLOCK, BLOCKS, TABLE = 4, 12, 3  # tokens of a page, pages of the pool, pages of a row's table


def _pages(trial: Trial, heads: int, groups: int) -> tuple[Tensor, ...]:
    """Pools that are NaN where no row has a token, and a table whose unused entries are invalid."""
    lengths = torch.tensor([1, BLOCK, BLOCK * 2 - 1, BLOCK * TABLE])
    pools = [torch.full((BLOCKS, BLOCK, groups, 8), float("nan")) for _ in "kv"]
    table = torch.full((len(lengths), TABLE), BLOCKS * 1000, dtype=torch.int64)
    free = trial.permutation(BLOCKS).tolist()
    for row, length in enumerate(lengths.tolist()):
        for at in range(-(-length // BLOCK)):
            table[row, at] = free.pop()
            here = min(BLOCK, length - at * BLOCK)
            for pool in pools:
                pool[table[row, at], :here] = trial.randn(here, groups, 8)
    return trial.randn(len(lengths), heads, 8), *pools, table, lengths


@law("bounded", "paged")
def paged_equals_dense(subject: Subject, trial: Trial) -> None:
    """Pages give what the same keys give in one piece; no other slot is read."""
    for heads, groups in ((2, 2), (4, 2), (4, 1)):
        q, k, v, table, lengths = _pages(trial, heads, groups)
        with torch.no_grad():
            out = called(subject.thing, q.clone(), k.clone(), v.clone(), table.clone(), lengths)
        for row, length in enumerate(lengths.tolist()):
            used = table[row, : -(-length // BLOCK)]
            keys, values = (x[used].flatten(0, 1)[:length].movedim(0, 1)[None] for x in (k, v))
            expected = attention(q[row, :, None][None], keys, values).out[0, :, 0]
            label = f"H={heads} G={groups}, {length} tokens in pages of {BLOCK}"
            cause = "a slot that is not of this row was read, or one was missed"
            require(label, out[row].double(), expected, 1e-4, cause)


@law("exact", "paged", advised=True)
def paged_bounds(subject: Subject, trial: Trial) -> None:
    """A row longer than its table is refused."""
    q, k, v, table, lengths = _pages(trial, 2, 2)
    lengths[-1] = BLOCK * TABLE + 1
    try:
        with torch.no_grad():
            called(subject.thing, q, k, v, table, lengths)
    except SubjectError:
        return
    fail(f"{TABLE} pages of {BLOCK}, {BLOCK * TABLE + 1} tokens", "", "an error", "an output",
         "it reads past its table, or leaves tokens out")  # fmt: skip


@dataclass
class _Allocations:
    """An allocator, the blocks of each request, and the operations so far."""

    allocator: Any
    owned: list[list[int]] = field(default_factory=list)
    done: list[str] = field(default_factory=list)

    def used(self) -> set[int]:
        return {block for blocks in self.owned for block in blocks}

    def free(self) -> int | None:
        """The number of free blocks, by the allocator's own count."""
        for name in ("num_free", "free_blocks", "available", "num_free_blocks"):
            if hasattr(self.allocator, name):
                found = getattr(self.allocator, name)
                found = called(found) if callable(found) else found
                return len(found) if hasattr(found, "__len__") else int(found)
        return None

    def step(self, trial: Trial, total: int) -> None:
        """One random operation: free, share or allocate."""
        verb = int(trial.integers(0, 4, 1))
        if self.owned and (verb == 0 or len(self.owned) > 6):  # or no block would be free again
            blocks = self.owned.pop(int(trial.integers(0, len(self.owned), 1)))
            self.done.append(f"free {blocks}")
            called(self.allocator.free, blocks)
        elif verb == 1 and self.owned and hasattr(self.allocator, "share"):
            blocks = self.owned[int(trial.integers(0, len(self.owned), 1))]
            self.done.append(f"share {blocks}")
            called(self.allocator.share, blocks)
            self.owned.append(list(blocks))
        else:
            self.allocate(int(trial.integers(1, total // 2 + 2, 1)))

    def allocate(self, many: int) -> None:
        used, before = self.used(), self.free()
        self.done.append(f"allocate {many}")
        label = "; ".join(self.done[-4:])
        try:
            got = called(self.allocator.allocate, many)
        except SubjectError:
            got = None
        if got is None:
            if before is not None and self.free() != before:
                fail(label, "free after a request that failed", before, self.free(),
                     "a request that fails does not return what it had taken")  # fmt: skip
            if before is not None and many <= before:
                fail(label, f"a request for {many} of {before}", "blocks", "none",
                     "it refuses a request although enough blocks are free")  # fmt: skip
            return
        got = [int(block) for block in got]
        if len(set(got)) != many or used & set(got):
            both = sorted(used & set(got)) or got
            fail(label, f"blocks {both}", "blocks of one owner", "two owners",
                 "a block was allocated while in use: it was freed twice")  # fmt: skip
        self.owned.append(got)


@law("exact", "allocator")
def allocator_invariants(subject: Subject, trial: Trial) -> None:
    """No block has two owners, free and used add up, a failed request takes nothing, and all blocks
    come back.
    """
    state = _Allocations(called(subject.thing))
    total = subject.conventions.capacity or state.free()
    if not total:
        raise NotApplicable("its number of blocks is not known")
    for _ in range(60 if trial.quick else 400):
        state.step(trial, total)
        used, free = len(state.used()), state.free()
        if free is not None and free + used != total:
            cause = "blocks leaked" if free + used < total else "a block is free and in use"
            fail("; ".join(state.done[-6:]), "free and used", total, f"{free} + {used}", cause)
    for blocks in state.owned:
        called(state.allocator.free, blocks)
    got = list(called(state.allocator.allocate, total))
    if len(set(got)) != total:
        fail("all freed, then all requested", "different blocks", total, len(set(got)),
             "after all are freed, not every block comes back once")  # fmt: skip


@law("exact", "prefix")
def prefix_isolation(subject: Subject, trial: Trial) -> None:
    """A prefix is found by its tokens and its salt alone, with the value that was inserted."""
    prefixes = called(subject.thing)
    salted = "salt" in parameters_of(prefixes.lookup)

    def salt_of(salt: Any) -> dict[str, Any]:
        return {"salt": salt} if salted else {}

    called(prefixes.insert, [1, 2, 3], "ours", **salt_of("a"))
    called(prefixes.insert, [9, 23], "other", **salt_of("a"))
    cases: list[tuple[list[int], Any, Any, str]] = [
        ([1, 2, 3], "a", "ours", "an inserted prefix is not found"),
        ([1, 2, 4], "a", None, "other tokens hit"),
        ([3, 2, 1], "a", None, "the order of the tokens is ignored"),
        ([92, 3], "a", None, "tokens are joined without a separator"),
        ([1, 2], "a", None, "a shorter prefix hits the longer one's value"),
        ([], "a", None, "an empty prefix hits"),
    ]
    if salted:
        cases += [
            ([1, 2, 3], "b", None, "another salt hits: tenants read each other's cache"),
            ([1, 2, 3], None, None, "a lookup without salt hits an entry with one"),
            ([2, 3], "a1", None, "salt and tokens are joined without a separator"),
            ([2, 3], "a,1", None, "salt and tokens are joined by a separator that both may hold"),
        ]
    for tokens, salt, expected, cause in cases:
        got = called(prefixes.lookup, tokens, **salt_of(salt))
        if got != expected:
            fail(f"lookup {tokens} with salt {salt!r}", "", expected, got, cause)
