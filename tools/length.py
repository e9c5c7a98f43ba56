"""How long the pages are: `make docs` calls it. A line for each tab of the menu, and what a reader would read in all.

Words are what blanks divide and what has a letter or a digit: bars of tables and marks of lists are none. Prose and code are
counted, headings, lists and comments in code too. Tables are counted apart. Those of Evidence are written by programs of
`benchmarks/` and tests, as are two whole pages; the others are by hand.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = {"changes.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}  # pages that lie beside docs/
WRITTEN = {"reference/cli.md", "guides/mistakes.md"}  # by argparse, and by tests/support/mistakes.py


def count(text: str) -> tuple[int, int]:
    """Words of prose and code, and words of tables."""
    prose = _words(re.sub(r"^\|.*$", "", text, flags=re.MULTILINE))
    return prose, _words(text) - prose


def _words(text: str) -> int:
    return sum(any(mark.isalnum() for mark in word) for word in text.split())


def main() -> None:
    menu = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    totals = {"prose and code": 0, "tables by hand": 0, "written by programs": 0}
    for tab in re.split(r"^  - (?=\w)", menu, flags=re.MULTILINE)[1:]:
        words = dict.fromkeys(totals, 0)
        for name in re.findall(r": ([\w./-]+\.md)$", tab, re.MULTILINE):
            prose, tables = count((ROOT / FILES.get(name, f"docs/{name}")).read_text())
            if name in WRITTEN:
                words["written by programs"] += prose + tables
            else:
                words["prose and code"] += prose
                words["written by programs" if tab.startswith("Evidence") else "tables by hand"] += tables
        totals = {kind: totals[kind] + words[kind] for kind in totals}
        sys.stdout.write(f"{tab.partition(':')[0]}: " + _said(words))
    prose, tables = count((ROOT / "README.md").read_text())
    totals["prose and code"] += prose
    totals["tables by hand"] += tables
    sys.stdout.write(f"words, README included: {_said(totals)}")


def _said(words: dict[str, int]) -> str:
    return ", ".join(f"{number:,} {kind}" for kind, number in words.items()) + "\n"


if __name__ == "__main__":
    main()
