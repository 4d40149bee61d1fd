"""What does each conversion cost in quality, at each size of cache, on each kind of text?

    python benchmarks/converting.py --quick              four methods, on Python's own texts
    python benchmarks/corpora.py texts                   more kinds of text
    python benchmarks/converting.py --corpora texts      every method at every size; 1.5 hours
    python benchmarks/converting.py --corpora texts --docs     keeps the table and its picture

SmolLM2-135M-Instruct, run in float32. A row's `ratio` is its perplexity divided by the model's own,
the geometric mean over texts of different kinds that nothing was calibrated on; windows are of
1,024 tokens. No row is trained. `cache` is the size of the cache as a share of the shipped one, in
bytes of the checkpoint's dtype.
Rows named after papers use the paper's rule (`published_rules.py`), not its training.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import finish, machine
from corpora import read
from published_rules import RULES

from regard.cache import KVCache, QuantizedCache
from regard.compare.runner import Runner
from regard.compare.shapes import bytes_of_caches, shape_of, storage_of
from regard.convert import Step, Target, convert, target_of, walk, windows_of
from regard.convert.measuring import ratio
from regard.convert.texts import LENGTH, calibration, python_texts, python_topics
from regard.hf import attention_modules, attention_of, fetch_smollm2, load
from regard.hf.generating.predicting import losses_of
from regard.hf.packages import quiet

STORED = "float16"  # the dtype of SmolLM2's checkpoint, which runs in float32 here
DOCS = Path(__file__).parent.parent / "docs"
ALONE = 4  # windows to calibrate on, if all are of one kind of text
INT8, INT4 = partial(QuantizedCache, bits=8), partial(QuantizedCache, bits=4, group=32)


class Method(NamedTuple):
    """A row: its name, target and cache, whether `--quick` measures it, the kind of text to
    calibrate on if not all, and the published rule if not regard's."""

    name: str
    target: Target | None
    cache: Any = KVCache
    quick: bool = False
    kind: str | None = None
    rule: str | None = None


def methods(shipped: Sequence[Any], kinds: Iterable[str]) -> list[Method]:
    """Every method at every size, and one of them calibrated on each kind of text alone."""
    latent = partial(target_of, "mla", shipped, form="exact-rope")
    deepseek = partial(target_of, "mla", shipped, form="deepseek")
    half = {"latent": latent(budget=0.5), "DeepSeek's form": deepseek(budget=0.5)}
    mqa = target_of("mqa", shipped)
    papers = (
        Method("MQA, mean pooling (GQA paper)", replace(mqa, method="mean", refit=False)),
        Method("MQA, first head (GQA paper)", replace(mqa, method="first", refit=False)),
        *(
            Method(f"{rule} (no training), {share:.0%}", deepseek(budget=share), rule=rule)
            for rule in RULES
            for share in (0.75, 0.5)
        ),
    )
    return [
        Method("as shipped", None, quick=True),
        Method("int8 cache", None, INT8, quick=True),
        Method("int4 cache", None, INT4),
        Method("MHA, spelled out", target_of("mha", shipped)),
        Method("latent, 100 %", latent(budget=1.0)),
        *(Method(f"latent, {s:.0%}", latent(budget=s), quick=s == 0.5) for s in (0.75, 0.5, 0.25)),
        Method("latent of equal ranks, 25%", replace(latent(budget=0.25), by_layer=False)),
        *(Method(f"DeepSeek's form, {s:.0%}", deepseek(budget=s)) for s in (1.0, 0.75, 0.5)),
        *(
            Method(f"DeepSeek's form, portable, {s:.0%}", deepseek(budget=s, portable=True))
            for s in (1.0, 0.75, 0.5)
        ),
        Method("MQA, aligned", mqa, quick=True),
        *(Method(f"{name}, 50 %, int8 cache", each, INT8) for name, each in half.items()),
        Method("MQA, aligned, int8 cache", mqa, INT8),
        *papers,
        *(Method(f"latent, 50 %, from {kind} alone", half["latent"], kind=kind) for kind in kinds),
    ]


