"""The command line, and its verbs that load or measure a model.

An error of the user is a sentence and exit code 2.
"""

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.text import Text

from regard.cli import planning, seeing  # noqa: F401  (their verbs join `app`)
from regard.cli.options import (
    VERBS,
    Device,
    Dtype,
    Json,
    OptionalModel,
    Threads,
    app,
    imported,
    named,
    verb,
)
from regard.cli.sentences import printable, wrapped
from regard.names import CACHES, PAGES, PLAIN

__all__ = ["app", "run"]

ROWS = (
    "shipped, int8, int4, k8v4, k6v4, k4v4, mha, gqa, mqa, latent-100, latent-75, latent-50, "
    "latent-25, deepseek-100, deepseek-75, deepseek-50, portable-75, portable-50, latent-50-int8, "
    "deepseek-50-int8"
)
STORED = ("model", "gguf", "compare", "compiled", "rates", "all")
TARGETS = (
    "mha, gqa:N, mqa; latent-50, deepseek-50, portable-50 (rows of compare, of any percentage); "
    "mla:RANK, mla:RANK+ROPE, or mla with a budget"
)
VERIFY_MISSING = (
    "regard verify needs regard-verify: python -m pip install 'regard-verify[cli]', or, from a "
    "clone of regard, python -m pip install './packages/regard-verify[cli]'"
)


