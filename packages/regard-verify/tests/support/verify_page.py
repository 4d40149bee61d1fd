"""The report in docs/guides/verify.md: its file, and what the command prints on it.

After a change of laws or of their words, this prints it anew in both languages, with the number of
laws: `PYTHONPATH=tests/support python packages/regard-verify/tests/support/verify_page.py`.
"""

import io
import re
import tempfile
from pathlib import Path

from rich.console import Console

from pages import ROOT, blocks, read
from regard_verify import LAWS, Report, check
from regard_verify.terminal import show

PAGE, DETAILS = "docs/guides/verify.md", "docs/verify-details.md"
TRANSLATED = "docs/zh/guides/verify.md"
FILE, SUBJECT = "my_attention.py", "MultiHeadAttention"
WIDTH = 100  # columns of the page


def example(page: str = PAGE) -> str:
    """The file that the page shows first."""
    first = blocks(page, "python")[0]
    assert first.title == f'title="{FILE}"'
    return first.code


def shown(page: str = PAGE) -> str:
    """The report on the page."""
    (report,) = [each.code for each in blocks(page, "text") if each.code.startswith(f"{FILE}:")]
    return report.strip("\n")


def printed() -> str:
    """The report on that file, as the command prints it."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, FILE)
        file.write_text(example())
        report = check(f"{file}:{SUBJECT}", quick=True, limit=300.0)
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
    report = printed()
    for page in (PAGE, TRANSLATED):
        text = read(page).replace(f"\n{shown(page)}\n", f"\n{report}\n")
        text = re.sub(r"checks \d+ laws", f"checks {len(LAWS)} laws", text)
        text = re.sub(r"\d+ 条定律", f"{len(LAWS)} 条定律", text)
        (ROOT / page).write_text(text, encoding="utf-8")
