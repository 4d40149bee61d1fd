"""What do conversions cost on kinds of text on which none of their constants was chosen?

    python benchmarks/corpora.py texts
    python benchmarks/elsewhere.py --corpora texts --published --keep docs/elsewhere.json
    python benchmarks/elsewhere.py --corpora texts --only "latent, 50" --keep docs/elsewhere.json
    python benchmarks/elsewhere.py --corpora texts --many-kinds --only "latent, 25"
    python benchmarks/elsewhere.py --corpora texts --many-kinds --passes 4 --only "latent, 25"
    python benchmarks/elsewhere.py --corpora texts --many-kinds --passes 2 --heal 500
    python benchmarks/elsewhere.py --corpora texts --many-kinds --heal 500 --own-text half
    python benchmarks/elsewhere.py --corpora texts --model gemma-3-270m.gguf

Each row is measured on two groups of texts: those of the table of `converting.py`, and the King
James Bible, Perl's manual, JavaScript and German, which took part neither in calibration nor in the
choice of a constant (`cross_validating.py`). A figure is the perplexity divided by the model's own,
with the 95 % interval of a bootstrap that draws the same windows for both. Windows are of 512
tokens; calibration is on equally many tokens of each of eight other texts, and with `--many-kinds`
on regard's passages of many kinds besides. With `--passes` layers are refined, as `regard convert`
does. With `--heal` the converted models are then trained for that many steps; a quarter of the
windows is of the passages, the others are of the texts of the calibration; with `--own-text only`
all are of the passages and of text that the model writes itself, with `--own-text half` half of
them are of that text. `--lr` is the rate of the training.
`--keep` adds the rows to those that a file has already, in place of rows of the same names, with
the mean loss of every window; a row of many kinds, refined or healed is then compared with the row
that is named as it is without that, window by window.
"""

import argparse
import copy
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import finish, machine
from converting import INT8, told
from corpora import ELSEWHERE, MEASURED, read, some
from published_rules import RULES, care, care_ranks, separate

from regard.cache import KVCache, QuantizedCache
from regard.compare.frontiers import bootstrap
from regard.compare.runner import Runner
from regard.compare.shapes import bytes_of_caches, shape_of, storage_of
from regard.convert import (
    Recipe,
    Step,
    Target,
    convert,
    heal,
    own_text,
    target_of,
    walk,
    watch,
    windows_of,
)
from regard.convert.healing.environment import keep_freed_memory
from regard.convert.measuring import dtype_name
from regard.convert.texts import calibration, many_kinds, python_texts, python_topics
from regard.hf import attention_modules, attention_of, fetch_smollm2, load, place
from regard.hf.generating.predicting import losses_of
from regard.hf.loading.checkpoints import stored_dtype
from regard.hf.packages import quiet

LENGTH = 512  # tokens of a window
MANY = ", many kinds"  # the end of names of rows that are calibrated on them, too
# and of rows whose layers are refined, by the passes
PASSES = {2: "", 4: " in four passes", 8: " in eight passes", 16: " in sixteen passes"}
REFINED = {passes: f", refined{name}" for passes, name in PASSES.items()}
HEALED = ", healed"  # and of rows that are trained afterwards
# after that, of rows that were trained on text of the model, without the calibration's or with it
ON = {"none": "", "only": " on its own text", "half": " on both texts"}
AUTOCAST = torch.bfloat16  # as `regard convert` where the processor multiplies it
PASSAGES = 4  # one window in four to heal on is of the passages of many kinds
# windows that the model writes for each window of the training: 240 for 500 steps, as many as
# `regard convert --minutes 30` has
WRITTEN = 0.24
GROUPS = {"own": ("manual", *MEASURED), "elsewhere": ELSEWHERE}
SKIPPED = 0.3  # share of a text before its first window: titles and contents are there
K8V4, K4V4 = (partial(QuantizedCache, format=name) for name in ("K8V4", "K4V4"))


class Row(NamedTuple):
    """A row: its name, target, cache, and the published rule if it is not regard's."""

    name: str
    target: Target | None
    cache: Any = KVCache
    rule: str = ""


