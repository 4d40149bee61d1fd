"""Compile whole models with regard installed, and count graphs. Run by test_installing in its own
process, because checked annotations cannot be traced. Prints one line of JSON."""

import json
import logging
import warnings
from dataclasses import replace

import torch
import transformers
from torch._dynamo.testing import CompileCounter

import regard.hf
from regard.hf.generating.watching import argument_of
from session import LONG
from zoo import ZOO, inputs, result, tokens

warnings.simplefilter("ignore")
transformers.logging.set_verbosity_error()
logging.disable(logging.WARNING)
DECODED = {  # each takes seconds to trace
    "llama": ("ours", "transformers'"),
    "gemma3": ("ours", "transformers'"),
    "gpt-oss": ("ours",),
    "deepseek-v3": ("ours", "transformers'"),
}
if not LONG:
    DECODED = {"gemma3": ("ours",)}
TRAINED = ("llama", "bert", "deepseek-v3") if LONG else ("deepseek-v3",)
STEPS = 24


def build(name):
    """A model of the zoo; in a normal run its first two layers, one with a window if any has."""
    kind, options = ZOO[name], {}
    if not LONG:
        options["num_hidden_layers"] = 2
        if "layer_types" in kind.options:
            options["layer_types"] = kind.options["layer_types"][:2]
    return replace(kind, options={**kind.options, **options}).build()


def decode(name, whose):
    """Greedy text from an eager prefill and compiled steps, against text without compiling."""
    torch._dynamo.reset()
    model = build(name)
    regard.hf.install(model)
    ids = tokens(2, 9)
    wanted = continued(model, model, ids, cache_of(model, whose))
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter)
    found = continued(model, compiled, ids, cache_of(model, whose))
    return {"same": bool(found.equal(wanted)), "graphs": counter.frame_count}


def cache_of(model, whose):
    if whose == "ours":
        return regard.hf.cache(model, "static", max_length=48)
    return transformers.StaticCache(config=model.config, max_cache_len=48)


@torch.no_grad()
def continued(model, step, ids, cache):
    given = argument_of(model, cache)
    token = model(ids, **given).logits[:, -1:].argmax(-1)
    written = [token]
    for _ in range(STEPS):
        token = step(token, **given).logits[:, -1:].argmax(-1)
        written.append(token)
    return torch.cat(written, 1)


def forward(name):
    """Prefill of a padded batch, and its gradients, compiled against eager."""
    torch._dynamo.reset()
    model, given = build(name), inputs(name, padding="left")
    if "input_ids" in given and ZOO[name].fed == "decoder":
        given["use_cache"] = False
    wanted = gradients(model, model, given)
    regard.hf.install(model)
    found = gradients(model, torch.compile(model, backend="aot_eager"), given)
    return max((a - b).abs().max().item() for a, b in zip(found, wanted, strict=True))


def gradients(model, run, given):
    model.zero_grad()
    output = result(run(**given))
    (output * given["attention_mask"][..., None]).square().mean().backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


def main():
    decoded = {
        f"{name} with {whose} cache": decode(name, whose)
        for name, caches in DECODED.items()
        for whose in caches
    }
    trained = {name: forward(name) for name in TRAINED}
    print(json.dumps({"decoded": decoded, "trained": trained}))


if __name__ == "__main__":
    main()
