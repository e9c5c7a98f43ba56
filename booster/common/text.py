"""How messages and tables are worded: names in a sentence, counts, columns, dtypes and powers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def listed(names: Sequence[str], most: int = 10) -> str:
    """Return `names` for a message: the first `most` of them, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def counted(count: int, noun: str) -> str:
    """Return `count` of `noun`, an "s" behind it but for one."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def columns(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """Return `rows` as lines, every column as wide as its widest cell. right: places of columns that end alike."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(f"{cell:{'>' if place in right else '<'}{widths[place]}}" for place, cell in enumerate(row)).rstrip()
        for row in rows
    )
    return "\n".join(lines)


def print_table(console: Any, table: Any) -> None:
    """Print `table` of rich on its `console`. Where that is no terminal, lines end with their last letter, not with blanks."""
    if console.is_terminal or console.record:
        console.print(table)
        return
    with console.capture() as captured:
        console.print(table)
    console.file.writelines(f"{line.rstrip()}\n" for line in captured.get().splitlines())


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of `dtype` in torch, as "float32"."""
    return str(dtype).removeprefix("torch.")


def raised(exponent: int) -> str:
    """Return `exponent` in superscript."""
    return str(exponent).translate(_SUPERSCRIPTS)


def shortened(name: str, most: int) -> str:
    """Return `name` in `most` letters: which block it is, and which of its weights, is kept."""
    *modules, last = name.split(".")
    for place, module in enumerate(modules):
        # As far as is needed modules are named by their first letter, from the outermost on.
        if len(name) > most and not module.isdigit():
            modules[place] = module[:1]
            name = ".".join([*modules, last])
    # Then the middle is left out.
    before = (most - 1) // 3
    return name if len(name) <= most else name[:before] + "…" + name[len(name) - (most - 1 - before) :]