def rows_for(shipped: Sequence[Any], stored: torch.dtype, published: bool) -> list[Row]:
    """The rows that the model can have; those of papers if they are asked for."""

    def chosen(to: str, **changes: Any) -> list[Target]:
        try:
            return [replace(target_of(to, shipped, dtype=stored, stored=stored), **changes)]
        except ValueError as error:
            print(f"no {to}: {error}")
            return []

    rows = [Row("as shipped", None), Row("int8 cache", None, INT8)]
    rows += [Row("K8V4 cache", None, K8V4), Row("K4V4 cache", None, K4V4)]
    latents = {share: chosen(f"latent-{share}") for share in (75, 50, 25)}
    rows += [Row(f"latent, {share} %", t) for share, each in latents.items() for t in each]
    for share in (75, 50):
        differing = [replace(target, by_layer=True) for target in latents[share]]
        rows += [Row(f"latent by layer, {share} %", target) for target in differing]
    rows += [Row("latent of equal ranks, 25 %", replace(t, by_layer=False)) for t in latents[25]]
    rows += [Row(f"latent, {s} %, int8 cache", t, INT8) for s in (75, 50) for t in latents[s]]
    rows += [Row(f"DeepSeek's form, {s} %", t) for s in (75, 50) for t in chosen(f"deepseek-{s}")]
    if shipped[0].num_kv_heads > 1:
        rows += [Row("MQA, aligned", t) for t in chosen("mqa")]
    if not published:
        return rows
    for share in (75, 50):
        for target in chosen(f"latent-{share}", refit=False):
            rows.append(Row(f"latent, {share} %, output not refitted", target))
            names = ("Palu, each head", "Palu and ReCalKV, all heads", "CARE")
            rows += [Row(f"{name}, {share} %", target, rule=name) for name in names]
        for target in chosen(f"deepseek-{share}", refit=False):
            rows.append(Row(f"DeepSeek's form, {share} %, output not refitted", target))
            rows += [Row(f"{name}, {share} %", target, rule=name) for name in RULES]
    return rows


def fitted(row: Row, many: bool, passes: int, healed: str) -> Row:
    """The row with the name and target of this calibration; a cache alone has none."""
    if row.target is None:
        return row
    name = row.name + MANY * many + (REFINED[passes] if passes else "") + healed
    return row._replace(name=name, target=replace(row.target, passes=passes))


def by_rule(row: Row, model: Any, shipped: Sequence[Any], tokens: torch.Tensor) -> Any:
    """The function that converts a layer by a published rule, without another fit."""
    target, rule = row.target, row.rule
    assert target is not None
    if rule in RULES:
        sizes = {"rank": target.rank, "rope_dim": target.rope_dim}
        return lambda step: RULES[rule](attention_of(step.module), moments(step), **sizes).layer
    if rule == "CARE":
        with watch(list(attention_modules(model).values())) as found:
            for window in tokens:
                model.base_model(input_ids=window[None], use_cache=False)
        ranks = care_ranks(shipped, [each.covariance for each in found], target.rank)
        return lambda step: care(attention_of(step.module), moments(step), ranks[step.index])
    groups = shipped[0].num_kv_heads if rule == "Palu, each head" else 1
    return lambda step: separate(
        attention_of(step.module), moments(step), rank=target.rank, groups=groups
    )


def moments(step: Step) -> torch.Tensor:
    """The covariance of a layer's inputs."""
    return step.moments.covariance


