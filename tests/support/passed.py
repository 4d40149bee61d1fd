"""Whether regard-verify is as it was when all of its tests last passed.

It is a distribution of its own and imports nothing of regard. So the results of its tests depend on
its files, on the pages that they read, on what tests share, and on the pinned versions of other
packages. One digest of these is in `packages/regard-verify/tests/passed.txt`: while it is the same,
`./scripts/test` leaves these tests to `--all`, but for `WITH_REGARD`.

    python tests/support/passed.py --tests     which tests of the package to run, as a path
    python tests/support/passed.py --record    after all of them have passed
"""

import argparse
import hashlib
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "packages/regard-verify"
RECORD = f"{PACKAGE}/tests/passed.txt"
WITH_REGARD = f"{PACKAGE}/tests/test_no_false_alarm.py"  # judges layers of regard
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
    """Of the names and the contents of all files that git knows or would add."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *READ]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = hashlib.sha256()
    for name in sorted({*names.split("\0")} - {"", RECORD}):
        file = ROOT / name
        content = file.read_bytes() if file.is_file() else b"deleted"
        found.update(f"{name} {hashlib.sha256(content).hexdigest()}\n".encode())
    return found.hexdigest()


def tests() -> str:
    """The tests of the package that an ordinary run has to run, as a path."""
    record = ROOT / RECORD
    known = record.read_text().strip() if record.is_file() else ""
    return WITH_REGARD if known == digest() else PACKAGE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--tests", action="store_true")
    what.add_argument("--record", action="store_true")
    if parser.parse_args().tests:
        print(tests())
    elif tests() == PACKAGE:
        (ROOT / RECORD).write_text(digest() + "\n")
        print(f"all tests of {PACKAGE} passed: commit {RECORD}")


if __name__ == "__main__":
    main()