def perplexity(model: Any, layers: Any, cache: Any, windows: torch.Tensor) -> tuple[float, float]:
    """The perplexity over windows, and the bytes of cache a token in the checkpoint's dtype."""
    runner = Runner(model, layers, cache=cache)
    losses = []
    for window in windows:
        losses.append(losses_of(model, runner.hidden(window[None])[0], window))
        runner.reset()
    storage = storage_of(runner.caches)
    assert storage is not None
    shapes, length = tuple(map(shape_of, layers)), windows.shape[1]
    nbytes = bytes_of_caches(shapes, storage, context=length, dtype=STORED)
    return math.exp(float(torch.cat(losses).mean())), nbytes / length


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpora", type=Path, help="a folder that corpora.py has written")
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="of the names of methods")
    parser.add_argument("--quick", action="store_true", help="four of them")
    parser.add_argument("--windows", type=int, default=16, help="of calibration")
    parser.add_argument("--docs", action="store_true", help="keep the table and its picture")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    with quiet():
        model, tokenizer = load(fetch_smollm2())
    measured, training = read(options.corpora)
    windows = {
        name: windows_of(tokenizer, [text], length=LENGTH, most=2)
        for name, text in {"manual": python_topics()[1], **measured}.items()
    }
    names = ("manual's other half", "documentation", "source")
    texts = {**dict(zip(names, python_texts(), strict=True)), **training}
    shipped = [attention_of(module) for module in attention_modules(model).values()]
    chosen = [
        each
        for each in methods(shipped, texts)
        if each.name == "as shipped"
        or (options.only in each.name and (each.quick or not options.quick))
    ]
    tokens = {
        kind: calibration(tokenizer, [texts[kind]] if kind else [*texts.values()], windows=count)
        for kind, count in {None: options.windows, **dict.fromkeys(texts, ALONE)}.items()
    }
    rows = list(measure(model, shipped, chosen, tokens, windows))
    if options.docs:
        keep(rows, tokens[None].numel(), [*texts])
    finish("converting", rows)


def keep(rows: list[dict[str, Any]], tokens: int, kinds: list[str]) -> None:
    """The table and its picture, in the documentation."""
    from conversions import draw

    found = {
        "benchmark": "converting",
        "machine": machine(),
        "calibrated_on": kinds,
        "calibration_tokens": tokens,
        "results": rows,
    }
    DOCS.mkdir(exist_ok=True)
    (DOCS / "conversions.json").write_text(json.dumps(found, indent=1) + "\n")
    draw(found, DOCS / "conversions.png")


def measure(
    model: Any,
    shipped: Sequence[Any],
    chosen: Sequence[Method],
    tokens: dict[str | None, torch.Tensor],
    windows: dict[str, torch.Tensor],
) -> Iterator[dict[str, Any]]:
    """Convert to all targets with the same calibration text at once, then measure row by row."""
    own: dict[str, float] = {}
    whole = 0.0
    for kind, group in groupby(chosen, key=lambda each: each.kind):
        rows = list(group)
        made = conversions(model, rows, tokens[kind])
        for each in rows:
            layers = list(shipped) if each.target is None else made[each.target, each.rule]
            found = {name: perplexity(model, layers, each.cache, w) for name, w in windows.items()}
            texts = {name: value for name, (value, _) in found.items()}
            nbytes = next(iter(found.values()))[1]
            own, whole = own or texts, whole or nbytes
            row = {
                "method": each.name,
                "cache": nbytes / whole,
                "ratio": ratio(texts, own),
                "perplexity": texts,
            }
            values = "  ".join(f"{name} {value:8.2f}" for name, value in texts.items())
            print(
                f"{each.name:<40}{row['cache']:>6.0%}{row['ratio']:>10.4f}   {values}", flush=True
            )
            yield row


def conversions(
    model: Any, rows: Sequence[Method], tokens: torch.Tensor
) -> dict[tuple[Target, str | None], Any]:
    """The converted layers, by target and published rule."""
    wanted = list(dict.fromkeys((row.target, row.rule) for row in rows if row.target is not None))
    if not wanted:
        return {}
    started = time.perf_counter()
    own = [target for target, rule in wanted if rule is None]
    published = [(target, rule) for target, rule in wanted if rule is not None]
    layers = {
        (each.target, None): each.layers for each in convert(model, own, tokens, progress=told)
    }
    walked = walk(model, tokens, [partial(by_rule, *each) for each in published])
    seconds = time.perf_counter() - started
    print(f"\n{len(wanted)} conversions in {seconds:.0f} s, {tokens.numel():,} tokens", flush=True)
    return layers | dict(zip(published, walked, strict=True))


def by_rule(target: Target, rule: str, step: Step) -> Any:
    """A layer converted by a published rule; its output projection is not refitted."""
    layer, covariance = attention_of(step.module), step.moments.covariance
    return RULES[rule](layer, covariance, rank=target.rank, rope_dim=target.rope_dim).layer


def told(what: str, done: int, total: int) -> None:
    """Show progress on one line of stderr."""
    print(f"\r{what:<20} {done:>6} / {total}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
