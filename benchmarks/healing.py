"""How much of a conversion's loss does half an hour of healing recover?

    python benchmarks/corpora.py texts
    python benchmarks/healing.py --corpora texts --to mla:128+64
    python benchmarks/healing.py --corpora texts --to mqa --state mqa   resumes if interrupted

SmolLM2-135M-Instruct, bfloat16 autocast. It is trained on half the topics of Python's own help, the
descriptions and docstrings of the installed packages, and the texts of `corpora.py`, equally many
windows of each; the conversion before is calibrated on them too. Perplexity is measured on the
other half of the topics and on texts that are not trained on.
"""

import argparse
import ast
import copy
import random
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import finish
from corpora import read
from torch import Tensor

import regard.hf
from regard.convert import Healed, Recipe, convert, heal, target_of, windows_of
from regard.convert.healing.environment import keep_freed_memory
from regard.convert.measuring import measure, ratio
from regard.convert.texts import LENGTH, calibration, python_texts, python_topics
from regard.hf.packages import quiet

MEASURED = 2  # windows of 1,024 tokens of each text that is held out
CALIBRATION = 16  # windows, over all texts
LONGEST = 6_000  # characters of one module's docstrings, so that many modules are read


def texts(seed: int) -> Iterator[str]:
    """Descriptions and docstrings of the installed packages, shuffled with `seed`."""
    packages, library = (Path(sysconfig.get_path(name)) for name in ("purelib", "stdlib"))
    files = [*packages.glob("*.dist-info/METADATA")]
    for root in (packages, library):
        inside = root.rglob("*.py")
        files += [file for file in inside if not _left_out(file, root is library)]
    random.Random(seed).shuffle(files)
    for file in sorted(files, key=lambda file: file.name != "METADATA"):  # prose comes first
        text = _text_of(file)
        if len(text) > 500:
            yield text[:LONGEST]


def _left_out(file: Path, library: bool) -> bool:
    """Whether a file is a test, or a text that is measured on."""
    parts = set(file.parts)
    return bool(parts & {"pydoc_data", "test", "tests"}) or (library and "site-packages" in parts)


def _text_of(file: Path) -> str:
    if file.name == "METADATA":
        return file.read_text(encoding="utf-8", errors="ignore").partition("\n\n")[2]
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return ""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    found = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
    return "\n\n".join(each for each in found if each and len(each) > 200)


def converted(model: Any, to: str, windows: Tensor) -> Any:
    """A copy of the model, converted."""
    layers = [regard.hf.attention_of(each) for each in regard.hf.attention_modules(model).values()]
    (made,) = convert(model, [target_of(to, layers)], windows, progress=told)
    return copy.deepcopy(regard.hf.place(copy.deepcopy(model), made.layers))


def told(what: str, done: int, total: int) -> None:
    """Show progress on one line of stderr."""
    print(f"\r{what:<40} {done:>6} / {total}", end="", file=sys.stderr, flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", default="mla:128+64", help="as for regard convert")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--length", type=int, default=768, help="tokens a window")
    parser.add_argument("--windows", type=int, default=400, help="of each text, at most")
    parser.add_argument("--float32", action="store_true", help="instead of bfloat16 autocast")
    parser.add_argument("--corpora", type=Path, help="a folder that corpora.py has written")
    parser.add_argument("--state", type=Path)
    parser.add_argument("--picture", type=Path, help="of the loss, a .png")
    for name, value in asdict(Recipe()).items():
        if isinstance(value, (int, float)):
            parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    keep_freed_memory()
    with quiet():
        model, tokenizer = regard.hf.smollm2()
    measured, training = read(options.corpora)
    held_out = {
        name: windows_of(tokenizer, [text], length=LENGTH, most=MEASURED)
        for name, text in {"manual": python_topics()[1], **measured}.items()
    }
    shipped = measure(model, held_out).perplexity
    kinds = [*python_texts(), *training.values()]
    started = time.perf_counter()
    student = converted(model, options.to, calibration(tokenizer, kinds, windows=CALIBRATION))
    seconds = time.perf_counter() - started
    before = measure(student, held_out).perplexity
    print(f"\n{options.to} in {seconds:.0f} s: {ratio(before, shipped):.3f} times the perplexity")
    healed, recipe = trained(student, model, windows(tokenizer, training, options), options)
    after = measure(student, held_out).perplexity
    for name in held_out:
        values = (each[name] for each in (shipped, before, after))
        print("\n{:<12} as shipped {:.2f}, converted {:.2f}, healed {:.2f}".format(name, *values))
    print(f"{ratio(after, shipped):.3f} times the perplexity after {healed.seconds / 60:.1f} min")
    if options.picture:
        draw(healed, options.picture)
    result = {
        "to": options.to,
        "ratio before": ratio(before, shipped),
        "ratio after": ratio(after, shipped),
        "perplexity": {"shipped": shipped, "converted": before, "healed": after},
        "conversion seconds": seconds,
        "tokens": healed.tokens,
        "tokens a second": healed.tokens / healed.seconds,
        "steps": healed.steps,
        "minutes": healed.seconds / 60,
        "recipe": {**asdict(recipe), "autocast": str(recipe.autocast)},
        "losses": healed.losses[:: max(1, healed.steps // 50)],
    }
    finish("healing", [result])


def draw(healed: Healed, path: Path) -> None:
    """Write the loss of every step as a picture, and the means of twenty parts of the run."""
    from matplotlib.figure import Figure  # not pyplot, which keeps a state of its own

    figure = Figure(figsize=(4.6, 3.2), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="nats a token", ylim=(0, max(healed.losses)))
    axes.plot(healed.losses, lw=0.8, alpha=0.4)
    width = max(1, healed.steps // 20)
    parts = [healed.losses[at : at + width] for at in range(0, healed.steps, width)]
    middles = [at * width + (len(part) - 1) / 2 for at, part in enumerate(parts)]
    axes.plot(middles, [statistics.fmean(part) for part in parts], lw=2)
    figure.savefig(path, dpi=130)


def windows(tokenizer: Any, training: dict[str, str], options: argparse.Namespace) -> Tensor:
    """Windows of every text, equally many of each."""
    one_by_one = ([text] for text in (python_topics()[0], *training.values()))
    cut = partial(windows_of, tokenizer, length=options.length, most=options.windows)
    return torch.cat([cut(text) for text in (texts(options.seed), *one_by_one)])


def trained(
    student: Any, model: Any, tokens: Tensor, options: argparse.Namespace
) -> tuple[Healed, Recipe]:
    """Heal the student; returns the result and the recipe."""
    autocast = None if options.float32 else torch.bfloat16
    chosen = {name: getattr(options, name, value) for name, value in asdict(Recipe()).items()}
    recipe = Recipe(**{**chosen, "autocast": autocast})
    teacher = model if autocast is None else model.to(autocast)
    minutes, state = options.minutes, options.state
    return heal(
        student, teacher, tokens, minutes=minutes, recipe=recipe, state=state, progress=told
    ), recipe


if __name__ == "__main__":
    main()
