"""regard generate: text as it comes, then what it cost."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer

from regard.cli.compare import waiting
from regard.hf import SMOLLM2, Written, fetch_smollm2, load, write
from regard.hf.loading import quiet

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def generate_command(
    prompt: Annotated[str, typer.Option(help="What to continue, or to answer with --chat.")],
    model: Annotated[
        Path | None,
        typer.Argument(
            help=f"A folder with config.json and *.safetensors, or a .gguf; {SMOLLM2} if left out.",
            show_default=False,
        ),
    ] = None,
    attention: Annotated[
        Literal["regard", "interface", "transformers"],
        typer.Option(help="Installed, registered as an attention function, or transformers' own."),
    ] = "regard",
    cache: Annotated[
        Literal["growing", "static", "sliding", "int8", "int4", "transformers"],
        typer.Option(help="What keeps the past; transformers has its own."),
    ] = "growing",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write at most.")] = 128,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0 for the likeliest token each time.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the dice, where the temperature is above 0.")] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Use the model's chat template.")] = False,
    stream: Annotated[bool, typer.Option(help="Show the text as it comes, or at the end.")] = True,
    against: Annotated[
        Literal["transformers"] | None,
        typer.Option(help="Run transformers' own attention and cache too, and compare."),
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], typer.Option(help="Of the weights.")
    ] = "float32",
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads; torch's own choice if left out.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Only JSON on stdout.")] = False,
) -> None:
    """Write text with regard inside a transformers model, and say what it cost."""
    if threads is not None:
        torch.set_num_threads(threads)
    settings = {"max_new_tokens": max_new_tokens, "temperature": temperature, "chat": chat}
    shown = _show if stream and not as_json else _hide
    with quiet():
        with waiting(f"loading {model or SMOLLM2}"):
            lent = load(model or fetch_smollm2(), dtype=DTYPES[dtype])
        if against:  # the first run of anything is slow, and neither should be the first
            for setting in ((attention, cache), (against, against)):
                _run(lent, prompt, setting, seed, _hide, {**settings, "max_new_tokens": 2})
        runs = [_run(lent, prompt, (attention, cache), seed, shown, settings)]
        if against:
            with waiting("writing it again with transformers"):
                runs.append(_run(lent, prompt, (against, against), seed, _hide, settings))
    if as_json:
        sys.stdout.write(json.dumps([asdict(each) for each in runs], indent=2) + "\n")
        return
    sys.stdout.write("\n" if stream else runs[0].text + "\n")
    sys.stdout.write("\n".join(["", *map(str, runs), *_compared(runs), ""]))


def _run(
    lent: tuple[Any, Any],
    prompt: str,
    setting: tuple[str, str],
    seed: int,
    shown: Callable[[str], object],
    settings: dict[str, Any],
) -> Written:
    """One text, by one attention and cache, from the same dice."""
    torch.manual_seed(seed)
    attention: Any = setting[0]
    return write(*lent, prompt, attention=attention, cache=setting[1], shown=shown, **settings)


def _hide(text: str) -> None:
    """Text that nobody waits for."""


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _compared(runs: list[Written]) -> list[str]:
    """The sentence that two runs end with."""
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
