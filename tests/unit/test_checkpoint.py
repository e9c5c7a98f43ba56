"""A checkpoint holds a whole run, appears whole or not at all, and is verified before anything is touched."""

import hashlib
import json
import math
import multiprocessing
import sys
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pytest
import torch
from comparing import same
from torch import nn
from torch.utils.data import TensorDataset

from booster import Booster
from booster.checkpoint import CheckpointError, latest, saving
from booster.checkpoint import saved_checkpoint as saved
from booster.checkpoint.state_tree import decode, encode
from booster.mixed_precision import (
    BF16NaiveMixedPrecision,
    FP16ApexMixedPrecision,
    FP16NaiveMixedPrecision,
    FP16TorchMixedPrecision,
)
from booster.tensors import trees

PRECISIONS = {
    "fp32": lambda: "fp32",
    "fp16": lambda: "fp16",
    "bf16": lambda: "bf16",
    "fp16_naive": lambda: FP16NaiveMixedPrecision(initial_scale=2.0**10),
    "fp16_naive split": lambda: FP16NaiveMixedPrecision(initial_scale=2.0**10, master_weights="split"),
    "bf16_naive": BF16NaiveMixedPrecision,
    "bf16_naive fp32": lambda: BF16NaiveMixedPrecision(master_weights="fp32"),
    "bf16_naive kahan": lambda: BF16NaiveMixedPrecision(master_weights="none", rounding="kahan"),
    "bf16_naive stochastic": lambda: BF16NaiveMixedPrecision(master_weights="none", rounding="stochastic"),
    "O1": lambda: FP16ApexMixedPrecision("O1", verbosity=0),
    "O2": lambda: FP16ApexMixedPrecision("O2", verbosity=0),
}


@dataclass
class Job:
    booster: Booster
    parts: tuple

    def train(self, steps):
        model, optimizer, criterion, loader, schedule = self.parts
        losses = []
        while len(losses) < steps:
            for x, y in loader:
                loss = criterion(model(x), y)
                self.booster.backward(loss, optimizer)
                optimizer.clip_grad_by_norm(1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                losses.append(loss.item())
                if len(losses) == steps:
                    break
        return losses

    def state(self):
        model, optimizer, *_ = self.parts
        return {**model.state_dict(), "scale": torch.tensor(optimizer.loss_scale)}


def job(precision="bf16_naive", seed=0, width=16, workers=0, optimizer=torch.optim.AdamW):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.Dropout(0.1), nn.Linear(width, 4))
    made = optimizer(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(made, 50)
    booster = Booster("cpu", PRECISIONS[precision]())
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(40, 8, generator=generator), torch.randint(0, 4, (40,), generator=generator))
    loader = booster.prepare_dataloader(data, batch_size=8, shuffle=True, num_workers=workers)
    return Job(booster, booster.boost(model, made, nn.CrossEntropyLoss(), loader, schedule))


# ---- resuming ----


OPTIMIZERS = [
    "AdamW",
    "SGD",
    "Adagrad",
    "Adadelta",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "ASGD",
    "Adafactor",
]
OPTIONS = {"SGD": {"momentum": 0.9}, "RMSprop": {"momentum": 0.9, "centered": True}}


