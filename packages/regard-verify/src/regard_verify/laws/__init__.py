"""The laws, and the table of them in the order of the report."""

from regard_verify.law import Law
from regard_verify.laws import (
    built,
    caches,
    callers,
    compiler,
    execution,
    gradients,
    heads,
    inplace,
    layers,
    masks,
    names,
    numbers,
    padding,
    pages,
    permutations,
    refused_steps,
    rotation,
    visibility,
)

LAWS: dict[str, Law] = {
    law.name: law
    for law in (
        *built.LAWS,  # that it is a module which runs
        *numbers.LAWS,  # what is computed
        *names.LAWS,
        *permutations.LAWS,
        *heads.LAWS,
        *visibility.LAWS,  # which keys a query may attend to
        *masks.LAWS,
        *padding.LAWS,
        *gradients.LAWS,
        *rotation.LAWS,
        *execution.LAWS,  # how a call runs
        *callers.LAWS,
        *inplace.LAWS,
        *compiler.LAWS,
        *caches.LAWS,  # what is stored between calls
        *refused_steps.LAWS,
        *pages.LAWS,
        *layers.LAWS,
    )
}

__all__ = ["LAWS"]