@verb
def compare(
    model: OptionalModel = None,
    text: Annotated[
        Path | None,
        typer.Option(help="Text to measure on; topics of Python's own help if left out."),
    ] = None,
    attention: Annotated[
        list[str] | None,
        typer.Option(
            help=f"A row; may be repeated. Six without it, twelve by `all`: {ROWS}.",
            autocompletion=lambda: ROWS.split(", "),
        ),
    ] = None,
    context: Annotated[int, typer.Option(min=2, help="Tokens in each window.")] = 512,
    windows: Annotated[
        int | None,
        typer.Option(min=1, help="Windows of text, for smaller intervals: 1; of a frontier 8."),
    ] = None,
    memory: Annotated[float, typer.Option(help="GiB of cache, for the context that fits.")] = 1.0,
    dtype: Dtype = None,
    device: Device = "cpu",
    threads: Threads = None,
    full: Annotated[
        bool, typer.Option("--full", help="Every column; prefills are timed in turns, too.")
    ] = False,
    frontier: Annotated[
        bool,
        typer.Option(
            "--frontier",
            help="Bytes against loss instead: quantised, evicted, latent, and these together.",
        ),
    ] = False,
    budget: Annotated[
        float | None,
        typer.Option(help="With --frontier: the methods that fit this share of the cache."),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write the table and curves of the caches as a page.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Cache, speed and perplexity of a model under each attention it can be converted to."""
    given = locals()
    if memory <= 0:
        raise typer.BadParameter(f"{memory} GiB is not above 0", param_hint="--memory")
    if budget is not None and not 0 < budget < 1:
        raise typer.BadParameter(f"{budget} is not between 0 and 1", param_hint="--budget")
    if (frontier or budget is not None) and attention:
        raise typer.BadParameter("a frontier has rows of its own", param_hint="--attention")
    imported("compare").run(**given)


@verb
def convert(
    model: Annotated[Path, typer.Argument(help="A folder with *.safetensors, or a .gguf.")],
    to: Annotated[str, typer.Option(help=f"{TARGETS}.")],
    out: Annotated[Path, typer.Option(help="The folder to make.")],
    form: Annotated[
        Literal["exact-rope", "deepseek"] | None,
        typer.Option(help="Of mla: keys rotated on reading, or DeepSeek's, which can be absorbed."),
    ] = None,
    portable: Annotated[
        bool, typer.Option("--portable", help="As a stock deepseek_v3 checkpoint.")
    ] = False,
    budget: Annotated[
        float | None,
        typer.Option(help="Cache for --to mla: 0.5 is half of the model's own."),
    ] = None,
    by_layer: Annotated[
        bool, typer.Option("--by-layer", help="Choose a rank for each layer.")
    ] = False,
    calibrate: Annotated[
        list[Path] | None, typer.Option(help="Text to calibrate on; Python's help if none.")
    ] = None,
    heal: Annotated[
        list[Path] | None, typer.Option(help="Text for distillation from the original model.")
    ] = None,
    minutes: Annotated[float, typer.Option(min=0.01, help="Time for healing.")] = 30.0,
    text: Annotated[
        list[Path] | None, typer.Option(help="Held-out text to measure on, too.")
    ] = None,
    low_memory: Annotated[
        bool, typer.Option("--low-memory", help="Load one layer at a time.")
    ] = False,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Of the weights that are written; the checkpoint's own if left out."),
    ] = None,
    device: Device = "cpu",
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Convert a model's attention, report what that lost, and save it in a folder."""
    imported("convert").run(**locals())


@verb
def generate(
    prompt: Annotated[str, typer.Option(help="What to continue, or to answer with --chat.")],
    model: OptionalModel = None,
    attention: Annotated[
        Literal["regard", "interface", "transformers"],
        typer.Option(help="Installed, registered as an attention function, or transformers' own."),
    ] = "regard",
    cache: Annotated[
        str,
        typer.Option(
            metavar="<kind>",
            help=f"{', '.join(CACHES)} or transformers. auto: windows of layers that have one, all "
            "tokens of others. K8V4: keys in 8 bits, values in 4.",
            autocompletion=lambda: [*CACHES, "transformers"],
        ),
    ] = "auto",
    format: Annotated[
        str, named(PAGES, f"Of the pages of --cache paged: {', '.join(PAGES)}.")
    ] = PLAIN,
    prefix_cache: Annotated[
        Path | None,
        typer.Option(
            help="A folder that stores the pages of prompts: one that begins like an earlier one "
            "is computed from where they differ. Needs --cache paged."
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 128,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0 for the most likely token at each step.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Random seed, for temperatures above 0.")] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Use the model's chat template.")] = False,
    stream: Annotated[
        bool, typer.Option(help="Show text as it is generated, or at the end.")
    ] = True,
    against: Annotated[
        Literal["transformers"] | None,
        typer.Option(help="Run transformers' own attention and cache too, and compare."),
    ] = None,
    dtype: Dtype = None,
    device: Device = "cpu",
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Generate text with a transformers model on regard, with its time and memory."""
    given = locals()
    if cache.lower() != "paged" and (prefix_cache is not None or format != PLAIN):
        hint = "--format" if prefix_cache is None else "--prefix-cache"
        raise typer.BadParameter(f"it needs --cache paged, got --cache {cache}", param_hint=hint)
    imported("generate").run(**given)


@verb
def bench(
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 32,
    kv_heads: Annotated[int, typer.Option(min=1, help="Key heads; divides the query heads.")] = 8,
    head_dim: Annotated[int, typer.Option(min=1, help="Channels of a head.")] = 128,
    keys: Annotated[int, typer.Option(min=1, help="Tokens in the cache at most.")] = 4096,
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Of queries, keys and values.")
    ] = "float32",
    threads: Threads = None,
    every: Annotated[
        bool, typer.Option("--all", help="Rows of torch and of every backend, too.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Time decoding and prefill on this machine: regard and its backends against torch."""
    given = locals()
    if heads % kv_heads:
        raise typer.BadParameter(
            f"{kv_heads} does not divide the {heads} query heads", param_hint="--kv-heads"
        )
    imported("bench", timed=True).run(**given)


@verb
def tune(
    forget: Annotated[
        bool, typer.Option("--forget", help="Remove the saved rates; use the defaults.")
    ] = False,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="CPU threads, as your programs use; torch's choice if left out."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure this machine once, so that the fastest backend is chosen on it."""
    imported("tune", timed=True).run(**locals())


@verb
def cache(
    clear: Annotated[
        list[str] | None,
        named(STORED, f"Remove {', '.join(STORED)}; may be repeated."),
    ] = None,
    as_json: Json = False,
) -> None:
    """What regard stores on this disk, where and how much; and its removal."""
    imported("cache").run(**locals())


def verb_of_regard_verify() -> Callable[..., None]:
    """The function whose parameters are the options of the verb.

    Raises:
        ModuleNotFoundError: if a package other than regard-verify is missing.
    """
    try:
        from regard_verify.command import verify
    except ModuleNotFoundError as error:
        if error.name != "regard_verify":
            raise
        return missing
    return verify


def missing(
    arguments: Annotated[list[str] | None, typer.Argument(metavar="SUBJECT")] = None,
) -> None:
    """Check an attention of any origin; it needs the package regard-verify."""
    raise ImportError(VERIFY_MISSING)


def add_verify() -> None:
    """Add the verb to the command line of regard."""
    verb = verb_of_regard_verify()
    VERBS["verify"] = verb
    first_line = (verb.__doc__ or "").partition("\n")[0]
    lenient = {"ignore_unknown_options": True} if verb is missing else {}
    app.command("verify", short_help=first_line, context_settings=lenient)(verb)


add_verify()


def _version(wanted: bool | None) -> None:
    if wanted:
        sys.stdout.write(f"regard {_installed()}\n")
        raise typer.Exit


def _installed() -> str:
    """The version: of the installed distribution, else of the source on the path."""
    try:
        return metadata.version("regard")
    except metadata.PackageNotFoundError:
        import regard

        return regard.__version__


@app.callback()
def options(
    version: Annotated[
        bool | None,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = None,
) -> None:
    """Options that come before the verb."""


def run() -> int:
    """Run the command line; the exit code."""
    try:
        with _printable_warnings():
            app(prog_name="regard")
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    except (OSError, ValueError, ImportError) as error:
        _complain(f"regard: {error}")
        return 2
    return 0


@contextmanager
def _printable_warnings() -> Iterator[None]:
    """Warnings may quote files, too."""
    usual = warnings.formatwarning

    def formatted(*given: Any, **named: Any) -> str:
        return "\n".join(map(printable, usual(*given, **named).split("\n")))

    warnings.formatwarning = formatted
    try:
        yield
    finally:
        warnings.formatwarning = usual


def _complain(sentence: str) -> None:
    """Print on stderr; on a terminal, wrapped between words."""
    console = Console(stderr=True, highlight=False)
    sentence = "\n".join(map(printable, sentence.split("\n")))  # it may quote files
    if console.is_terminal:
        sentence = wrapped(sentence, console.width)
    console.print(Text(sentence), soft_wrap=True)
