"""Whether regard-verify is as it was when all of its tests last passed.

It is a distribution of its own and imports nothing of regard. So the results of its tests depend on
its files, on the pages that they read, on what tests share, and on the pinned versions of other
packages and of Python. One digest of these is in `packages/regard-verify/tests/passed.txt`: while
it is the same, `./scripts/test` leaves these tests to `--all`, but for `WITH_REGARD`.

    python tests/support/passed.py --tests            which tests of the package to run, as a path
    python tests/support/passed.py --digest           before they are run
    python tests/support/passed.py --record DIGEST    that one, after all of them have passed
"""

import argparse
import hashlib
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "packages/regard-verify"
RECORD = f"{PACKAGE}/tests/passed.txt"
WITH_REGARD = f"{PACKAGE}/tests/test_no_false_alarm.py"  # judges layers of regard
PYTHON = sys.version_info[:2]
READ = (
    PACKAGE,
    "tests/support",
    "conftest.py",
    "constraints.txt",
    "pyproject.toml",
    ".pre-commit-hooks.yaml",
    "docs/guides/verify.md",
    "docs/zh/guides/verify.md",
    "docs/verify-*.md",
)


def digest() -> str:
    """Of the names and the contents of all files that git knows or would add, and of Python's
    version; "" where there is no git to ask, which is never the record."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *READ]
    try:
        names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
    found = hashlib.sha256(f"Python {PYTHON}\n".encode())
    for name in sorted({*names.split("\0")} - {"", RECORD}):
        file = ROOT / name
        content = file.read_bytes() if file.is_file() else b"deleted"
        found.update(f"{name} {hashlib.sha256(content).hexdigest()}\n".encode())
    return found.hexdigest()


def tests() -> str:
    """The tests of the package that an ordinary run has to run, as a path."""
    record = ROOT / RECORD
    known = record.read_text().strip() if record.is_file() else ""
    return WITH_REGARD if known and known == digest() else PACKAGE


def record(before: str) -> None:
    """Write the digest of before the tests, unless it is known, or a file changed meanwhile."""
    if before and before == digest() and tests() == PACKAGE:
        (ROOT / RECORD).write_text(before + "\n")
        print(f"all tests of {PACKAGE} passed: commit {RECORD}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--tests", action="store_true")
    what.add_argument("--digest", action="store_true")
    what.add_argument("--record", metavar="DIGEST")
    given = parser.parse_args()
    if given.record is not None:
        record(given.record)
    else:
        print(tests() if given.tests else digest())


if __name__ == "__main__":
    main()
