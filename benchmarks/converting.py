"""What does each conversion cost in quality, at each size of cache, on each kind of text?

    python benchmarks/converting.py                 every method at every size; about ten minutes
    python benchmarks/converting.py --quick         four of them
    python benchmarks/converting.py --docs          writes docs/conversions.json and its picture
    python benchmarks/converting.py --text novel=moby.txt --calibrate speeches.txt ...

SmolLM2-135M-Instruct, float32. A row's `ratio` is its perplexity over the model's own, a geometric
mean over texts of different kinds that nothing was calibrated on; windows are of 1,024 tokens. No
row is trained. `cache` is the share of the shipped cache's numbers a token, in bytes where it is
quantised. Rows named after papers use the paper's rule of selection, and not its training.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import finish, machine

from regard.cache import KVCache, QuantizedCache
from regard.compare.runner import Runner, hidden_states, logits_of
from regard.convert import Target, convert, target_of
from regard.convert.texts import LENGTH, calibration, python_topics, unwrapped
from regard.convert.windows import windows_of
from regard.hf import attention_modules, attention_of, fetch_smollm2, load
from regard.hf.loading import quiet

DOCS = Path(__file__).parent.parent / "docs"
LICENCE = Path("/usr/share/common-licenses/GPL-3")
INT8, INT4 = partial(QuantizedCache, bits=8), partial(QuantizedCache, bits=4, group=32)


class Method(NamedTuple):
    """A row: its name, what the layers become, and the cache they are read from."""

    name: str
    target: Target | None
    cache: Any = KVCache
    quick: bool = False


def methods(shipped: Sequence[Any]) -> list[Method]:
    """Every method at every size."""
    latent = partial(target_of, "mla", shipped, form="exact-rope")
    deepseek = partial(target_of, "mla", shipped, form="deepseek")
    half = {"latent": latent(budget=0.5), "DeepSeek's form": deepseek(budget=0.5)}
    mqa = target_of("mqa", shipped)
    papers = (
        Method("MQA, mean pooling (GQA paper)", replace(mqa, method="mean", refit=False)),
        Method("MQA, first head (GQA paper)", replace(mqa, method="first", refit=False)),
        *(
            Method(f"{rule} (no training), {share:.0%}", plain(deepseek(budget=share), rule))
            for rule in ("TransMLA", "MHA2MLA")
            for share in (0.75, 0.5)
        ),
    )
    return [
        Method("as shipped", None, quick=True),
        Method("int8 cache", None, INT8, quick=True),
        Method("int4 cache", None, INT4),
        Method("MHA, spelled out", target_of("mha", shipped)),
        Method("latent, 100 %", Target("exact-rope", rank=full(shipped[0]))),
        *(Method(f"latent, {s:.0%}", latent(budget=s), quick=s == 0.5) for s in (0.75, 0.5, 0.25)),
        *(
            Method(f"latent by layer, {s:.0%}", replace(latent(budget=s), by_layer=True))
            for s in (0.5, 0.25)
        ),
        *(Method(f"DeepSeek's form, {s:.0%}", deepseek(budget=s)) for s in (1.0, 0.75, 0.5)),
        *(
            Method(f"DeepSeek's form, portable, {s:.0%}", deepseek(budget=s, portable=True))
            for s in (1.0, 0.75, 0.5)
        ),
        Method("MQA, aligned", mqa, quick=True),
        *(Method(f"{name}, 50 %, int8 cache", each, INT8) for name, each in half.items()),
        Method("MQA, aligned, int8 cache", mqa, INT8),
        *papers,
    ]


def full(layer: Any) -> int:
    """The rank at which a joint latent loses nothing."""
    return min(layer.hidden_size, 2 * layer.num_kv_heads * layer.head_dim)


def plain(target: Target, rule: str) -> Target:
    """A paper's rule, and its output projection left alone."""
    return replace(target, rule=rule, refit=False)


