"""Every decoder of the installed transformers, tiny and random: is it itself under regard?

Question: of all models that generate, language models and those that read images, sound or another
sequence besides, which compute the same under `install` and under `attn_implementation="regard"`,
which are refused and why, and is any of them different?

Each model is built tiny by `tiny.py`. Its own eager forward is the reference: logits with padding
left and right, greedy generation with its cache, beams, a static cache, gradients, the outputs of
encoders of images and sound, bfloat16. Where its own forward under `sdpa` is another, it may be
that one. Prompts hold tokens, without images among them.

    python benchmarks/models.py
    python benchmarks/models.py --only llama mistral
    python benchmarks/models.py --only llama --write    # and its place in the guide's tables
    python benchmarks/models.py --json rows.json        # the rows, with reasons
    python benchmarks/models.py --read rows.json --write  # the tables from rows of before
    PYTHONPATH=FOLDER python benchmarks/models.py       # another release, of pip install --target

The last line counts models, and under "folders" the folders of transformers with an equal model.
"""

import argparse
import json
import logging
import multiprocessing
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import regard.hf
from regard.hf.running import registering
from tiny import built, configured, folder, models, prompt, read, tokens, towers

ROOT = Path(__file__).parents[1]
GUIDES = (ROOT / "docs/guides/transformers.md", ROOT / "docs/zh/guides/transformers.md")
MARKS = ("<!-- models -->", "<!-- /models -->")
SECONDS = 90  # for one model
NEW = 20  # tokens that are generated


def logits(model: nn.Module, mask: Tensor | None) -> Tensor:
    """The logits of the tokens that are no padding."""
    out = model(**read(model, mask)).logits.float()
    return out if mask is None else out[mask.bool()]


def generated(model: Any, mask: Tensor, **options: Any) -> Any:
    """What is generated after tokens that are padded at the left."""
    options = {"max_new_tokens": NEW, "do_sample": False, "num_beams": 1} | options
    made = model.generate(
        **prompt(model, mask),
        **options,
        return_dict_in_generate=True,
        output_logits=True,
        output_scores=options["num_beams"] > 1,
    )
    return made.sequences, torch.stack(made.logits), getattr(made, "sequences_scores", None)


def gradients(model: nn.Module) -> Tensor:
    """All gradients of a loss."""
    ids, left, _ = tokens()
    model.zero_grad()
    out = logits(model, left)
    torch.nn.functional.cross_entropy(out, ids[left.bool()]).backward()
    grads = [each.grad for each in model.parameters() if each.grad is not None]
    return torch.cat([each.flatten() for each in grads])


@torch.no_grad()
def seen_and_heard(model: nn.Module) -> Tensor:
    """The outputs of what reads images or sound before the decoder."""
    return torch.cat([each.flatten().float() for each in towers(model)])


@torch.no_grad()
def in_bfloat16(model: nn.Module) -> Tensor:
    """Logits in bfloat16."""
    narrow = model.to(torch.bfloat16)
    return logits(narrow, tokens()[1])


def checks() -> dict[str, Callable[[nn.Module], Any]]:
    """What is compared, the last first changing the model."""
    _, left, right = tokens()
    without = torch.no_grad()
    return {
        "logits": without(lambda model: logits(model, None)),
        "left padding": without(lambda model: logits(model, left)),
        "right padding": without(lambda model: logits(model, right)),
        "greedy": lambda model: generated(model, left),
        "beams": lambda model: generated(model, left, num_beams=3),
        "static cache": lambda model: generated(model, left, cache_implementation="static"),
        "gradients": gradients,
        "images and sound": seen_and_heard,
        "bfloat16": in_bfloat16,
    }


def results(model: nn.Module) -> dict[str, Any]:
    """Each check's outcome: a value, or the error in words."""
    made: dict[str, Any] = {}
    for name, check in checks().items():
        try:
            made[name] = check(model)
        except Exception as error:
            made[name] = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return made


