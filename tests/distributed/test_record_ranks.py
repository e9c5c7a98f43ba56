"""Records of several ranks: parts of parameters add up to what one process would have written, on every plugin."""

import torch
from small_job import batch, boost, net, sgd
from torch.nn import functional as F

from booster import Booster
from booster.mixed_precision import BF16NaiveMixedPrecision, FP16TorchMixedPrecision
from booster.numerics import read_run
from booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin

PLUGINS = {
    "ddp": TorchDDPPlugin,
    "zero": lambda: LowLevelZeroPlugin(stage=2),
    "fsdp": TorchFSDPPlugin,
    "tp": lambda: HybridParallelPlugin(tp_size=2, pp_size=1, tp_plan={"0": "colwise", "2": "rowwise"}),
}
PRECISIONS = {
    "fp16": lambda: FP16TorchMixedPrecision(init_scale=2.0**8),
    "bf16_naive": BF16NaiveMixedPrecision,
}
STEPS = 2


def run(booster, folder, rows):
    model = net()
    model, optimizer, *_ = booster.boost(model, sgd(model.parameters()))
    losses = []
    with booster.record(folder, every=1):
        for seed in range(1, STEPS + 1):
            x, y = batch(seed)
            loss = F.cross_entropy(model(x[rows]), y[rows])
            losses.append(loss.item())
            booster.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def record(rank, world_size, folder):
    losses = {}
    for plugin, make in PLUGINS.items():
        for precision, strategy in PRECISIONS.items():
            rows = slice(None) if plugin == "tp" else slice(rank * 8, rank * 8 + 8)
            booster = Booster("cpu", strategy(), make())
            losses[plugin, precision] = run(booster, f"{folder}/{plugin}-{precision}", rows)
    return losses


def test_parts_of_parameters_add_up_to_those_of_one_process(ranks2, tmp_path):
    per_rank = ranks2(record, str(tmp_path))
    for precision, strategy in PRECISIONS.items():
        run(Booster("cpu", strategy()), tmp_path / precision, slice(None))
        expected = read_run(tmp_path / precision)
        for plugin in PLUGINS:
            case = f"{plugin} {precision}"
            found = read_run(tmp_path / f"{plugin}-{precision}")
            assert found.about["world_size"] == 2, case
            means = [sum(losses) / 2 for losses in zip(*(each[plugin, precision] for each in per_rank), strict=True)]
            assert [step.loss for step in found.steps["0"]] == means, case
            ours, theirs = found.samples["0"], expected.samples["0"]
            assert [(row.step, row.name) for row in ours] == [(row.step, row.name) for row in theirs], case
            for row, other in zip(ours, theirs, strict=True):
                assert row.exponents.total == other.exponents.total, (case, row.name)
                assert row.format == other.format, (case, row.name)
                for name in ("norm", "weight_norm", "update_norm", "largest"):
                    assert abs(getattr(row, name) - getattr(other, name)) <= 0.05 * getattr(other, name), (
                        case,
                        row.name,
                        name,
                    )
                assert row.still is not None, (case, row.name)


def skip_on_one(rank, world_size, folder):
    booster, model, optimizer = boost(FP16TorchMixedPrecision(init_scale=2.0**8), plugin=TorchFSDPPlugin())
    with booster.record(folder, every=1):
        x, y = batch()
        loss = F.cross_entropy(model(x), y) * (1e30 if rank == 1 else 1.0)
        booster.backward(loss, optimizer)
        assert not optimizer.step()


def test_a_skip_is_written_by_all_ranks_and_read_as_one(ranks2, tmp_path):
    ranks2(skip_on_one, str(tmp_path))
    (step,) = read_run(tmp_path).steps["0"]
    assert not step.applied
    assert step.reason == "nonfinite_grad"
    assert set(step.culprit) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert len(list(tmp_path.iterdir())) == 2
    assert torch.cuda.is_available() or read_run(tmp_path).about["device"] == "cpu"
