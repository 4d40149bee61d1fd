"""regard generate: text while it is generated, then its time and memory."""

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from regard.cli.terminal import say, stdout, waiting
from regard.hf import SMOLLM2, Written, fetch_smollm2, load, write
from regard.hf.generating.prefix_folder import prefixes_in
from regard.hf.packages import quiet
from regard.ops.observed import kernel_objection

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def run(
    *,
    prompt: str,
    model: Path | None,
    attention: str,
    cache: str,
    seed: int,
    stream: bool,
    against: str | None,
    dtype: str,
    threads: int | None,
    prefix_cache: Path | None,
    as_json: bool,
    **settings: Any,
) -> None:
    """Load, generate once or twice, and print; `settings` are further arguments of `write`."""
    if threads is not None:
        torch.set_num_threads(threads)
    shown = stream and not as_json
    with ExitStack() as stack:  # prefixes are stored at its end: an error then loses no text
        stack.enter_context(quiet())
        with waiting(f"loading {model or SMOLLM2}"):
            loaded = load(model or fetch_smollm2(), dtype=DTYPES[dtype])
            pages = _pages(settings.pop("format"), prefix_cache, loaded[0], stack)
        if against:  # the first run of each is slow, so it is not timed
            few = {**settings, "max_new_tokens": 2}
            for setting in ((attention, cache), (against, against)):
                _run(loaded, prompt, setting, seed, _hide, few)
        show_text = _show if shown else _hide
        runs = [_run(loaded, prompt, (attention, cache), seed, show_text, settings | pages)]
        if shown:
            _show("\n")  # so that a progress line does not erase the text's last line
        if against:
            with waiting("generating again with transformers"):
                runs.append(_run(loaded, prompt, (against, against), seed, _hide, settings))
        _print(runs, shown, as_json)


def _print(runs: list[Written], shown: bool, as_json: bool) -> None:
    """Print the text, unless it was shown, and what it took; or JSON alone."""
    if as_json:
        sys.stdout.write(json.dumps([asdict(each) for each in runs], indent=2) + "\n")
        return
    if not shown:
        _show(runs[0].text + "\n")
    _show("\n")
    show(runs, stdout())


def _pages(format: str, folder: Path | None, model: Any, stack: ExitStack) -> dict[str, Any]:
    """The arguments of `write` about pages; a folder of prefixes is stored again when `stack`
    ends."""
    if folder is None:
        return {"format": format}
    return {"pool": stack.enter_context(prefixes_in(folder, model, format=format))}


def show(runs: list[Written], console: Console) -> None:
    """Print the time and memory of each run, and how two compare."""
    for sentence in (*map(str, runs), *_compared(runs)):
        say(console, sentence)
    objection = kernel_objection()
    if objection is not None:
        say(console, f"fused did not run: {objection}.", style="dim")


def _run(
    loaded: tuple[Any, Any],
    prompt: str,
    setting: tuple[str, str],
    seed: int,
    shown: Callable[[str], object],
    settings: dict[str, Any],
) -> Written:
    """One text, by one attention and cache, from the same seed."""
    torch.manual_seed(seed)
    attention: Any = setting[0]
    return write(*loaded, prompt, attention=attention, cache=setting[1], shown=shown, **settings)


def _hide(text: str) -> None:
    """Print nothing."""


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _compared(runs: list[Written]) -> list[str]:
    """A sentence that compares two runs."""
    if len(runs) < 2:
        return []
    mine, theirs = runs
    same = mine.tokens == theirs.tokens
    text = "the same text" if same else "another text (rounding, or a cache that rounds)"
    if not (mine.decode_tokens_per_second and theirs.decode_tokens_per_second):
        return [text]
    decode = mine.decode_tokens_per_second / theirs.decode_tokens_per_second
    prefill = mine.prefill_tokens_per_second / theirs.prefill_tokens_per_second
    return [f"{text}; {prefill:.2f}x the prefill and {decode:.2f}x the decode speed"]
