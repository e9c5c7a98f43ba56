"""The table of precisions and parallelisms in README and docs, from the results of the matrix test.

python -m pytest tests/distributed/test_matrix.py --matrix-out docs/matrix.json
python tests/support/matrix_table.py
"""

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "matrix.json"
PAGES = (ROOT / "README.md", ROOT / "docs" / "parallelism.md")
_MARKED = re.compile(r"(<!-- matrix -->\n).*?(<!-- end of matrix -->)", re.DOTALL)


def render(results):
    """A Markdown table: a row for each precision, a column for each parallelism, in the order of the results."""
    cells = [tuple(cell) for cell in results["passed"]]
    rows = list(dict.fromkeys(precision for precision, _ in cells))
    columns = list(dict.fromkeys(parallelism for _, parallelism in cells))
    lines = [["", *columns], ["---"] * (len(columns) + 1)]
    lines += [[f"`{row}`", *("yes" if (row, column) in cells else "no" for column in columns)] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def with_table(text, table):
    """`text` with `table` between its markers. Raises ValueError if it has none."""
    if not _MARKED.search(text):
        raise ValueError("the page has no place for the table: <!-- matrix --> and <!-- end of matrix -->")
    return _MARKED.sub(lambda found: found[1] + table + found[2], text)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_table(page.read_text(), render(json.loads(RESULTS.read_text()))))
