"""The application of the command line, its verbs' decorator, and the options that verbs share."""

import gc
import os
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

DEFAULT_MODEL = "SmolLM2-135M-Instruct"

OptionalModel = Annotated[
    Path | None,
    typer.Argument(
        help="A folder with config.json and *.safetensors, or a .gguf; "
        f"{DEFAULT_MODEL} if left out.",
        show_default=False,
    ),
]
Threads = Annotated[
    int | None, typer.Option(min=1, help="CPU threads; torch's own choice if left out.")
]
Dtype = Annotated[
    Literal["float32", "bfloat16", "float16"] | None,
    typer.Option(help="What the model computes in; float32 on a CPU, else the checkpoint's own."),
]
Device = Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, cuda:1, mps.")]
Json = Annotated[bool, typer.Option("--json", help="Only JSON on stdout.")]

app = typer.Typer(
    help="Attention layers that are right, fast and cache-aware; and which one your model wants.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: in panels of 60 columns option names are cut
)


# Turns of a loop in which a thread of GNU's OpenMP waits before it sleeps: 30 microseconds, about
# the time between two operators. The default of 300,000 takes the cores from other programs.
SPINS = 10_000

VERBS: dict[str, Callable[..., None]] = {}  # by what is typed, as "show mask"


def verb(function: Callable[..., None]) -> Callable[..., None]:
    """Make a function a verb. It refuses wrong options first, then imports what it needs."""
    return _added(app, function.__name__, function, function.__name__)


def group(name: str, text: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator as `verb`, for the verbs of a group: `show_mask` is typed `show mask`."""
    verbs = typer.Typer(help=text, no_args_is_help=True, rich_markup_mode=None)
    app.add_typer(verbs, name=name, short_help=text)

    def verb_of_group(function: Callable[..., None]) -> Callable[..., None]:
        short = function.__name__.removeprefix(f"{name}_")
        return _added(verbs, short, function, f"{name} {short}")

    return verb_of_group


def _added(
    verbs: typer.Typer, name: str, function: Callable[..., None], typed: str
) -> Callable[..., None]:
    VERBS[typed] = function
    first_line = (function.__doc__ or "").partition("\n")[0]
    verbs.command(name, short_help=first_line)(function)
    return function


def named(names: Sequence[str], text: str, also: Sequence[str] = ()) -> Any:
    """An option whose value is one of these names, in upper or lower case; `also` may be given, and
    is not completed."""
    spelled = {each.lower(): each for each in (*names, *also)}

    def check(value: Any) -> Any:
        given = [value] if isinstance(value, str) else value or []
        for each in given:
            if each.lower() not in spelled:
                near = get_close_matches(each.lower(), spelled, 1)
                meant = f"; did you mean {spelled[near[0]]!r}?" if near else ""
                raise typer.BadParameter(f"{each!r} is none of {', '.join(names)}{meant}")
        found = [spelled[each.lower()] for each in given]
        return found[0] if isinstance(value, str) else found if value else value

    return typer.Option(help=text, autocompletion=lambda: list(names), callback=check)


def set_threads(threads: int | None) -> None:
    """Let torch use so many threads of the CPU; as many as it chooses if None."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def imported(name: str, *, timed: bool = False) -> Any:
    """The module of a verb in this package, imported without garbage collections: of torch's half a
    million objects each takes a tenth of a second, and none of them is garbage.

    Args:
        name: of the module.
        timed: whether the verb times calls as they run in the user's own programs, so that threads
            wait as they do there.
    """
    if not timed and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPINS))  # read when torch is imported
    collecting = gc.isenabled()
    gc.disable()
    try:
        return import_module(f"regard.cli.{name}")
    finally:
        gc.freeze()
        if collecting:
            gc.enable()
