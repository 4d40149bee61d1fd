"""The application of the command line, its verbs' decorator, and the options that verbs share."""

import gc
import os
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer

DEFAULT_MODEL = "SmolLM2-135M-Instruct"

MOST = 10**12  # tokens, heads, channels, rows: a larger number is taken for an error
MOST_MEMORY = 9 * 10**8  # GiB, below the 10**18 bytes that a plan takes


def option(default: Any, text: str, *names: str, **settings: Any) -> Any:
    """An option with its default (`...` where it has none here) and its help, named after its
    parameter or by `names`."""
    return typer.Option(default, *names, help=text, **settings)


def size(default: Any, text: str, *names: str, least: int = 1) -> Any:
    """The option of a number from `least` to `MOST`."""

    def check(value: int | None) -> int | None:
        if value is not None and value > MOST:
            raise typer.BadParameter(f"{value} is above {MOST:,}")
        return value

    return option(default, text, *names, min=least, callback=check)


def in_utf8(value: Any) -> Any:
    """The text, or the name of a folder to load, if it is UTF-8."""
    try:
        str(value).encode()
    except UnicodeEncodeError as error:
        reason = f"character {error.start} of {str(value)[:40]!r} is not UTF-8; give it in UTF-8"
        raise typer.BadParameter(reason) from error
    return value


OptionalModel = Annotated[
    Path | None,
    typer.Argument(
        help="A folder with config.json and *.safetensors, or a .gguf; "
        f"{DEFAULT_MODEL} if left out.",
        show_default=False,
        callback=in_utf8,
    ),
]
ModelOrSizes = Annotated[
    Path | None,
    typer.Argument(
        help="A folder with config.json, a config.json, or a .gguf; or give sizes.",
        show_default=False,
    ),
]
Threads = Annotated[
    int | None,
    option(..., "CPU threads; torch's own choice if left out.", min=1, max=4096),  # more may crash
]
Dtype = Annotated[
    Literal["float32", "bfloat16", "float16"] | None,
    option(..., "What the model computes in; float32 on a CPU, else the checkpoint's own."),
]
AnyDtype = Literal["float64", "float32", "bfloat16", "float16"]
NumHeads = Annotated[int | None, size(..., "Query heads, in place of a MODEL.")]
NumKVHeads = Annotated[int | None, size(..., "Key heads; as many as query heads if left out.")]
ValueDim = Annotated[int | None, size(..., "Channels of a value, if not those of a key.")]
Batch = Annotated[int, size(..., "Rows.")]
Device = Annotated[str, option(..., "Where the model runs: cpu, cuda, cuda:1, mps.")]
Json = Annotated[bool, option(..., "Only JSON on stdout.", "--json")]
Svg = Annotated[Path | None, option(..., "Write the picture as SVG.")]
Png = Annotated[Path | None, option(..., "Write the picture as PNG.")]
Html = Annotated[Path | None, option(..., "Write a page to explore in a browser.")]

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


SHOW = "Draw a mask, or where the heads of a model look."
shows = typer.Typer(help=SHOW, no_args_is_help=True, rich_markup_mode=None)
app.add_typer(shows, name="show", short_help=SHOW)


def verb(
    function: Callable[..., None], *, of: typer.Typer = app, **settings: Any
) -> Callable[..., None]:
    """Make a function a verb. It refuses wrong options first, then imports what it needs.

    A verb of the group `shows` has a name such as `show_mask`, and is typed `show mask`.
    """
    typed = function.__name__.replace("_", " ")
    VERBS[typed] = function
    first_line = (function.__doc__ or "").partition("\n")[0]
    of.command(typed.split()[-1], short_help=first_line, **settings)(function)
    return function


def named(default: Any, names: Sequence[str], text: str, also: Sequence[str] = ()) -> Any:
    """An option whose value is one of these names, which are `{}` in its help, in upper or lower
    case; `also` may be given, and is not completed."""
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

    text = text.format(", ".join(names))
    return option(default, text, autocompletion=lambda: list(names), callback=check)


def start(module: str, *, threads: int | None = None, timed: bool = False) -> None:
    """Import what a verb needs, and let torch use so many threads of the CPU; as many as it chooses
    if None.

    Garbage is not collected meanwhile: of torch's half a million objects a collection takes a tenth
    of a second, and none of them is garbage. If the verb times calls as they run in the user's own
    programs, it is `timed`, so that threads wait as they do there.
    """
    if not timed and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPINS))  # read when torch is imported
    collecting = gc.isenabled()
    gc.disable()
    try:
        import_module(module)
        if threads is not None:
            import torch

            torch.set_num_threads(threads)
    finally:
        gc.freeze()
        if collecting:
            gc.enable()


def refuse(option: str, reason: str) -> NoReturn:
    """Raise the error of an option: a sentence, and exit code 2."""
    raise typer.BadParameter(reason, param_hint=option)


def check_memory(memory: float) -> None:
    """Refuse a number of GiB that cannot be meant."""
    if not 0 < memory <= MOST_MEMORY:
        refuse("--memory", f"{memory} GiB is not above 0 and at most {MOST_MEMORY:,}")


def check_source(model: Path | None, sizes: Mapping[str, Any], *needed: str) -> None:
    """Refuse sizes beside a MODEL, and without one sizes that are not all that is needed."""
    if model is not None and sizes:
        refuse(spelled(min(sizes)), "a MODEL has its own sizes")
    if model is None and not {*needed} <= sizes.keys():
        refuse("MODEL", f"give a MODEL, or {' and '.join(map(spelled, needed))}")


def check_divides(heads: int, kv_heads: int) -> None:
    """Refuse key heads that do not divide the query heads."""
    if heads % kv_heads:
        refuse("--num-kv-heads", f"{kv_heads} does not divide the {heads} query heads")


def spelled(name: str) -> str:
    """The option of a parameter, as it is typed."""
    return f"--{name.replace('_', '-')}"
