"""Laws of paged attention.

A paged function is `(q [B, H, D], k_pool [N, T, G, D], v_pool, block_table [B, M], lengths [B])` to
`[B, H, D]`.
"""

import torch
from torch import Tensor

from regard_verify.law import Trial, fail, law, require
from regard_verify.oracle import attention
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
