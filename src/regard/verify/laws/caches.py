"""Laws of the past: in pieces or at once, cut back, reordered, copied; and what it costs."""

import copy

import torch
from torch import Tensor

from regard.verify.law import Broken, NotApplicable, Trial, compare, fail, insist, law
from regard.verify.subject.caches import DIM, HEADS, Store, new_store
from regard.verify.subject.decoding import at_once, in_steps
from regard.verify.subject.subject import Subject, SubjectError

LENGTH = 9


def _whole(subject: Subject, trial: Trial, batch: int = 2) -> tuple[Tensor, Tensor]:
    """x, and the output without a past."""
    if subject.stepper is None:
        said = subject.inferred["cache"]
        fail("L=3 in pieces of [2, 1]", "", "an output", "an error", said)
    if not subject.conventions.causal and "mask" not in subject.has:
        raise NotApplicable("it is not causal: a past cannot give what the whole does")
    x = subject.tokens(batch, LENGTH, trial)
    return x, at_once(subject, x)


def _cause(got: Tensor, whole: Tensor, cuts: list[int]) -> str:
    """Where it first goes wrong says why."""
    error = (got - whole).abs().amax(-1).amax(0)
    wrong = int((error > 1e-3 * float(1 + whole.abs().max())).float().argmax())
    starts = [sum(cuts[:i]) for i in range(len(cuts))]
    if wrong not in starts[1:] and cuts[-1] > 1:
        return f"first wrong at token {wrong}, inside a piece: the mask of a piece with a past"
    return f"first wrong at token {wrong}: positions, mask or past begin anew with each piece"


def _pieces(subject: Subject, trial: Trial, ways: list[list[int]]) -> None:
    x, whole = _whole(subject, trial)
    for cuts in ways:
        got = in_steps(subject, x, cuts)
        allowed = 1e-4 * float(1 + whole.abs().max())
        found = compare(f"B=2 L={LENGTH} in pieces of {cuts}", got, whole, allowed, "")
        if found is not None:
            raise Broken(type(found)(**{**vars(found), "cause": _cause(got, whole, cuts)}))


@law(
    "A sequence in pieces gives what it gives at once, however it is cut.",
    "bounded",
    "a mask without the past's offset, a causal rule skipped with a cache, positions that restart",
    "cache|unusable cache",
)
def chunked_prefill(subject: Subject, trial: Trial) -> None:
    _pieces(subject, trial, [[LENGTH], [5, 4], [1, 5, 3], [3, 1, 1, 4]])


@law(
    "Token by token gives what the whole sequence gives, at every position.",
    "bounded",
    "a cache appended on the wrong axis, positions that stand still, a window off by one",
    "cache|unusable cache",
)
def decode_equals_full(subject: Subject, trial: Trial) -> None:
    _pieces(subject, trial, [[1] * LENGTH, [4] + [1] * (LENGTH - 4)])


@law(
    "Two pasts know nothing of each other.",
    "exact",
    "a cache shared by layers, requests or instances",
    "cache|store",
)
def cache_isolation(subject: Subject, trial: Trial) -> None:
    if subject.stepper is None:
        stores = [new_store(subject) for _ in range(2)]
        given = [[trial.randn(1, HEADS, 2, DIM) for _ in "kv"] for _ in range(2)]
        stores[0].append(*given[0])
        k, _ = stores[1].append(*given[1])
        same(subject, "two caches", k, given[1][0], "a new cache holds what another was given")
        return
    if subject.stepper.style == "internal":
        raise NotApplicable("its past is inside: there is one")
    x, whole = _whole(subject, trial)
    y = subject.tokens(2, LENGTH, trial)
    one, other = subject.stepper.new(), subject.stepper.new()
    pieces = []
    for a, b in zip(x.split(3, 1), y.split(3, 1), strict=True):
        first, one = subject.stepper.step(a, one)
        second, other = subject.stepper.step(b, other)
        pieces.append(torch.cat([first, second]))
    expected = torch.cat([whole, at_once(subject, y)])
    insist(
        compare(
            f"B=2 L={LENGTH}, two sequences in turns",
            torch.cat(pieces, 1),
            expected,
            1e-4 * float(1 + whole.abs().max()),
            "one past leaks into the other",
        )
    )


def same(subject: Subject, shape: str, got: Tensor, expected: Tensor, cause: str) -> None:
    """Equal; for a rounding cache, as nearly as it rounds."""
    insist(compare(shape, got, expected, _allowed(subject, expected), cause))


