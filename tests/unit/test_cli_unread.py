"""Commands without a reader any more, as after `| head`: they end without a word, like other tools."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_advise import SCRIPT
from test_memory_estimate import JOB

from booster.cli import _COMMANDS, main

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a checkpoint, a record and two scripts."""
    import torch
    from torch import nn

    from booster import Booster

    folder = tmp_path_factory.mktemp("unread")
    (folder / "advised.py").write_text(SCRIPT)
    (folder / "job.py").write_text(JOB)
    booster = Booster("cpu")
    model, optimizer, *_ = booster.boost(*(lambda model: (model, torch.optim.SGD(model.parameters())))(nn.Linear(4, 2)))
    with booster.record(folder / "record"):
        booster.backward(model(torch.ones(1, 4)).sum(), optimizer)
        optimizer.step()
    booster.save(folder / "saved", model, optimizer, step=1)
    return folder


ARGUMENTS = {
    "": ["--help"],
    "run": ["--help"],
    "check": ["--json"],
    "env": [],
    "estimate": ["--precision", "fp32", "--json", "job.py:job"],
    "estimate, a table": ["--precision", "fp32", "job.py:job"],
    "checkpoint": ["show", "saved"],
    "checkpoint, all": ["verify", "saved"],
    "report": ["--json", "record"],
    "report, tables": ["record"],
    "compare": ["record", "record"],
    "advise": ["--precisions", "fp32", "--steps", "3", "--device", "cpu", "--json", "advised.py"],
}


def test_every_command_is_tried():
    assert {name.partition(",")[0] for name in ARGUMENTS} - {""} == set(_COMMANDS)


@pytest.mark.parametrize("buffered", [False, True], ids=["written at once", "written at the end"])
@pytest.mark.parametrize("command", ARGUMENTS)
def test_a_reader_that_has_gone_ends_a_command_without_a_word(command, buffered, folder, monkeypatch, capfd):
    if command == "checkpoint":
        pytest.importorskip("safetensors")
    if command in ("estimate, a table", "report, tables"):
        pytest.importorskip("rich", reason="tables are drawn by rich")
    monkeypatch.chdir(folder)
    monkeypatch.setattr("booster.cli.machine_commands._PROBE_SECONDS", 1e-4)
    monkeypatch.setattr("booster.cli.machine_commands.probe_all", lambda *given: [])
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w", buffering=-1 if buffered else 1) as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        status = main([*command.partition(",")[0].split(), *ARGUMENTS[command]])
    monkeypatch.undo()
    assert capfd.readouterr().err == ""
    assert status == 141 or (status == 1 and "table" in command), "rich has its own status"


@pytest.mark.slow
def test_a_process_whose_reader_has_gone_is_quiet_at_its_end_too(folder):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "booster", "checkpoint", "show", "saved"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=folder, env=environment, stdout=writing, stderr=subprocess.PIPE, timeout=600)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (141, b"")


def test_a_broken_pipe_of_the_script_itself_is_told(tmp_path, capsys):
    (tmp_path / "own.py").write_text("def job():\n    raise BrokenPipeError('a worker of mine is gone')\n")
    assert main(["estimate", "--precision", "fp32", f"{tmp_path / 'own.py'}:job"]) == 1
    assert "a worker of mine is gone" in capsys.readouterr().err
