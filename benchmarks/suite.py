"""How does regard compare, over everything it does? Every case, by all that can run it.

    python benchmarks/suite.py                   all cases: under half an hour
    python benchmarks/suite.py --quick           a representative dozen: two minutes
    python benchmarks/suite.py --only "decode"   cases whose name holds that
    python benchmarks/suite.py --docs            writes docs/benchmarks.json and the picture of it

The files are written after every case. With --only a file's other cases stay, and with --resume
the cases that it holds are not run again: a long run may be interrupted, or made in parts.

Contestants of a case take turns within one process, with keys in no cache. `ratio` is regard's time
over a peer's, a median of rounds with its quartiles; `of_limit` is the share of what this machine
can do at most, measured in the same run: reading the keys once, or the products alone.
"""

import argparse
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import (
    LAST_LEVEL_CACHE,
    PEERS,
    finish,
    interleave,
    introduce,
    machine,
    product_rate,
    quartiles,
    read_bandwidth,
)
from problems import Contest, first_line
from results import count_targets, earlier, judged, keep, merged, show

from cases import CASES, Case
from peers import contest

DOCS = Path(__file__).parent.parent / "docs"
MOST = 24 << 30  # bytes
GAPS = {"float32": 2e-3, "bfloat16": 6e-2, 8: 2e-1, 4: 5e-1}  # relative error, by dtype or bits


class Effort(NamedTuple):
    """The effort for a case."""

    rounds: int = 15
    sample: float = 0.02
    seconds: float = 7.0
    cold: int = 4 * LAST_LEVEL_CACHE
    rest: float = 0.05  # seconds: threads of OpenVINO spin for some of it
    compiled: bool = False


class Limits(NamedTuple):
    """The limits of this machine: bytes read and operations of products per second."""

    read: float
    products: dict[str, float]


def measure_limits(tiny: bool) -> Limits:
    size = 128 if tiny else 2048
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    rates = {name: product_rate(dtype, size) for name, dtype in dtypes.items()}
    return Limits(read_bandwidth(8 if tiny else 512), rates)


def available() -> int:
    """Bytes of available memory."""
    table = Path("/proc/meminfo")
    if table.exists():
        for line in table.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def run_case(case: Case, limits: Limits, effort: Effort) -> dict[str, Any]:
    """One row of the results; a remark if it cannot be run."""
    result: dict[str, Any] = {"case": case.name, **case.row()}
    room = min(MOST, int(0.8 * available()))
    if case.needs() > room:
        wanted = f"{case.needs() / 2**30:.1f} GiB where {room / 2**30:.1f} are available"
        return {**result, "remark": f"skipped: needs {wanted}"}
    torch.manual_seed(0)
    whole = case.kind.startswith("layer") or case.kind == "MLA layer"
    found = (
        _layers(case, effort)
        if whole
        else contest(case, cold=effort.cold, compiled=effort.compiled and case.quick)
    )
    nbytes = case.nbytes()
    if whole:
        from peer_layers import weights_nbytes

        nbytes += weights_nbytes(case)
    gaps, remarks = _agreement(case, found)
    times = interleave(
        found.runs,
        rounds=effort.rounds,
        sample=effort.sample,
        limit=effort.seconds,
        rest=effort.rest,
    )
    reading, computing = nbytes / limits.read, found.flops / limits.products[case.dtype]
    least = max(reading, computing)
    result["bound"] = "reads" if reading > computing else "products"
    result["limit_ms"] = 1e3 * least
    result["rows"] = {
        name: _row(times["regard"], seconds, least, gaps[name]) for name, seconds in times.items()
    }
    result["targets"] = [judged(target, result["rows"]) for target in case.targets]
    return {**result, "remark": "; ".join(remarks)} if remarks else result


def _layers(case: Case, effort: Effort) -> Contest:
    from peer_layers import layer_contest  # transformers takes seconds to import

    return layer_contest(case, cold=effort.cold)


def _row(mine: list[float], seconds: list[float], least: float, gap: float) -> dict[str, float]:
    ratio, low, high = quartiles(mine, seconds)
    middle = statistics.median(seconds)
    return {
        "ms": 1e3 * middle,
        "ratio": ratio,
        "low": low,
        "high": high,
        "of_limit": least / middle,
        "gap": gap,
    }


def _agreement(case: Case, found: Contest) -> tuple[dict[str, float], list[str]]:
    """The error of each relative to regard on the same keys; failed and wrong ones are left out."""
    gaps: dict[str, float] = {}
    remarks = list(found.failed)
    wanted = _on_first_keys(found, found.runs["regard"])
    most = GAPS[case.bits or case.dtype]
    for name, run in list(found.runs.items()):
        try:
            out = _on_first_keys(found, run)
        except Exception as error:  # each library has its own kinds
            if name.startswith("regard"):
                raise
            remarks.append(first_line(name, error))
            del found.runs[name]
            continue
        gaps[name] = float((out - wanted).abs().max() / wanted.abs().max())
        if not gaps[name] <= most:
            remarks.append(f"{name} is left out: it differs by {gaps[name]:.1e}")
            del found.runs[name]
    return gaps, remarks


def _on_first_keys(found: Contest, run: Callable[[], torch.Tensor]) -> torch.Tensor:
    found.cold.turn = 0
    return run().detach().float()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="of the names of cases")
    parser.add_argument("--quick", action="store_true", help="a representative dozen, few rounds")
    parser.add_argument(
        "--compiled",
        action="store_true",
        help="FlexAttention and sdpa by torch.compile too, in the representative cases",
    )
    parser.add_argument("--tiny", action="store_true", help="sizes that say nothing, to test this")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to keep the results")
    parser.add_argument("--docs", action="store_true", help="keep them and their picture in docs/")
    parser.add_argument("--resume", action="store_true", help="only cases that the file lacks")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    file = DOCS / "benchmarks.json" if options.docs else options.json
    try:
        held = earlier(file, machine()) if file and (options.only or options.resume) else []
    except ValueError as error:
        parser.error(str(error))
    done = {each["case"] for each in held} if options.resume else set()
    wanted = [
        case
        for case in CASES
        if options.only in case.name and case.name not in done and (case.quick or not options.quick)
    ]
    finish("suite", run_cases(wanted, held, file, options))


def effort_of(options: argparse.Namespace) -> Effort:
    effort = Effort(compiled=options.compiled)
    if options.quick:
        effort = effort._replace(rounds=7, seconds=2.5)
    return effort._replace(rounds=1, sample=0, cold=1 << 16) if options.tiny else effort


def run_cases(
    wanted: list[Case], held: list[dict[str, Any]], file: Path | None, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Run, show and keep each case; the results of this run."""
    effort, limits = effort_of(options), measure_limits(options.tiny)
    introduce("numba", *PEERS)
    print(f"{limits.read / 1e9:.1f} GB/s read", end="")
    print(*(f", {rate / 1e9:.0f} GFLOP/s {name}" for name, rate in limits.products.items()), sep="")
    head = {"benchmark": "suite", "machine": machine(), "limits": limits._asdict()}
    results: list[dict[str, Any]] = []
    for case in wanted:
        result = run_case(case.tiny() if options.tiny else case, limits, effort)
        results.append({**result, "case": case.name})
        show(results[-1])
        if file:
            keep(file, {**head, "results": merged(held, results)})
    print(f"\n{count_targets(results)}")
    if options.docs:
        from picture import draw

        draw({**head, "results": merged(held, results)}, DOCS / "benchmarks.png")
    return results


if __name__ == "__main__":
    main()
