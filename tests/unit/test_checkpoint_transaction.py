"""A load of several objects is one transaction: whichever of them refuses its state, none has changed."""

import copy
import json
import random

import pytest
import torch
from choices import precisions
from refusals import fingerprint
from resealed import reseal
from torch import nn
from torch.utils.data import TensorDataset

from booster import Booster
from booster.checkpoint import CheckpointError

PRECISIONS = precisions(
    "fp32", "fp16", "fp16_naive", "fp16_naive split", "bf16_naive", "bf16_naive kahan", "O2", scale=2.0**10
)


class Counter:
    def __init__(self):
        self.value, self.refuses = torch.zeros(2), False

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value.copy_(state["value"])
        if self.refuses:
            self.refuses = False  # it takes its own back
            raise OSError("planted")


class Job:
    def __init__(self, precision, seed, steps):
        torch.manual_seed(seed)
        self.booster = b = Booster("cpu", PRECISIONS[precision]())
        self.models, self.optimizers, self.schedules = {}, {}, {}
        for name in ("one", "two"):
            model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3))
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
            model, optimizer, _, _, schedule = b.boost(model, optimizer, lr_scheduler=schedule)
            self.models[name], self.optimizers[name], self.schedules[name] = model, optimizer, schedule
        data = TensorDataset(torch.arange(40.0).reshape(20, 2))
        self.loader = b.boost(nn.Linear(1, 1), dataloader=b.prepare_dataloader(data, batch_size=2, shuffle=True))[3]
        self.counter = Counter()
        self.batches = iter(self.loader)
        for _ in range(steps):
            self.step()

    def step(self):
        next(self.batches)
        self.counter.value += 1
        for name, model in self.models.items():
            self.booster.backward(model(torch.randn(4, 6)).square().mean(), self.optimizers[name])
            self.optimizers[name].step()
            self.optimizers[name].zero_grad()
            self.schedules[name].step()

    @property
    def parts(self):
        return self.models, self.optimizers, None, self.loader, self.schedules

    def fingerprint(self):
        rest = copy.deepcopy([schedule.state_dict() for schedule in self.schedules.values()])
        loader = {key: value for key, value in vars(self.loader).items() if key != "_loader"}
        randomness = (random.getstate(), torch.get_rng_state())
        counter = self.counter.value.tolist()
        held = [model.unwrap()[1] for model in self.models.values()]
        held += [own for schedule in self.schedules.values() for own in (schedule, schedule.unwrap())]
        attributes = [repr(vars(own)) for own in held]
        return fingerprint(self.models, self.optimizers), rest, loader, repr(randomness), counter, attributes


def refuse_state(job):
    def hook(optimizer, state_dict):
        raise RuntimeError("planted")

    job.booster.unwrap(job.optimizers["two"]).register_load_state_dict_pre_hook(hook)


def refuse_late(job):
    # After the optimizer has taken the state, which is the latest that it can raise.
    def hook(optimizer):
        raise RuntimeError("planted")

    job.booster.unwrap(job.optimizers["two"]).register_load_state_dict_post_hook(hook)


def refuse_schedule(job):
    inner = job.booster.unwrap(job.schedules["two"])

    class Refusing(type(inner)):
        def load_state_dict(self, state):
            if state["last_epoch"] != self.last_epoch:  # takes its own back
                raise RuntimeError("planted")

    inner.__class__ = Refusing


def refuse_extra(job):
    job.counter.refuses = True


def refuse_hook(job):
    # After the weights of this model, and of the other one, were written.
    def hook(module, keys):
        raise RuntimeError("planted")

    for model in job.models.values():
        job.booster.unwrap(model)[0].register_load_state_dict_post_hook(lambda module, keys: None)
    job.booster.unwrap(job.models["two"])[2].register_load_state_dict_post_hook(hook)


def refuse_weights(job):
    class Refusing(nn.LayerNorm):
        def _load_from_state_dict(self, *args):
            self.eps, self.epsilon = 1.0, 1.0
            super()._load_from_state_dict(*args)
            raise RuntimeError("planted")

    job.booster.unwrap(job.models["one"])[1].__class__ = Refusing


FAULTS = [refuse_state, refuse_late, refuse_schedule, refuse_extra, refuse_hook, refuse_weights]


