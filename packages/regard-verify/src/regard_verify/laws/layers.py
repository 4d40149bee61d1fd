"""Laws of layers: absorbed MLA, cross-attention, state dicts, references, memory, train mode."""

import copy
from contextlib import suppress
from typing import Any

import torch

from regard_verify.law import NotApplicable, Trial, fail, law, require, tolerance, worst
from regard_verify.laws.cases import ODD
from regard_verify.subject.caches import storage_bytes
from regard_verify.subject.signatures import parameters_of
from regard_verify.subject.subject import Subject, SubjectError, called

SWITCHES: dict[str, tuple[Any, Any]] = {  # by name: the values for expanded and for absorbed
    "form": ("expanded", "absorbed"),
    "absorb": (False, True),
    "absorbed": (False, True),
    "use_absorb": (False, True),
    "attn_impl": ("naive", "absorb"),
}


@law("bounded", "layer")
def mla_absorbed(subject: Subject, trial: Trial) -> None:
    """Absorbed and expanded MLA give the same, at all positions."""
    names = parameters_of(subject.module.forward) if subject.module is not None else {}
    name = next((each for each in SWITCHES if each in names), "")
    if not name:
        raise NotApplicable("it has no absorbed form that is an argument of its calls")
    x = subject.tokens(2, 7, trial)
    outs = [subject.run_layer(x, **{name: value}) for value in SWITCHES[name]]
    allowed = tolerance(outs[0])
    cause = "the absorbed form computes something else"
    if float((outs[1] - outs[0]).abs()[:, 0].max()) <= allowed:
        cause += "; position 0 agrees, so the scale, the rotation or the mask is wrong"
    require(f"B=2 L=7, {name}={SWITCHES[name][1]!r}", outs[1], outs[0], allowed, cause)


@law("exact", "context")
def cross_attention(subject: Subject, trial: Trial) -> None:
    """Cross-attention depends on the other sequence, but not on the order of its tokens; keys and
    values that are given apart are both read, and as what they are.
    """
    if subject.layer.inputs == 3:
        with suppress(SubjectError):
            _reads_keys_and_values(subject, trial)
    x, context = subject.tokens(2, 3, trial), subject.tokens(2, 5, trial)
    try:
        base = subject.run_layer(x, context=context)
        again = subject.run_layer(x, context=context.flip(0) + 1)
        fresh = subject.run_layer(x, context=context)
    except SubjectError as error:
        raise NotApplicable(f"it could not be given another sequence: {error}") from error
    if torch.equal(base, again):
        cause = "the other sequence is not read, or an older one is still stored"
        fail("L=3 S=5", "", "another output", "the same", cause)
    cause = "the context of an earlier call changes the output"
    require("L=3 S=5, the first context again", fresh, base, 0.0, cause)
    unplaced = subject.conventions.pairing == "none" and not subject.has.unknown_positions
    if not bool(subject.visible(3, 5).all()) or (subject.layer.inputs == 3 and not unplaced):
        return  # its own pattern, or the positions of a sequence, depend on the order of these keys
    got = subject.run_layer(x, context=context[:, torch.tensor([4, 2, 0, 1, 3])])
    cause = "the order of the context matters"
    require("L=3 S=5, context in another order", got, base, tolerance(base), cause)


def _reads_keys_and_values(subject: Subject, trial: Trial) -> None:
    """Raise unless a layer of queries, keys and values reads the keys and the values it is given.

    The weight of a single key is 1, whatever it is, unless sinks or the like take a part of it.
    """
    for queries, keys in ((3, 3), (1, 1), (3, 5)):
        x, k, v = (subject.tokens(2, n, trial) for n in (queries, keys, keys))
        base = subject.run_layer(x, others=(k, v))
        other = {"query": (1 - x, k, v), "keys": (x, 1 - k, v), "values": (x, k, 1 - v)}
        outs = {name: subject.run_layer(q, others=(k, v)) for name, (q, k, v) in other.items()}
        same = [name for name, out in outs.items() if torch.equal(out, base)]
        label = f"B=2 L={x.shape[1]} S={k.shape[1]}"
        if k.shape[1] > 1 and {"keys", "values"} & {*same}:
            cause = f"the {same[-1]} it is given are not read"
            fail(label, "", "another output", "the same", cause)
        if k.shape[1] == 1 and "query" in same and "keys" not in same:
            cause = "the values are read from the keys"
            fail(label, "", "the same for another key", "another output", cause)


@law("exact", "module")
def state_dict(subject: Subject, trial: Trial) -> None:
    """The state dict, loaded into a copy with other weights, makes the same layer."""
    module = subject.module
    try:
        twin = copy.deepcopy(module)
    except Exception as error:
        raise NotApplicable(f"it cannot be copied: {type(error).__name__}") from error
    if not list(twin.parameters()):
        raise NotApplicable("it has no parameters")
    state = {name: value.clone() for name, value in module.state_dict().items()}
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.normal_()
    called(twin.load_state_dict, state)
    x = subject.tokens(2, 4, trial)
    with torch.no_grad():
        got, right = subject.layer_of(twin)(x).nan_to_num(), subject.run_layer(x).nan_to_num()
    cause = "it depends on weights that its state dict does not hold"
    require("B=2 L=4, after loading", got, right, 0.0, cause)


@law("bounded", "reference")
def reference_parity(subject: Subject, trial: Trial) -> None:
    """The output is that of the declared reference."""
    on_tokens = subject.layer is not None
    sizes = subject.fit(ODD)
    given = (subject.tokens(2, 6, trial),) if on_tokens else subject.inputs(sizes, trial)
    with torch.no_grad():
        expected = called(subject.reference, *given)
    expected = expected[0] if on_tokens and isinstance(expected, tuple) else expected
    got = subject.run_layer(*given) if on_tokens else subject.run(*given)
    require("B=2", got, expected, tolerance(expected), "the output is not that of its reference")


@law("resource", "cache", quick=False)
def memory_law(subject: Subject, trial: Trial) -> None:
    """The cache grows by one token a step, and no faster."""
    if subject.stepper.style == "internal":
        raise NotApplicable("its cache is in the layer")
    state, held = subject.stepper.new(), []
    for x in subject.tokens(1, 64, trial).split(1, 1):
        _, state = subject.stepper.step(x, state)
        held.append(storage_bytes(state.held))
    if held[-1] > 3.2 * held[15] * (64 / 16) / 2:
        fail("64 steps", "bytes after 64 tokens", f"about {4 * held[15]}", held[-1],
             "the cache grows faster than the tokens")  # fmt: skip


@law("bounded", "module")
def train_eval_agree(subject: Subject, trial: Trial) -> None:
    """Without dropout, train mode and eval mode give the same output."""
    module = subject.module
    if subject.has.dropout:
        raise NotApplicable("it has dropout in train mode")
    call = subject.calls(ODD, trial)[-1]
    with torch.no_grad():
        base = call.target(**call.given)
        module.train()
        try:
            got = call.target(**call.given)
        finally:
            module.eval()
    if worst(got, base)[1] > 0:
        cause = "train and eval mode compute different things"
        require(f"{ODD}, in train mode", got, base, 1e-5, cause)
