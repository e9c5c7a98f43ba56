"""The page of other projects' scenarios, made from what the tests under tests/scenarios say of themselves.

python tests/support/held_to_table.py
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scenarios import FOLDER, collected

PAGE = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "held_to.md"
BEGIN, END = "<!-- scenarios -->\n", "<!-- end of scenarios -->\n"


def render(found):
    """Markdown of the scenarios (each with its number of cases): a table for each project, then one of what differs."""
    found = list(found)
    held = sum(cases for each, cases in found if not each.differs)
    other = sum(cases for each, cases in found if each.differs)
    files = {(each.project, each.file) for each, _ in found}
    parts = [
        f"{held + other} cases from {len(files)} files, where a test of ours that answers for two of theirs counts for both: "
        f"{held} hold, {other} differ by design.\n"
    ]
    for project in dict.fromkeys(each.project for each, _ in found):
        rows = [["source file", "their tests: what holds here", "cases", "result"], ["---", "---", "--:", "---"]]
        for file in dict.fromkeys(each.file for each, _ in found if each.project == project):
            own = [(each, cases) for each, cases in found if (each.project, each.file) == (project, file)]
            says = "; ".join(f"`{each.test}`: {each.says}" for each, _ in own)
            differing = sum(cases for each, cases in own if each.differs)
            result = "held" if not differing else f"{differing} by design otherwise"
            rows.append([f"`{file}`", says, str(sum(cases for _, cases in own)), result])
        parts.append(f"## {project}\n\n{_table(rows)}")
    rows = [["project and test", "here", "reason"], ["---", "---", "---"]]
    rows += [
        [f"{each.project}, `{each.file}`, `{each.test}`", each.says, each.differs] for each, _ in found if each.differs
    ]
    parts.append(f"## Different by design\n\n{_table(rows)}")
    return "\n".join(parts)


def with_tables(text, tables):
    """`text` with `tables` between its markers. Raises ValueError if it has none."""
    if BEGIN not in text or END not in text:
        raise ValueError(f"the page has no place for the tables: {BEGIN.strip()} and {END.strip()}")
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}{tables}{END}{rest.partition(END)[2]}"


def _table(rows):
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


if __name__ == "__main__":
    sys.path.insert(0, str(FOLDER))
    PAGE.write_text(with_tables(PAGE.read_text(), render(collected())))
