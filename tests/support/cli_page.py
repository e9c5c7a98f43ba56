"""The page of the commands, docs/reference/cli.md, from what each command says of itself.

python tests/support/cli_page.py
"""

import contextlib
import io
from pathlib import Path
from unittest import mock

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "cli.md"
ACTIONS = {"checkpoint": ("show", "verify", "convert")}  # commands with commands of their own

INTRODUCTION = """# Commands

What `booster COMMAND --help` prints, for each command. `--name_like_this` and `--name-like-this` are the same option.
"""


def commands() -> list[tuple[str, ...]]:
    """Each command, and each action of one that has several."""
    from booster.cli import _COMMANDS

    names: list[tuple[str, ...]] = []
    for name in _COMMANDS:
        names += [(name,), *((name, action) for action in ACTIONS.get(name, ()))]
    return names


def help_of(command: tuple[str, ...]) -> str:
    """What `booster COMMAND --help` prints, at a width of 96."""
    from booster.cli import main

    printed = io.StringIO()
    with mock.patch.dict("os.environ", {"COLUMNS": "96"}), contextlib.redirect_stdout(printed):
        main([*command, "--help"])
    return printed.getvalue()


def render() -> str:
    sections = [f"## {' '.join(name)}\n\n```text\n{help_of(name).rstrip()}\n```\n" for name in commands()]
    return "\n".join([INTRODUCTION, *sections])


if __name__ == "__main__":
    PAGE.write_text(render())