@pytest.mark.slow_cases("Rprop", "RAdam", "NAdam", "Adamax")
@pytest.mark.crossed
@pytest.mark.parametrize("precision", ["fp32", "bf16_naive"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_load_into_a_job_that_has_stepped_is_to_the_bit_and_needs_no_second_memory(tmp_path, name, precision):
    def made(seed):
        def optimizer(params, lr):
            return getattr(torch.optim, name)(params, lr=lr, **OPTIONS.get(name, {}))

        return job(precision, seed=seed, optimizer=optimizer)

    def tensors(job):
        inner = job.parts[1].unwrap()
        states = [value for own in inner.state.values() for value in own.values() if isinstance(value, torch.Tensor)]
        return [*job.parts[0].parameters(), *job.parts[0].buffers(), *(value for value in states if value.dim())]

    def go_on(job):
        model, optimizer, criterion, _, schedule = job.parts
        losses = []
        for _ in range(4):
            losses.append(criterion(model(torch.ones(8, 8)), torch.arange(8) % 4))
            job.booster.backward(losses[-1], optimizer)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        return losses

    first = made(0)
    first.train(7)
    first.booster.save(tmp_path, *first.parts, step=7)
    expected = go_on(first)
    second = made(1)
    second.train(3)
    before, versions = [t.data_ptr() for t in tensors(second)], [p._version for p in second.parts[0].parameters()]
    second.booster.load(tmp_path, *second.parts)
    if precision == "fp32" and name != "Adafactor":  # which has states of other shapes
        assert [t.data_ptr() for t in tensors(second)] == before
    assert all(p._version > then for p, then in zip(second.parts[0].parameters(), versions, strict=True))
    assert go_on(second) == expected
    assert same(first.state(), second.state())


class Replaces:
    """What is loaded before weights are, and writes other bytes into the checkpoint meanwhile, as another process may."""

    def __init__(self, folder, cut):
        self.folder, self.cut, self.value = folder, cut, 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]
        (path,) = self.folder.glob("step-*/tensors-*")
        with path.open("r+b") as file:
            file.seek(-8, 2)
            if self.cut:
                file.truncate()
            else:
                file.write(b"\xff" * 8)


@pytest.mark.parametrize("cut", [False, True], ids=["other bytes", "cut short"])
def test_a_file_that_changes_between_being_verified_and_being_read_is_told_with_what_holds_parts_of_it(tmp_path, cut):
    first = job("fp32")
    first.train(2)
    first.booster.save(tmp_path, *first.parts, step=2, extra=Replaces(tmp_path, cut))
    second = job("fp32", seed=1)
    second.train(3)
    schedule, extra = second.parts[4].state_dict(), Replaces(tmp_path, cut)
    extra.value = 3
    with pytest.raises(
        CheckpointError, match=r"another process changed it meanwhile: weights and optimizer states of this job"
    ):
        second.booster.load(tmp_path / "step-0000000002", *second.parts, extra=extra)
    assert second.parts[4].state_dict() == schedule


# Every precision within an epoch; where in its epochs a run is makes no difference to them.
RESUMED = [*((precision, 8) for precision in PRECISIONS), ("fp16", 3), ("fp16", 5), ("bf16_naive", 5)]


@pytest.mark.slow_cases("fp16_naive", "bf16_naive kahan", "bf16_naive stochastic")
@pytest.mark.parametrize(("precision", "at"), RESUMED)
def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(tmp_path, precision, at):
    first = job(precision)
    # In one pass over the loader, so that the position is one inside the epoch.
    model, optimizer, criterion, loader, schedule = first.parts
    batches = (batch for _ in range(9) for batch in loader)

    def train(parts, batches, steps):
        model, optimizer, criterion, _, schedule = parts
        losses = []
        for _ in range(steps):
            x, y = next(batches)
            loss = criterion(model(x), y)
            first.booster.backward(loss, optimizer)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    train(first.parts, batches, at)
    first.booster.save(tmp_path, *first.parts, step=at)
    expected = train(first.parts, batches, 10)
    second = job(precision, seed=1)
    assert second.booster.load(tmp_path, *second.parts).step == at
    again = (batch for _ in range(9) for batch in second.parts[3])
    assert train(second.parts, again, 10) == expected
    assert same(first.state(), second.state())


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16_naive", "O2"])
def test_a_run_that_accumulates_goes_on_with_the_short_last_group(tmp_path, precision):
    def epochs(job, number, save_after=None):
        """Groups of three batches of an epoch's five, so that the second has two."""
        model, optimizer, criterion, loader, schedule = job.parts
        losses = []
        for _ in range(number):
            batches = iter(loader)
            while group := list(islice(batches, 3)):
                with job.booster.accumulate(model, optimizer, num_micro_batches=len(group)):
                    for x, y in group:
                        loss = criterion(model(x), y)
                        job.booster.backward(loss, optimizer)
                        losses.append(loss.item())
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                if len(losses) == save_after:
                    job.booster.save(tmp_path, *job.parts)
        return losses

    first, second = job(precision), job(precision, seed=1)
    expected = epochs(first, 3, save_after=8)
    second.booster.load(tmp_path, *second.parts)
    assert epochs(second, 2) == expected[8:]
    assert same(first.state(), second.state())


def test_a_run_is_saved_and_loaded_where_numpy_is_absent(tmp_path, monkeypatch):
    def absent(*args, **kwargs):
        raise RuntimeError("Numpy is not available")

    monkeypatch.setattr(torch.Tensor, "numpy", absent)
    monkeypatch.setitem(sys.modules, "numpy", None)
    first = job()
    first.train(3)
    first.booster.save(tmp_path, *first.parts, step=3)
    second = job(seed=1)
    second.booster.load(tmp_path, *second.parts)
    assert same(first.state(), second.state())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_gradients_that_wait_for_a_step_are_not_lost_in_silence(tmp_path, precision):
    refused = pytest.raises(
        RuntimeError, match=r"1 backward pass of optimizer .* wait for a step.*call optimizer.step\(\)"
    )
    first = job(precision)
    model, optimizer, criterion, loader, _ = first.parts
    batches = [batch for batch, _ in zip(loader, range(2), strict=False)]

    def backward(batch):
        first.booster.backward(criterion(model(batch[0]), batch[1]), optimizer)

    with first.booster.accumulate(model, optimizer, num_micro_batches=2):
        backward(batches[0])
        with refused:
            first.booster.save(tmp_path, *first.parts)
        backward(batches[1])
    optimizer.step()
    backward(batches[0])
    with refused:
        first.booster.save(tmp_path, model, [optimizer])
    optimizer.zero_grad()
    first.booster.save(tmp_path, *first.parts)
    backward(batches[0])
    optimizer.step()
    first.booster.save(tmp_path, *first.parts)  # also before zero_grad


def test_workers_go_on_with_the_order_of_the_epoch(tmp_path):
    first = job(workers=2)
    batches = iter(first.parts[3])
    next(batches), next(batches)
    first.booster.save(tmp_path, *first.parts)
    second = job(workers=2, seed=3)
    second.booster.load(tmp_path, *second.parts)
    rest = list(second.parts[3])
    assert len(rest) == 3
    for one, other in zip(batches, rest, strict=True):
        assert torch.equal(one[0], other[0])
    assert [len(batch) for batch in [list(second.parts[3])]] == [5], "the next epoch is whole"


def test_a_foreign_loader_reads_again_what_was_seen(tmp_path):
    def make():
        booster = Booster("cpu")
        model = nn.Linear(1, 1)
        batches = [torch.full((1,), float(n)) for n in range(4)]
        model, optimizer, _, loader, _ = booster.boost(
            model, torch.optim.SGD(model.parameters(), lr=0.1), None, batches, None
        )
        return booster, model, optimizer, loader

    booster, model, optimizer, loader = make()
    seen = iter(loader)
    next(seen)
    booster.save(tmp_path, model, optimizer, dataloader=loader)
    booster, model, optimizer, loader = make()
    booster.load(tmp_path, model, optimizer, dataloader=loader)
    assert [float(batch) for batch in loader] == [1.0, 2.0, 3.0]
    assert [float(batch) for batch in loader] == [0.0, 1.0, 2.0, 3.0]


def test_a_save_in_the_background_is_that_of_its_moment(tmp_path):
    first = job()
    first.train(3)
    moment = {key: value.clone() for key, value in first.state().items()}
    path = first.booster.save(tmp_path, *first.parts, step=3, async_save=True)
    first.train(5)
    first.booster.wait_for_save()
    assert latest(tmp_path) == path
    second = job(seed=1)
    second.booster.load(tmp_path, *second.parts)
    assert same(second.state(), moment)


def test_a_failed_save_in_the_background_surfaces_at_the_next_call(tmp_path):
    first = job()
    (tmp_path / "step-0000000003").mkdir()
    (tmp_path / "step-0000000003" / "notes.txt").write_text("mine")
    first.booster.save(tmp_path, *first.parts, step=3, async_save=True)
    with pytest.raises(CheckpointError, match="exists and is not a checkpoint; it is left alone"):
        first.booster.save(tmp_path, *first.parts, step=4)
    assert (tmp_path / "step-0000000003" / "notes.txt").read_text() == "mine"
    first.booster.save(tmp_path, *first.parts, step=4)
    assert latest(tmp_path).name == "step-0000000004"


@pytest.mark.parametrize("async_save", [False, True])
def test_a_save_that_fails_for_want_of_memory_is_an_error_of_the_checkpoint_wherever_it_is_written(
    tmp_path, monkeypatch, async_save
):
    first = job()

    def fail(*args):
        raise MemoryError("no room")

    monkeypatch.setattr(saving, "write_synced", fail)
    with pytest.raises(CheckpointError, match="no room"):
        first.booster.save(tmp_path, *first.parts, step=3, async_save=async_save)
        first.booster.wait_for_save()
    assert latest(tmp_path) is None


def test_what_ends_the_writing_thread_otherwise_surfaces_at_the_next_call_too(tmp_path, monkeypatch):
    first = job()

    def fail(*args, **options):
        raise KeyError("a name")

    monkeypatch.setattr(saving, "write", fail)
    first.booster.save(tmp_path, *first.parts, step=3, async_save=True)
    with pytest.raises(CheckpointError, match="saving failed: KeyError"):
        first.booster.wait_for_save()


class Counting:
    def __init__(self, count):
        self.count = count

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def test_objects_with_a_state_are_kept_in_lists_and_tuples_of_extra_as_they_are_in_dicts(tmp_path):
    def extra(start):
        return {"pair": (Counting(start), start), "list": [Counting(start + 1), {"in": Counting(start + 2)}]}

    first = job()
    first.booster.save(tmp_path, *first.parts, extra=extra(5))
    second, own = job(seed=1), extra(0)
    found = second.booster.load(tmp_path, *second.parts, extra=own).extra
    assert [own["pair"][0].count, own["list"][0].count, own["list"][1]["in"].count] == [5, 6, 7]
    assert found["pair"] == ({"count": 5}, 5)


@pytest.fixture
def slow_disk(monkeypatch):
    """Makes a save take its time before its last rename."""
    real = saving.publish

    def publish(staging, final, lock):
        time.sleep(0.3)
        real(staging, final, lock)

    monkeypatch.setattr(saving, "publish", publish)


def test_a_load_waits_for_the_save_in_the_background(tmp_path, slow_disk):
    first = job()
    first.train(2)
    first.booster.save(tmp_path, *first.parts, step=2, async_save=True)
    moment = {key: value.clone() for key, value in first.state().items()}
    first.train(1)
    assert first.booster.load(tmp_path, *first.parts).step == 2
    assert same(first.state(), moment)


def _save_and_end(folder):
    running = job()
    running.booster.save(folder, *running.parts, step=4, async_save=True)


def test_the_end_of_the_process_waits_for_the_save_in_the_background(tmp_path, slow_disk):
    process = multiprocessing.get_context("fork").Process(target=_save_and_end, args=(tmp_path,))
    process.start()
    process.join(240)
    assert process.exitcode == 0
    assert latest(tmp_path).name == "step-0000000004"


def test_several_models_and_optimizers_are_kept_by_name(tmp_path):
    def gan(seed):
        torch.manual_seed(seed)
        booster = Booster("cpu", FP16TorchMixedPrecision(init_scale=8.0))
        parts = [
            booster.boost(model, torch.optim.Adam(model.parameters()))[:2]
            for model in (nn.Linear(2, 2), nn.Linear(2, 1))
        ]
        return (
            booster,
            dict(zip("gd", [p[0] for p in parts], strict=True)),
            dict(zip("gd", [p[1] for p in parts], strict=True)),
        )

    booster, models, optimizers = gan(0)
    for name in "gd":
        booster.backward(models[name](torch.ones(1, 2)).sum(), optimizers[name])
        optimizers[name].step()
    booster.save(tmp_path, models, optimizers)
    other, others, other_optimizers = gan(1)
    other.load(tmp_path, others, other_optimizers)
    for name in "gd":
        assert same(models[name].state_dict(), others[name].state_dict())
        assert other_optimizers[name].num_applied == 1


# ---- other precisions ----


@pytest.mark.crossed
@pytest.mark.parametrize("target", PRECISIONS)
@pytest.mark.parametrize("source", PRECISIONS)
def test_weights_move_to_another_precision_with_every_bit_that_it_holds(tmp_path, source, target):
    first = job(source)
    first.train(3)
    first.booster.save(tmp_path, *first.parts)
    second = job(target, seed=1)
    second.booster.load(tmp_path, *second.parts)
    _check_moved(first, second, source, target)


def _check_moved(first, second, source, target):
    def wide(job):
        model, optimizer, *_ = job.parts
        own = optimizer.state_dict()["booster"].get("masters", {}).get("weights", {})
        return {**{k: v.float() for k, v in model.state_dict().items()}, **{k: v.float() for k, v in own.items()}}

    exact = "kahan" not in target and "stochastic" not in target
    for name, value in wide(first).items():
        bound = 0 if exact or source == target else 2**-7
        torch.testing.assert_close(
            wide(second)[name], value, rtol=bound, atol=0, msg=lambda text, name=name: f"{name} in {target}: {text}"
        )
    states = [one.parts[1].state_dict()["state"] for one in (first, second)]
    assert states[0].keys() == states[1].keys()
    for key, own in states[0].items():
        assert torch.equal(own["exp_avg"].float(), states[1][key]["exp_avg"].float()), target


def test_every_counter_of_a_loss_scale_comes_back(tmp_path):
    def scaled(seed):
        torch.manual_seed(seed)
        booster = Booster("cpu", FP16TorchMixedPrecision(init_scale=1024.0, growth_interval=9, hysteresis=2))
        model = nn.Linear(4, 2)
        return booster, *booster.boost(model, torch.optim.SGD(model.parameters(), lr=1e-3))[:2]

    def step(booster, model, optimizer, factor):
        booster.backward(model(torch.ones(3, 4)).square().mean() * factor, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        return optimizer.loss_scale

    first, second = scaled(0), scaled(1)
    for factor in (math.inf, 1.0):
        assert step(*first, factor) == 1024.0, "the first overflow is forgiven"
    first[0].save(tmp_path, *first[1:], step=2)
    second[0].load(tmp_path, *second[1:])
    assert second[2]._update.gradients.scaler.state_dict() == first[2]._update.gradients.scaler.state_dict()
    assert [step(*job, math.inf) for job in (first, second)] == [512.0, 512.0], "the second is not"


# ---- what does not fit ----


def test_one_error_lists_all_that_differs_and_nothing_is_loaded(tmp_path):
    first = job()
    first.booster.save(tmp_path, *first.parts)
    other = job(width=12, optimizer=torch.optim.SGD)
    before = {key: value.clone() for key, value in other.state().items()}
    with pytest.raises(CheckpointError) as error:
        other.booster.load(tmp_path, *other.parts)
    text = str(error.value)
    assert "0.weight has shape (16, 8) in the checkpoint and shape (12, 8) here" in text
    assert "3.weight has shape (4, 16)" in text
    assert "the checkpoint is of AdamW, this is SGD" in text
    assert same(other.state(), before)


def test_entries_that_only_one_side_has_are_named_or_left_out_when_asked(tmp_path, caplog):
    booster = Booster("cpu")
    small, _, *_ = booster.boost(nn.Sequential(nn.Linear(2, 2)))
    booster.save(tmp_path, small)
    large, *_ = booster.boost(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    with pytest.raises(CheckpointError, match=r"1\.weight, 1\.bias are not in the checkpoint"):
        booster.load(tmp_path, large)
    booster.load(tmp_path, large, strict=False)
    assert torch.equal(large[0].weight, small[0].weight)
    assert "1.weight, 1.bias are not in the checkpoint" in caplog.text


@pytest.mark.parametrize("call", ["load", "load_model"])
def test_what_was_left_out_is_said_in_one_line(tmp_path, caplog, call):
    booster = Booster("cpu")
    saved, own = (nn.ModuleDict({name: nn.Linear(2, 2) for name in names}) for names in ("ab", "ac"))
    boosted = booster.boost(saved)[0]
    if call == "load":
        booster.save(tmp_path, boosted)
        booster.load(tmp_path, booster.boost(own)[0], strict=False)
    else:
        booster.save_model(boosted, tmp_path / "model.safetensors")
        booster.load_model(booster.boost(own)[0], tmp_path / "model.safetensors", strict=False)
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line.index("c.weight") < line.index("b.weight")
    assert "not in" in line
    assert "\n" not in line


class Buffered(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("bins", torch.tensor([0.5, 2.5]).to(dtype))


CASTS = [
    (torch.float32, torch.int64),
    (torch.int64, torch.int32),
    (torch.int64, torch.float32),
    (torch.uint8, torch.bool),
]


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(("saved", "own"), CASTS, ids=str)
def test_numbers_of_another_kind_are_refused_and_not_cut_off(tmp_path, saved, own, strict):
    booster = Booster("cpu")
    booster.save(tmp_path / "run", booster.boost(Buffered(saved))[0])
    booster.save_model(booster.boost(Buffered(saved))[0], tmp_path / "model.safetensors")
    model = booster.boost(Buffered(own))[0]
    before = model.bins.clone()
    refused = f"bins has dtype {saved} in the .* and {own} "
    with pytest.raises(CheckpointError, match=refused):
        booster.load(tmp_path / "run", model, strict=strict)
    with pytest.raises(CheckpointError, match=refused):
        booster.load_model(model, tmp_path / "model.safetensors", strict=strict)
    assert torch.equal(model.bins, before)
    other = booster.boost(Buffered(torch.float16))[0]
    if saved == torch.float32:
        booster.load(tmp_path / "run", other)
        assert other.bins.tolist() == [0.5, 2.5], "among floating-point dtypes the numbers are kept"


def test_what_cannot_be_kept_is_refused_by_name(tmp_path):
    first = job()
    with pytest.raises(TypeError, match="extra/when is a .*Path, which a checkpoint does not hold"):
        first.booster.save(tmp_path, *first.parts, extra={"when": Path()})
    with pytest.raises(TypeError, match="needs the optimizer that boost"):
        first.booster.save(tmp_path, first.parts[0], first.booster.unwrap(first.parts[1]))
    assert not list(tmp_path.iterdir())


VALUES = [
    *(None, True, 3, -2.5, math.inf, -math.inf, "text", [1, [2, "x"]], (1, (2,)), {"a": 1, "b": {"c": [None]}}),
    *({1: 2, (3, "x"): 4.0}, {1, 2}, frozenset({"a"}), torch.float16, torch.device("cpu"), {"__booster__": "tensor"}),
    *(torch.arange(3), {"t": [torch.tensor(1.5)]}),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_plain_values_come_back_as_they_were(value):
    tensors = {}
    text = json.dumps(encode(value, "x", tensors), allow_nan=False)
    assert repr(decode(json.loads(text), tensors)) == repr(value)


# ---- folders ----


def test_keep_last_leaves_the_newest(tmp_path):
    first = job()
    for step in (1, 2, 3, 10**10):
        first.booster.save(tmp_path, *first.parts, step=step, keep_last=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-0000000003", "step-10000000000"]
    assert latest(tmp_path).name == "step-10000000000"


def test_the_newest_valid_checkpoint_is_found_and_a_bad_one_named(tmp_path, caplog):
    first = job()
    for step in (1, 2):
        first.booster.save(tmp_path, *first.parts, step=step)
    (tmp_path / "step-0000000002" / "state.json").write_text("{}")
    assert latest(tmp_path).name == "step-0000000001"
    assert "step-0000000002 is passed over: state.json has 2 bytes" in caplog.text
    with pytest.raises(CheckpointError, match="step-0000000002 is damaged: state.json has 2 bytes"):
        first.booster.load(tmp_path / "step-0000000002", *first.parts)
    assert first.booster.load(tmp_path, *first.parts).step == 1


def test_a_checkpoint_whose_replacement_was_cut_off_still_has_its_name(tmp_path):
    first = job()
    path = first.booster.save(tmp_path, *first.parts, step=2)
    path.rename(f"{path}.replaced")
    assert latest(tmp_path) == Path(f"{path}.replaced")
    assert first.booster.load(path, *first.parts).step == 2
    assert first.booster.load(tmp_path, *first.parts).step == 2
    first.booster.save(tmp_path, *first.parts, step=2)
    assert [found.name for found in tmp_path.iterdir()] == [path.name]


def test_a_manifest_says_only_what_was_written(tmp_path):
    first = job()
    path = first.booster.save(tmp_path, *first.parts, step=2)
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"step":2', '"step":3'))
    with pytest.raises(CheckpointError, match="its content does not match its hash"):
        first.booster.load(path, *first.parts)


def _resealed(path, change):
    """Write a manifest that was changed by somebody who made its hash right again."""
    outer = json.loads((path / "manifest.json").read_text())
    change(outer)
    text = json.dumps(outer["content"], sort_keys=True, separators=(",", ":"))
    outer["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(outer))


def _names_a_file_outside(outer):
    outer["content"]["files"]["../state.json"] = outer["content"]["files"].pop("state.json")


def _covers_half_a_tensor(outer):
    chunk = outer["content"]["tensors"]["models/0/0.weight"]["chunks"][0]
    chunk["sizes"][0] //= 2


def _is_of_version_3(outer):
    outer["version"] = 3


def _names_another_hash(outer):
    outer["content"]["files"]["state.json"]["hash"] = "md5"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_names_a_file_outside, "a file is '../state.json', and not a file's name"),
        (_covers_half_a_tensor, "the parts of models/0/0.weight do not make up its shape"),
        (_is_of_version_3, "is of version 3 of the format; this booster reads version 2"),
        (_names_another_hash, "hash is 'md5', and not 'xxh3_128'"),
    ],
)
def test_a_manifest_that_nobody_here_wrote_is_refused(tmp_path, change, message):
    first = job()
    path = first.booster.save(tmp_path / "runs", *first.parts, step=2)
    (tmp_path / "runs" / "state.json").write_bytes((path / "state.json").read_bytes())
    _resealed(path, change)
    with pytest.raises(CheckpointError, match=message):
        first.booster.load(path, *first.parts)


def _flip_last_byte(file):
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_every_file_is_verified_whatever_is_read_of_it(tmp_path):
    first = job()
    path = first.booster.save(tmp_path, *first.parts, step=2)
    _flip_last_byte(path / "tensors-00000.safetensors")
    with pytest.raises(CheckpointError, match="is damaged: tensors-00000.safetensors holds other bytes"):
        first.booster.load(path, first.parts[0], lr_scheduler=first.parts[4])
    with pytest.raises(CheckpointError, match="is damaged: tensors-00000.safetensors holds other bytes"):
        first.booster.load(path, None, lr_scheduler=first.parts[4])


@pytest.mark.parametrize("width", [16, 8], ids=["which fits", "which fits no more"])
def test_a_damaged_checkpoint_is_passed_over_when_it_is_read(tmp_path, caplog, width):
    first = job()
    first.train(1)
    first.booster.save(tmp_path, *first.parts, step=1)
    other = job(width=width)
    _flip_last_byte(other.booster.save(tmp_path, *other.parts, step=2) / "tensors-00000.safetensors")
    second = job(seed=1)
    assert second.booster.load(tmp_path, *second.parts).step == 1
    assert same(first.state(), second.state())
    assert (
        "step-0000000002 is passed over: tensors-00000.safetensors holds other bytes than were written" in caplog.text
    )


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_read_again(tmp_path, monkeypatch):
    first, second = job(), job(seed=1)
    path = first.booster.save(tmp_path, *first.parts, step=1)
    first.train(1)
    real, times = saved.read_manifest, []

    def replaced_afterwards(folder):
        manifest = real(folder)
        times.append(folder)
        if len(times) == 1:
            assert first.booster.save(tmp_path, *first.parts, step=1) == path
        return manifest

    monkeypatch.setattr(saved, "read_manifest", replaced_afterwards)
    second.booster.load(path, *second.parts)
    assert same(first.state(), second.state())
    assert times.count(path) == 2  # the save between looks at what it wrote elsewhere


@pytest.mark.parametrize("call", ["save", "save in the background", "load"])
def test_without_xxhash_the_message_says_what_to_install(tmp_path, monkeypatch, call):
    first = job()
    path = first.booster.save(tmp_path / "runs", *first.parts, step=1)
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(ImportError, match="need xxhash: pip install xxhash"):
        if call == "load":
            first.booster.load(path, *first.parts)
        else:
            first.booster.save(tmp_path / "runs", *first.parts, step=2, async_save=call != "save")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["step-0000000001"]


def test_another_number_of_groups_is_refused(tmp_path):
    def boosted(split):
        booster, model = Booster("cpu"), nn.Linear(2, 2)
        groups = [{"params": [model.weight]}, {"params": [model.bias]}] if split else [{"params": model.parameters()}]
        return booster, *booster.boost(model, torch.optim.SGD(groups, lr=0.1))[:2]

    booster, *parts = boosted(split=False)
    booster.save(tmp_path, *parts)
    booster, *parts = boosted(split=True)
    with pytest.raises(CheckpointError, match="the checkpoint has 1 parameter groups, this has 2"):
        booster.load(tmp_path, *parts)


def test_an_empty_folder_says_that_it_is_one(tmp_path):
    first = job()
    with pytest.raises(CheckpointError, match="there is no valid checkpoint in .*: it holds no folder"):
        first.booster.load(tmp_path / "nowhere", *first.parts)


@pytest.mark.crossed
@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_no_load_would_take_is_not_written_and_what_is_written_loads(tmp_path, precision, async_save):
    running = job(precision)
    running.train(1)
    good = {key: value.clone() for key, value in running.state().items()}
    running.booster.save(tmp_path, *running.parts, step=1, keep_last=1)
    model = running.parts[0]
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")

    def save():
        running.booster.save(tmp_path, *running.parts, step=2, keep_last=1, async_save=async_save)
        running.booster.wait_for_save()

    if "naive" in precision or precision == "O2":
        with pytest.raises(CheckpointError, match="0.weight holds NaN"):
            save()
        assert [path.name for path in tmp_path.iterdir()] == ["step-0000000001"]
    else:
        save()
        good = running.state()
    again = job(precision, seed=1)
    again.booster.load(tmp_path, *again.parts)
    for key, value in again.state().items():
        assert torch.equal(value.nan_to_num(), good[key].nan_to_num()), key


@pytest.mark.parametrize("keep_last", [1, 2, 3])
def test_nothing_takes_the_place_of_the_last_checkpoint_that_loads(tmp_path, keep_last):
    running = job()
    for step in (3, 8, 9, 10):
        path = running.booster.save(tmp_path, *running.parts, step=step)
        if step == 8:
            (path / "manifest.json").unlink()
        elif step == 9:
            (path / "state.json").write_text("")
        elif step == 10:
            next(path.glob("*.safetensors")).unlink()
    running.train(1)
    running.booster.save(tmp_path, *running.parts, step=4, keep_last=keep_last)
    left = sorted(int(path.name.removeprefix("step-")) for path in tmp_path.iterdir())
    assert left == [4, 8, 9, 10] if keep_last == 1 else [3, 4, 8, 9, 10]
    running.booster.save(tmp_path, *running.parts, step=2, keep_last=1)
    assert latest(tmp_path).name == "step-0000000004", "the newest of those that load"
    assert (tmp_path / "step-0000000002").exists(), "what was just saved is kept"


class Containers(torch.optim.Optimizer):
    """Momentum, in a container of the state; a mean in half of float32 weights; a state of no parameter."""

    def __init__(self, params, form, lr=0.1):
        super().__init__(params, {"lr": lr})
        self.form = form

    def __setstate__(self, state):
        super().__setstate__(state)  # to which torch casts what it loads
        for own in (own for own in self.state.values() if isinstance(own, dict) and "mean" in own):
            own["mean"] = own["mean"].bfloat16()

    @torch.no_grad()
    def step(self, closure=None):
        steps = self.state.setdefault("steps", torch.zeros(1)).add_(1)
        for p in (p for group in self.param_groups for p in group["params"]):
            state = self.state[p]
            if not state:
                state["x"] = CONTAINERS[self.form](torch.zeros_like(p), torch.zeros(3, 2))
                state["mean"] = torch.zeros_like(p, dtype=torch.bfloat16)
            (momentum,) = [t for t in trees.tensors(state["x"]) if t.shape == p.shape]
            momentum.mul_(0.9).add_(p.grad)
            state["mean"].lerp_(momentum.bfloat16(), 0.5)
            p.sub_(momentum + state["mean"] / steps, alpha=self.param_groups[0]["lr"])


CONTAINERS = {
    "list": lambda a, b: [a, b],
    "by columns": lambda a, b: [a.mT.clone().mT, b.mT] if a.dim() == 2 else [a, b],
    "tuple": lambda a, b: (a, 1.5, b),
    "dict": lambda a, b: {"m": a, "q": b},
    "whole numbers as keys": lambda a, b: {0: a, 1: b},
    "nested": lambda a, b: {"a": [None, {"m": (a,)}], "b": ["s", True, b]},
    "not of the weight's dtype": lambda a, b: {
        "m": a, "name": "warm", "seen": torch.tensor([True]), "count": torch.arange(2), "b": b,
        "exact": [torch.tensor(1 / 3, dtype=torch.float64)],
    },
}  # fmt: skip


@pytest.mark.crossed
@pytest.mark.parametrize("precision", ["fp32", "bf16_naive"])
@pytest.mark.parametrize("form", CONTAINERS)
def test_an_optimizer_whose_states_are_containers_of_tensors_goes_on_to_the_bit(tmp_path, form, precision):
    def start():
        torch.manual_seed(0)
        model = nn.Linear(8, 5)
        booster = Booster("cpu", precision)
        return booster, *booster.boost(model, Containers(model.parameters(), form))[:2]

    def train(booster, model, optimizer, steps):
        for step in steps:
            data = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            booster.backward(model(data).float().square().mean(), optimizer)
            optimizer.step()
            optimizer.zero_grad()

    first, second = start(), start()
    train(*first, range(3))
    first[0].save(tmp_path, *first[1:])
    second[0].load(tmp_path, *second[1:])
    # Products of matrices that lie in memory otherwise sum in another order.
    strides = [
        [t.stride() for t in trees.tensors(optimizer.state_dict()["state"][0])] for *_, optimizer in (first, second)
    ]
    assert strides[0] == strides[1]
    assert same(first[2].state_dict(), second[2].state_dict())
    train(*first, range(3, 13))
    train(*second, range(3, 13))
    assert all(map(torch.equal, first[1].parameters(), second[1].parameters()))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "bf16_naive", "fp16_naive"])
def test_a_run_that_was_loaded_within_inference_mode_goes_on_to_the_bit(tmp_path, precision):
    first, second = job(precision=precision), job(seed=1, precision=precision)
    first.train(5)  # an epoch
    first.booster.save(tmp_path, *first.parts)
    first.train(2)
    with torch.inference_mode():
        second.booster.load(tmp_path, *second.parts)
    second.train(2)
    assert same(first.state(), second.state())
