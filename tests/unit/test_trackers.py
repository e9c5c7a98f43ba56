"""The numbers of steps reach a tracker by its own means."""

import pytest
from small_job import boost, train


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