def losses(model: Any, layers: Any, cache: Any, windows: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """The loss of every token of the windows, `[N, T]`, and the caches that were filled."""
    runner, found = Runner(model, layers, cache=cache), []
    for window in windows:
        runner.reset()
        found.append(losses_of(model, runner.hidden(window[None])[0], window))
    return torch.stack(found), runner.caches


def text_to_heal(
    model: Any, tokenizer: Any, kinds: Sequence[str], windows: int, share: str
) -> torch.Tensor:
    """Windows to heal on: of the passages, of the texts, and of text that the model writes; the
    share of the last is a key of `ON`."""
    passages = windows_of(tokenizer, [many_kinds()], length=LENGTH)
    if share == "only":
        return torch.cat([passages, text_of_its_own(model, tokenizer, windows)])
    own = torch.empty(0, LENGTH, dtype=torch.int64)
    if share == "half":
        own = text_of_its_own(model, tokenizer, windows)
        own = own[torch.arange(windows // 2) % len(own)]
    count = (windows - len(own)) // PASSAGES
    others = windows - len(own) - count
    text = calibration(tokenizer, kinds, windows=others, length=LENGTH)
    return torch.cat([passages[torch.arange(count) % len(passages)], text, own])


def text_of_its_own(model: Any, tokenizer: Any, windows: int) -> torch.Tensor:
    """Windows that the model writes to be trained on this number of windows."""
    writer = copy.deepcopy(model).to(AUTOCAST)
    count = round(WRITTEN * windows)
    return own_text(writer, tokenizer, windows=count, length=LENGTH, progress=told)


def trained(
    model: Any, layers: Sequence[Any], tokens: torch.Tensor, steps: int, recipe: Recipe
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Copies of the layers, healed, and what that took."""
    student = place(copy.deepcopy(model), copied := copy.deepcopy(list(layers)))
    teacher = copy.deepcopy(model).to(AUTOCAST)
    started = time.process_time()
    with torch.enable_grad():
        healed = heal(student, teacher, tokens, steps=steps, recipe=recipe, progress=told)
    spent = {"steps": steps, "tokens": healed.tokens, "lr": recipe.lr}
    return copied, spent | {"processor_minutes": (time.process_time() - started) / 60}


def measure(
    model: Any,
    rows: Sequence[Row],
    tokens: torch.Tensor,
    texts: dict[str, dict[str, torch.Tensor]],
    stored: torch.dtype,
    healing: tuple[torch.Tensor, int, Recipe] | None = None,
) -> Iterator[dict[str, Any]]:
    """Convert to all targets with the same calibration text, then measure row by row; `healing` is
    the text, the steps and the recipe."""
    shipped = [attention_of(module) for module in attention_modules(model).values()]
    own = list(dict.fromkeys(r.target for r in rows if r.target is not None and not r.rule))
    made: dict[Any, Any] = {
        (each.target, ""): each.layers for each in convert(model, own, tokens, progress=told)
    }
    named = [row for row in rows if row.rule]
    makes = [by_rule(row, model, shipped, tokens) for row in named]
    for row, layers in zip(named, walk(model, tokens, makes) if makes else [], strict=True):
        made[row.target, row.rule] = layers
    base: dict[str, torch.Tensor] = {}
    whole = 0.0
    for row in rows:
        layers, spent = made.get((row.target, row.rule), shipped), {}
        if healing is not None and row.target is not None:
            layers, spent = trained(model, layers, *healing)
        found = {
            name: losses(model, layers, row.cache, windows)
            for group in texts.values()
            for name, windows in group.items()
        }
        base = base or {name: each for name, (each, _) in found.items()}
        storage = storage_of(next(iter(found.values()))[1])
        assert storage is not None
        shapes, dtype = tuple(map(shape_of, layers)), dtype_name(stored)
        nbytes = bytes_of_caches(shapes, storage, context=LENGTH, dtype=dtype)
        whole = whole or nbytes
        result: dict[str, Any] = {"method": row.name, "cache": nbytes / whole}
        result |= {"healing": spent} if spent else {}
        for name, group in texts.items():
            mine, others = (
                torch.cat([each[text] for text in group])
                for each in ({text: one for text, (one, _) in found.items()}, base)
            )
            result[name] = asdict(bootstrap(mine, others))
        result["texts"] = {
            text: float((each.mean() - base[text].mean()).exp())
            for text, (each, _) in found.items()
        }
        result["losses"] = {
            text: [round(loss, 6) for loss in each.double().mean(1).tolist()]
            for text, (each, _) in found.items()
        }
        print(line(result), flush=True)
        yield result


def line(result: dict[str, Any]) -> str:
    """A row of the table, as the page has it."""
    groups = [result[name] for name in ("own", "elsewhere")]
    ratios = [f"{r['value']:.3f} ({r['low']:.3f}-{r['high']:.3f})" for r in groups]
    each = [f"{value:.3f}" for name, value in result["texts"].items() if name in ELSEWHERE]
    return f"| {result['method']} | {result['cache']:.0%} | {' | '.join([*ratios, *each])} |"


def windows_for(tokenizer: Any, texts: dict[str, str], most: int) -> dict[str, torch.Tensor]:
    """Windows of each text, from the same share of its length."""
    return {
        name: windows_of(tokenizer, [text[int(SKIPPED * len(text)) :]], length=LENGTH, most=most)
        for name, text in texts.items()
    }


def keep(path: Path, results: list[dict[str, Any]], model: str, tokens: int) -> None:
    """Add the rows to the file, in place of rows of the same names."""
    there = json.loads(path.read_text())["results"] if path.exists() else []
    own = machine()
    beside = {"calibration_tokens": tokens, "machine": f"{own['processor']}, torch {own['torch']}"}
    new = [row | beside for row in results]
    rows = {row["method"]: row for row in (*there, *new)}
    for row in rows.values():
        name: str = row["method"]
        ends = (*(HEALED + each for each in ON.values()), *REFINED.values(), MANY)
        last = next((end for end in ends if name.endswith(end)), "")
        plain = rows.get(name.removesuffix(last), row)
        if plain is not row:
            row["paired"] = {group: paired(row, plain, texts) for group, texts in GROUPS.items()}
    found = {"benchmark": "elsewhere", "model": model, "results": [*rows.values()]}
    path.write_text(json.dumps(found, indent=1) + "\n")


def paired(row: dict[str, Any], plain: dict[str, Any], texts: Sequence[str]) -> dict[str, Any]:
    """The perplexity of a row over another's, from the mean losses of the same windows."""
    mine, others = (
        torch.tensor([loss for text in texts for loss in each["losses"][text]])[:, None]
        for each in (row, plain)
    )
    return asdict(bootstrap(mine, others))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpora", type=Path, required=True, help="that corpora.py has written")
    parser.add_argument("--model", type=Path, help="SmolLM2-135M-Instruct if none is given")
    parser.add_argument("--only", nargs="+", default=[""], metavar="SUBSTRING", help="of names")
    parser.add_argument("--published", action="store_true", help="rules of papers, too")
    parser.add_argument("--windows", type=int, default=4, help="of each text, to measure on")
    parser.add_argument("--calibration", type=int, default=16, help="windows to calibrate on")
    parser.add_argument("--many-kinds", action="store_true", help="calibrate on them, too")
    parser.add_argument(
        "--passes", type=int, choices=(0, *REFINED), default=0, help="of gradient steps over text"
    )
    parser.add_argument("--heal", type=int, default=0, metavar="STEPS", help="of training after it")
    parser.add_argument("--lr", type=float, default=Recipe.lr, help="of the training, at most")
    parser.add_argument("--own-text", choices=ON, default="none", help="to train on, of the model")
    parser.add_argument("--keep", type=Path, help="a JSON file that gets the rows")
    options = parser.parse_args()
    if options.own_text != "none" and not options.heal:
        parser.error("--own-text is text to train on: give --heal STEPS")
    torch.set_grad_enabled(False)
    keep_freed_memory()
    path = options.model or fetch_smollm2()
    with quiet():
        model, tokenizer = load(path)
    measured, training = read(options.corpora)
    groups = {
        "own": {"manual": python_topics()[1], **measured},
        "elsewhere": some(options.corpora, ELSEWHERE),
    }
    texts = {name: windows_for(tokenizer, each, options.windows) for name, each in groups.items()}
    kinds = [*python_texts(), *training.values()]
    tokens = calibration(tokenizer, kinds, windows=options.calibration, length=LENGTH)
    if options.many_kinds:
        tokens = torch.cat([tokens, windows_of(tokenizer, [many_kinds()], length=LENGTH)])
    shipped = [attention_of(module) for module in attention_modules(model).values()]
    stored = stored_dtype(path)
    rows = [
        row
        for row in rows_for(shipped, stored, options.published)
        if row.name == "as shipped" or any(each in row.name for each in options.only)
    ]
    healed = (HEALED + ON[options.own_text]) * bool(options.heal)
    rows = [fitted(row, options.many_kinds, options.passes, healed) for row in rows]
    healing, recipe = None, Recipe(autocast=AUTOCAST, lr=options.lr)
    if options.heal:
        text = text_to_heal(model, tokenizer, kinds, recipe.batch * options.heal, options.own_text)
        healing = text, options.heal, recipe
    results = list(measure(model, rows, tokens, texts, stored, healing))
    if options.keep is not None:
        keep(options.keep, results, path.name, tokens.numel())
    finish("elsewhere", results)


if __name__ == "__main__":
    main()