def difference(own: Any, ours: Any, near: float) -> str | None:
    """How two outcomes differ, in words; None if they do not, or there is nothing to compare."""
    if isinstance(own, str):
        return None
    if isinstance(ours, str):
        return ours
    if isinstance(own, Tensor):
        if own.shape != ours.shape:
            return f"shapes {tuple(own.shape)}, {tuple(ours.shape)}"
        far = (own - ours).abs().max() / own.abs().max()
        return None if own.isnan().any() or far <= near else f"{far:.1e} of the largest"
    (text, steps, score), (other_text, other_steps, other_score) = own, ours
    if score is not None:
        same = torch.equal(text, other_text) or bool(
            ((score - other_score).abs() <= near * 9).all()
        )
        return None if same else "other texts"
    prompt = text.shape[1] - len(steps)
    for step in range(len(steps)):
        same = text[:, : prompt + step] == other_text[:, : prompt + step]
        begun = same.flatten(1).all(dim=1)
        if begun.any():
            worse = difference(steps[step][begun], other_steps[step][begun], near)
            if worse:
                return f"{worse} at token {step + 1}"
    return None


def judged(own: dict[str, Any], ours: dict[str, Any]) -> tuple[str, str]:
    """`equal`, `refused` or `different`, and why."""
    for name, expected in own.items():
        near = 1e-3
        if name == "bfloat16":
            if isinstance(expected, str) or isinstance(own["left padding"], str):
                continue
            exact = own["left padding"]
            near = 0.03 + 2.0 * float((expected - exact).abs().max() / exact.abs().max())
            expected = exact
        why = difference(expected, ours[name], near)
        if why is not None:
            kind = (
                "refused"
                if "regard" in why and why.startswith(("ValueError", "TypeError"))
                else "different"
            )
            return kind, f"{name}: {why}"
    return "equal", ""


def usual(name: str) -> str:
    """The implementation of attention that transformers itself gives to this model."""
    return "sdpa" if getattr(transformers, models()[name])._supports_sdpa else "eager"


def registered(name: str, config: Any, row: dict[str, str]) -> tuple[str, dict[str, Any]]:
    """Results with regard as one of transformers' attention functions."""
    calls = Counter[str]()
    own = registering.attention

    def counted(*args: Any, **given: Any) -> Any:
        calls["regard"] += 1
        return own(*args, **given)

    regard.hf.register()
    transformers.AttentionInterface.register("regard", counted)
    try:
        model = built(name, config, usual(name))
        model.set_attn_implementation("regard")
    except (ValueError, NotImplementedError, ImportError) as error:
        return " ".join(str(error).split()), {}
    made = results(model)
    if not calls["regard"]:
        return "its attention does not call transformers' AttentionInterface", made
    return "", made


def installed(name: str, config: Any, row: dict[str, str]) -> tuple[str, dict[str, Any]]:
    """Results with `install`."""
    model = built(name, config, usual(name))
    try:
        done = regard.hf.install(model)
    except ValueError as error:
        return " ".join(str(error).split()), {}
    left = set(done.left_alone.values())
    row["install_how"] = "calls" if done.called else "knows"
    row["install_said"] = "; ".join(sorted(set(done.called.values())))
    return "left alone: " + "; ".join(sorted(left)) if left else "", results(model)


def surveyed(name: str) -> dict[str, str]:
    """One model's row."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    row = {"folder": folder(name), "model": name}
    try:
        config = configured(name)
        model = built(name, config, "eager")
        own = results(model)
        if isinstance(own["logits"], str):
            raise ValueError(own["logits"])
    except Exception as error:
        return row | {"unbuilt": f"{type(error).__name__}: {' '.join(str(error).split())}"}
    row["own"] = "; ".join(f"{each}: {made}" for each, made in own.items() if isinstance(made, str))
    for way, run in (("register", registered), ("install", installed)):
        try:
            why, ours = run(name, config, row)
        except Exception as error:
            row |= {way: "different", f"{way}_why": f"{type(error).__name__}: {error}"}
            continue
        kind, what = judged(own, ours) if ours else ("refused", why)
        if kind == "different" and usual(name) != "eager":
            other = judged(results(built(name, config, usual(name))), ours)
            kind, what = other if other[0] == "equal" else (kind, what)
        if kind == "equal" and why:
            kind, what = ("in part" if why.startswith("left alone") else "refused"), why
        row |= {way: kind, f"{way}_why": what}
    return row


def _send(name: str, pipe: Any) -> None:
    pipe.send(surveyed(name))


def bounded(name: str) -> dict[str, str]:
    """`surveyed` in a process of its own, which is ended when its time is over."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)
    process = fork.Process(target=_send, args=(name, theirs))
    process.start()
    theirs.close()
    row = {"folder": folder(name), "model": name}
    try:
        row = ours.recv() if ours.poll(SECONDS) else row | {"unbuilt": f"not done in {SECONDS} s"}
    except EOFError:
        row |= {"unbuilt": "its process ended"}
    process.kill()
    process.join()
    return row


