"""The report of a conversion, as data and as a model card."""

from dataclasses import asdict, dataclass, field
from typing import Any

from regard.convert.converting import LayerReport
from regard.convert.healing.heal import Healed
from regard.convert.measuring import Measured, ratio
from regard.convert.targets import Target
from regard.turns import Ratio, perplexity_ratio

STOCK = (
    "Any transformers loads it:\n\n"
    "```python\nmodel = AutoModelForCausalLM.from_pretrained(path)\n```"
)
PLACED = (
    "Its attention is regard's; transformers alone cannot load it:\n\n"
    "```python\nimport regard.hf\n\nmodel, tokenizer = regard.hf.load(path)\n```"
)


@dataclass(frozen=True)
class Report:
    """A conversion: the attention before and after, and the measurements of both."""

    model: str
    was: str
    target: Target
    stock: bool
    calibrated_on: tuple[str, ...]
    calibration_tokens: int
    before: Measured
    after: Measured
    layers: tuple[LayerReport, ...] = ()
    healing: Healed | None = None
    healed_on: tuple[str, ...] = ()
    seconds: float = 0.0
    unhealed: Measured | None = field(default=None)
    dtype: str = ""  # of the weights that were written

    @property
    def ratio(self) -> float:
        """Perplexity after, divided by that before; the geometric mean over the texts."""
        return ratio(self.after.perplexity, self.before.perplexity)

    def as_dict(self) -> dict[str, Any]:
        """The report as data that JSON holds: all but the losses of tokens."""
        data = asdict(self)
        for name in ("before", "after", "unhealed"):
            if data[name] is not None:
                del data[name]["losses"]
        interval = None if self.interval is None else asdict(self.interval)
        return {**data, "ratio": self.ratio, "interval": interval, "into": str(self.target)}

    @property
    def interval(self) -> Ratio | None:
        """The ratio over the same tokens, and two standard errors around it."""
        before, after = self.before.losses, self.after.losses
        if before is None or after is None or len(before) != len(after):
            return None
        return perplexity_ratio(after, before)

    @property
    def quality(self) -> str:
        """A sentence on the perplexity, which decides nothing inside of its interval."""
        found = self.interval
        if found is None:
            return f"Perplexity is {self.ratio:.3f} times the original's"
        within = f"({found.low:.2f} to {found.high:.2f})"
        if not found.differs:
            return f"Perplexity has no measurable difference from the original's {within}"
        return f"Perplexity is {self.ratio:.3f} times the original's {within}"

    def table(self) -> list[tuple[str, str, str]]:
        """The rows of the table of measurements: title, value before, value after."""
        rows = [
            (f"perplexity, {name}", f"{self.before.perplexity[name]:,.3f}", f"{perplexity:,.3f}")
            for name, perplexity in self.after.perplexity.items()
        ]
        both = (self.before, self.after)
        was, now = (f"{each.cache_bytes_per_token:,.0f}" for each in both)
        rows.append(("cache bytes a token", was, now))
        for phase, form in (("prefill", ",.0f"), ("decode", ",.1f")):
            first = getattr(self.before, f"{phase}_tokens_per_second")
            if first is not None:
                speed = getattr(self.after, f"{phase}_speed")
                rows.append((f"{phase} speed", f"{first:{form}} tokens/s", str(speed)))
        return rows


def card(report: Report) -> str:
    """The text of the model card: what was done, what it costs, how to load the model."""
    table = "\n".join(f"| {' | '.join(row)} |" for row in report.table())
    return (
        f"# {report.model}, its attention converted: {report.target}\n\n"
        f"The attention of {report.model} was {report.was}. It was converted by "
        f"regard to {report.target}; nothing else was changed. "
        f"{report.quality}, on text that was neither calibrated nor trained on.\n\n"
        f"| | before | after |\n|---|---:|---:|\n{table}\n\n"
        f"{_calibration(report)}{_healing(report)}{STOCK if report.stock else PLACED}\n"
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
    unhealed = ratio(before.perplexity, report.before.perplexity)
    return (
        f"It was then trained to imitate the original for {healing.seconds / 60:.0f} minutes, on "
        f"{healing.tokens:,} tokens of {', '.join(report.healed_on)}; before that, perplexity was "
        f"{unhealed:.3f} times the original's.\n\n"
    )
