"""Processes that make rows, and who watches them: what becomes of a row that ends its process, or that never ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.row import Found, RowFile, begun, ended, stamp
from benchmarks.gpu.verdict import line_of

IMPORTS = 180.0  # seconds until a process may have begun its first row
REFUSED, NO_SPACE, LOST = 2, 3, 4  # exit codes of a worker; the last: CUDA can do nothing more in that process
ROOT = Path(__file__).parents[2]


@dataclass
class Job:
    """What workers are told. parts: to be made. seconds: for each of them. again: make all anew. only: a pattern of names of
    rows. together: processes at once. worker: the module that they run."""

    parts: tuple[int, ...]
    seconds: float
    rehearse: bool = False
    again: bool = False
    only: str = ""
    together: int = 1
    worker: str = "benchmarks.gpu.worker"


class _Worker:
    """One process. `index` of `job.together`."""

    def __init__(self, job: Job, folder: Path, since: float, index: int) -> None:
        self.log = tempfile.TemporaryFile()  # noqa: SIM115  (as long as the process)
        self.active = time.time()  # when it last wrote a line
        given = [
            ",".join(map(str, job.parts)),
            str(folder),
            f"{job.seconds:g}",
            f"{since:.6f}",
            f"{index}/{job.together}",
        ]
        given.append(str(os.getpid()))
        given += ["--rehearse"] * job.rehearse + ["--again"] * job.again + ["--only", job.only] * bool(job.only)
        command = [sys.executable, "-m", job.worker, *given]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment(job.rehearse), stdout=self.log, stderr=self.log, start_new_session=True
        )

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that waits for a driver may outlive this
            self.process.wait(timeout=10.0)

    def close(self) -> None:
        self.kill()  # also what it started
        self.log.close()

    def last_words(self) -> str:
        self.log.seek(0)
        lines = [line for line in self.log.read().decode(errors="replace").splitlines() if line.strip()]
        return " / ".join(lines[-3:])[-400:]


def environment(rehearse: bool) -> dict[str, str]:
    """Of a worker: it must not interpret kernels on a card, and sees none where it rehearses."""
    own = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))}
    own.pop("TRITON_INTERPRET", None)
    if rehearse:
        own |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return own


def supervise(job: Job, file: RowFile, say: Any = print) -> int:
    """Have the rows of `job` made; return 0, or the exit code of a worker that could not. `say` is given each row as it ends.

    Raises OSError where the file cannot be written."""
    since = time.time()
    until = since + job.seconds * len(job.parts)
    workers = {index: _Worker(job, file.folder, since, index) for index in range(job.together)}
    told, idle = len(file.lines()), dict.fromkeys(workers, 0)
    code = 0
    try:
        while workers and not code:
            time.sleep(0.2)
            lines, now = file.lines(), time.time()
            for line in lines[told:]:
                if line["worker"] in workers:
                    workers[line["worker"]].active = now
                if "ended" in line:
                    say(line_of(line))
            told = len(lines)
            current = {line["worker"]: line for line in begun(lines).values() if line["begun"] >= since}
            for index, worker in list(workers.items()):
                ended_with, row = worker.process.poll(), current.get(index)
                if ended_with in (0, REFUSED, NO_SPACE):
                    if ended_with and not code:  # what one of them says holds for all
                        say(worker.last_words())
                    code = code or ended_with
                    workers.pop(index).close()
                    continue
                late = row is not None and now > row["begun"] + row["limit"]
                stuck = row is None and now > worker.active + IMPORTS
                if ended_with is None and now <= until and not late and not stuck:
                    continue
                worker.kill()
                if ended_with == LOST:
                    idle[index] = 0
                elif row is not None:
                    why = _why(ended_with, late, row)
                    file.write({**row, "ended": stamp(), "error": f"{why}: {worker.last_words()}"})
                    idle[index] = 0
                else:
                    idle[index] += 1
                    why = f"it did nothing for {IMPORTS:g} s" if stuck else _why(ended_with, late, row)
                    why = f"a process was ended outside of any row, {why}: {worker.last_words()}"
                    say(why)
                    for part in job.parts if idle[index] == 3 else ():  # it is tried no more, and its parts have failed
                        own = {"part": part, "worker": index, "row": "all", "begun": now}
                        file.write({**own, "ended": stamp(), "error": why})
                workers.pop(index).close()
                if now <= until and idle[index] < 3:
                    workers[index] = _Worker(job, file.folder, since, index)
    finally:
        for worker in workers.values():
            worker.close()
    for line in file.lines()[told:]:
        if "ended" in line:
            say(line_of(line))
    return code


def _why(ended_with: int | None, late: bool, row: Found | None) -> str:
    if ended_with is not None:
        name = signal.Signals(-ended_with).name if ended_with < 0 else f"exit code {ended_with}"
        return f"its process ended with {name}"
    if late and row is not None:
        return f"it took more than {row['limit']:.0f} s and was killed"
    return "the time of its part was over and it was killed"


def left(lines: list[Found], part: int) -> list[str]:
    """Names of rows of a part that were not made."""
    names = next((line["rows"] for line in reversed(lines) if line["part"] == part and "rows" in line), [])
    made = {name for number, name in ended(lines) if number == part}
    return [name for name in names if name not in made]