def _allowed(subject: Subject, right: Tensor) -> float:
    coarse: float = subject.other["coarse"]
    return coarse * float(right.abs().max()) if coarse and right.numel() else 0.0


@law(
    "Whatever is done in whatever order, a cache holds what a plain list would.",
    "exact",
    "a cut that leaves what it should drop, a reorder that forgets a buffer, a wrong length",
    "store",
)
def cache_state_machine(subject: Subject, trial: Trial) -> None:
    runs, steps = (5, 10) if trial.quick else (40, 15)
    for run in range(runs):
        _one_life(subject, trial, run, steps)


def _one_life(subject: Subject, trial: Trial, run: int, steps: int) -> None:
    store, batch, done = new_store(subject), 2, list[str]()
    model = [trial.randn(batch, HEADS, 0, DIM) for _ in "kv"]
    verbs = ["append", *(["cut"] * ("store cut" in subject.has))]
    verbs += ["reorder"] * ("store reorder" in subject.has)
    most = subject.conventions.capacity or 10_000
    for _ in range(steps):
        verb = verbs[int(trial.integers(0, len(verbs), 1))]
        new = int(trial.integers(1, 4, 1))
        length = model[0].shape[2]
        if verb == "append" and length + new <= most:
            done.append(f"append {new}")
            given = [trial.randn(batch, HEADS, new, DIM) for _ in "kv"]
            model = [torch.cat([held, x], 2) for held, x in zip(model, given, strict=True)]
            _holds(subject, store.append(*given), model, done)
        elif verb == "cut" and length > 1:
            keep = int(trial.integers(1, length, 1))
            if _cut(subject, store, keep):
                done.append(f"cut to {keep}")
                model = [held[:, :, :keep] for held in model]
        elif verb == "reorder" and length:
            rows = trial.integers(0, batch, batch)
            done.append(f"reorder {rows.tolist()}")
            store.reorder(rows)
            model = [held[rows] for held in model]
        _length(subject, store, model[0].shape[2], done)


def _cut(subject: Subject, store: Store, keep: int) -> bool:
    """Whether it was cut back: a window may have lost what would be needed, and say so."""
    try:
        store.truncate(keep)
    except SubjectError:
        if not subject.conventions.window:
            raise
        return False
    return True


def _length(subject: Subject, store: Store, length: int, done: list[str]) -> None:
    if "store length" in subject.has and length and store.length != length:
        fail("; ".join(done), "its length", length, store.length,
             f"after {done[-1]!r} it counts its tokens wrongly")  # fmt: skip


def _holds(
    subject: Subject, got: tuple[Tensor, Tensor], model: list[Tensor], done: list[str]
) -> None:
    window = subject.conventions.window or 0
    for name, mine, right in zip(("keys", "values"), got, model, strict=True):
        if window:  # the newest it must still have; older ones may be gone
            right = right[:, :, -min(window, right.shape[2]) :]
            mine = mine[:, :, -right.shape[2] :]
        cause = f"after {done[-1]!r} the {name} are not what was put in"
        same(subject, "; ".join(done), mine.to(right.dtype), right, cause)


@law(
    "Beyond its capacity a cache refuses before it changes anything; a window keeps no more memory "
    "than it declares.",
    "resource",
    "a silent wrap, a length that advances although it raised, memory kept behind a view",
    "store",
)
def cache_bounds(subject: Subject, trial: Trial) -> None:
    capacity, window = subject.conventions.capacity, subject.conventions.window
    if not capacity and not window:
        raise NotApplicable("it declares no capacity and no window")
    if capacity:
        _overflow(subject, trial, capacity)
    if window:
        store = new_store(subject)
        most = 2 * HEADS * DIM * 4 * (2 * window + 16)
        for new in (8 * window + 40, 1, 1):
            store.append(*(trial.randn(1, HEADS, new, DIM) for _ in "kv"))
            if store.storage() > most:
                fail(f"window={window}, after {new} tokens", "bytes held", f"at most {most}",
                     store.storage(), "what the window dropped is still in memory")  # fmt: skip


