"""regard generate: text while it is generated, then its time and memory."""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console

from regard.cli import options
from regard.cli.layout import tabulate
from regard.cli.options import in_utf8, named, option
from regard.cli.terminal import print_json, say, stdout, waiting
from regard.names import CACHES, PAGES, PLAIN
from regard.page.readable import readable_bytes
from regard.words import counted, without_controls

if TYPE_CHECKING:
    from regard.cli.loading import Loaded
    from regard.hf import Written

COLUMNS = ("", "prompt, tokens/s", "first token, s", "text, tokens/s", "cache", "peak memory")
CHAT = "--chat asks the model by its chat template; "
NEXT = "--against transformers compares the speeds"
SMALLER = "; --cache K8V4 saves memory"  # said of the default cache alone
TOKENS = 9  # of a text in a round: the prompt, then eight steps
ROUNDS = 12
COLDEST = 1e-6  # temperature besides 0: logits divided by less overflow
SECONDS = 60.0  # after which no further round begins


@options.verb
def generate(
    prompt: str = option(..., "What to continue, or to answer with --chat.", callback=in_utf8),
    model: options.OptionalModel = None,
    attention: Literal["regard", "interface", "transformers"] = option(
        "regard", "Installed, registered as an attention function, or transformers' own."
    ),
    cache: str = option(
        "auto",
        f"{', '.join(CACHES)} or transformers. auto: windows of layers that have one, all "
        "tokens of others. K8V4: keys in 8 bits, values in 4.",
        metavar="<kind>",
        autocompletion=lambda: [*CACHES, "transformers"],
    ),
    format: str = named(PLAIN, PAGES, "Of the pages of --cache paged: {}."),
    prefix_cache: Path | None = option(
        None,
        "A folder that stores the pages of prompts: one that begins like an earlier one "
        "is computed from where they differ. Needs --cache paged.",
    ),
    max_new_tokens: int = option(128, "Tokens to generate at most.", min=1),
    temperature: float = option(0.0, "0 for the most likely token at each step.", min=0.0),
    seed: int = option(0, "Random seed, for temperatures above 0.", min=-(2**63), max=2**64 - 1),
    chat: bool = option(False, "Use the model's chat template.", "--chat"),
    stream: bool = option(True, "Show text as it is generated, or at the end."),
    against: Literal["transformers"] | None = option(
        None, "Run transformers' own attention and cache too, and compare."
    ),
    dtype: options.Dtype = None,
    device: options.Device = "cpu",
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Generate text with a transformers model on regard, with its time and memory."""
    if cache.lower() != "paged" and (prefix_cache is not None or format != PLAIN):
        hint = "--format" if prefix_cache is None else "--prefix-cache"
        options.refuse(hint, f"it needs --cache paged, got --cache {cache}")
    if 0 < temperature < COLDEST:
        rule = f"{temperature} is above 0 and below {COLDEST}; 0 takes the most likely token"
        options.refuse("--temperature", rule)
    options.start("regard.hf", threads=threads)
    from regard.cli.loading import load_for
    from regard.hf.generating.pool_of_model import prefixes_in
    from regard.hf.generating.text import cache_name
    from regard.hf.packages import quiet

    more = {"max_new_tokens": max_new_tokens, "temperature": temperature, "chat": chat}
    own: dict[str, Any] = {"attention": attention, "cache": cache_name(cache), "format": format}
    other, pages, shown = {"attention": against, "cache": against}, {}, stream and not as_json
    with ExitStack() as stack:  # prefixes are stored at its end: an error then loses no text
        stack.enter_context(quiet())
        with waiting(f"loading {model or options.DEFAULT_MODEL}"):
            loaded = load_for(model, dtype=dtype, device=device)
            if prefix_cache is not None:
                pool = prefixes_in(prefix_cache, loaded.model, format=format)
                pages = {"pool": stack.enter_context(pool)}
        run = partial(_written, loaded, prompt, seed, **more)
        runs = [run(**own, **pages, **{"shown": _show} if shown else {})]
        if shown:
            _show("\n")  # so that a progress line does not erase the text's last line
        if against:
            with waiting("generating again with transformers, then both in turns"):
                runs.append(run(**other))
                few = {"max_new_tokens": min(max_new_tokens, TOKENS), "warm_up": False}
                runs[0] = _beside(runs[0], partial(run, **own | few), partial(run, **other | few))
    if as_json:
        print_json([asdict(each) for each in runs])
        return
    _show("\n" if shown else f"{runs[0].text}\n\n")
    show(
        runs, stdout(), has_chat=not chat and bool(getattr(loaded.tokenizer, "chat_template", None))
    )


def _written(loaded: "Loaded", prompt: str, seed: int, **settings: Any) -> "Written":
    import torch

    from regard.hf import write

    torch.manual_seed(seed)
    return write(loaded.model, loaded.tokenizer, prompt, **settings)


def show(runs: list["Written"], console: Console, *, has_chat: bool = False) -> None:
    """Print the time and memory of each run, and how two compare; with `has_chat`, that the model
    has a chat template that was not used."""
    from regard.ops.explain import kernel_objection

    first = runs[0]
    found = f" ({first.prefix_tokens:,} of them found)" if first.prefix_tokens else ""
    prompt, text = counted(first.prompt_tokens, "token"), counted(len(first.tokens), "token")
    say(console, f"{prompt} of prompt{found}, {text} of text")
    console.print()
    tabulate(console, COLUMNS, [_cells(each) for each in runs])
    console.print()
    for sentence in (*map(_backends, runs), *_compared(runs)):
        say(console, sentence)
    if (objection := kernel_objection()) is not None:
        say(console, f"fused did not run: {objection}.", style="dim")
    if len(runs) == 1:
        console.print()
        say(console, f"Next: {CHAT * has_chat}{NEXT}{SMALLER * (first.cache == 'auto')}.")


def _cells(written: "Written") -> list[str]:
    cache = "" if written.cache == written.attention else f", {written.cache} cache"
    return [
        f"{written.attention}{cache}",
        f"{written.prefill_tokens_per_second:,.0f}",
        f"{written.seconds_to_first_token:.2f}",
        f"{speed:,.1f}" if (speed := written.decode_tokens_per_second) else "",
        readable_bytes(written.cache_bytes),
        readable_bytes(written.peak_memory),
    ]


def _backends(written: "Written") -> str:
    decoding = f", decoding on {written.decode_backend}" if written.decode_backend else ""
    return f"{written.attention}: prompt read on {written.prefill_backend}{decoding}."


def _beside(
    written: "Written", mine: Callable[[], "Written"], theirs: Callable[[], "Written"]
) -> "Written":
    """With the ratios of the speeds of two short runs, in turns; none of what did not run."""
    from regard.turns import in_turns, ratio_of

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


def _show(text: str) -> None:
    """Print text of a model, control characters as escapes; `--json` has them as they are."""
    sys.stdout.write(without_controls(text))
    sys.stdout.flush()


def _compared(runs: list["Written"]) -> list[str]:
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
