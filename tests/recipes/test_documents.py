"""The commands that the documents show are real: their keys and options exist and compose."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.commands import compose_config

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(
    r"dlrm (prepare|train|check|evaluate|predict)((?: +[^\s`|#]+=(?:\"[^\"]*\"|[^\s`|#]*))+)"
)


def commands() -> list[tuple[str, str, str]]:
    found = []
    for document in DOCUMENTS:
        text = document.read_text().replace("\\\n", " ")
        for verb, arguments in COMMAND.findall(text):
            found.append((document.name, verb, arguments.strip()))
    return found


@pytest.mark.parametrize(("document", "verb", "arguments"), sorted(set(commands())))
def test_a_documented_command_composes(document: str, verb: str, arguments: str) -> None:
    overrides = [a for a in shlex.split(arguments) if "…" not in a and "NAME" not in a]
    if "NAME" in arguments or "=mine" in arguments or "=shop" in arguments:
        pytest.skip("its dataset is the reader's own")
    needs_run = verb in ("evaluate", "predict", "export")
    if needs_run and not any(a.startswith("run=") for a in overrides):
        overrides.append("run=outputs/train/x")
    compose_config(verb, *overrides)


def test_there_are_commands_to_check() -> None:
    assert len(commands()) > 10


def test_every_file_in_the_readme_s_tree_exists() -> None:
    tree = (ROOT / "README.md").read_text().split("## Tree")[1].split("```")[1]
    folder = ""
    for line in tree.strip().splitlines():
        if heading := re.match(r"(\w+)/", line):
            folder = heading[1]
        for name in re.findall(r"[\w/]+\.(?:py|md)", line):
            assert (ROOT / folder / name).exists() or (ROOT / name).exists(), f"{folder}/{name}"