@pytest.mark.slow_cases("bf16_naive kahan", "fp16", "bf16_naive")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_load_that_one_object_refuses_changes_none(tmp_path, precision):
    source = Job(precision, 0, 5)
    source.booster.save(tmp_path, *source.parts, step=5, extra={"counter": source.counter})
    for plant in FAULTS:
        job = Job(precision, 1, 2)
        plant(job)
        before = job.fingerprint()
        with pytest.raises(CheckpointError, match="planted"):
            job.booster.load(tmp_path, *job.parts, extra={"counter": job.counter})
        assert job.fingerprint() == before, plant.__name__


@pytest.mark.slow_cases("bf16_naive kahan", "fp16", "bf16_naive")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_without_a_fault_all_of_them_load(tmp_path, precision):
    source = Job(precision, 0, 5)
    source.booster.save(tmp_path, *source.parts, step=5, extra={"counter": source.counter})
    source.step()
    job = Job(precision, 1, 2)
    job.booster.load(tmp_path, *job.parts, extra={"counter": job.counter})
    job.batches = iter(job.loader)
    job.step()
    assert job.counter.value.tolist() == source.counter.value.tolist() == [6.0, 6.0]
    for name, model in source.models.items():
        for one, two in zip(model.parameters(), job.models[name].parameters(), strict=True):
            assert torch.equal(one, two)
    assert job.fingerprint()[1] == source.fingerprint()[1]


# ---- states that no save writes, in checkpoints that are whole ----


def at(tree, path):
    for key in path:
        tree = tree[key]
    return tree


WRONG = {
    "random": [
        ((0,), ["nothing", None, [], {}, "the weights"]),
        ((0, "python"), [None, {}, "the weights"]),
        ((0, "python", "version"), ["gone", 2.5, "x"]),
        ((0, "python", "words"), [None, "x", "the weights"]),
        ((0, "python", "gauss"), ["gone", "x", []]),
        ((0, "torch"), ["gone", 0, None, "the weights"]),
        ((0, "numpy"), [None, [1, 2], {"a": 1}, "the weights"]),
        ((0, "numpy", "name"), ["x", 0]),
        ((0, "numpy", "words"), ["x", "the weights"]),
        ((0, "numpy", "position"), ["gone", -1, 10**6, 2**70, 1.5, "x"]),
        ((0, "numpy", "gauss"), ["x", {}]),
        ((0, "numpy", "cached"), ["gone", None, "x"]),
    ],
    "extra": [(("counter",), [None, 3, "the weights"]), (("counter", "value"), ["gone", "x", "the weights"])],
    "models": [
        (("two",), [None, [], "the weights", "gone"]),
        (("two", "0.weight"), [None, "x", {}, [1.0], "gone"]),
    ],
    "optimizers": [
        (("two",), [None, [], "gone"]),
        (("two", "class"), [None, "SGD", "gone"]),
        (("two", "groups"), [None, [], [None], "gone"]),
        (("two", "groups", 0, "params"), [None, [], {}, "gone"]),
        (("two", "groups", 0, "options"), [None, [], {}, "gone"]),
        (("two", "groups", 0, "options", "lr"), ["high", None, [], {}, "the weights", "gone"]),
        (("two", "groups", 0, "options", "betas"), [None, 0.9, [], [0.9], [0.9, 0.9, 0.9], [0.9, "x"], [None, 0.9]]),
        (("two", "groups", 0, "options", "eps"), [None, "x"]),
        (("two", "groups", 0, "options", "amsgrad"), [None, "x", 1.5]),
        (("two", "state"), [None, "x", [1]]),
        (("two", "state", "0.weight"), ["x", [1], "the weights"]),
        (("two", "state", "0.weight", "exp_avg"), [None, "x", 1.0, "gone"]),
        (("two", "booster"), [None, "x", [], "gone"]),
        (("two", "booster", "loss_scaler"), [None, "x", [1], "gone"]),
        (("two", "booster", "num_steps"), [None, "x", -1, 0.5, "gone"]),
    ],
    "dataloaders": [(("0",), [None, [], {}, "gone"]), (("0", "epoch"), [None, "x", -1, "gone"])],
    "lr_schedulers": [
        (("two",), [None, [], "x", "the weights", "gone"]),
        (("two", "step"), [3, "x"]),
        (("two", "optimizer"), [None, 3]),
        (("two", "get_lr"), ["x"]),
        (("two", "step_size"), [None, "x", [3], {}, "the weights"]),
        (("two", "base_lrs"), [None, 0.1, [], [0.1, 0.1], ["high"], [None]]),
        (("two", "last_epoch"), [None, "x", {}, "the weights"]),
    ],
}


