"""A record read back: the files of all ranks as one run.

The files of a record: one for each rank, a JSON object on each line.

Each line has a `kind`:

- `run`: a process began to write. `schema`, `rank`, `world_size`, precision, plugin, versions; lines of this process follow.
- `step`: one optimizer step. `optimizer`, `step` (from 1), `time` (seconds since 1970), `applied`, `loss_scale`, and where
  known `loss`, `grad_norm`, `clip` (the factor of a clip, where it was not 1), `lr` of each group, and of a skip `reason`
  and `culprit`.
- `switch`: the run went over to another `precision` after the step `step`; `why` says by what.
- `look`: an autopilot looked at the step `step` of the `model`-th that was boosted, from 0; see
  `booster.mixed_precision.low_precision.autopilot.Measurement`.
- `pilot`: it made the product `role` of the layer `name` wide after that step, or low again; see `Change` there.
- `low`: one operand of a low-precision layer, looked at in one step; see `booster.numerics.record.low_layers`.
- `sample`: one tensor, looked at in one step; see `booster.numerics.record.samples`.

Readers pass over kinds and keys that they do not know. `schema` counts up where old readers would misread a file.

The form of a record's lines: what a reader may take for granted of each key, whoever wrote the file.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from booster.common import arguments
from booster.common.untrusted_files import TEXT, JsonForm, check_form, open_regular, parse_json, printable, whole
from booster.numerics.record.underflow import Underflow, merge

_MOST = 2**63
_LAST_YEAR = 2**37  # seconds since 1970: the year 6325
_MOST_COUNTS = 256  # exponents of float32
_LOWEST, _HIGHEST = -2400, 2400  # exponents of float64, times a loss scale
_FORMATS = ("float16", "bfloat16", "float32", "float64")


def held_to_form(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return `line` without the lists and objects of keys that readers do not know.

    Raises ValueError that names the key, where a known one is missing or holds what no line of its kind holds.
    """
    kind = line["kind"]
    check_form("its kind", kind, TEXT)
    form = _FORMS.get(kind, {})
    check_form(f"a line of the kind {kind}", line, form)
    known = {key.rstrip("?") for key in form}
    return {key: value for key, value in line.items() if key in known or not isinstance(value, (dict, list))}


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
_TIME = JsonForm(lambda value: _finite(value) and 0 <= value <= _LAST_YEAR, "a time in seconds since 1970")
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
        "low": whole(_LOWEST, _HIGHEST),
        "counts": _BINS,
        "copies?": whole(1, 2**31),
        "stored?": TEXT,
    },
}


SCHEMA = 1
_LONGEST = 2**23  # bytes of a line
_NONFINITE = {math.inf: "inf", -math.inf: "-inf"}
_FROM_TEXT = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
NUMBERS = (
    *("loss", "loss_scale", "grad_norm", "clip", "norm", "largest", "scale", "update_norm", "weight_norm"),
    *("noise", "ahead"),
)
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
        """Append `lines`, or none of them: raises OSError where the disk is full."""
        if self._file is None:
            return
        data = "".join(_encoded(line) + "\n" for line in lines).encode()
        written = 0
        try:
            while written < len(data):
                written += os.write(self._file, data[written:])
        except OSError:
            if written:
                os.ftruncate(self._file, os.fstat(self._file).st_size - written)
            raise

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


_MOST_RANKS = 16  # that are named
_MOST_OPTIMIZERS = 1000


@dataclass(frozen=True)
class Step:
    """One optimizer step, of all ranks together.

    loss: the mean over the ranks that computed one; None where none did. grad_norm, clip: None where the step did not look at
    its gradients, or nothing was clipped. culprit: parameters whose gradients were not finite, of all ranks.
    """

    number: int
    applied: bool
    time: float
    loss: float | None
    loss_scale: float
    grad_norm: float | None
    clip: float | None
    lr: tuple[float, ...]
    reason: str | None
    culprit: tuple[str, ...]


class Switched(NamedTuple):
    """After the step `step` the run went on in another precision. why: by what, in words."""

    step: int
    precision: str
    why: str


class Piloted(NamedTuple):
    """After the step `step` an autopilot made a product of a layer of the `model`-th boosted model wide, or low again.

    noise: over signal. ahead: what it was taken to be at the next look.
    """

    step: int
    name: str
    role: str
    wide: bool
    noise: float
    ahead: float
    model: int


class Looked(NamedTuple):
    """An autopilot looked at the step `step` of the `model`-th boosted model, at so many layers.

    operations: as a share of those of all products from look to look. wide: which share of products is, from then on. again:
    between two looks, at what the last one found to grow.
    """

    step: int
    layers: int
    operations: float
    wide: float
    model: int
    again: bool


@dataclass(frozen=True)
class Rounded:
    """How one operand of a low-precision layer was rounded in one step: shares of numbers; see `record.low_layers`."""

    step: int
    name: str
    product: str
    operand: str
    format: str
    underflow: float
    saturated: float
    top: float


