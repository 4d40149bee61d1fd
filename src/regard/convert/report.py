"""What was done to a model, what it lost, and what it costs now: for people, and for programs."""

from dataclasses import asdict, dataclass, field
from typing import Any

from regard.convert.converting import LayerReport
from regard.convert.measuring import Measured, ratio
from regard.convert.targets import Target

STOCK = (
    "Any transformers loads it:\n\n"
    "```python\nmodel = AutoModelForCausalLM.from_pretrained(path)\n```"
)
HOSTED = (
    "Its attention is regard's; transformers alone refuses it:\n\n"
    "```python\nimport regard.hf\n\nmodel, tokenizer = regard.hf.load(path)\n```"
)


@dataclass(frozen=True)
class Healing:
    """How long a model learned from the original, on how many tokens, and its last losses."""

    minutes: float
    steps: int
    tokens: int
    losses: tuple[float, ...]


@dataclass(frozen=True)
class Report:
    """A conversion: of what, into what, with what loss."""

    model: str
    was: str
    target: Target
    stock: bool
    calibrated_on: tuple[str, ...]
    calibration_tokens: int
    before: Measured
    after: Measured
    layers: tuple[LayerReport, ...] = ()
    healing: Healing | None = None
    seconds: float = 0.0
    unhealed: Measured | None = field(default=None)

    @property
    def ratio(self) -> float:
        """Perplexity after over before, a geometric mean over the texts."""
        return ratio(self.after, self.before)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "ratio": self.ratio, "into": str(self.target)}


def card(report: Report) -> str:
    """The model card: what was done, what it costs, how it is loaded."""
    before, after = report.before, report.after
    rows = [
        (f"perplexity, {name}", f"{before.perplexity[name]:.3f}", f"{after.perplexity[name]:.3f}")
        for name in after.perplexity
    ]
    numbers = (
        ("cache bytes a token", "cache_bytes_per_token", ",.0f"),
        ("prefill tokens/s", "prefill_tokens_per_second", ",.0f"),
        ("decode tokens/s", "decode_tokens_per_second", ",.1f"),
    )
    for said, name, form in numbers:
        was, now = (format(getattr(each, name), form) for each in (before, after))
        rows.append((said, was, now))
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return (
        f"# {report.model}, its attention converted: {report.target}\n\n"
        f"The attention of {report.model} was {report.was}. It was converted by "
        f"regard to {report.target}; nothing else was changed. "
        f"Perplexity is {report.ratio:.3f} times what it was, on text that was neither calibrated "
        f"nor trained on.\n\n"
        f"| | before | after |\n|---|---:|---:|\n{table}\n\n"
        f"{_calibration(report)}{_healing(report)}{STOCK if report.stock else HOSTED}\n"
    )


def _calibration(report: Report) -> str:
    if not report.layers:
        return "Exact: nothing is lost but rounding.\n\n"
    worst = max(report.layers, key=lambda layer: layer.still_missed)
    mean = sum(layer.still_missed for layer in report.layers) / len(report.layers)
    return (
        f"Calibrated on {report.calibration_tokens:,} tokens of {', '.join(report.calibrated_on)}. "
        f"Attention layers miss {mean:.1%} of their output's energy on that text, {worst.name} the "
        f"most with {worst.still_missed:.1%}.\n\n"
    )


def _healing(report: Report) -> str:
    healing, before = report.healing, report.unhealed
    if healing is None or before is None:
        return ""
    return (
        f"It then learned from the original for {healing.minutes:.0f} minutes, on "
        f"{healing.tokens:,} tokens: perplexity was {ratio(before, report.before):.3f} times the "
        "original's before that.\n\n"
    )
