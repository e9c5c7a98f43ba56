"""The files of a record: one for each rank, a JSON object on each line.

Each line has a `kind`:

- `run`: a process began to write. `schema`, `rank`, `world_size`, precision, plugin, versions; lines of this process follow.
- `step`: one optimizer step. `optimizer`, `step` (from 1), `time` (seconds since 1970), `applied`, `loss_scale`, and where
  known `loss`, `grad_norm`, `clip` (the factor of a clip, where it was not 1), `lr` of each group, and of a skip `reason`
  and `culprit`.
- `sample`: one tensor, looked at in one step; see `booster.numerics.samples`.

Readers pass over kinds and keys that they do not know. `schema` counts up where old readers would misread a file.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from booster.foreign_files import open_regular, parse_json
from booster.names import printable
from booster.numerics.line_form import held_to_form

__all__ = ["SCHEMA", "LineFile", "Torn", "as_json", "rank_files", "read_lines"]

SCHEMA = 1
_LONGEST = 2**23  # bytes of a line
_NONFINITE = {math.inf: "inf", -math.inf: "-inf"}
_FROM_TEXT = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
NUMBERS = ("loss", "loss_scale", "grad_norm", "clip", "norm", "largest", "scale", "update_norm", "weight_norm")
"""Keys whose value is a number, and a text where it is not finite, which JSON cannot say."""


class Torn(NamedTuple):
    """A line that a kill cut short."""

    file: Path
    line: int


class LineFile:
    """One rank's file, to append to. Each line is handed to the system at once, so that a kill of the process loses none."""

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"rank-{rank:05d}.jsonl"
        # A link that somebody else put there would have its target written to.
        links = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        if self.path.is_symlink():
            raise OSError(f"{self.path} is a link, which a record does not write through; remove it")
        self._file: int | None = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | links, 0o644)
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            self.close()
            raise OSError(f"{self.path} is no regular file, so no record can be written to it")
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":  # the last line of a process that was killed
            os.write(self._file, b"\n")

    def write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Append `lines`. Raises OSError where the disk is full."""
        if self._file is None:
            return
        data = "".join(_encoded(line) + "\n" for line in lines).encode()
        while data:
            data = data[os.write(self._file, data) :]

    def close(self) -> None:
        """Close the file; what is written later is dropped."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def rank_files(folder: Path) -> list[Path]:
    """Return the files of a record, by rank."""
    return sorted(folder.glob("rank-*.jsonl"))


def read_lines(path: Path) -> Iterator[dict[str, Any] | Torn]:
    """Yield the lines of one file, with a `Torn` in place of each that a kill cut short.

    Such a line is the last one, or followed by that of a new process. Raises ValueError for any other damage, and for a
    schema of a later version. A line has at most 8 MiB, and is held to its form, so that what reads on need not ask.
    """
    torn: Torn | None = None
    with open_regular(path) as file:
        for number in itertools.count(1):
            text = file.readline(_LONGEST + 1)
            if not text:
                break
            if len(text) > _LONGEST:
                raise ValueError(
                    f"line {number} of {path} has more than {_LONGEST} bytes, which no line of a record has"
                )
            if not text.strip():
                continue
            line = _decoded(text)
            if torn is not None and (line is None or line.get("kind") != "run"):
                raise ValueError(
                    f"line {torn.line} of {path} is not a line of a record, and others of the same process follow it, so the "
                    "file was changed or damaged. Remove that line to read the rest"
                )
            torn = Torn(path, number) if line is None else None
            if torn is not None:
                yield torn
                continue
            assert line is not None
            try:
                line = held_to_form(line)
            except ValueError as error:
                raise ValueError(f"line {number} of {path} is not as a record writes it: {error}") from error
            if line["kind"] == "run" and line.get("schema", 0) > SCHEMA:
                raise ValueError(
                    f"{path} was written by a later version of booster (schema {line['schema']}, this one reads {SCHEMA}); "
                    "upgrade booster to read it"
                )
            yield line


def as_json(value: Any) -> Any:
    """Return `value`, of plain containers, with texts in place of numbers that are not finite, which JSON cannot say."""
    if isinstance(value, dict):
        return {key: as_json(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(entry) for entry in value]
    return _plain(value)


def _encoded(line: Mapping[str, Any]) -> str:
    plain = {key: _plain(value) for key, value in line.items() if value is not None}
    return json.dumps(plain, separators=(",", ":"), allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return _NONFINITE.get(value, "nan")
    return value


def _decoded(text: bytes) -> dict[str, Any] | None:
    try:
        line = parse_json(text)
        if b"\\" in text or not text.decode().rstrip("\r\n").isprintable():
            line = _printable(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or "kind" not in line:
        return None
    for key in NUMBERS:
        if isinstance(line.get(key), str):
            line[key] = _FROM_TEXT.get(line[key], math.nan)
    return line


def _printable(value: Any) -> Any:
    """`value` with its texts as a terminal may show them."""
    if isinstance(value, dict):
        return {printable(key): _printable(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_printable(entry) for entry in value]
    return printable(value) if isinstance(value, str) else value