@dataclass
class Run:
    """What `read_run` found.

    folder: of the record.
    steps, samples: by optimizer, in order.
    about: of the last process that wrote.
    notes: what is not as it should be, such as a line that a kill cut short, as sentences.
    switches: to other precisions, in order.
    rounded: of low-precision layers, all ranks together.
    piloted: products that an `Autopilot` made wide, or low again, in order.
    looks: what its looks took, in order.
    """

    folder: Path
    about: dict[str, Any]
    steps: dict[str, list[Step]] = field(default_factory=dict)
    samples: dict[str, list[Underflow]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    switches: list[Switched] = field(default_factory=list)
    rounded: list[Rounded] = field(default_factory=list)
    piloted: list[Piloted] = field(default_factory=list)
    looks: list[Looked] = field(default_factory=list)


def read_run(folder: Any) -> Run:
    """Read the record in `folder`, all ranks merged; a step that was made again after a resume counts as made last, and later
    ones that it went back behind, and did not make again, are left out.

    Files of ranks on several machines are copied into one folder first. Raises FileNotFoundError where there is no record,
    and ValueError for a damaged one; a last line that a kill cut short is left out and noted.
    """
    root = arguments.path("folder", folder)
    files = rank_files(root)
    if not files:
        raise FileNotFoundError(f"there is no record in {root}; Booster.record(folder) writes files named rank-*.jsonl")
    ranks = [_RankFile(path) for path in files]
    about = ranks[0].about
    for rank in ranks[1:]:
        rank.leave_out_lost_ranks(ranks[0].stretches)
    run = Run(root, about)
    run.piloted = ranks[0].told(ranks[0].piloted)
    run.looks = ranks[0].told(ranks[0].looks)
    run.switches = ranks[0].told(ranks[0].switches)
    for rank in ranks:
        run.notes += rank.notes()
    num_ranks, here = about.get("world_size", 1), {rank.about.get("rank", 0) for rank in ranks}
    missing = list(islice((rank for rank in range(num_ranks) if rank not in here), _MOST_RANKS))
    if missing:
        more = num_ranks - sum(0 <= rank < num_ranks for rank in here) - len(missing)
        others = f" and {more} more" if more else ""
        run.notes.append(f"the files of ranks {missing}{others} are not here; what follows is of the others")
    for name in dict.fromkeys(name for rank in ranks for name in rank.steps):
        lines: dict[int, list[Mapping[str, Any]]] = {}
        for rank in ranks:
            for number, line in rank.steps.get(name, {}).items():
                lines.setdefault(number, []).append(line)
        run.steps[name] = [_merged(number, lines[number]) for number in sorted(lines)]
    counts: dict[tuple[Any, ...], list[int]] = {}
    for rank in ranks:
        for (_, *place), own in rank.rounded.items():
            key = tuple(place)
            counts[key] = [a + b for a, b in zip(counts.get(key, (0, 0, 0, 0)), own, strict=True)]
    run.rounded = [
        Rounded(*key, *(count / max(1, total) for count in found)) for key, (total, *found) in counts.items()
    ]
    run.rounded.sort(key=lambda each: each.step)
    parts: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for rank in ranks:
        for key, line in rank.samples.items():
            parts.setdefault(key, []).append(line)
    for key in sorted(parts, key=lambda key: (*key[:3], parts[key][0].get("place", 0))):
        run.samples.setdefault(key[0], []).append(merge(parts[key]))
    return run


class _Stretch:
    """Lines of one process, from its beginning, or from where it went back to an earlier step.

    about: the line of the process. begins: the step that each optimizer began with. is_process: it is the first of the process.
    """

    def __init__(self, about: dict[str, Any], *, is_process: bool = True) -> None:
        self.about, self.is_process = about, is_process
        self.begins: dict[str, int] = {}

    def leaves(self, step: int) -> bool:
        """Whether what an earlier stretch says of `step` holds still."""
        begin = max(self.begins.values(), default=math.inf)
        # A process that goes back may write of its first step before the line of that step.
        return step < begin or (step == begin and not self.is_process)


class _RankFile:
    """The lines of one rank's file; of steps made twice the later, without those that a resume went back behind."""

    def __init__(self, path: Path) -> None:
        self.stretches: list[_Stretch] = []
        self.steps: dict[str, dict[int, dict[str, Any]]] = {}
        self.samples: dict[tuple[Any, ...], dict[str, Any]] = {}
        self.rounded: dict[tuple[Any, ...], list[int]] = {}
        # What is of no optimizer, each with the place of its stretch.
        self.switches: dict[tuple[Any, ...], tuple[int, Switched]] = {}
        self.piloted: dict[tuple[Any, ...], tuple[int, Piloted]] = {}
        self.looks: dict[tuple[Any, ...], tuple[int, Looked]] = {}
        self._name = printable(path.name)
        self._torn: list[str] = []
        self._last: dict[str, int] = {}
        self._gone: dict[str, set[int]] = {}
        for line in read_lines(path):
            if isinstance(line, Torn):
                self._torn.append(f"line {line.line} of {self._name} was cut short, as by a kill; it is left out")
                continue
            if line["kind"] == "run" or not self.stretches:
                self.stretches.append(_Stretch(line if line["kind"] == "run" else {}))
            place = len(self.stretches) - 1
            if line["kind"] == "step":
                self._take(line)
                if len(self.steps) > _MOST_OPTIMIZERS:
                    raise ValueError(f"{path} has steps of more than {_MOST_OPTIMIZERS} optimizers, which no run has")
            elif line["kind"] == "pilot":
                change = Piloted(**{name: line[name] for name in Piloted._fields})
                self.piloted[change.model, change.step, change.name, change.role] = place, change
            elif line["kind"] == "look":
                look = Looked(**{name: line[name] for name in Looked._fields})
                self.looks[look.step, look.model] = place, look
            elif line["kind"] == "low":
                key = tuple(line[name] for name in ("optimizer", "step", "name", "product", "operand", "format"))
                self.rounded[key] = [line[name] for name in ("total", "underflow", "saturated", "top")]
            elif line["kind"] == "switch":
                self.switches[(line["step"],)] = place, Switched(line["step"], line["precision"], line.get("why", ""))
            elif line["kind"] == "sample":
                self.samples[line["optimizer"], line["step"], line["of"], line["name"]] = line
        if not any(stretch.about for stretch in self.stretches):
            raise ValueError(f"{path} does not begin with the line of a run, so it is no file of a record")

    def _take(self, line: dict[str, Any]) -> None:
        """Take a step's line; what was written before of it and of later ones is of no run any more."""
        name, number = line["optimizer"], line["step"]
        if number <= self._last.get(name, -1):
            self._drop(name, {each for each in self.steps[name] if each >= number})
            if name in self.stretches[-1].begins:
                self.stretches.append(_Stretch(self.stretches[-1].about, is_process=False))
        self.stretches[-1].begins.setdefault(name, number)
        self._last[name] = number
        self.steps.setdefault(name, {})[number] = line

    def _drop(self, optimizer: str, numbers: set[int]) -> None:
        self._gone.setdefault(optimizer, set()).update(numbers)
        for number in numbers:
            del self.steps[optimizer][number]
        for table in (self.samples, self.rounded):
            for key in [key for key in table if key[0] == optimizer and key[1] in numbers]:
                del table[key]

    @property
    def about(self) -> dict[str, Any]:
        """The line of the last process that wrote."""
        return self.stretches[-1].about

    def leave_out_lost_ranks(self, stretches: Sequence[_Stretch]) -> None:
        """Leave out what this rank wrote of steps that fewer ranks, without it, have made again since.

        stretches: those of rank 0.
        """
        for later in stretches:
            since = later.about.get("time", -math.inf)
            if self.about.get("rank", 0) < later.about.get("world_size", math.inf):
                continue
            for optimizer, begin in later.begins.items():
                own = self.steps.get(optimizer, {})
                gone = {number for number, line in own.items() if number >= begin and line["time"] < since}
                self._drop(optimizer, gone)

    def told(self, found: Mapping[tuple[Any, ...], tuple[int, Any]]) -> list[Any]:
        """Return of `found` what no later stretch went back behind, by step."""
        held = [
            told
            for place, told in found.values()
            if all(later.leaves(told.step) for later in self.stretches[place + 1 :])
        ]
        return sorted(held, key=lambda told: told.step)

    def notes(self) -> list[str]:
        """What is not as it should be, as sentences."""
        processes = sum(stretch.is_process for stretch in self.stretches)
        gone = [(name, number) for name, numbers in self._gone.items() for number in numbers]
        if processes < 2 and not gone:
            return self._torn
        lost = [number for name, number in gone if number not in self.steps.get(name, {})]
        by = f"{processes} processes in turn" if processes > 1 else "a process that went back"
        told = f"{self._name} was written by {by}"
        if again := len(gone) - len(lost):
            told += f", and {again} steps were made again; the later ones count"
        if lost:
            told += (
                f"; what it has of steps {min(lost)} to {max(lost)} is left out, since the run went back behind them"
            )
        return [*self._torn, told]


def _merged(number: int, lines: list[Mapping[str, Any]]) -> Step:
    first = lines[0]
    losses = [line["loss"] for line in lines if "loss" in line]
    return Step(
        number=number,
        applied=all(line["applied"] for line in lines),
        time=first["time"],
        loss=math.fsum(loss / len(losses) for loss in losses)
        if losses and all(map(math.isfinite, losses))
        else _odd(losses),
        loss_scale=first.get("loss_scale", 1.0),
        grad_norm=_first(line.get("grad_norm") for line in lines),
        clip=_first(line.get("clip") for line in lines),
        lr=tuple(rate for rate in first.get("lr") or () if rate is not None),
        reason=_first(line.get("reason") for line in lines),
        culprit=tuple(dict.fromkeys(name for line in lines for name in line.get("culprit", ()))),
    )


def _odd(losses: list[float]) -> float | None:
    """The mean of `losses`, of which some are not finite."""
    return sum(losses) / len(losses) if losses else None


def _first(values: Iterable[Any]) -> Any:
    return next((value for value in values if value is not None), None)
