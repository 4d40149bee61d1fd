"""The pages: what the documents show, in both languages."""

import re
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^( *)```(\w*)([^\n]*)\n(.*?)^\1```[ ]*$", re.DOTALL | re.MULTILINE)
PRINTS = 'title="prints"'
PRINTS_FIGURES = 'title="prints (figures vary)"'
EXCERPT = 'title="excerpt"'  # lines of a function, which do not run alone
FILE = re.compile(r'title="(\w+\.py)"')  # the name of a file, as the title of its block


class Block(NamedTuple):
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    title: str
    code: str


def pages() -> list[str]:
    """Every page that users read, as paths from the root of the repository."""
    found = [*ROOT.glob("*.md"), *ROOT.glob("packages/*/*.md"), *(ROOT / "docs").rglob("*.md")]
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, *languages: str) -> list[Block]:
    """The fenced blocks of a page, of these languages or of all, without their indentation."""
    text, found = read(page), []
    for match in FENCE.finditer(text):
        indent, language, title, code = match.groups()
        if languages and language not in languages:
            continue
        line = text.count("\n", 0, match.start()) + 1
        lines = [each.removeprefix(indent) for each in code.splitlines(keepends=True)]
        found.append(Block(page, line, language, title.strip(), "".join(lines)))
    return found


def snippets() -> list[tuple[Block, Block | None]]:
    """Every Python snippet of every page, with the block that shows what it prints, if any."""
    found = []
    for page in pages():
        shown = blocks(page)
        for each, following in zip_longest(shown, shown[1:]):
            alone = each.title != EXCERPT and not (following and _runs(following, each))
            if each.language == "python" and alone:
                prints = following and following.title in (PRINTS, PRINTS_FIGURES)
                found.append((each, following if prints else None))
    return found


def programs() -> list[tuple[Block, Block, Block]]:
    """Every program of several ranks: the file, the command that runs it, and what it prints."""
    found = []
    for page in pages():
        shown = blocks(page)
        for file, command, prints in zip(shown, shown[1:], shown[2:], strict=False):
            if _runs(command, file):
                assert prints.title == PRINTS, f"{page}:{file.line} does not show what it prints"
                found.append((file, command, prints))
    return found


def _runs(command: Block, file: Block) -> bool:
    """Whether a command runs a block, which has a file's name as its title, on several ranks."""
    name = FILE.fullmatch(file.title)
    return name is not None and command.code.startswith("torchrun ") and name[1] in command.code


def shown_commands(page: str, verb: str) -> list[tuple[str, Block]]:
    """The command lines `regard VERB` of a page that stand alone, with what they print."""
    found = blocks(page)
    return [
        (each.code.strip().removeprefix("regard "), following)
        for each, following in pairwise(found)
        if each.language == "sh" and following.title in (PRINTS, PRINTS_FIGURES)
        if each.code.startswith(f"regard {verb} ")
    ]


def without_figures(text: str) -> str:
    """The text with every number as N, and runs of spaces as one."""
    return re.sub(r"\s+", " ", re.sub(r"\d[\d,.]*(e[+-]?\d+)?", "N", text)).strip()


def prose(page: str) -> str:
    """A page without its fenced blocks."""
    return FENCE.sub("", read(page))


INLINE = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)")


def without_blocks(text: str) -> str:
    """A text without its fenced blocks."""
    return FENCE.sub("", text)


def inline_codes(text: str) -> list[str]:
    """What stands between backticks, outside of fenced blocks."""
    return [code.strip() for _, code in INLINE.findall(without_blocks(text))]


def fences(text: str, *languages: str) -> list[str]:
    """The fenced blocks of a text in these languages."""
    return [code for _, language, _, code in FENCE.findall(text) if language in languages]


MEASURED = re.compile(r"\d\s?(?:[x\u00d7\u500d]|ms|µs|s|tokens/s|/s)(?!\w)|\d\.\d")
ARXIV = re.compile(r"arXiv[ :]\d+\.\d+")
COMMAND = re.compile(
    r"python (?:benchmarks|drawings|examples|packages|tests)/\w"
    r"|\bregard (?:compare|convert|bench|verify) "
    r"|`regard \w+`|\.json\b|^```python",
    re.MULTILINE,
)


def tables_without_source(text: str) -> list[str]:
    """Tables of measurements whose section names no command, JSON file or snippet.

    A table is of measurements if a third of its cells have a unit of time or a decimal point:
    sizes and counts are integers, and follow from arithmetic. A section ends at the next heading
    of level 2, so that a table under a smaller heading may have its command above it.
    """
    found = []
    for section in re.split(r"^(?=## )", text, flags=re.MULTILINE):
        for table in re.findall(r"(?:^\|.*\n?)+", without_blocks(section), re.MULTILINE):
            rows = [line.strip().strip("|").split("|") for line in table.splitlines()[2:]]
            cells = [cell for row in rows for cell in row[1:]]
            measured = [cell for cell in cells if MEASURED.search(ARXIV.sub("", cell))]
            if 3 * len(measured) > len(cells) and not COMMAND.search(section):
                found.append(f"{table.splitlines()[0]}: no command, JSON file or snippet beside it")
    return found


def words_of(text: str) -> float:
    """The words of a page without blocks; a Chinese word has 1.7 characters.

    Chinese words have one or two characters, most two, and 1.5 to 1.8 on average; at 1.7 a page
    and its translation come out nearly alike.
    """
    text = re.sub(r"\]\([^)]*\)", "]", without_blocks(text))
    chinese = len(re.findall("[\u4e00-\u9fff]", text))
    return chinese / 1.7 + len(re.findall(r"[A-Za-z0-9_]+(?:[.,'\u2019-][A-Za-z0-9_]+)*", text))