@pytest.mark.slow_cases("lr_schedulers-fp16")
@pytest.mark.crossed
@pytest.mark.parametrize("precision", ["fp16", "bf16_naive"])
@pytest.mark.parametrize("kind", WRONG)
def test_a_part_that_does_not_say_what_was_saved_is_refused_before_anything_changes(tmp_path, precision, kind):
    source = Job(precision, 0, 5)
    folder = source.booster.save(tmp_path, *source.parts, step=5, extra={"counter": source.counter})
    text = (folder / "state.json").read_text()
    job = Job(precision, 1, 2)
    before, wrong = job.fingerprint(), []
    for path, values in WRONG[kind]:
        for value in values:
            tree = json.loads(text)
            holder = at(tree[kind], path[:-1])
            if value == "gone":
                del holder[path[-1]]
            else:
                weights = {"__booster__": "tensor", "name": "models/two/2.bias"}
                holder[path[-1]] = weights if value == "the weights" else value
            reseal(folder, tree)
            try:
                job.booster.load(tmp_path, *job.parts, extra={"counter": job.counter})
                wrong.append(f"{path} = {value!r}: loaded")
            except CheckpointError:
                wrong += [f"{path} = {value!r}: changed"] * (job.fingerprint() != before)
            if wrong:
                job = Job(precision, 1, 2)
                before = job.fingerprint()
    assert not wrong, "\n".join(wrong)


# ---- entries that a module writes and does not read ----


class QuantizedState(nn.Module):
    """A frozen weight as codes under a scale that is in the state dict, and that no load reads, as others pack them."""

    def __init__(self, scale):
        super().__init__()
        self.scale, self.reads = torch.tensor(scale), nn.Linear(2, 2)
        self.weight = nn.Parameter(torch.tensor([int(8 / scale)], dtype=torch.uint8), requires_grad=False)

    def forward(self, x):
        return self.reads(x) + self.scale * self.weight

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.scale"] = self.scale


def packed(scale):
    booster = Booster("cpu")
    torch.manual_seed(int(scale * 100))
    model = QuantizedState(scale)
    return booster, *booster.boost(model, torch.optim.AdamW(model.reads.parameters()))[:2]


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("load", ["load", "load_model"])
def test_an_entry_that_no_module_reads_and_that_differs_from_the_job_s_is_refused_with_nothing_changed(
    tmp_path, load, frozen
):
    booster, model, optimizer = packed(0.5)
    folder = booster.save(tmp_path, model, optimizer, frozen=frozen)
    for scale in (0.5, 2.0):
        other, loaded, its_optimizer = packed(scale)
        with torch.no_grad():
            loaded.reads.weight.add_(1)
        before = {key: value.clone() for key, value in loaded.state_dict().items()}
        given = (folder, loaded, its_optimizer) if load == "load" else (loaded, folder)
        if scale != 0.5 and frozen:
            with pytest.raises(CheckpointError, match=r"weight\.scale.* differ from the job's"):
                getattr(other, load)(*given)
            assert all(torch.equal(value, before[key]) for key, value in loaded.state_dict().items())
            continue
        getattr(other, load)(*given)
        assert torch.equal(loaded.reads.weight, model.reads.weight)
        assert loaded.scale * loaded.weight == 8


def test_an_entry_of_a_file_that_no_module_reads_is_refused_with_nothing_changed(tmp_path):
    booster, model, _ = packed(0.5)
    booster.save_model(model, tmp_path / "weights.safetensors")
    other, loaded, _ = packed(2.0)
    with pytest.raises(CheckpointError, match=r"weight\.scale.* differ from the job's"):
        other.load_model(loaded, tmp_path / "weights.safetensors")
    assert loaded.scale * loaded.weight == 8
