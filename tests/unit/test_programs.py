"""What tests run as a program is what `python` runs: its arguments, folder, environment, output, end."""

import signal
import subprocess
import sys

import pytest
from programs import Program, run

SCRIPT = """
import atexit, multiprocessing, os, sys, threading, time
atexit.register(print, "at the end")
threading.Thread(target=lambda: (time.sleep(0.2), print("a thread"))).start()
print(__name__, sys.argv, os.getcwd(), os.environ.get("GIVEN"), os.environ.get("OTHER"))
print(sys.path[0], sys.stdin.read() == "", multiprocessing.get_start_method(allow_none=True))
print("on stderr", file=sys.stderr)
"""


@pytest.mark.parametrize("form", [["script.py"], ["-m", "pack.module"], ["-c", SCRIPT]], ids=lambda form: form[0])
def test_a_program_is_told_and_tells_what_one_of_a_new_interpreter_does(tmp_path, monkeypatch, form):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "module.py").write_text(SCRIPT)
    monkeypatch.setenv("OTHER", "not given")
    arguments = [*form, "two words", "--", ""]
    here = run(*arguments, folder=tmp_path, environment={"GIVEN": "1"})
    there = subprocess.run(
        [sys.executable, *arguments],
        cwd=tmp_path,
        env={"GIVEN": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    assert (here.returncode, here.stdout, here.stderr) == (0, there.stdout, there.stderr)


@pytest.mark.parametrize(
    ("code", "status", "printed"),
    [
        ("raise SystemExit", 0, ""),
        ("raise SystemExit(75)", 75, ""),
        ("raise SystemExit('no data')", 1, "no data\n"),
        ("raise KeyError('x')", 1, "KeyError: 'x'\n"),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
    ],
)
def test_the_status_is_that_of_the_program(code, status, printed):
    done = run("-c", code)
    assert done.returncode == status
    assert done.stderr.endswith(printed)
    assert bool(done.stderr) == bool(printed)


def test_what_takes_too_long_is_killed():
    with pytest.raises(subprocess.TimeoutExpired):
        run("-c", "import time; time.sleep(60)", timeout=0.1)


def test_a_signal_reaches_a_program_that_runs(tmp_path):
    code = "import signal, time; open('up', 'w').close(); time.sleep(60)"
    with Program("-c", code, folder=tmp_path) as program:
        while not (tmp_path / "up").exists():
            assert program.poll() is None
        program.send_signal(signal.SIGTERM)
        assert program.wait() == -signal.SIGTERM
