"""Is the model of docs/scaling.md near what two ranks took? `python benchmarks/scaling.py`

Reads docs/distributed.json, which `python benchmarks/distributed.py --docs` writes. Of each case
the run of one process gives the rate of this machine, and gloo's messages the rate of the link; the
model then says what two ranks take, from the formulas of `regard.plan`. Prints the table of the
page; with --docs it is written there.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scaling_model import BACKWARD, BACKWARD_SCORES, Machine, ring_seconds

from regard.plan.cost import cost_of
from regard.plan.flops import attention_flops, visible_pairs
from regard.plan.sent import sent_of, sum_sent
from regard.plan.shapes import STORAGES, LayerShape, Workload

DOCS = Path(__file__).parents[1] / "docs"
POINTS, PAGES = DOCS / "distributed.json", (DOCS / "scaling.md", DOCS / "zh" / "scaling.md")
RULE = "|---|---|---:|---|---:|---:|---:|"
PLAIN = STORAGES["plain"]
RANKS = 2
ALONE, HALVES = "one process", "two halves, nothing sent"
LAYER = LayerShape(hidden_size=1024, num_heads=16, num_kv_heads=4, head_dim=64, v_head_dim=64)
STEP = LayerShape(hidden_size=2560, num_heads=32, num_kv_heads=8, head_dim=128, v_head_dim=128)
MLA = LayerShape(
    hidden_size=2560,
    num_heads=16,
    num_kv_heads=16,
    head_dim=192,
    v_head_dim=128,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
)


@dataclass(frozen=True)
class Check:
    """A measured point with what the model says of it.

    Args:
        case: the name of the case.
        what: the plan.
        tokens: of the prefill or the cache.
        dtype: of weights and activations.
        measured: seconds on two ranks.
        modelled: the same by the model.
    """

    case: str
    what: str
    tokens: int
    dtype: str
    measured: float
    modelled: float

    @property
    def ratio(self) -> float:
        """Modelled over measured: below 1 the model is too fast."""
        return self.modelled / self.measured


def checks(report: dict[str, Any]) -> list[Check]:
    """All points of two ranks that the model speaks of."""
    points = report["points"]
    found = {(row.get("case"), row["what"], row.get("dtype")): row for row in points}
    shared = {  # how much slower one of two busy processes is than one alone
        (case.partition(":")[0], dtype): 2 * row["seconds"] / found[case, ALONE, dtype]["seconds"]
        for (case, what, dtype), row in found.items()
        if what == HALVES
    }
    rows = []
    for (case, what, dtype), row in found.items():
        if case is None or what in (ALONE, HALVES):
            continue
        alone = found[case, ALONE, dtype]["seconds"]
        kind = case.partition(":")[0]
        slower = shared.get((kind, dtype), shared.get(("prefill", dtype), 1.0))
        seconds = modelled(case, what, row["tokens"], dtype, alone * slower, machine_of(points))
        rows.append(Check(case, what, row["tokens"], dtype, row["seconds"], seconds))
    return rows


def machine_of(points: list[dict[str, Any]]) -> Machine:
    """The link as measured; rates of computing are those of each case."""
    named = {row["what"]: row for row in points}
    return Machine(
        flops=1.0,
        bandwidth=1.0,
        sends=named["rate of gloo, each way"]["bytes_a_second"],
        latency=named["latency of gloo"]["seconds"],
    )


def modelled(
    case: str, what: str, tokens: int, dtype: str, alone: float, machine: Machine
) -> float:
    """Seconds of two ranks, of those that one rank takes for all of the work."""
    call = {"context": tokens, "dtype": dtype}
    half = alone / RANKS
    if case == "decode: layer":
        return _step_of_layer(what, call, alone, machine)
    if case.startswith("decode"):
        layer = MLA if "MLA" in case else STEP
        partial = layer.num_heads * ((layer.kv_lora_rank or layer.v_head_dim) + 1) * 4
        return half + machine.sending(partial, 1)
    if case == "prefill: heads split":
        sent = sent_of([LAYER], **call, tp=RANKS)
        return half + machine.sending(sent.prefill, sent.prefill_steps)
    sent = sent_of([LAYER], **call, cp=RANKS)
    scores = _share_of_scores(case, tokens)
    nbytes, steps = sent.prefill, sent.prefill_steps
    gradients = 0.0
    if case.startswith("training"):
        nbytes, steps = sent.training, sent.training_steps
        weights, itemsize = cost_of(LAYER, PLAIN, context=0).parameters, Workload(**call).itemsize
        gradients = machine.sending(sum_sent(weights, RANKS, itemsize), 4 * RANKS)
    sending = machine.sending(nbytes, steps)
    if "gather" in what:
        return half + sending
    ring = ring_seconds(scores * half, sending, RANKS)
    return (1 - scores) * half + ring + gradients


def _share_of_scores(case: str, tokens: int) -> float:
    """The share of the operations that a ring hides its messages behind."""
    if case == "prefill: causal attention":
        return 1.0
    scores = attention_flops(LAYER, Workload(context=tokens), visible_pairs(LAYER, tokens))
    products = cost_of(LAYER, PLAIN, context=tokens).visible_prefill_flops - scores
    if case.startswith("training"):
        scores, products = (1 + BACKWARD_SCORES) * scores, (1 + BACKWARD) * products
    return scores / (scores + products)


def _step_of_layer(what: str, call: dict[str, Any], alone: float, machine: Machine) -> float:
    """A decoded token: the weights are read by all ranks, or by each its share; so is the cache."""
    one = cost_of(STEP, PLAIN, **call)
    share = {"tp": RANKS} if "heads" in what else {"cp": RANKS}
    rank = cost_of(STEP, PLAIN, **call, **share)
    sent = sent_of([STEP], **call, **share)
    reading = alone * rank.decode_bytes / one.decode_bytes
    return reading + machine.sending(sent.decode, sent.decode_steps)


def table(found: list[Check]) -> Iterator[str]:
    """The rows of the page's table."""
    for each in found:
        yield (
            f"| {each.case} | {each.what} | {each.tokens:,} | {each.dtype} "
            f"| {1e3 * each.measured:.1f} | {1e3 * each.modelled:.1f} | {each.ratio:.2f} |"
        )


def write(page: Path, rows: list[str]) -> None:
    """Put the rows below the heading of the page's table in place of those that are there."""
    above, rule, below = page.read_text(encoding="utf-8").partition(f"{RULE}\n")
    assert rule, f"{page} has no table of these columns"
    rest = below.splitlines(keepends=True)
    while rest and rest[0].startswith("|"):
        rest.pop(0)
    lines = "".join(f"{row}\n" for row in rows)
    page.write_text(above + rule + lines + "".join(rest), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--docs", action="store_true", help="write the table into the pages, too")
    options = parser.parse_args()
    rows = [*table(checks(json.loads(POINTS.read_text(encoding="utf-8"))))]
    print(f"| case | plan | tokens | dtype | measured ms | modelled ms | ratio |\n{RULE}")
    print("\n".join(rows))
    for page in PAGES if options.docs else ():
        write(page, rows)


if __name__ == "__main__":
    main()
