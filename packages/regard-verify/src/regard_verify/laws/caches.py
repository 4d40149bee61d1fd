"""Laws of layers with a cache: pieces against the whole sequence, drafts, and bytes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from regard_verify.law import Broken, NotApplicable, Trial, fail, law, require, tolerance
from regard_verify.subject.caches import BY_AMOUNT, TRUNCATES, storage_bytes
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


@law("resource", "cache")
def cache_bytes(subject: Subject, trial: Trial) -> None:
    """A token costs at most the declared bytes."""
    declared = subject.conventions.cache_bytes
    if declared is None:
        raise NotApplicable("it declares no bytes for a token")
    tokens, state = 256, subject.stepper.new()
    for x in subject.tokens(1, tokens, trial).split(64, 1):
        _, state = subject.stepper.step(x, state)
    held = storage_bytes(state.held)
    if held > 1.3 * declared * tokens:
        cause = (
            "it holds more than it declares: repeated heads, or keys and values where a latent "
            "would be enough"
        )
        fail(f"{tokens} tokens", "bytes for each", f"{declared:g}", f"{held / tokens:.1f}", cause)
