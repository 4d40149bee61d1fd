"""All that a comparison measured, as a table and a verdict."""

from dataclasses import dataclass
from html import escape

from regard.compare.measure import MEASURED, SHORT, Row, cells
from regard.compare.proving import Proof
from regard.page.page import table
from regard.page.readable import readable_bytes
from regard.words import counted


@dataclass(frozen=True)
class Comparison:
    """Everything that `regard compare` measured, and the sentence it ends with.

    Attributes:
        model: the model's name.
        kind: its own attention.
        num_layers: its attention layers.
        context: tokens of a window.
        memory: bytes that `context_in_memory` of each row is about.
        dtype: in which the model ran.
        threads: threads of torch.
        text: where the text is from.
        proof: that regard computes what the model computes.
        rows: the measurements of each attention.
        verdict: which attention saves most memory, and what it costs.
        seconds: in total.
        decoded: tokens that `decode_perplexity` of each row is about, over all windows.
        cache_dtype: of the checkpoint, in which `cache_bytes_per_token` and `context_in_memory`
            count the numbers that are not codes; that of the model if empty.

    Examples:
        >>> from regard.compare import Comparison, Proof, Row
        >>> proof = Proof(largest_difference=2e-6, tolerance=1e-4, largest_logit=9.0)
        >>> rows = (Row("MHA, as shipped", exact=True, cache_bytes_per_token=512.0),)
        >>> comparison = Comparison("tiny", "MHA", 2, 64, 1 << 30, "float32", 1, "my text", proof,
        ...     rows, "Nothing to compare with.", 0.5)
        >>> comparison.proof.holds, comparison.rows[0].cache_bytes_per_token
        (True, 512.0)
    """

    model: str
    kind: str
    num_layers: int
    context: int
    memory: int
    dtype: str
    threads: int
    text: str
    proof: Proof
    rows: tuple[Row, ...]
    verdict: str
    seconds: float
    decoded: int = 0
    cache_dtype: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "cache_dtype", self.cache_dtype or self.dtype)

    @property
    def columns(self) -> dict[str, str]:
        """The columns of the table: attributes of `Row`, each with its heading.

        Bytes in the dtype in which the model ran are a column if it is not the checkpoint's.
        """
        return {
            name: head.format(within=readable_bytes(self.memory), dtype=self.dtype)
            for name, head in MEASURED.items()
            if name != "run_bytes_per_token" or self.dtype != self.cache_dtype
        }

    def table(self, full: bool = True) -> tuple[list[str], list[list[str]]]:
        """The headings and the cells of all rows that ran; a few columns unless `full`."""
        columns = {name: head for name, head in self.columns.items() if full or name in SHORT}
        rows = [
            [f"{row.name} (exact)" if row.exact else row.name, *cells(row, columns)]
            for row in self.rows
            if row.perplexity is not None
        ]
        return ["attention", *columns.values()], rows

    @property
    def title(self) -> str:
        """The heading of a page."""
        return f"{self.model}: its attentions, compared"

    @property
    def about(self) -> str:
        """The model and the text, for the line above the table."""
        layers, threads = counted(self.num_layers, "layer"), counted(self.threads, "thread")
        run = "" if self.dtype == self.cache_dtype else f" run in {self.dtype}"
        heads = f"{layers} of {self.kind}, {self.cache_dtype}{run}"
        return f"{heads}, {threads}; {self.context:,} tokens of {self.text}"

    @property
    def legend(self) -> str:
        """The columns in two or three sentences."""
        return (
            f"Decode perplexity: of the last {self.decoded:,} tokens, given one at a time. Speeds "
            "but the first are ratios to it. ±: two standard errors; of a speed, half of its "
            "quartiles' distance; same: no measurable difference."
        )

    def drawn(self, row: Row) -> float | None:
        """The perplexity of a row in a picture."""
        return row.perplexity

    def _repr_html_(self) -> str:
        """The verdict and the table of what ran, for notebooks and pages."""
        decoded = f"{self.decoded:,} decoded one at a time"
        about = f"{self.about}, {decoded}, measured in {self.seconds:.0f} s"
        return (
            f"<p>{escape(self.verdict)}</p>\n{table(about, *self.table())}"
            f'<p class="aside">{self.legend}</p>'
            '<p class="aside">regard computes what the model computes: logits differ by '
            f"{self.proof.largest_difference:.1e} at most, and rounding explains "
            f"{self.proof.tolerance:.1e}.</p>\n"
        )
