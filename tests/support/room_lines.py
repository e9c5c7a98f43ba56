"""Lines of each room of booster/ beside its budget. `make lint` prints them: who passes one says why in the commit.

A budget is the size that the room had when it was last put in order, and a tenth more.
"""

from pathlib import Path

ROOT = Path(__file__).parents[2] / "booster"
BUDGETS = {
    "loose": 2000,
    "capture": 1300,
    "checkpoint": 4400,
    "cli": 2800,
    "data": 1300,
    "facade": 1800,
    "frozen": 300,
    "common": 2100,
    "integrations": 700,
    "interface": 1600,
    "kernels": 2100,
    "masters": 4200,
    "memory": 1900,
    "mixed_precision": 6600,
    "model": 700,
    "nn": 500,
    "number_formats": 600,
    "numerics": 6300,
    "plugin": 7400,
    "ranks": 500,
    "shards": 2700,
    "tensors": 1000,
    "update": 3700,
}


def lines() -> dict[str, int]:
    """Lines of Python by room; files that lie in no room are one room together, by the name of "loose"."""
    found: dict[str, int] = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).parts
        room = parts[0] if len(parts) > 1 else "loose"
        found[room] = found.get(room, 0) + len(path.read_text().splitlines())
    return found


if __name__ == "__main__":
    sizes = lines()
    over = [room for room, size in sizes.items() if size > BUDGETS.get(room, 0)]
    print(
        f"{sum(sizes.values()):,} lines in booster/, of {sum(BUDGETS.values()):,}; "
        + (
            f"over their budget: {', '.join(f'{r} {sizes[r]:,} of {BUDGETS.get(r, 0):,}' for r in over)}"
            if over
            else "no room is over its budget"
        )
    )