def _overflow(subject: Subject, trial: Trial, capacity: int) -> None:
    store = new_store(subject)
    first = [trial.randn(1, HEADS, capacity - 1, DIM) for _ in "kv"]
    last = [trial.randn(1, HEADS, 1, DIM) for _ in "kv"]
    store.append(*first)
    shape = f"capacity={capacity}, {capacity - 1} tokens and 2 more"
    try:
        store.append(*(trial.randn(1, HEADS, 2, DIM) for _ in "kv"))
    except SubjectError:
        if "store length" in subject.has and store.length != capacity - 1:
            fail(shape, "its length", capacity - 1, store.length,
                 "it raised, but counted the tokens first")  # fmt: skip
        k, _ = store.append(*last)
        whole = torch.cat([first[0], last[0]], 2)
        same(subject, shape, k[:, :, : whole.shape[2]], whole, "it raised, but had written already")
        return
    fail(shape, "", "an error", "none", "what does not fit is lost or overwrites the beginning")


@law(
    "A token costs the bytes that are declared, and not more.",
    "resource",
    "an MLA cache that keeps keys and values instead of the latent, heads stored repeated",
    "store|cache",
)
def cache_bytes(subject: Subject, trial: Trial) -> None:
    promised = subject.conventions.cache_bytes
    if promised is None:
        raise NotApplicable("it declares no bytes for a token")
    tokens = 256
    if subject.kind == "cache":
        store = new_store(subject)
        store.append(*(trial.randn(1, HEADS, tokens, DIM) for _ in "kv"))
        held = store.storage()
    else:
        held = _past_bytes(subject, trial, tokens)
    if held > 1.3 * promised * tokens:
        fail(f"{tokens} tokens", "bytes for each", f"{promised:g}", f"{held / tokens:.1f}",
             "it keeps more than it declares: repeated heads, or keys and values where a latent "
             "would do")  # fmt: skip


def _past_bytes(subject: Subject, trial: Trial, tokens: int) -> int:
    assert subject.stepper is not None
    past = subject.stepper.new()
    for x in subject.tokens(1, tokens, trial).split(64, 1):
        _, past = subject.stepper.step(x, past)
    return Store(past.held, None, None).storage()


@law(
    "A rounding cache is as exact late as early, after an outlier, and whatever its neighbours in "
    "the batch hold.",
    "bounded",
    "a scale frozen by the first tokens, shared by the batch, or applied twice",
    "store",
)
def quant_drift(subject: Subject, trial: Trial) -> None:
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
        cause = "the scale is frozen by the first tokens, or shared with larger tokens or rows"
        fail("40 tokens, the last 20 200 times larger, row 1 1000 times", f"row {row}, "
             f"token {token}", "an error below 20 % of the token", f"{float(relative.max()):.0%}",
             cause)  # fmt: skip


@law(
    "A copy of a cache goes its own way.",
    "exact",
    "a copy that shares storage, a deepcopy that fails",
    "store",
)
def serialise_cache(subject: Subject, trial: Trial) -> None:
    store = new_store(subject)
    first = [trial.randn(1, HEADS, 3, DIM) for _ in "kv"]
    store.append(*first)
    try:
        twin = Store(copy.deepcopy(store.held), store.cut, store.reorder_name, store.by_amount)
    except Exception as error:
        fail("3 tokens", "deepcopy", "a copy", f"{type(error).__name__}", str(error))
    one, other, last = ([trial.randn(1, HEADS, 1, DIM) for _ in "kv"] for _ in range(3))
    store.append(*one)
    twin.append(*other)
    got = store.append(*last)[0][:, :, -5:-1]  # a window may hold less
    expected = torch.cat([first[0], one[0]], 2)[:, :, -got.shape[2] :]
    same(subject, "3 tokens, a copy and one token each", got, expected, "its copy writes into it")


@law(
    "A cache copies what it is given: what the caller does later changes nothing.",
    "exact",
    "a cache that keeps a view of the caller's tensor",
    "store",
)
def cache_no_alias(subject: Subject, trial: Trial) -> None:
    store = new_store(subject)
    k, v = (trial.randn(1, HEADS, 3, DIM) for _ in "kv")
    kept = k.clone()
    store.append(k, v, copied=False)
    k.fill_(99.0)
    got, _ = store.append(*(trial.randn(1, HEADS, 1, DIM) for _ in "kv"))
    cause = "it holds a view of its input"
    same(subject, "3 tokens, then the caller writes", got[:, :, -4:-1], kept, cause)


LAWS = (
    chunked_prefill,
    decode_equals_full,
    cache_isolation,
    cache_state_machine,
    cache_bounds,
    cache_bytes,
    quant_drift,
    serialise_cache,
    cache_no_alias,
)
