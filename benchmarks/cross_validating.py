"""Which constants of the fits lose least on a kind of text that was not calibrated on?

    python benchmarks/corpora.py texts
    python benchmarks/cross_validating.py --corpora texts
    python benchmarks/cross_validating.py --corpora texts --model gemma-3-270m.gguf

Five kinds of text: code, documentation, prose, licences, and French. Each is left out once: layers
are calibrated on the other four, their output projections refitted there, and the error of their
outputs on the kind that was left out is measured, as a share of the outputs' energy. That is done
for some layers of the model, on inputs of the model itself, once for each form and value of a
constant, the other constants staying at their present values. A figure is the geometric mean over
kinds and layers, divided by that of the present value. The texts of `elsewhere.py` take no part.
"""

import argparse
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from common import finish
from corpora import read, some

from regard.convert import decouple, latentize, refit_output, regroup, target_of, windows_of
from regard.convert.lossy import calibrate, sensitivity
from regard.convert.lossy.calibrate import moments_of
from regard.convert.texts import python_texts
from regard.hf import attention_modules, attention_of, fetch_smollm2, load
from regard.hf.loading.checkpoints import stored_dtype
from regard.hf.packages import quiet

LENGTH = 512  # tokens of a window
FORMS = ("latent-50", "latent-25", "deepseek-50", "mqa")
CONSTANTS: dict[str, tuple[Any, str, tuple[float, ...]]] = {  # module, name, values tried
    "shrinkage": (sensitivity, "SHRINKAGE", (0.01, 0.1, 0.3, 1.0)),
    "ridge": (calibrate, "RIDGE", (0.03, 0.1, 0.3, 1.0)),
}
Inputs = dict[str, dict[int, torch.Tensor]]  # of each kind, of each layer


def kinds_of(folder: Path) -> dict[str, list[str]]:
    """The texts of each kind."""
    reference, docstrings, source = python_texts()
    _, training = read(folder)
    prose = [training[name] for name in ("austen", "essays", "speeches")]
    documentation = [reference, docstrings, training["handbook"]]
    french = [*some(folder, ["french"]).values()]
    return {
        "code": [source],
        "documentation": documentation,
        "prose": prose,
        "licences": [training["licences"]],
        "french": french,
    }


@torch.no_grad()
def inputs_of(
    model: Any, tokenizer: Any, texts: list[str], count: int, which: list[int]
) -> dict[int, torch.Tensor]:
    """The inputs of some attention layers over windows from the middles of these texts."""
    modules = list(attention_modules(model).values())
    found: dict[int, list[torch.Tensor]] = defaultdict(list)

    def keeping(index: int) -> Callable[..., None]:
        def hook(module: Any, args: tuple[Any, ...], given: dict[str, Any]) -> None:
            found[index].append((args[0] if args else given["hidden_states"]).detach())

        return hook

    hooks = [
        modules[index].register_forward_pre_hook(keeping(index), with_kwargs=True)
        for index in which
    ]
    for i in range(count):
        text = texts[i % len(texts)]
        middle = text[len(text) * (1 + i) // (count + 2) :]
        window = windows_of(tokenizer, [middle[: 12 * LENGTH]], length=LENGTH, most=1)
        model.base_model(input_ids=window, use_cache=False)
    for hook in hooks:
        hook.remove()
    return {index: torch.cat(each) for index, each in found.items()}


def converted(layer: Any, form: str, x: torch.Tensor, stored: torch.dtype) -> Any:
    """The layer in this form, calibrated on its inputs, its output not refitted."""
    target = target_of(form, [layer], dtype=stored, stored=stored)
    moments = moments_of(x)
    if target.kind == "heads":
        return regroup(layer, 1, covariance=moments.augmented).layer
    if target.kind == "exact-rope":
        return latentize(layer, rank=target.rank, covariance=moments.covariance, inputs=x).layer
    sizes = {"rank": target.rank, "rope_dim": target.rope_dim}
    return decouple(layer, **sizes, covariance=moments.covariance, inputs=x).layer


@contextmanager
def constant(name: str, value: float) -> Iterator[None]:
    """A constant of the fits with another value."""
    module, attribute, _ = CONSTANTS[name]
    before = getattr(module, attribute)
    setattr(module, attribute, value)
    try:
        yield
    finally:
        setattr(module, attribute, before)


@torch.no_grad()
def held_out(layer: Any, form: str, inputs: Inputs, index: int, stored: torch.dtype) -> list[float]:
    """The logarithm of the error on each kind, where the layer is calibrated on the others."""
    logs = []
    for kind, own in inputs.items():
        x = torch.cat([each[index] for name, each in inputs.items() if name != kind])
        made = converted(layer, form, x, stored)
        target = torch.cat([layer(window[None]) for window in x])
        refit_output(made, x, target, ridge=calibrate.RIDGE)
        missed = whole = 0.0
        for window in own[index]:
            wanted = layer(window[None])
            missed += float((made(window[None]) - wanted).double().square().sum())
            whole += float(wanted.double().square().sum())
        logs.append(math.log(missed / whole))
    return logs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpora", type=Path, required=True, help="that corpora.py has written")
    parser.add_argument("--model", type=Path, help="SmolLM2-135M-Instruct if none is given")
    parser.add_argument("--windows", type=int, default=3, help="of each kind")
    parser.add_argument("--layers", type=int, default=3, help="of the model, evenly spread")
    parser.add_argument("--forms", nargs="+", default=FORMS)
    options = parser.parse_args()
    path = options.model or fetch_smollm2()
    with quiet():
        model, tokenizer = load(path)
    stored = stored_dtype(path)
    layers = [attention_of(module) for module in attention_modules(model).values()]
    which = [len(layers) * (2 * i + 1) // (2 * options.layers) for i in range(options.layers)]
    inputs = {
        kind: inputs_of(model, tokenizer, texts, options.windows, which)
        for kind, texts in kinds_of(options.corpora).items()
    }
    rows = []
    for form in options.forms:
        for name, (module, attribute, values) in CONSTANTS.items():
            present, errors = getattr(module, attribute), {}
            for value in values:
                with constant(name, value):
                    logs = [held_out(layers[i], form, inputs, i, stored) for i in which]
                errors[value] = torch.tensor(logs).mean(0)
            for value, each in errors.items():
                ratio = float((each - errors[present]).mean().exp())
                kinds = dict(zip(inputs, (each - errors[present]).exp().tolist(), strict=True))
                row = {"form": form, "constant": name, "value": value, "ratio": ratio}
                row |= {"error": float(each.mean().exp()), "kinds": kinds}
                shown = "  ".join(f"{kind} {value:.3f}" for kind, value in kinds.items())
                here = "present" if value == present else ""
                print(
                    f"{form:<12}{name:<10}{value:<8}{row['error']:.4f} {ratio:.3f}  {shown} {here}",
                    flush=True,
                )
                rows.append(row)
    finish("cross_validating", rows)


if __name__ == "__main__":
    main()
