"""The numbers of steps reach a tracker, by its own means and by those of the example."""

import csv
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from small_job import boost, train

ROOT = Path(__file__).resolve().parents[2]
FEATURES = ROOT / "examples" / "features"

# wandb starts a service, so this runs in its own process.
BY_WANDB = """
import wandb
from small_job import boost, train
from trackers import FOLDER, to_wandb

FOLDER.mkdir(parents=True)
booster, model, optimizer = boost("fp16")
with booster.record(FOLDER, tracker=to_wandb()):
    print(*train(booster, model, optimizer))
run = wandb.run
run.log({"over": 1}, step=99)  # a step is complete when the next one begins
print(run.summary["loss"], run.summary["loss_scale"], run.summary["applied"])
wandb.finish()
"""


def test_the_csv_of_the_example_has_every_number_of_every_step(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(FEATURES)
    example = runpy.run_path(str(FEATURES / "trackers.py"))
    example["FOLDER"].mkdir(parents=True)
    booster, model, optimizer = boost("fp16")
    with booster.record(tmp_path / "run", tracker=example["to_csv"]()):
        losses = train(booster, model, optimizer)
    with open(tmp_path / "runs" / "trackers" / "steps.csv", newline="") as file:
        rows = [(int(step), name, float(value)) for step, name, value in csv.reader(file)]
    assert [(step, value) for step, name, value in rows if name == "loss"] == [
        (number, pytest.approx(loss)) for number, loss in enumerate(losses, 1)
    ]
    assert {name for _, name, _ in rows} >= {"loss", "loss_scale", "grad_norm", "applied", "lr"}


@pytest.mark.slow
def test_wandb_offline_gets_every_number(tmp_path):
    pytest.importorskip("wandb", reason="needs pip install wandb")
    paths = os.pathsep.join(map(str, (ROOT, FEATURES, ROOT / "tests" / "support")))
    job = subprocess.run(
        [sys.executable, "-c", BY_WANDB],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths, "WANDB_SILENT": "true"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert job.returncode == 0, job.stderr
    losses, last = job.stdout.splitlines()
    loss, scale, applied = map(float, last.split())
    assert loss == pytest.approx(float(losses.split()[-1]))
    assert scale > 1
    assert applied == 1
    (written,) = (tmp_path / "runs" / "trackers" / "wandb").glob("offline-run-*/run-*.wandb")
    assert written.stat().st_size > 0


def test_tensorboard_gets_every_number_of_every_step(tmp_path):
    pytest.importorskip("tensorboard", reason="needs pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(tmp_path / "events")
    booster, model, optimizer = boost("fp16")
    with booster.record(
        tmp_path / "run", tracker=lambda values, step: [writer.add_scalar(*v, step) for v in values.items()]
    ):
        losses = train(booster, model, optimizer)
    writer.close()
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [
        (n, pytest.approx(loss)) for n, loss in enumerate(losses, 1)
    ]
    assert set(events.Tags()["scalars"]) >= {"loss", "loss_scale", "grad_norm", "applied", "lr"}
