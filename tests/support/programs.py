"""Python programs, run as `python` runs them, in processes that are forked from one that has imported torch and the library.

Importing them takes two seconds of a core, which is longer than most of these programs. What a program imports first, or
how the interpreter starts, is not tested by these: see tests/unit/test_imports.py.
"""

import atexit
import multiprocessing as mp
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, TracebackType

import torch
from pool import PRELOADED

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 600.0  # seconds

Ran = subprocess.CompletedProcess[str]


class Program:
    """What `python *arguments` does in `folder`; of subprocess.Popen, what tests need.

    arguments: a script, `-m` and a module, or `-c` and the code; then what the program finds in sys.argv.
    environment: all of it, as of a subprocess; None: that of this process.
    """

    def __init__(
        self, *arguments: str | Path, folder: Path | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        self._written = Path(tempfile.mkdtemp(prefix="booster-program-"))
        weakref.finalize(self, shutil.rmtree, self._written, ignore_errors=True)
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        given = (str(self._written), str(folder or Path.cwd()), dict(environment or os.environ))
        self._process = context.Process(target=_run, args=(*given, [str(word) for word in arguments]), daemon=False)
        self._process.start()
        self.pid: int = self._process.pid  # type: ignore[assignment]

    @property
    def returncode(self) -> int | None:
        """The exit status, minus the signal that ended it, or None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        if self.returncode is None:
            self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float = TIMEOUT) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("python", timeout)
        return self.returncode

    def communicate(self, timeout: float = TIMEOUT) -> tuple[str, str]:
        """What it wrote to stdout and to stderr, once it has ended."""
        self.wait(timeout)
        return (self._written / "stdout").read_text(), (self._written / "stderr").read_text()

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.kill()
        self.wait()


def run(
    *arguments: str | Path,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    timeout: float = TIMEOUT,
) -> Ran:
    """Run the program to its end; what takes longer than `timeout` seconds is killed, and raises."""
    with Program(*arguments, folder=folder, environment=environment) as program:
        out, err = program.communicate(timeout)
        return Ran(arguments, program.wait(), out, err)


# ---- in the process ----


def _run(written: str, folder: str, environment: dict[str, str], arguments: list[str]) -> None:
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        file = os.open(os.path.join(written, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # it may be given in the environment
    mp.set_start_method(None, force=True)  # not what forked this process
    torch.set_num_threads(
        torch.get_num_threads()
    )  # the pool of threads, before threads of the program ask for it at once
    status = 1
    try:
        _as_python(arguments)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if status and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    threading._shutdown()  # type: ignore[attr-defined]  (joins threads, as the end of an interpreter does)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def _as_python(arguments: list[str]) -> None:
    where = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    ours = ("", str(ROOT))
    sys.path[:] = [*where, *(path for path in sys.path if path not in ours and not path.startswith(f"{ROOT}/tests"))]
    # What the server of forks has imported is no module of a program, which may have one of that name.
    others = tuple(f"{ROOT}/{folder}/" for folder in ("tests", "benchmarks", "examples", "docs"))
    for name in [name for name, each in sys.modules.items() if str(getattr(each, "__file__", "")).startswith(others)]:
        del sys.modules[name]
    kind, *rest = arguments
    if kind == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *rest[1:]]
        sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(sys.modules["__main__"]))  # noqa: S102  (a test's own code)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(kind)))
        sys.argv = arguments
        runpy.run_path(kind, run_name="__main__")
