"""The files of a record: one for each rank, a JSON object on each line, and what a reader may take for granted of each key.

Each line has a `kind`:

- `run`: a process began to write. `schema`, `rank`, `world_size`, precision, plugin, versions; lines of this process follow.
- `step`: one optimizer step. `optimizer`, `step` (from 1), `time` (seconds since 1970), `applied`, `loss_scale`, and where
  known `loss`, `grad_norm`, `clip` (the factor of a clip, where it was not 1), `lr` of each group, and of a skip `reason`
  and `culprit`.
- `switch`: the run went on in another `precision` after the step `step`; `why` says by what.
- `look`: an autopilot measured the step `step` of the `model`-th that was boosted, from 0.
- `pilot`: it made the product `role` of the layer `name` wide after that step, or low again.
- `low`: one operand of a low-precision layer in one step; see `booster.numerics.record.layer_counts`.
- `sample`: one tensor in one step; see `booster.numerics.record.samples`.

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

from booster.common.untrusted_files import TEXT, JsonForm, check_form, open_regular, parse_json, printable, whole

SCHEMA = 1
_LONGEST = 2**23  # bytes of a line
_MOST = 2**63
_MOST_COUNTS = 256  # exponents of float32
_FORMATS = ("float16", "bfloat16", "float32", "float64")


def check_line(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return `line` without the lists and objects of keys that readers do not know.

    Raises ValueError that names the key, where a known one is missing or holds what no line of its kind holds.
    """
    kind = line["kind"]
    check_form("its kind", kind, TEXT)
    form = _FORMS.get(kind, {})
    check_form(f"a line of the kind {kind}", line, form)
    keys = {key.rstrip("?") for key in form}
    return {key: value for key, value in line.items() if key in keys or not isinstance(value, (dict, list))}


def _number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) <= _MOST)


def _finite(value: Any) -> bool:
    return _number(value) and math.isfinite(value)


def _counts(value: Any) -> bool:
    if not isinstance(value, list) or len(value) > _MOST_COUNTS:
        return False
    return all(_COUNT.holds(count) for count in value) and (not value or any(value))


_TEXTS = JsonForm(lambda value: isinstance(value, list) and all(map(TEXT.holds, value)), "a list of texts")
_BOOLEAN = JsonForm(lambda value: type(value) is bool, "a boolean")
_NUMBER = JsonForm(_number, "a number")
_STEP = whole(0, 2**53)
_COUNT = whole(0, _MOST)
_TIME = JsonForm(
    lambda value: _finite(value) and 0 <= value <= 2**37, "a time in seconds since 1970"
)  # to the year 6325
_RATES = JsonForm(
    lambda value: isinstance(value, list) and all(rate is None or _finite(rate) for rate in value), "a list of numbers"
)
_BINS = JsonForm(_counts, f"a list of at most {_MOST_COUNTS} counts that are not all zero")
_FORMAT = JsonForm(lambda value: value in _FORMATS, f"one of {', '.join(_FORMATS)}")


def _keys(names: str, form: JsonForm) -> dict[str, JsonForm]:
    return dict.fromkeys(names.split(), form)


