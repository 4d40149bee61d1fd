"""How much of what a conversion loses does half an hour of healing bring back?

    python benchmarks/healing.py --to mla:128+64                  SmolLM2-135M, 30 minutes, bfloat16
    python benchmarks/healing.py --to mqa --minutes 30 --held-out one.txt two.txt
    python benchmarks/healing.py --to mqa --state /tmp/mqa        can be stopped and called again

The text is half the topics of Python's own help, what the installed packages say of themselves,
in their descriptions and docstrings, and any files given. Perplexity is measured on the other half
of the topics and on the files held out. Targets: a latent of half the cache within 1.10 of the
original in 30 minutes on two cores, MQA within 1.5.
"""

import argparse
import ast
import copy
import math
import random
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import finish
from torch import Tensor

import regard.hf
from regard.convert import Recipe, convert, draw_losses, heal, target_of, windows_of
from regard.convert.lesson import last_hidden, logits_of
from regard.convert.texts import calibration, python_topics
from regard.hf.loading import quiet

MEASURED = 1024  # tokens of each text that is held out
LONGEST = 6_000  # characters of one module's docstrings: many voices, not a few loud ones


def texts(seed: int) -> Iterator[str]:
    """Descriptions and docstrings of what is installed, in an order of the seed's."""
    packages, library = (Path(sysconfig.get_path(name)) for name in ("purelib", "stdlib"))
    files = [*packages.glob("*.dist-info/METADATA")]
    for root in (packages, library):
        inside = root.rglob("*.py")
        files += [file for file in inside if not _left_out(file, root is library)]
    random.Random(seed).shuffle(files)
    for file in sorted(files, key=lambda file: file.name != "METADATA"):  # prose comes first
        text = _said(file)
        if len(text) > 500:
            yield text[:LONGEST]


def _left_out(file: Path, library: bool) -> bool:
    """Tests say little, and one of these texts is measured on."""
    parts = set(file.parts)
    return bool(parts & {"pydoc_data", "test", "tests"}) or (library and "site-packages" in parts)


def _said(file: Path) -> str:
    if file.name == "METADATA":
        return file.read_text(encoding="utf-8", errors="ignore").partition("\n\n")[2]
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return ""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    found = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
    return "\n\n".join(each for each in found if each and len(each) > 200)


@torch.no_grad()
def perplexities(model: Any, held_out: dict[str, Tensor]) -> dict[str, float]:
    """Of a window of each text."""
    found = {}
    for name, window in held_out.items():
        hidden = last_hidden(model, window[None])[0, :-1]
        pieces = zip(hidden.split(256), window[1:].split(256), strict=True)
        losses = [
            F.cross_entropy(logits_of(model, h).float(), t, reduction="sum") for h, t in pieces
        ]
        found[name] = math.exp(float(sum(losses)) / len(hidden))
    return found


def ratio(ours: dict[str, float], theirs: dict[str, float]) -> float:
    """The geometric mean over texts."""
    return math.exp(sum(math.log(ours[name] / theirs[name]) for name in ours) / len(ours))


def converted(model: Any, to: str, windows: Tensor) -> Any:
    """A copy of the model with another attention."""
    layers = [regard.hf.attention_of(each) for each in regard.hf.attention_modules(model).values()]
    (made,) = convert(model, [target_of(to, layers)], windows, progress=told)
    return copy.deepcopy(regard.hf.place(copy.deepcopy(model), made.layers))


def told(what: str, done: int, total: int) -> None:
    """One line on stderr that changes."""
    print(f"\r{what:<40} {done:>6} / {total}", end="", file=sys.stderr, flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", default="mla:128+64", help="as for regard convert")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--length", type=int, default=384, help="tokens a window")
    parser.add_argument("--windows", type=int, default=4000, help="at most")
    parser.add_argument("--float32", action="store_true", help="instead of bfloat16 autocast")
    parser.add_argument("--held-out", type=Path, nargs="*", default=[])
    parser.add_argument("--text", type=Path, nargs="*", default=[], help="to heal on as well")
    parser.add_argument("--state", type=Path)
    parser.add_argument("--picture", type=Path, help="of the loss, a .png")
    for name, value in asdict(Recipe()).items():
        if isinstance(value, (int, float)):
            parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    with quiet():
        model, tokenizer = regard.hf.smollm2()
    given = [path.read_text(encoding="utf-8") for path in options.text]
    said = chain(given, [python_topics()[0]], texts(options.seed))
    tokens = windows_of(tokenizer, said, length=options.length, most=options.windows)
    written = {path.name: path.read_text(encoding="utf-8") for path in options.held_out}
    held_out = {
        name: windows_of(tokenizer, [text], length=MEASURED, most=1)[0]
        for name, text in {"pydoc topics": python_topics()[1], **written}.items()
    }
    shipped = perplexities(model, held_out)
    started = time.perf_counter()
    student = converted(model, options.to, calibration(tokenizer))
    seconds = time.perf_counter() - started
    before = perplexities(student, held_out)
    print(f"\n{options.to} in {seconds:.0f} s: {ratio(before, shipped):.3f} times the perplexity")
    autocast = None if options.float32 else torch.bfloat16
    chosen = {name: getattr(options, name, value) for name, value in asdict(Recipe()).items()}
    recipe = Recipe(**{**chosen, "autocast": autocast})
    teacher = model if autocast is None else model.to(autocast)
    healed = heal(
        student, teacher, tokens, minutes=options.minutes, recipe=recipe, state=options.state,
        progress=told,
    )  # fmt: skip
    after = perplexities(student, held_out)
    for name in held_out:
        values = (each[name] for each in (shipped, before, after))
        print("\n{:<24} as shipped {:.2f}, converted {:.2f}, healed {:.2f}".format(name, *values))
    print(f"{ratio(after, shipped):.3f} times the perplexity after {healed.seconds / 60:.1f} min")
    if options.picture:
        draw_losses(healed, options.picture)
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
        "recipe": {**asdict(recipe), "autocast": str(autocast)},
        "losses": healed.losses[:: max(1, healed.steps // 50)],
    }
    finish("healing", [result])


if __name__ == "__main__":
    main()
