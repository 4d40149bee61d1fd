"""The report in docs/verify.md: its file, and what the command prints on it.

After a change of laws or of their words, `python tests/support/verify_page.py` prints it anew, with
the number of laws.
"""

import io
import re
import tempfile
from pathlib import Path

from rich.console import Console

from regard.cli.verify import show
from regard.verify import LAWS, Report, check

PAGE = Path(__file__).parents[2] / "docs/verify.md"
COMMAND = "`regard verify my_attention.py:MultiHeadAttention --quick` prints"
WIDTH = 100  # columns of the page


def example() -> str:
    """The file that the page shows first."""
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]


def shown() -> str:
    """The report on the page."""
    return PAGE.read_text().partition(COMMAND)[2].split("```")[1].strip("\n")


def printed() -> str:
    """The report on that file, as the command prints it."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "my_attention.py")
        file.write_text(example())
        report = check(f"{file}:MultiHeadAttention", quick=True, limit=300.0)
    whole = Report.from_json(report.to_json().replace(f"{folder}/", ""))
    console = Console(file=io.StringIO(), width=WIDTH, highlight=False)
    show(whole, console)
    lines = console.file.getvalue().splitlines()
    return "\n".join(line.rstrip() for line in lines)


def without_figures(text: str) -> str:
    """The report without seconds and decimals, which depend on the machine, on one line."""
    text = re.sub(r"\d+ s$", "N s", text, count=1, flags=re.MULTILINE)
    return " ".join(re.sub(r"-?\d+\.\d+(e-\d+)?|\d+e-\d+", "N", text).split())


if __name__ == "__main__":
    before, command, after = PAGE.read_text().partition(COMMAND)
    _, _, rest = after.split("```", 2)
    before = re.sub(r"checks \d+ laws", f"checks {len(LAWS)} laws", before)
    PAGE.write_text(f"{before}{command}\n\n```\n{printed()}\n```{rest}")