# By kind of line, forms by key; see `check_form`.
_FORMS: dict[str, dict[str, JsonForm]] = {
    "run": {
        "schema?": whole(0, 2**31),
        "rank?": whole(0, 2**31),
        "world_size?": whole(1, 2**31),
        "time?": _TIME,
        **_keys("precision? plugin? format? device? booster? torch?", TEXT),
    },
    "step": {
        "optimizer": TEXT,
        "step": _STEP,
        "time": _TIME,
        "applied": _BOOLEAN,
        **_keys("loss? loss_scale? grad_norm? clip?", _NUMBER),
        "lr?": _RATES,
        "reason?": TEXT,
        "culprit?": _TEXTS,
    },
    "switch": {"step": _STEP, "precision": TEXT, "time?": _TIME, "why?": TEXT},
    "pilot": {
        **_keys("name role", TEXT),
        "step": _STEP,
        **_keys("noise ahead", _NUMBER),
        "wide": _BOOLEAN,
        "time?": _TIME,
        "model": _COUNT,
    },
    "look": {
        "step": _STEP,
        **_keys("layers model", _COUNT),
        **_keys("operations wide", _NUMBER),
        "time?": _TIME,
        "again": _BOOLEAN,
    },
    "low": {
        **_keys("optimizer name product operand format", TEXT),
        "step": _STEP,
        **_keys("total underflow saturated top", _COUNT),
    },
    "sample": {
        **_keys("optimizer of name", TEXT),
        "step": _STEP,
        "format": _FORMAT,
        **_keys("scale largest norm? update_norm? weight_norm?", _NUMBER),
        **_keys("zeros nonfinite place? group? still? looked?", _COUNT),
        "low": whole(-2400, 2400),  # exponents of float64, times a loss scale
        "counts": _BINS,
        "copies?": whole(1, 2**31),
        "stored?": TEXT,
    },
}
# Keys with a number, and a text where it is not finite, which JSON cannot say.
_NUMBERS = {key.rstrip("?") for forms in _FORMS.values() for key, form in forms.items() if form is _NUMBER}


class CutLine(NamedTuple):
    """A line that a kill cut short."""

    file: Path
    number: int


class LineFile:
    """One rank's file, to append to. Each line is handed to the system at once, so that a kill of the process loses none."""

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"rank-{rank:05d}.jsonl"
        # A link that somebody else put there would have its target written to.
        flags = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        if self.path.is_symlink():
            raise OSError(f"{self.path} is a link, which a record does not write through; remove it")
        self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | flags, 0o644)
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            self.close()
            raise OSError(f"{self.path} is no regular file, so no record can be written to it")
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":  # the last line of a process that was killed
            os.write(self._file, b"\n")

    def write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Append `lines`, or none of them: raises OSError where the disk is full."""
        plain = ({key: _plain(value) for key, value in line.items() if value is not None} for line in lines)
        data = "".join(json.dumps(each, separators=(",", ":"), allow_nan=False) + "\n" for each in plain).encode()
        written = 0
        try:
            while written < len(data):
                written += os.write(self._file, data[written:])
        except OSError:
            if written:
                os.ftruncate(self._file, os.fstat(self._file).st_size - written)
            raise

    def close(self) -> None:
        """Close the file, to which nothing is written later."""
        os.close(self._file)


def read_lines(path: Path) -> Iterator[dict[str, Any] | CutLine]:
    """Yield the lines of one file, with a `CutLine` in place of each that a kill cut short.

    Raises ValueError for any other damage, and for a schema of a later version.
    """
    # Such a line is the last one, or followed by that of a new process.
    cut: CutLine | None = None
    with open_regular(path) as file:
        for number in itertools.count(1):
            text = file.readline(_LONGEST + 1)
            if not text:
                break
            # A line has at most 8 MiB, and is held to its form, so that what reads on need not ask.
            if len(text) > _LONGEST:
                raise ValueError(
                    f"line {number} of {path} has more than {_LONGEST} bytes, which no line of a record has"
                )
            if not text.strip():
                continue
            line = _decoded(text)
            if cut is not None and (line is None or line.get("kind") != "run"):
                raise ValueError(
                    f"line {cut.number} of {path} is not a line of a record, and others of the same process follow it, so the "
                    "file was changed or damaged. Remove that line to read the rest"
                )
            cut = CutLine(path, number) if line is None else None
            if cut is not None:
                yield cut
                continue
            assert line is not None
            try:
                line = check_line(line)
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


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _decoded(text: bytes) -> dict[str, Any] | None:
    try:
        line = parse_json(text)
        if b"\\" in text or not text.decode().rstrip("\r\n").isprintable():
            line = _printable(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or "kind" not in line:
        return None
    for key, value in line.items():
        if isinstance(value, str) and key in _NUMBERS:
            line[key] = float(value) if value in ("inf", "-inf") else math.nan
    return line


def _printable(value: Any) -> Any:
    """`value` with its texts as a terminal may show them."""
    if isinstance(value, dict):
        return {printable(key): _printable(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_printable(entry) for entry in value]
    return printable(value) if isinstance(value, str) else value
