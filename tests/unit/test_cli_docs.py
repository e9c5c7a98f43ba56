"""Every option of the command line is on the page of its command, or on that of all commands, which the page then names."""

import re
from pathlib import Path

import pytest

from booster.cli import _COMMANDS, main

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = {
    "run": "launch",
    "check": "launch",
    "env": "launch",
    "estimate": "memory",
    "checkpoint show": "checkpoints",
    "checkpoint verify": "checkpoints",
    "checkpoint convert": "checkpoints",
    "report": "numerics",
    "compare": "numerics",
    "advise": "guides/choose",
}


def options_in(text):
    return {name.replace("-", "_") for name in re.findall(r"(?<![\w-])--([a-z][a-z_-]*)", text)}


@pytest.mark.parametrize("command", PAGES)
def test_every_option_of_a_command_is_on_its_page(command, capsys):
    assert main([*command.split(), "--help"]) == 0
    spelled = options_in(capsys.readouterr().out) - {"help", "name_with_underscores", "name_with_hyphens"}
    page = (DOCS / f"{PAGES[command]}.md").read_text()
    assert f"booster {command}" in page
    if spelled - options_in(page):
        assert "reference/cli.md" in page
        section = (DOCS / "reference/cli.md").read_text().partition(f"\n## {command}\n")[2].partition("\n## ")[0]
        assert spelled - options_in(page) - options_in(section) == set()


def test_every_command_has_a_page():
    assert {command.partition(" ")[0] for command in PAGES} == set(_COMMANDS)
