"""Lines of each room of booster/ and its budget; exits with 1 where a room, or the whole, is over it. `make lint` runs it.

python tests/support/room_lines.py           compare
python tests/support/room_lines.py --print   the budgets that the sizes of now would have

A budget is the size that the room had when it was last put in order, rounded up to the next hundred. Who needs more lines takes
some away elsewhere in the room, or raises the number in the commit that needs it, and says why there.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2] / "booster"
BUDGETS = {
    "loose": 1900,
    "capture": 1600,
    "checkpoint": 5600,
    "cli": 2400,
    "common": 3000,
    "data": 1300,
    "facade": 3900,
    "integrations": 700,
    "interface": 1900,
    "kernels": 3700,
    "masters": 4500,
    "memory": 1900,
    "mixed_precision": 8600,
    "model": 1200,
    "nn": 640,
    "number_formats": 600,
    "numerics": 6400,
    "plugin": 9700,
    "ranks": 500,
    "shards": 3000,
    "tensors": 1600,
    "update": 4700,
}
TOTAL = 68_420  # less than all rooms together: not every one of them may use its hundred up
LARGEST, SMALLEST = 500, 40  # lines of a file that is rather two nouns, or half a one


def files() -> dict[Path, int]:
    """Lines of every file, by its path in the package."""
    return {path.relative_to(ROOT): len(path.read_text().splitlines()) for path in sorted(ROOT.rglob("*.py"))}


def lines() -> dict[str, int]:
    """Lines by room; files outside of any room are one room together, called "loose"."""
    found: dict[str, int] = {}
    for path, number in files().items():
        room = path.parts[0] if len(path.parts) > 1 else "loose"
        found[room] = found.get(room, 0) + number
    return found


def faults(sizes: dict[str, int]) -> list[str]:
    """What is over its budget, in words."""
    found = [
        f"{room} has {size:,} lines of {BUDGETS.get(room, 0):,}"
        for room, size in sizes.items()
        if size > BUDGETS.get(room, 0)
    ]
    if sum(sizes.values()) > TOTAL:
        found.append(f"booster/ has {sum(sizes.values()):,} lines of {TOTAL:,}")
    return found


def main() -> int:
    sizes, each = lines(), files()
    if "--print" in sys.argv[1:]:
        print("\n".join(f'    "{room}": {-(-size // 100) * 100},' for room, size in sizes.items()))
        return 0
    large = [str(path) for path, number in each.items() if number > LARGEST]
    small = [str(path) for path, number in each.items() if number < SMALLEST and not path.name.startswith("__")]
    print(f"{sum(sizes.values()):,} lines of {TOTAL:,} in {len(each)} files of booster/")
    print(f"{len(large)} files over {LARGEST} lines: {', '.join(large) or 'none'}")
    print(f"{len(small)} files under {SMALLEST} lines: {', '.join(small) or 'none'}")
    for fault in faults(sizes):
        print(f"over budget: {fault}", file=sys.stderr)
    return 1 if faults(sizes) else 0


if __name__ == "__main__":
    sys.exit(main())
