"""regard generate: text while it is generated, then its time and memory."""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from regard.cli.layout import Column, tabulate
from regard.cli.loading import load_for
from regard.cli.terminal import print_json, say, stdout, waiting
from regard.hf import SMOLLM2, Written, fetch_smollm2, write
from regard.hf.generating.prefix_folder import prefixes_in
from regard.hf.generating.text import cache_name
from regard.hf.packages import quiet
from regard.ops.explain import kernel_objection
from regard.page.readable import readable_bytes
from regard.turns import in_turns, ratio_of
from regard.words import counted, without_controls

COLUMNS = (
    Column("", words=True),
    Column("prompt, tokens/s"),
    Column("first token, s"),
    Column("text, tokens/s"),
    Column("cache"),
    Column("peak memory"),
)
TOKENS = 9  # of a text in a round: the prompt, then eight steps
ROUNDS = 12
SECONDS = 60.0  # after which no further round begins


def run(
    *,
    prompt: str,
    model: Path | None,
    attention: str,
    cache: str,
    seed: int,
    stream: bool,
    against: str | None,
    dtype: str | None,
    device: str,
    threads: int | None,
    prefix_cache: Path | None,
    as_json: bool,
    **settings: Any,
) -> None:
    """Load, generate once or twice, and print; `settings` are further arguments of `write`."""
    cache = cache_name(cache)
    if threads is not None:
        torch.set_num_threads(threads)
    shown = stream and not as_json
    with ExitStack() as stack:  # prefixes are stored at its end: an error then loses no text
        stack.enter_context(quiet())
        with waiting(f"loading {model or SMOLLM2}"):
            found = load_for(model or fetch_smollm2(), dtype=dtype, device=device)
            loaded = found.model, found.tokenizer
            format = settings.pop("format")
            pages = _pages(format, prefix_cache, loaded[0], stack)
        show_text = _show if shown else _hide
        runs = [_run(loaded, prompt, (attention, cache), seed, show_text, settings | pages)]
        if shown:
            _show("\n")  # so that a progress line does not erase the text's last line
        if against:
            with waiting("generating again with transformers, then both in turns"):
                runs.append(_run(loaded, prompt, (against, against), seed, _hide, settings))
                few = settings | {"max_new_tokens": min(settings["max_new_tokens"], TOKENS)}
                again = partial(_run, loaded, prompt, seed=seed, shown=_hide, warm_up=False)
                mine = partial(again, (attention, cache), settings=few | {"format": format})
                theirs = partial(again, (against, against), settings=few)
                runs[0] = _beside(runs[0], mine, theirs)
        _print(runs, shown, as_json)


def _print(runs: list[Written], shown: bool, as_json: bool) -> None:
    """Print the text, unless it was shown, and what it took; or JSON alone."""
    if as_json:
        print_json([asdict(each) for each in runs])
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
    first = runs[0]
    found = f" ({first.prefix_tokens:,} of them found)" if first.prefix_tokens else ""
    prompt, text = counted(first.prompt_tokens, "token"), counted(len(first.tokens), "token")
    say(console, f"{prompt} of prompt{found}, {text} of text")
    console.print()
    tabulate(console, COLUMNS, [_cells(each) for each in runs])
    console.print()
    for sentence in (*map(_backends, runs), *_compared(runs)):
        say(console, sentence)
    objection = kernel_objection()
    if objection is not None:
        say(console, f"fused did not run: {objection}.", style="dim")
    if len(runs) == 1:
        console.print()
        say(console, "Next: --against transformers compares the speeds; --cache K8V4 saves memory.")


def _cells(written: Written) -> list[str]:
    cache = "" if written.cache == written.attention else f", {written.cache} cache"
    return [
        f"{written.attention}{cache}",
        f"{written.prefill_tokens_per_second:,.0f}",
        f"{written.seconds_to_first_token:.2f}",
        f"{speed:,.1f}" if (speed := written.decode_tokens_per_second) else "",
        readable_bytes(written.cache_bytes),
        readable_bytes(written.peak_memory),
    ]


def _backends(written: Written) -> str:
    decoding = f", decoding on {written.decode_backend}" if written.decode_backend else ""
    return f"{written.attention}: prompt read on {written.prefill_backend}{decoding}."


def _run(
    loaded: tuple[Any, Any],
    prompt: str,
    setting: tuple[str, str],
    seed: int,
    shown: Callable[[str], object],
    settings: dict[str, Any],
    warm_up: bool = True,
) -> Written:
    """One text, by one attention and cache, from the same seed."""
    torch.manual_seed(seed)
    options: dict[str, Any] = {"attention": setting[0], "cache": setting[1], **settings}
    return write(*loaded, prompt, shown=shown, warm_up=warm_up, **options)


def _beside(
    written: Written, mine: Callable[[], Written], theirs: Callable[[], Written]
) -> Written:
    """With the ratios of the speeds of two short runs, in turns; none of what did not run."""
    found = in_turns({"mine": mine, "theirs": theirs}, ROUNDS, limit=SECONDS)
    ratios: dict[str, Any] = {}
    for phase in ("prefill", "decode"):
        own, other = (
            [getattr(each, f"{phase}_tokens_per_second") for each in runs]
            for runs in found.values()
        )
        if all(own) and all(other):
            ratios[f"{phase}_speed"] = ratio_of(own, other)
    return replace(written, **ratios)


def _hide(text: str) -> None:
    """Print nothing."""


def _show(text: str) -> None:
    """Print text of a model, control characters as escapes; `--json` has them as they are."""
    sys.stdout.write(without_controls(text))
    sys.stdout.flush()


def _compared(runs: list[Written]) -> list[str]:
    """A sentence that compares two runs."""
    if len(runs) < 2:
        return []
    mine, theirs = runs
    same = mine.tokens == theirs.tokens
    text = "The same text" if same else "Another text (rounding, or a cache that rounds)"
    both = {"prefill": mine.prefill_speed, "decoding": mine.decode_speed}
    whose = f"{theirs.attention}' speed"
    speeds = [f"{what} {ratio.of(whose)}" for what, ratio in both.items() if ratio is not None]
    return ["; ".join([text, *speeds]) + "."]
