"""The tables of precisions and parallelisms in docs/, from the results of the tests of their cells.

python -m pytest tests/distributed/test_matrix.py --matrix-out docs/matrix.json
python -m pytest tests/distributed/test_checkpoint_ranks.py -k interrupted --resume-out docs/resume.json
python tests/support/matrix_table.py
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Table:
    """A table in `pages` between the markers `<!-- name -->` and `<!-- end of name -->`, made of the file `results`."""

    name: str
    results: Path
    pages: tuple[Path, ...]

    def render(self):
        return render(json.loads(self.results.read_text()))


TABLES = (
    Table("matrix", ROOT / "docs" / "matrix.json", (ROOT / "docs" / "parallelism.md",)),
    Table("resume matrix", ROOT / "docs" / "resume.json", (ROOT / "docs" / "checkpoints.md",)),
)


def render(results):
    """A Markdown table: a row for each precision, a column for each parallelism, in the order of the results."""
    cells = [tuple(cell) for cell in results["passed"]]
    rows = list(dict.fromkeys(precision for precision, _ in cells))
    columns = list(dict.fromkeys(parallelism for _, parallelism in cells))
    lines = [["", *columns], ["---"] * (len(columns) + 1)]
    lines += [[f"`{row}`", *("yes" if (row, column) in cells else "no" for column in columns)] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def with_table(text, name, table):
    """`text` with `table` between the markers of `name`. Raises ValueError if it has none."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    marked = re.compile(f"({re.escape(begin)}).*?({re.escape(end)})", re.DOTALL)
    if not marked.search(text):
        raise ValueError(f"the page has no place for the table: {begin.strip()} and {end}")
    return marked.sub(lambda found: found[1] + table + found[2], text)


if __name__ == "__main__":
    for each in TABLES:
        for page in each.pages:
            page.write_text(with_table(page.read_text(), each.name, each.render()))
