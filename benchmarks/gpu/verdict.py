"""What rows come to: tables, one line a part, and lines for booster/kernels/switches.py."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.gpu.row import PARTS, Found, ended

SLOWER = 1.05  # as long as torch's way of the same: what takes longer is switched off
_SHOWN = 3  # names in a line


def line_of(row: Found) -> str:
    """One row in one line."""
    said = [row[key] for key in ("error", "skipped") if key in row]
    if "right" in row:
        said.append("right" if row["right"] else f"WRONG: {row.get('why', '')}")
    ways: Mapping[str, float] = row.get("ways", {})
    base = next(iter(ways.values()), None)
    for name, us in ways.items():
        share = f" ({us / base:.2f})" if base and us is not base else ""
        extra = [f"{row[key][name]} {word}" for key, word in _OF_A_WAY if row.get(key, {}).get(name) is not None]
        said.append(f"{name} {us:,.0f} us{share}" + "".join(f", {each}" for each in extra))
    said += [f"floor {row['floor']:,.0f} us"] if "floor" in row else []
    said += [f"{name}: {why}" for name, why in row.get("left", {}).items()]
    said += [f"{way} over its goal of {most:g}" for way, most in over_goal(row)]
    said += [row[key] for key in ("note",) if key in row]
    return f"{row['part']} {row['row']}: {'; '.join(said)}"


_OF_A_WAY = (("launches", "launches"), ("waits", "waits"), ("peak", "GiB"))


def is_rehearsed(row: Found) -> bool:
    """Whether times of a row say nothing."""
    return str(row.get("machine", "")).startswith("rehearsal")


def over_goal(row: Found) -> list[tuple[str, float]]:
    """Ways that take longer than their goal, with that."""
    ways = {} if is_rehearsed(row) else row.get("ways", {})
    return [
        (way, most)
        for way, beside, most in row.get("goals", ())
        if way in ways and beside in ways and ways[way] > most * ways[beside]
    ]


def decided(rows: Iterable[Found]) -> dict[str, tuple[bool, str, Found]]:
    """By switch: whether it is on, why, and the row that says so, the first that says no."""
    found: dict[str, tuple[bool, str, Found]] = {}
    for row in rows:
        for switch, ways in row.get("judges", {}).items():
            why = _against(row, ways)
            if "skipped" in row or (switch in found and (not found[switch][0] or why is None)):
                continue
            if why is not None or "right" in row or _was_timed(row, ways):
                found[switch] = why is None, why or "right", row
    return found


def _was_timed(row: Found, ways: Any) -> bool:
    return bool(ways) and not is_rehearsed(row) and all(way in row.get("ways", {}) for way in ways)


def _against(row: Found, ways: Any) -> str | None:
    """Why a row has what it judges switched off."""
    if "error" in row:
        return f"{row['row']}: {row['error']}"[:120]
    if row.get("right") is False:
        return f"{row['row']}: {row.get('why', 'wrong')}"[:120]
    if _was_timed(row, ways):
        mine, torchs = (row["ways"][way] for way in ways)
        if mine > SLOWER * torchs:
            return f"{row['row']}: {mine / torchs:.2f} of torch's time"
    return None


def last_line(part: int, rows: list[Found], left: list[str]) -> str:
    """What is right, what is slower than its goal, what to switch off, what failed, and what is left."""
    own = [row for row in rows if row["part"] == part]
    judged = [row for row in own if "right" in row]
    right = [row for row in judged if row["right"]]
    wrong = [row["row"] for row in judged if not row["right"]]
    slow = [f"{row['row']}: {way}" for row in own for way, _ in over_goal(row)]
    failed = [row["row"] for row in own if "error" in row]
    skipped = [row["row"] for row in own if "skipped" in row]
    off = [switch for switch, (on, _, _) in decided(own).items() if not on]
    timed = sum("ways" in row for row in own)
    said = [f"{len(right)} of {len(judged)} right"] * bool(judged) + [f"{timed} timed"] * bool(timed)
    for word, names in (
        ("wrong", wrong),
        ("slower than the goal", slow),
        ("switch off", off),
        ("failed", failed),
        ("not here", skipped),
        ("not made", left),
    ):
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            said.append(f"{word}: {', '.join(names[:_SHOWN])}{more}")
    return f"part {part}, {PARTS[part][1]}: {'; '.join(said) or f'{len(own)} rows, none of them judged'}"


def switch_lines(rows: list[Found]) -> list[str]:
    """Lines for `DECIDED` in booster/kernels/switches.py."""
    found = []
    for switch, (on, why, row) in sorted(decided(rows).items()):
        card, date = row.get("machine", "").partition(";")[0], row.get("ended", "")[:10]
        found.append(f'    "{switch}": KernelSwitch({on}, {_quoted(card)}, "{date}", {_quoted(why)}),')
    return found


def _quoted(text: str) -> str:
    return '"' + "".join(each for each in text if each.isprintable()).replace("\\", "/").replace('"', "'") + '"'


def is_bad(rows: Iterable[Found]) -> bool:
    """Whether something is wrong or failed."""
    return any("error" in row or row.get("right") is False for row in rows)


def report(lines: list[Found], parts: Iterable[int], left: Mapping[int, list[str]]) -> str:
    """Tables of the parts, their last lines, and the lines of switches, in Markdown."""
    rows = list(ended(lines).values())
    said = []
    for part in parts:
        own = [row for row in rows if row["part"] == part]
        said.append(f"## Part {part}: {PARTS[part][1]}\n")
        machines = dict.fromkeys(
            f"{row.get('machine')}; {row.get('clocks')}; {row.get('ended', '')[:10]}" for row in own
        )
        said += [*machines, "", "| row | found |", "|---|---|"]
        said += ["| {} | {} |".format(*line_of(row).split(" ", 1)[1].replace("|", "/").split(": ", 1)) for row in own]
        said += ["", last_line(part, rows, left.get(part, [])), ""]
    said += ["## For `DECIDED` in booster/kernels/switches.py", "", "```python", *switch_lines(rows), "```", ""]
    return "\n".join(said)
