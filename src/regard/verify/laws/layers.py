"""Laws of layers: two forms of one attention, another sequence to read, weights that travel."""

import copy
from typing import Any

import torch
from torch import nn

from regard.verify.law import NotApplicable, Trial, compare, fail, insist, law, worst
from regard.verify.laws.execution import ODD
from regard.verify.subject.caches import _storages
from regard.verify.subject.mask_forms import parameters_of
from regard.verify.subject.subject import Subject, SubjectError, called

SWITCHES: dict[str, tuple[Any, Any]] = {
    "form": ("expanded", "absorbed"),
    "absorb": (False, True),
    "absorbed": (False, True),
    "use_absorb": (False, True),
    "attn_impl": ("naive", "absorb"),
}


@law(
    "Absorbed and expanded MLA give the same, beyond position 0 and with a past.",
    "bounded",
    "the scale of the wrong width, a norm that is missed, a wrong split or transposition",
    "layer",
)
def mla_absorbed(subject: Subject, trial: Trial) -> None:
    module = subject.module
    inner = getattr(module, "inner", module)
    names = parameters_of(module.forward) if module is not None else {}
    found = [n for n in SWITCHES if n in names or _has_switch(inner, n)]
    if not found:
        raise NotApplicable("it has no absorbed form")
    name = found[0]
    x = subject.tokens(2, 7, trial)
    outs = []
    for value in SWITCHES[name]:
        if name in names:
            outs.append(subject.through(x, **{name: value}))
            continue
        before = getattr(inner, name)
        setattr(inner, name, value)
        try:
            outs.append(subject.through(x))
        finally:
            setattr(inner, name, before)
    allowed = 1e-4 * float(1 + outs[0].abs().max())
    cell_zero = float((outs[1] - outs[0]).abs()[:, 0].max()) <= allowed
    cause = "the absorbed form computes something else"
    if cell_zero:
        cause += "; position 0 agrees, so the scale, the rotation or the mask is wrong"
    insist(compare(f"B=2 L=7, {name}={SWITCHES[name][1]!r}", outs[1], outs[0], allowed, cause))


def _has_switch(inner: Any, name: str) -> bool:
    return getattr(inner, name, None) in (*SWITCHES[name], "auto") and hasattr(inner, name)


@law(
    "Cross-attention reads the other sequence: changing it changes the output, hiding it does not.",
    "exact",
    "a stale memory, keys made of the wrong sequence",
    "context",
)
def cross_attention(subject: Subject, trial: Trial) -> None:
    x, context = subject.tokens(2, 3, trial), subject.tokens(2, 5, trial)
    try:
        base = subject.through(x, context=context)
        again = subject.through(x, context=context.flip(0) + 1)
        fresh = subject.through(x, context=context)
    except SubjectError as error:
        raise NotApplicable(f"it could not be given another sequence: {error}") from error
    if torch.equal(base, again):
        fail("L=3 S=5", "", "another output", "the same", "the other sequence is not read, or "
             "an older one is kept")  # fmt: skip
    insist(compare("L=3 S=5, the first context again", fresh, base, 0.0,
                   "what was read before changes what is read now"))  # fmt: skip
    if subject.conventions.causal or subject.conventions.window:
        return  # its own pattern counts the other sequence's keys
    turned = context[:, torch.tensor([4, 2, 0, 1, 3])]
    got = subject.through(x, context=turned)
    insist(
        compare(
            "L=3 S=5, context in another order",
            got,
            base,
            1e-4 * float(1 + base.abs().max()),
            "the order of the context matters",
        )
    )


@law(
    "Its weights, saved and loaded, make the same layer; and all of them matter.",
    "exact",
    "parameters outside the state dict, names that collide, a layer that depends on more",
    "module",
)
def state_dict(subject: Subject, trial: Trial) -> None:
    module = subject.module
    assert module is not None
    try:
        twin = copy.deepcopy(module)
    except Exception as error:
        raise NotApplicable(f"it cannot be copied: {type(error).__name__}") from error
    if not list(twin.parameters()):
        if any(isinstance(x, nn.Module) for x in vars(module).values()):
            fail("state_dict()", "", "its weights", "none", "modules are kept outside nn.Module")
        raise NotApplicable("it has no parameters")
    state = {name: value.clone() for name, value in module.state_dict().items()}
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.normal_()
    missing = twin.load_state_dict(state, strict=False)
    if missing.missing_keys or missing.unexpected_keys:
        fail("load_state_dict", "", "no names left over", missing, "names do not fit themselves")
    assert subject.layer is not None
    x = subject.tokens(2, 4, trial)
    call: Any = copy.copy(subject.layer)
    call.module = twin
    with torch.no_grad():
        got = call(x)
    insist(compare("B=2 L=4, after loading", got, subject.through(x), 0.0,
                   "it depends on weights that its state dict does not hold"))  # fmt: skip


@law(
    "It gives what the declared reference gives.",
    "bounded",
    "a conversion that is wrong but consistent: layout, bias, norms",
    "reference",
)
def reference_parity(subject: Subject, trial: Trial) -> None:
    reference = subject.other["reference"]
    if subject.layer is not None:
        x = subject.tokens(2, 6, trial)
        with torch.no_grad():
            expected = called(reference, x)
        expected = expected[0] if isinstance(expected, tuple) else expected
        got = subject.through(x)
    else:
        given = subject.inputs(subject.fit(ODD), trial)
        with torch.no_grad():
            expected = called(reference, *given)
        got = subject.run(*given)
    insist(compare("B=2", got, expected, 1e-4 * float(1 + expected.abs().max()),
                   "it is not its reference"))  # fmt: skip


@law(
    "The past grows by one token a step, and no faster.",
    "resource",
    "a past that is concatenated twice, or keeps every intermediate",
    "cache",
    quick=False,
)
def memory_law(subject: Subject, trial: Trial) -> None:
    assert subject.stepper is not None
    if subject.stepper.style == "internal":
        raise NotApplicable("its past is inside")
    past, held = subject.stepper.new(), []
    for x in subject.tokens(1, 64, trial).split(1, 1):
        _, past = subject.stepper.step(x, past)
        held.append(sum(_storages(past.held, set()).values()))
    if held[-1] > 3.2 * held[15] * (64 / 16) / 2:
        fail("64 steps", "bytes after 64 tokens", f"about {4 * held[15]}", held[-1],
             "the past grows faster than the tokens")  # fmt: skip


@law(
    "Without dropout, training gives what eval gives.",
    "bounded",
    "a fast path in eval mode that computes something else",
    "module",
)
def train_eval_agree(subject: Subject, trial: Trial) -> None:
    module = subject.module
    assert module is not None
    if "dropout" in subject.has:
        raise NotApplicable("it drops in training")
    for call, given in subject.calls(ODD, trial)[-1:]:
        with torch.no_grad():
            base = call(**given)
            module.train()
            try:
                got = call(**given)
            finally:
                module.eval()
        if worst(got, base)[1] > 0:
            insist(compare(f"{ODD}, in train mode", got, base, 1e-5,
                           "train and eval compute different things"))  # fmt: skip


LAWS = (
    mla_absorbed,
    cross_attention,
    state_dict,
    reference_parity,
    memory_law,
    train_eval_agree,
)
