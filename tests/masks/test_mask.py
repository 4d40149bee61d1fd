"""A new rule is one class in one file: the library skips what it hides without knowing its name."""

import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from regard import EVERYTHING, Causal, Padding, Span, attend, prepare
from regard.masks.row_data import DataMask, as_rows, row_index, row_masks
from regard.masks.runs import Shown, intersection, union
from regard.ops.backends import BACKENDS
from regard.ops.backends.blocked import plan
from regard.ops.block_masks import BLOCK, visible_blocks
from regard.ops.mask_tensors import intervals_of

CORE = Path(__file__).parents[2] / "src/regard"
LENGTH, SIDE = 1024, 256
SQUARE = Span(0, LENGTH, 0, LENGTH)


@dataclass(frozen=True, eq=False, repr=False)
class Routed(DataMask):
    """A user's rule: each chunk of 256 queries may attend to one chunk of 256 keys."""

    chunks: Tensor  # [B, n], the chunk of keys of each chunk of queries
    table: list[list[int]] = field(init=False)

    def __post_init__(self):
        (chunks,) = self._copies(as_rows("Routed", "chunks", self.chunks))
        self._set(chunks=chunks, table=chunks.tolist())

    @property
    def batch(self):
        return self.chunks.shape[0]

    def __call__(self, b, h, q_idx, kv_idx):
        return self.chunks[row_index(self.chunks, b), q_idx // SIDE] == kv_idx // SIDE

    def runs(self, first, last):
        here = [row[first // SIDE : last // SIDE + 1] for row in self.table]
        seen = {chunk for row in here for chunk in row}
        runs = union([(SIDE * chunk, SIDE * (chunk + 1)) for chunk in seen])
        return Shown(runs, runs if len(seen) == 1 else [], range(0, LENGTH, SIDE))


ROUTED = Routed(torch.tensor([[0, 0, 1, 3], [2, 0, 0, 0]]))
ONE = Routed(torch.tensor([0, 0, 1, 3]))
MASKS = {
    "alone": ROUTED,
    "causal": Causal() & ROUTED,
    "or": (Causal() & ROUTED) | Padding(torch.arange(LENGTH) < 2),
    "not": ~ROUTED & Causal(),
}


def described(mask, batch=2):
    q = torch.empty(batch, 2, LENGTH, 8)
    return prepare(q, q, q, mask=mask, backend="eager").call


def runs_here(backend, q, v, mask):
    """Whether a backend of some sizes, masks or machines has no objection."""
    return BACKENDS[backend].objection(prepare(q, q, v, mask=mask, backend="eager").call) is None


@pytest.mark.parametrize("backend", sorted(BACKENDS))
@pytest.mark.parametrize("name", MASKS)
def test_every_backend_computes_it(name, backend):
    dtype = torch.bfloat16 if backend == "tiled" else torch.float32
    q, k, v = torch.randn(3, 2, 2, LENGTH, 16, dtype=dtype).unbind()
    mask = MASKS[name]
    keep = mask.dense(SQUARE, batch=2)
    scores = (q.float() @ k.float().mT / 4).masked_fill(~keep, -torch.inf)
    want = scores.softmax(-1).nan_to_num() @ v.float()
    with torch.no_grad():
        limited = ("fused", "grouped", "tiled", "latents", "flash")
        if backend in limited and not runs_here(backend, q, v, mask):
            return
        out = attend(q, k, v, mask=mask, backend=backend)
    assert torch.allclose(out.float(), want, atol=1e-5 if dtype == torch.float32 else 0.03)


def test_blocks_that_it_hides_are_skipped():
    blocks = plan(described(ROUTED))
    assert [block.runs for block in blocks if block.rows == (0, 1)] == [
        [(0, 256)], [(0, 256)], [(256, 512)], [(768, 1024)],
    ]  # fmt: skip
    assert all(block.plain for block in blocks)  # kernels need no mask
    some, every, _ = visible_blocks(described(ROUTED))
    side = SIDE // BLOCK
    assert some.sum() == every.sum() == 2 * 4 * side**2


def test_all_that_is_asked_of_a_mask_follows():
    assert ONE.within(Span(0, 512, 0, 256)) == EVERYTHING
    assert repr(ONE.within(Span(0, 512, 256, 1024))) == "Nothing()"
    assert ONE.reach(Span(512, 1024, 0, LENGTH)) == (256, 1023)
    assert ONE.runs(0, 599).edges_between(0, 600) == [256, 512]
    assert [row.table for row in row_masks(ROUTED, 2)] == [[row] for row in ROUTED.table]
    starts, stops = intervals_of(ROUTED, SQUARE)
    assert starts[0, ::SIDE].tolist() == [0, 0, 256, 768]
    assert stops[1, ::SIDE].tolist() == [768, 256, 256, 256]
    assert intersection(ONE.finder()(300, 600).every, [(0, LENGTH)]) == []


@pytest.mark.parametrize("rule", ["Tree", "Chunked", "Documents", "Prefix", "SlidingWindow"])
def test_masks_do_not_ask_which_rule_one_is(rule):
    """No `match` and no `isinstance` names a rule, in the folder and where blocks are planned."""
    files = [*(CORE / "masks").glob("*.py"), *(CORE / "ops").glob("block*.py")]
    asking = re.compile(rf"(case|isinstance)\b.*\b{rule}\b")
    assert [path.name for path in files if asking.search(path.read_text())] == []


def test_the_tree_is_in_one_file():
    named = {
        path.relative_to(CORE).as_posix()
        for folder in ("masks", "ops")
        for path in (CORE / folder).rglob("*.py")
        if re.search(r"\bTree\b", path.read_text())
    }
    assert named == {"masks/__init__.py", "masks/tree.py"}
