"""Who of several ranks that ended is said to have failed first."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import booster.cli
from booster.cli.agent import Attempt, report_failures

SECOND = 10**9
ATTEMPT = Attempt(command=(), nproc_per_node=2)


def failure(rank, exitcode, record=None, callstack=""):
    """What torchrun's agent reports of a rank it found dead in the second from 100 on; `record`: (ns, is_cut_off, status)."""
    data = {}
    if record is not None:
        moment, is_cut_off, status = record
        extra = {"py_callstack": callstack, "timestamp_ns": moment, "status": status, "is_cut_off": is_cut_off}
        data = {"message": {"message": "", "extraInfo": extra}}
    return SimpleNamespace(
        local_rank=rank,
        pid=1000 + rank,
        exitcode=exitcode,
        timestamp=100,
        error_file_data=data,
        signal_name=lambda: signal.Signals(-exitcode).name,
    )


@pytest.mark.parametrize(
    ("failures", "noted", "blamed", "status"),
    [
        pytest.param(
            [failure(0, 1, (100.6 * SECOND, True, 1)), failure(1, 5, (100.5 * SECOND, False, 5))],
            {},
            1,
            5,
            id="one that exits before one with a broken connection, neither death noted",
        ),
        pytest.param(
            [failure(0, 1, (100.6 * SECOND, True, 1)), failure(1, -signal.SIGTERM)],
            {1000: 100.7 * SECOND, 1001: 100.7 * SECOND},
            1,
            143,
            id="one that is killed before one with a broken connection, noted together",
        ),
        pytest.param(
            [failure(0, 1, (100.6 * SECOND, True, 1)), failure(1, -signal.SIGTERM)],
            {1000: 100.7 * SECOND, 1001: 100.8 * SECOND},
            0,
            1,
            id="one with a broken connection before one that the agent stopped",
        ),
        pytest.param(
            [failure(0, 75, (100.5 * SECOND, False, 75)), failure(1, 1, (100.6 * SECOND, True, 1))],
            {},
            0,
            75,
            id="one that stopped on request before one with a connection broken by that",
        ),
        pytest.param(
            [failure(0, -signal.SIGABRT), failure(1, 1, (100.9 * SECOND, False, 1))],
            {},
            1,
            1,
            id="one that raised before one with a death that was not noted",
        ),
    ],
)
def test_who_failed_first(failures, noted, blamed, status, capsys):
    by_rank = {entry.local_rank: entry for entry in failures}
    assert report_failures(by_rank, noted, ATTEMPT) == status
    expected = f"status 75 of rank {blamed}" if status == 75 else f"booster run: rank {blamed} (local rank {blamed}"
    assert expected in capsys.readouterr().err


TRACEBACK = "Traceback (most recent call last):\nRuntimeError: Connection closed by peer\n"


def test_a_rank_that_was_killed_is_named_last_below_the_traceback_that_others_left(capsys):
    broken = failure(0, 1, (100.6 * SECOND, True, 1), TRACEBACK)
    killed = failure(1, -signal.SIGKILL)
    assert report_failures({0: broken, 1: killed}, {1000: 100.7 * SECOND, 1001: 100.5 * SECOND}, ATTEMPT) == 137
    *before, last = capsys.readouterr().err.rstrip().splitlines()
    assert TRACEBACK.splitlines()[-1] in before
    assert last.startswith(
        "booster run: the first to end was rank 1: signal SIGKILL: killed from outside, or by the system"
    )


def test_a_rank_that_left_a_traceback_is_told_by_that_last(capsys):
    raised = failure(1, 1, (100.5 * SECOND, False, 1), "Traceback:\nValueError: the reason\n")
    broken = failure(0, 1, (100.6 * SECOND, True, 1), TRACEBACK)
    assert report_failures({0: broken, 1: raised}, {}, ATTEMPT) == 1
    assert capsys.readouterr().err.rstrip().endswith("ValueError: the reason")


def test_an_error_of_shards_in_the_users_own_code_comes_with_where_it_is_explained(tmp_path):
    script, report = tmp_path / "train.py", tmp_path / "error.json"
    script.write_text("raise RuntimeError('aten.add.Tensor got mixed torch.Tensor and DTensor, need to convert')")
    environment = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(report)}
    worker = Path(booster.cli.__file__).with_name("worker.py")
    assert subprocess.run([sys.executable, worker, script], env=environment, capture_output=True).returncode == 1
    extra = json.loads(report.read_text())["message"]["extraInfo"]
    assert extra["py_callstack"].endswith("copies of weights that work on every plugin.\n")
    assert not extra["is_cut_off"]