def perplexity(model: Any, layers: Any, cache: Any, windows: torch.Tensor) -> tuple[float, float]:
    """Over windows, and the bytes of cache a token."""
    runner = None if layers is None else Runner(model, layers, cache=cache)
    losses = []
    for window in windows:
        hidden = (
            hidden_states(model, window[None]) if runner is None else runner.hidden(window[None])
        )
        for start in range(0, len(window) - 1, 256):
            stop = min(start + 256, len(window) - 1)
            logits = logits_of(model, hidden[:, start:stop])[0].float()
            losses += (
                -logits.log_softmax(-1).gather(1, window[start + 1 : stop + 1, None])
            ).tolist()
        nbytes = 0.0 if runner is None else runner.cache_bytes / len(window)
        if runner is not None:
            runner.reset()
    return math.exp(statistics.fmean(loss for (loss,) in losses)), nbytes


def named(given: list[str]) -> dict[str, str]:
    """`NAME=FILE` as names and texts."""
    pairs = [each.partition("=")[::2] for each in given]
    return {name: unwrapped(Path(file).read_text(encoding="utf-8")) for name, file in pairs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", action="append", default=[], metavar="NAME=FILE")
    parser.add_argument("--calibrate", action="append", default=[], metavar="NAME=FILE")
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="of the names of methods")
    parser.add_argument("--quick", action="store_true", help="four of them")
    parser.add_argument("--windows", type=int, default=12, help="of calibration")
    parser.add_argument("--docs", action="store_true", help="keep the table and its picture")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    with quiet():
        model, tokenizer = load(fetch_smollm2())
    texts = {"manual": python_topics()[1], **named(options.text)}
    if LICENCE.exists():
        texts["licence"] = unwrapped(LICENCE.read_text(encoding="utf-8"))
    windows = {
        name: windows_of(tokenizer, [text], length=LENGTH, most=2) for name, text in texts.items()
    }
    calibrate = named(options.calibrate)
    tokens = calibration(tokenizer, list(calibrate.values()), windows=options.windows)
    shipped = [attention_of(module) for module in attention_modules(model).values()]
    chosen = [
        each
        for each in methods(shipped)
        if each.name == "as shipped"
        or (options.only in each.name and (each.quick or not options.quick))
    ]
    rows = list(measure(model, shipped, chosen, tokens, windows))
    found = {
        "benchmark": "converting",
        "machine": machine(),
        "calibrated_on": [*calibrate] or ["Python's own texts"],
        "calibration_tokens": tokens.numel(),
        "results": rows,
    }
    if options.docs:
        from conversions import draw

        DOCS.mkdir(exist_ok=True)
        (DOCS / "conversions.json").write_text(json.dumps(found, indent=1) + "\n")
        draw(found, DOCS / "conversions.png")
    finish("converting", rows)


def measure(
    model: Any,
    shipped: Sequence[Any],
    chosen: Sequence[Method],
    tokens: torch.Tensor,
    windows: dict[str, torch.Tensor],
) -> Any:
    """Convert to everything at once, then measure row by row."""
    targets = list(dict.fromkeys(each.target for each in chosen if each.target is not None))
    started = time.perf_counter()
    made = {each.target: each for each in convert(model, targets, tokens)} if targets else {}
    if targets:
        seconds = time.perf_counter() - started
        print(f"{len(targets)} conversions in {seconds:.0f} s, {tokens.numel():,} tokens\n")
    own: dict[str, float] = {}
    whole = 0.0
    for each in chosen:
        layers = list(shipped) if each.target is None else made[each.target].layers
        found = {name: perplexity(model, layers, each.cache, w) for name, w in windows.items()}
        texts = {name: value for name, (value, _) in found.items()}
        nbytes = next(iter(found.values()))[1]
        own, whole = own or texts, whole or nbytes
        logs = [math.log(texts[name] / own[name]) for name in texts]
        row = {
            "method": each.name,
            "cache": nbytes / whole,
            "ratio": math.exp(statistics.fmean(logs)),
            "perplexity": texts,
        }
        said = "  ".join(f"{name} {value:8.2f}" for name, value in texts.items())
        print(f"{each.name:<36}{row['cache']:>6.0%}{row['ratio']:>10.4f}   {said}", flush=True)
        yield row


if __name__ == "__main__":
    main()
