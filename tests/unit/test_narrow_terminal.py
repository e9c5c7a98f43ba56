"""What commands print fits into the terminal that there is: at 80 columns no line is longer, and in a pipe nothing is cut."""

import logging

import pytest
import torch
from small_job import boost, train

from booster.cli import main

SCRIPT = """
import torch
from torch import nn

def model_fn():
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))

def optimizer_fn(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)

batch = (torch.randn(8, 16), torch.zeros(8, dtype=torch.long))
criterion = nn.CrossEntropyLoss()

def job():
    model = model_fn()
    return model, optimizer_fn(model), batch, criterion
"""
COMMANDS = {
    "check": ["check"],
    "env": ["env"],
    "advise": ["advise", "--steps", "3", "--seconds", "600", "job.py"],
    "estimate": ["estimate", "--memory", "1", "--batch_size", "4", "job.py:job"],
    "report": ["report", "fp16"],
    "compare": ["compare", "fp16", "fp32"],
    "checkpoint show": ["checkpoint", "show", "saved"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A script, two records that part, and a checkpoint."""
    root = tmp_path_factory.mktemp("narrow")
    (root / "job.py").write_text(SCRIPT)
    for precision in ("fp16", "fp32"):
        b, model, optimizer = boost(precision)
        with b.record(root / precision, every=1):
            train(b, model, optimizer)
            b.backward(model(torch.full((1, 8), torch.nan)).sum(), optimizer)
            optimizer.step()
    optimizer.zero_grad()
    b.save(root / "saved", model, optimizer)
    return root


def printed(command, folder, columns, monkeypatch, capsys):
    pytest.importorskip("rich", reason="tables are drawn by rich")
    monkeypatch.setattr("booster.cli.machine_commands._PROBE_SECONDS", 0.01)
    monkeypatch.setattr("booster.cli.planning_commands._PATIENCE", 1e6)  # a loaded machine is slow
    monkeypatch.chdir(folder)
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", f"{columns}")
    assert main(COMMANDS[command]) in (0, 1)
    return capsys.readouterr()


@pytest.mark.slow_cases("estimate")
@pytest.mark.parametrize("command", COMMANDS)
def test_no_line_is_longer_than_80_columns_and_no_warning_stands_before_a_table(
    command, folder, monkeypatch, capsys, caplog
):
    out, err = printed(command, folder, 80, monkeypatch, capsys)
    assert [line for line in out.splitlines() if len(line) > 80] == []
    assert "…" not in out
    assert err == ""
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_at_80_columns_words_that_have_no_room_beside_numbers_stand_below_them(folder, monkeypatch, capsys):
    narrow, _ = printed("advise", folder, 80, monkeypatch, capsys)
    assert "\nnvfp4: " in narrow
    wide, _ = printed("advise", folder, None, monkeypatch, capsys)
    assert "\nnvfp4: " not in wide
    assert all(narrow.count(word) == wide.count(word) for word in ("rehearsed", "half_products"))


def test_in_a_pipe_lines_are_whole(folder, monkeypatch, capsys):
    out, _ = printed("compare", folder, None, monkeypatch, capsys)
    assert max(map(len, out.splitlines())) > 80
