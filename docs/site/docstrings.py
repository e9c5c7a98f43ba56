"""Docstrings of the library as Markdown: a line `name: what it is` begins an item of a list, and its name becomes code."""

import re
from typing import Any

import griffe

ITEM = re.compile(r"^(\w+(?:, \w+)*): (?=\S)")


class PlainDocstrings(griffe.Extension):
    """Rewrites each docstring before it is rendered."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """Paragraphs that explain arguments, one after the other, as a list; all else as it is."""
    lines: list[str] = []
    for line in text.splitlines():
        item = ITEM.match(line)
        if item and not line.startswith(("http", "Note", "Raises")):
            names = ", ".join(f"`{name}`" for name in item[1].split(", "))
            if lines and lines[-1] and not lines[-1].startswith(("- ", "  ")):
                lines.append("")
            lines.append(f"- {names}: {line[item.end() :]}")
        elif line and lines and lines[-1].startswith(("- ", "  ")) and not line.startswith((" ", "-")):
            lines.append(f"  {line}")
        else:
            lines.append(line)
    return "\n".join(lines)