def outcomes(row: dict[str, str]) -> set[int]:
    """Which rows of the table, counted from 0, name a model."""
    if "unbuilt" in row:
        return {7}
    install = {"equal": 0 if row.get("install_how") == "knows" else 1, "in part": 2}
    register = {"equal": 4, "refused": 5, "different": 6}
    return {(install | {"refused": 3, "different": 6})[row["install"]], register[row["register"]]}


def tabled(text: str) -> dict[str, set[int]]:
    """The same of each model in a table of before; one that is nowhere else is equal in row 4."""
    found: dict[str, set[int]] = {}
    lines = [line for line in text.splitlines() if line.startswith("| ")][1:]
    for number, line in enumerate(lines):
        for name in re.findall("`([^`]+)`", line.rpartition("|")[0].rpartition("|")[2]):
            found.setdefault(name, set()).add(number)
    return {name: each if each & {5, 6, 7} else each | {4} for name, each in found.items()}


def table(found: dict[str, set[int]], words: tuple[str, ...]) -> str:
    """The models of each outcome, as Markdown, and the number of their folders in transformers."""
    lines = ["|  | | |", "|---|---|---|"]
    for number, said in enumerate(words):
        names = sorted(name for name, each in found.items() if number in each)
        shown = "" if number == 4 else ", ".join(f"`{name}`" for name in names)
        lines.append(f"| {said} | {len(set(map(folder, names)))} | {shown} |")
    return "\n".join(lines)


ENGLISH = (
    "equal under `install`, as layers that regard knows",
    "equal under `install`, by their own forward, which calls regard",
    "equal under `install`, which leaves some of the attention alone",
    "refused by `install`",
    'equal under `attn_implementation="regard"`',
    'refused under `attn_implementation="regard"`',
    "different",
    "not built by the survey, so not compared",
)
CHINESE = (
    "`install` 后相同: regard 认识其注意力层",
    "`install` 后相同: 由其自身的 forward 调用 regard",
    "`install` 后相同: 但保留了部分注意力不变",
    "`install` 拒绝",
    '`attn_implementation="regard"` 时相同',
    '`attn_implementation="regard"` 时拒绝',
    "不同",
    "此调查未能构建: 因此没有比较",
)


def write(rows: list[dict[str, str]]) -> None:
    """Put the rows into the tables between the marks of the guide and of its twin, in the place of
    earlier ones of the same models."""
    new = {row["model"]: outcomes(row) for row in rows}
    for path, words in zip(GUIDES, (ENGLISH, CHINESE), strict=True):
        before, _, rest = path.read_text().partition(MARKS[0])
        old, _, after = rest.partition(MARKS[1])
        found = {name: each for name, each in tabled(old).items() if name in models()} | new
        path.write_text(f"{before}{MARKS[0]}\n\n{table(found, words)}\n\n{MARKS[1]}{after}")


def shown(row: dict[str, str]) -> str:
    """A row in one line."""
    if "unbuilt" in row:
        return f"{row['model']:28}cannot be built: {row['unbuilt'][:200]}"
    ways = (f"{way} {row[way]} {row[f'{way}_why'][:90]}" for way in ("register", "install"))
    return f"{row['model']:28}{' | '.join(ways)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", help="model types")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--read", type=Path, help="take the rows from here, without a run")
    parser.add_argument("--write", action="store_true", help="write the tables of the guide")
    options = parser.parse_args()
    began = time.perf_counter()
    if not options.read:
        surveyed("llama")  # the processes of all others begin with the modules that it imports
    rows = json.loads(options.read.read_text()) if options.read else []
    for name in () if options.read else options.only or models():
        rows.append(bounded(name))
        print(shown(rows[-1]), flush=True)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1))
    if options.write:
        write(rows)
    ways = ("register", "install")
    counts = {way: Counter(row.get(way, "unbuilt") for row in rows) for way in ways}
    folders = {"built": {folder(row["model"]) for row in rows if "unbuilt" not in row}} | {
        way: {folder(row["model"]) for row in rows if row.get(way) == "equal"} for way in ways
    }
    line = {
        "models": len(rows),
        **counts,
        "folders": {key: len(each) for key, each in folders.items()},
    }
    print(json.dumps(line | {"seconds": round(time.perf_counter() - began)}))


if __name__ == "__main__":
    main()
