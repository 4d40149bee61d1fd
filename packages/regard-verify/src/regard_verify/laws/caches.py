"""Laws of caches and pages: pieces against the whole sequence, truncation, copies, and bytes.

A paged function is `(q [B, H, D], k_pool [N, T, G, D], v_pool, block_table [B, M], lengths [B])` to
`[B, H, D]`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regard_verify.law import Broken, NotApplicable, Trial, fail, law, require, tolerance
from regard_verify.oracle import attention
from regard_verify.subject.caches import (
    BY_AMOUNT,
    DIM,
    HEADS,
    TRUNCATES,
    Store,
    new_store,
    new_tokens,
    storage_bytes,
)
from regard_verify.subject.decoding import at_once, in_steps
from regard_verify.subject.subject import Subject, SubjectError, called

LENGTH = 9


def _whole(subject: Subject, trial: Trial, batch: int = 2) -> tuple[Tensor, Tensor]:
    """x, and its output without a cache."""
    if subject.stepper is None:
        fail("L=3 in pieces of [2, 1]", "", "an output", "an error", subject.inferred["cache"])
    if not subject.conventions.causal and not subject.has.mask:
        raise NotApplicable("it is not causal: with a cache it cannot give what it gives at once")
    x = subject.tokens(batch, LENGTH, trial)
    return x, at_once(subject, x)


def _cause(got: Tensor, whole: Tensor, cuts: list[int]) -> str:
    """The likely mistake, by the first token that is wrong."""
    error = (got - whole).abs().amax(-1).amax(0)
    wrong = int((error > tolerance(whole, 1e-3)).float().argmax())
    starts = [sum(cuts[:i]) for i in range(len(cuts))]
    if wrong not in starts[1:] and cuts[-1] > 1:
        return f"first wrong at token {wrong}, inside a piece: the mask of a piece after others"
    return f"first wrong at token {wrong}: positions, mask or cache start again with each piece"


def _pieces(subject: Subject, trial: Trial, ways: list[list[int]]) -> None:
    x, whole = _whole(subject, trial)
    for cuts in ways:
        got = in_steps(subject, x, cuts)
        try:
            require(f"B=2 L={LENGTH} in pieces of {cuts}", got, whole, tolerance(whole), "")
        except Broken as broken:
            raise Broken(replace(broken.example, cause=_cause(got, whole, cuts))) from None


@law("bounded", "cache|unusable_cache")
def chunked_prefill(subject: Subject, trial: Trial) -> None:
    """A sequence in pieces gives the outputs of one call, however it is cut."""
    _pieces(subject, trial, [[LENGTH], [5, 4], [1, 5, 3], [3, 1, 1, 4]])


@law("bounded", "cache|unusable_cache")
def decode_equals_full(subject: Subject, trial: Trial) -> None:
    """Decoding token by token gives the outputs of one call on the whole sequence."""
    _pieces(subject, trial, [[1] * LENGTH, [4] + [1] * (LENGTH - 4)])


@law("bounded", "cache")
def drafts_dropped(subject: Subject, trial: Trial) -> None:
    """After drafted tokens are dropped from a cache, the next tokens give the outputs that they
    give without drafts.
    """
    x, whole = _whole(subject, trial)
    assert subject.stepper is not None
    for drafts in (1, 3):
        _, after = subject.stepper.step(x[:, :5], subject.stepper.new())
        if hasattr(after.held, "activate_past_recording"):  # transformers' caches of windows
            after.held.activate_past_recording()
        for token in subject.tokens(2, drafts, trial).split(1, 1):
            _, after = subject.stepper.step(token, after)
        name = next((each for each in TRUNCATES if hasattr(after.held, each)), "")
        if not name:
            raise NotApplicable("its cache has no method that drops tokens")
        try:
            _drop(getattr(after.held, name), name, drafts)
        except SubjectError as error:
            raise NotApplicable(f"its cache refuses to drop tokens: {error}") from error
        got, _ = subject.stepper.step(x[:, 5:], after._replace(length=5))
        label = f"B=2, 5 tokens, {drafts} drafted and dropped, 4 more"
        cause = "dropped tokens leave a trace in the cache, or took other tokens with them"
        require(label, got, whole[:, 5:], tolerance(whole), cause)


def _drop(method: Callable[[int], Any], name: str, drafts: int) -> None:
    """Drop the last tokens, by the length to keep, or by their number, which may be negative."""
    try:
        called(method, drafts if name in BY_AMOUNT else 5)
    except SubjectError:
        called(method, -drafts)


def same_tokens(subject: Subject, label: str, got: Tensor, expected: Tensor, cause: str) -> None:
    """Raise if cached values differ, by more than its rounding for a cache that rounds."""
    rounds = subject.rounding > 0 and expected.numel() > 0
    allowed = subject.rounding * float(expected.abs().max()) if rounds else 0.0
    require(label, got, expected, allowed, cause)


@law("exact", "cache_object")
def cache_state_machine(subject: Subject, trial: Trial) -> None:
    """After any operations in any order a cache holds the tokens that a plain list would."""
    runs, steps = (5, 10) if trial.quick else (40, 15)
    for _ in range(runs):
        _random_operations(subject, trial, steps)


def _random_operations(subject: Subject, trial: Trial, steps: int) -> None:
    store, batch, done = new_store(subject), 2, list[str]()
    model = new_tokens(trial, 0, batch)
    verbs = ["append", *(["cut"] * subject.has.cache_truncate)]
    verbs += ["reorder"] * subject.has.cache_reorder
    most = subject.conventions.capacity or 10_000
    for _ in range(steps):
        verb = verbs[int(trial.integers(0, len(verbs), 1))]
        new = int(trial.integers(1, 4, 1))
        length = model[0].shape[2]
        if verb == "append" and length + new <= most:
            done.append(f"append {new}")
            given = new_tokens(trial, new, batch)
            model = [torch.cat([held, x], 2) for held, x in zip(model, given, strict=True)]
            _holds(subject, store.append(*given), model, done)
        elif verb == "cut" and length > 1:
            keep = int(trial.integers(1, length, 1))
            if _truncated(subject, store, keep):
                done.append(f"truncate to {keep}")
                model = [held[:, :, :keep] for held in model]
        elif verb == "reorder" and length:
            rows = trial.integers(0, batch, batch)
            done.append(f"reorder {rows.tolist()}")
            store.reorder(rows)
            model = [held[rows] for held in model]
        length = model[0].shape[2]
        if subject.has.cache_length and length and store.length != length:
            cause = f"after {done[-1]!r} it counts its tokens wrongly"
            fail("; ".join(done), "its length", length, store.length, cause)


def _truncated(subject: Subject, store: Store, keep: int) -> bool:
    """Whether it was truncated: a windowed cache may refuse if it has dropped what is needed."""
    try:
        store.truncate(keep)
    except SubjectError:
        if not subject.conventions.window:
            raise
        return False
    return True


def _holds(
    subject: Subject, got: tuple[Tensor, Tensor], model: list[Tensor], done: list[str]
) -> None:
    window = subject.conventions.window or 0
    for name, mine, right in zip(("keys", "values"), got, model, strict=True):
        if window:  # the newest tokens must be there, older ones may be
            right = right[:, :, -min(window, right.shape[2]) :]
            mine = mine[:, :, -right.shape[2] :]
        cause = f"after {done[-1]!r} the {name} are not those that were stored"
        same_tokens(subject, "; ".join(done), mine.to(right.dtype), right, cause)


@law("resource", "cache_object")
def cache_bounds(subject: Subject, trial: Trial) -> None:
    """Beyond its capacity a cache refuses before it changes anything; a window holds no more memory
    than it declares.
    """
    capacity, window = subject.conventions.capacity, subject.conventions.window
    if not capacity and not window:
        raise NotApplicable("it declares no capacity and no window")
    if capacity:
        _overflow(subject, trial, capacity)
    if window:
        store = new_store(subject)
        most = 2 * HEADS * DIM * 4 * (2 * window + 16)
        for new in (8 * window + 40, 1, 1):
            store.append(*new_tokens(trial, new))
            if store.storage() > most:
                fail(f"window={window}, after {new} tokens", "bytes held", f"at most {most}",
                     store.storage(), "tokens outside the window are still in memory")  # fmt: skip


def _overflow(subject: Subject, trial: Trial, capacity: int) -> None:
    store = new_store(subject)
    first, last = new_tokens(trial, capacity - 1), new_tokens(trial, 1)
    store.append(*first)
    label = f"capacity={capacity}, {capacity - 1} tokens and 2 more"
    try:
        store.append(*new_tokens(trial, 2))
    except SubjectError:
        if subject.has.cache_length and store.length != capacity - 1:
            fail(label, "its length", capacity - 1, store.length,
                 "it raised, but counted the tokens first")  # fmt: skip
        k, _ = store.append(*last)
        whole = torch.cat([first[0], last[0]], 2)
        cause = "it raised, but had written already"
        return same_tokens(subject, label, k[:, :, : whole.shape[2]], whole, cause)
    fail(label, "", "an error", "none", "tokens that do not fit are lost or overwrite the first")


@law("resource", "cache_object|cache")
def cache_bytes(subject: Subject, trial: Trial) -> None:
    """A token costs at most the declared bytes."""
    declared = subject.conventions.cache_bytes
    if declared is None:
        raise NotApplicable("it declares no bytes for a token")
    tokens = 256
    if subject.kind == "cache":
        store = new_store(subject)
        store.append(*new_tokens(trial, tokens))
        held = store.storage()
    else:
        assert subject.stepper is not None
        state = subject.stepper.new()
        for x in subject.tokens(1, tokens, trial).split(64, 1):
            _, state = subject.stepper.step(x, state)
        held = storage_bytes(state.held)
    if held > 1.3 * declared * tokens:
        cause = (
            "it holds more than it declares: repeated heads, or keys and values where a latent "
            "would be enough"
        )
        fail(f"{tokens} tokens", "bytes for each", f"{declared:g}", f"{held / tokens:.1f}", cause)


@law("bounded", "cache_object")
def quant_drift(subject: Subject, trial: Trial) -> None:
    """A cache that rounds is as exact for late tokens as for early ones, after an outlier, and
    beside any other rows.
    """
    if subject.conventions.capacity or subject.conventions.window:
        raise NotApplicable("it holds too few tokens")
    k = trial.randn(2, HEADS, 40, DIM) * 0.05
    k[:, :, 20:] *= 200.0  # later tokens are far larger than the first
    k[1] *= 1e3
    store = new_store(subject)
    got = k[:, :, :0]
    for piece in k.split(5, 2):
        got, _ = store.append(piece, piece)
    if torch.equal(got, k):
        return
    error = (got - k).abs()
    size = k.abs().amax(-1, keepdim=True)
    relative = (error / (size + 1e-12)).amax(-1).amax(1)
    if float(relative.max()) > 0.2:
        row, token = (int(i) for i in (relative == relative.max()).nonzero()[0])
        fail("40 tokens, the last 20 200 times larger, row 1 1000 times", f"row {row}, "
             f"token {token}", "an error below 20 % of the token", f"{float(relative.max()):.0%}",
             "the scale is fixed by the first tokens, or shared with larger tokens or rows",
             )  # fmt: skip


@law("exact", "cache_object")
def cache_no_alias(subject: Subject, trial: Trial) -> None:
    """A cache copies its inputs: later changes of these tensors change nothing."""
    store = new_store(subject)
    k, v = new_tokens(trial, 3)
    before = k.clone()
    store.append(k, v, copied=False)
    k.fill_(99.0)
    got, _ = store.append(*new_tokens(trial, 1))
    cause = "it holds a view of its input"
    same_tokens(subject, "3 tokens, then the caller writes", got[:, :, -4:-1], before, cause)


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
    """Pages give the output of the same keys in one piece; no other slot is read."""
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
