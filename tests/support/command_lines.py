"""Command lines that pages show: whether their verbs, options, values and files exist."""

import re
import shlex
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import typer

from pages import ROOT
from regard.cli.app import app
from regard.compare import chosen
from regard.hf.generating.text import cache_name
from regard_verify import LAWS, Conventions

FOLDERS = ("src", "benchmarks", "docs", "scripts", "tests", "drawings", "examples", "packages")
PROGRAMS = ("src", "benchmarks", "scripts", "drawings", "examples", "packages/regard-verify")
FOREIGN_OPTIONS = {
    "--collect-only": "pytest",
    "--deselect": "pytest",
    "--no-deps": "pip",
    "--nproc-per-node": "torchrun",
    "--standalone": "torchrun",
    "--wheel-dir": "pip",
}
SHELL = {"cd", "export", "git", "mypy", "pip", "pytest", "python", "regard", "ruff", "source"}
PART = re.compile(r"""(?:"[^"]*"|'[^']*'|(?<!&)&(?!&)|[^;|&"'])+""")  # between && ; | but in quotes
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")


@cache
def command_line() -> Any:
    return typer.main.get_command(app)


def verbs() -> dict[str, Any]:
    """The verbs of the command line, those of a group with its name: `show mask`."""
    found = {}
    for name, command in command_line().commands.items():
        inside = getattr(command, "commands", None)
        found |= (
            {f"{name} {each}": one for each, one in inside.items()} if inside else {name: command}
        )
    return found


def options_of(verb: str) -> set[str]:
    """The options of a verb; of "", those that come before it."""
    command = verbs()[verb] if verb else command_line()
    names = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    return names | {"--help"}


@cache
def options() -> set[str]:
    """Every option of regard, of its scripts and of its pytest plugin."""
    found = {*FOREIGN_OPTIONS}.union(*(options_of(verb) for verb in ("", *verbs())))
    for folder in PROGRAMS:
        for path in (ROOT / folder).rglob("*"):
            program = path.parent.name == "scripts" and path.is_file()
            if path.suffix == ".py" or program:
                found |= set(OPTION.findall(path.read_text(encoding="utf-8")))
    return found


def commands(block: str) -> list[str]:
    """The commands of a block, without prompts and comments."""
    lines = re.sub(r"\\\n\s*", " ", block).splitlines()
    bare = (re.sub(r"(^|\s)#.*", "", line).removeprefix("$ ").strip() for line in lines)
    return [part.strip() for line in bare for part in PART.findall(line) if part.strip()]


def faults_of_command(line: str, *, whole: bool) -> list[str]:
    """The faults of a command; if it is not `whole`, arguments may be missing."""
    words = shlex.split(line)
    while words and re.fullmatch(r"\w+=\S*", words[0]):
        words = words[1:]
    if not words:
        return []
    first, *rest = words
    if first == "regard":
        return faults_of_verb(line, rest, whole=whole)
    if first == "regard-verify":
        return faults_of_verb(line, ["verify", *rest], whole=whole)
    if first.startswith("./"):
        return faults_of_program(line, first.removeprefix("./"), rest)
    if first == "python" and rest and rest[0] == "-m":
        # finding pip replaces distutils, with a warning, where setuptools is installed
        known = rest[1] == "pip" or find_spec(rest[1])
        return [] if known else [f"{line}: no module {rest[1]}"]
    if first == "python" and rest and rest[0].startswith(FOLDERS):
        return faults_of_program(line, rest[0], rest[1:])
    if first == "torchrun":
        return faults_of_torchrun(line, rest)
    if first == "pytest":
        given = [word for word in rest if OPTION.fullmatch(word)]
        return [f"{line}: no option {each}" for each in given if each not in options()]
    return [] if first in SHELL or not whole else [f"{line}: unknown command {first}"]


def faults_of_torchrun(line: str, words: list[str]) -> list[str]:
    """The faults of a call of torchrun: those of its own options, and of the program's."""
    at = next((at for at, word in enumerate(words) if word.endswith(".py")), len(words))
    own = [each for each in words[:at] if OPTION.match(each)]
    faults = [f"{line}: no option {e}" for e in own if FOREIGN_OPTIONS.get(e) != "torchrun"]
    if at < len(words) and words[at].startswith(FOLDERS):
        faults += faults_of_program(line, words[at], words[at + 1 :])
    return faults


def faults_of_program(line: str, path: str, words: list[str]) -> list[str]:
    """The faults of a call of a program of the repository."""
    if not (ROOT / path).is_file():
        return [f"{line}: no such file {path}"]
    texts = [ROOT / path, *(ROOT / path).parent.glob("common.py")]
    has = set(OPTION.findall("".join(each.read_text(encoding="utf-8") for each in texts)))
    if path == "scripts/test":
        has |= options()  # further arguments go to pytest
    given = [word.partition("=")[0] for word in words if word.startswith("--")]
    return [f"{line}: {path} has no option {each}" for each in given if each not in has]


def faults_of_verb(line: str, words: list[str], *, whole: bool) -> list[str]:
    """The faults of a command line of regard."""
    verb, *rest = words or [""]
    if rest and f"{verb} {rest[0]}" in verbs():
        verb, *rest = f"{verb} {rest[0]}", *rest[1:]
    if verb in options_of("") or verb in ("", "VERB"):
        return []
    if verb not in verbs():
        return [f"{line}: regard has no verb {verb}"]
    given = [word.partition("=")[0] for word in rest if OPTION.match(word)]
    found = [f"{line}: {verb} has no option {e}" for e in given if e not in options_of(verb)]
    for option, value in pairwise(rest):
        found += [f"{line}: {reason}" for reason in refused(verb, option, value)]
    if whole and not found:
        try:
            verbs()[verb].make_context(verb, list(rest))
        except Exception as error:  # of click, or of what typer has in its place
            sentence = getattr(error, "format_message", lambda: str(error))()
            found.append(f"{line}: {sentence}")
    return found


def refused(verb: str, option: str, value: str) -> list[str]:
    """Why the verb itself would refuse a value, which its parser does not know."""
    readers = {("compare", "--attention"): lambda: chosen([value])}
    readers |= {("generate", "--cache"): lambda: cache_name(value)}
    if (verb, option) in readers:
        try:
            readers[verb, option]()
        except ValueError as error:
            return [str(error)]
    if (verb, option) == ("verify", "--only") and value not in LAWS and not value.isupper():
        return [f"no law {value}"]
    if (verb, option) == ("verify", "--like"):
        name = value.partition("=")[0]
        if name not in Conventions.__dataclass_fields__ and name not in ("arguments", "options"):
            return [f"no convention {name}"]
    return []
