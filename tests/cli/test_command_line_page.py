"""The page of the command line names every verb and option, and no other."""

import re

import pytest
import typer

from pages import read
from regard.cli.app import app
from regard.cli.options import VERBS

PAGE = read("docs/reference/command-line.md")
COMMAND = typer.main.get_command(app)
OWN = {"--version", "--help", "--install-completion", "--show-completion"}


def options(verb):
    command = COMMAND
    for word in verb.split():  # of a group, its name comes first
        command = command.commands[word]
    found = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    return {name for name in found if name.startswith("--")}


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_of_a_verb_is_there(verb):
    missing = {name for name in options(verb) if not re.search(rf"{name}\b", PAGE)}
    assert missing <= {"--help", "--stream"}  # shown as --no-stream
    assert f"| `{verb}` |" in PAGE


def test_no_other_option_is_named():
    known = OWN.union(*map(options, VERBS))
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", PAGE)) <= known
