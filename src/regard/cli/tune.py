"""regard tune: measure this machine's rates, from which backends are chosen, and save them."""

from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from rich.console import Console

from regard.cli.layout import tabulate
from regard.cli.options import Json, Threads, option, start, verb
from regard.cli.terminal import UNWRAPPED, print_measured, remarks, say, stdout, waiting
from regard.words import counted

if TYPE_CHECKING:
    from regard.bench import Tuning
    from regard.rates import Speed

UNITS = {  # of `Speed`: the name of a rate with its unit, and the factor to that unit
    "call": ("to start an operator, us", 1e6),
    "products": ("float32 products, GFLOP/s", 1e-9),
    "elements": ("elementwise work, G/s", 1e-9),
    "row_float": ("torch's kernel, one query, float32, G/s", 1e-9),
    "row_half": ("the same in half precision, G/s", 1e-9),
    "rows_half": ("the same, several queries, G/s", 1e-9),
    "products_half": ("bfloat16 products, GFLOP/s", 1e-9),
    "scores": ("torch's kernel, softmax, G/s", 1e-9),
    "stream": ("fused, reading, GB/s", 1e-9),
    "fused": ("fused, many rows, GFLOP/s", 1e-9),
    "tiled": ("tiled, products, GFLOP/s", 1e-9),
}
COLUMNS = ("rate", "usual", "before", "now", "quartiles apart")


@verb
def tune(
    forget: bool = option(False, "Remove the saved rates; use the defaults.", "--forget"),
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Measure this machine once, so that the fastest backend is chosen on it."""
    start("regard.bench", threads=threads, timed=True)
    import torch

    from regard.bench import measure_speed
    from regard.bench.choices import compare_choices
    from regard.cache_folder import check_can_store
    from regard.rates import SPEED, forget_speed, typical, write_speed

    if forget:
        gone = forget_speed()
        if as_json:
            print_measured({"removed": gone and str(gone)})
        else:
            say(stdout(UNWRAPPED), f"removed {gone}" if gone else "nothing was saved")
        return
    check_can_store("rates")  # first: measuring takes a while
    before = SPEED.load()
    with waiting("measuring this machine"):
        tuning = measure_speed()
    if (objection := tuning.objection()) is not None:
        raise ValueError(f"{objection}; nothing was saved: stop other programs first")
    usual = typical(torch.get_num_threads())
    with waiting("comparing choices of backends"):
        choices = compare_choices(tuning.speed, usual)
    if choices.objection() is not None:  # then all rates change alike, and no choice does
        tuning = replace(tuning, speed=usual.faster(tuning.pace))
    path = write_speed(tuning.speed)
    SPEED.use(tuning.speed)
    if as_json:
        rates = {"usual": usual, "before": before, "now": tuning.speed}
        written = {name: asdict(rate) for name, rate in rates.items()}
        written |= {"spread": tuning.spread, "drift": tuning.drift, "load": asdict(tuning.load)}
        written |= {"choices": asdict(choices) | {"average": choices.average}}
        print_measured({"path": str(path), **written})
        return
    console = stdout()
    show(usual, before, tuning, console)
    console.print()
    say(console, f"{str(choices).capitalize()}.")
    if choices.objection() is not None:
        say(console, "So backends are chosen as by the constants, and all rates change alike.")
    say(console, f"Saved in {path}: backends are chosen by them from now on.")
    say(console, "Next: regard bench compares the choice; regard tune --forget removes them.")


def show(usual: "Speed", before: "Speed", tuning: "Tuning", console: Console) -> None:
    """Print the rates as a table, beside the constants and the rates before."""
    import torch

    from regard.ops.explain import kernel_objection

    rows, unmeasured = [], []
    for name, (what, factor) in UNITS.items():
        values = (getattr(speed, name) * factor for speed in (usual, before, tuning.speed))
        if (apart := tuning.spread.get(name)) is None:
            unmeasured.append(what.rpartition(", ")[0])
        spread = "" if apart is None else f"{apart:.2f}x"
        rows.append([what, *(f"{value:.3g}" for value in values), spread])
    title = "Rates of this machine"
    threads = counted(torch.get_num_threads(), "thread")
    say(console, f"{title}, torch {torch.__version__}, {threads}", bold=title)
    console.print()
    tabulate(console, COLUMNS, rows)
    reason = kernel_objection() or "this machine was measured without it"
    scaled = "its rates are the usual ones, scaled as the others are"
    remarks(console, "Not measured", dict.fromkeys(unmeasured, f"{reason}; {scaled}"))
