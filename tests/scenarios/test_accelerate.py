"""Scenarios of Accelerate: skipped steps, schedules, options, accumulation, gathering, resuming, imports."""

import gc
import os
import pickle
import subprocess
import sys
import weakref
from functools import partial
from typing import NamedTuple

import pytest
import torch
from scenarios import scenario
from small_job import backward, batch, boost, flat, flat_grads, in_float32, net, sgd, spoil, train
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from booster import Booster
from booster.mixed_precision import FP16TorchMixedPrecision
from booster.plugin import LowLevelZeroPlugin, TorchDDPPlugin

accelerate = partial(scenario, "Hugging Face Accelerate")
OPTIMIZER, SCHEDULER, OPTIONS = "tests/test_optimizer.py", "tests/test_scheduler.py", "tests/test_kwargs_handlers.py"
WHOLE, STATE, IMPORTS = "tests/test_accelerator.py", "tests/test_state_checkpointing.py", "tests/test_imports.py"
TOOLS = "tests/test_utils.py"
SCRIPTS = "src/accelerate/test_utils/scripts"
SYNC, SCRIPT, OPERATIONS = f"{SCRIPTS}/test_sync.py", f"{SCRIPTS}/test_script.py", f"{SCRIPTS}/test_ops.py"
METRICS = f"{SCRIPTS}/external_deps/test_metrics.py"
EVERY = ["fp32", "fp16", "bf16", "fp16_naive", "bf16_naive"]
MAKE = {
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "Adam": partial(torch.optim.Adam, lr=0.01),
    "AdamW": partial(torch.optim.AdamW, lr=0.01),
}


# ---------------------------------------------------------------------- optimizers and schedules


@accelerate(
    OPTIMIZER,
    "test_accelerated_optimizer_step_was_skipped",
    "says of each step whether a NaN skipped it, also with fused optimizers",
)
@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("fused", [True, False])
def test_every_step_says_whether_it_was_skipped(name, fused):
    booster, model, optimizer = boost("fp16", MAKE[name], fused_optimizer=fused)
    seen = []
    for bad in (False, True, True, False):
        backward(booster, model, optimizer)
        if bad:
            spoil(model, float("nan"))
        optimizer.step()
        optimizer.zero_grad()
        seen.append(optimizer.step_was_skipped)
    assert seen == [False, True, True, False]


@accelerate(OPTIMIZER, "test_accelerated_optimizer_pickling", "boosted optimizers survive pickle")
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_optimizers_survive_pickle(precision):
    booster, model, optimizer = boost(precision)
    train(booster, model, optimizer, 1)
    again = pickle.loads(pickle.dumps(optimizer))  # noqa: S301 - our own bytes
    assert again.loss_scale == optimizer.loss_scale


def schedule_job(rank, world_size, schedule, bad=()):
    plugin = TorchDDPPlugin() if world_size > 1 else None
    booster, model = Booster("cpu", "fp16", plugin), net()
    made = torch.optim.SGD(model.parameters(), lr=1e-3)
    made_schedule = schedule(made)
    model, optimizer, _, _, scheduler = booster.boost(model, made, lr_scheduler=made_schedule)
    rates = []
    for step in range(4):
        backward(booster, model, optimizer)
        if step in bad:
            spoil(model)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        rates.append(scheduler.get_last_lr()[0])
    return rates


def tenths(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 10)


def cycle(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=4)


@accelerate(
    SCHEDULER, "test_lambda_scheduler_steps_with_optimizer_single_process", "a schedule waits for a skipped step"
)
def test_a_schedule_waits_for_skipped_steps():
    assert schedule_job(0, 1, tenths, bad=(1,)) == pytest.approx([9e-4, 9e-4, 8e-4, 7e-4])


@accelerate(
    SCHEDULER, "test_one_cycle_scheduler_steps_with_optimizer_single_process", "a cycle is not stepped past its end"
)
def test_a_cycle_ends_where_it_ends():
    booster, model = Booster("cpu", "bf16"), net()
    made = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer, _, _, scheduler = booster.boost(model, made, lr_scheduler=cycle(made))
    for _ in range(3):
        backward(booster, model, optimizer)
        optimizer.step()
        scheduler.step()
        scheduler.step()  # twice after one step
    assert scheduler.last_epoch == 3


@accelerate(
    SCHEDULER,
    "test_lambda_scheduler_steps_with_optimizer_multiprocess",
    "a schedule on two ranks moves once with each update",
    differs="there it moves once for each process. A schedule in updates means the same on any number of ranks",
)
def test_a_schedule_counts_updates_on_ranks(ranks2):
    assert ranks2(schedule_job, tenths) == [pytest.approx(schedule_job(0, 1, tenths))] * 2


@accelerate(SCHEDULER, "test_accumulation", "with accumulation a schedule moves with the updates")
def test_a_schedule_moves_with_updates_under_accumulation():
    booster, model = Booster("cpu", "bf16"), net()
    made = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1 - step / 4)
    model, optimizer, _, _, scheduler = booster.boost(model, made, lr_scheduler=schedule)
    for _ in range(4):
        with booster.accumulate(model, optimizer, num_micro_batches=2):
            for seed in (1, 2):
                backward(booster, model, optimizer, seed)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert scheduler.get_last_lr()[0] == 0


# ---------------------------------------------------------------------- options


@accelerate(OPTIONS, "test_grad_scaler_kwargs", "options of the loss scale arrive")
def test_options_of_the_scale_arrive():
    booster, model, optimizer = boost(FP16TorchMixedPrecision(1024.0, growth_factor=4.0, growth_interval=1))
    train(booster, model, optimizer, 1)
    assert optimizer.loss_scale == 4096.0


def options_of_ddp(rank, world_size):
    plugin = TorchDDPPlugin(bucket_cap_mb=15, find_unused_parameters=True, broadcast_buffers=False)
    _, model, _ = boost("bf16", plugin=plugin)
    ddp = model.module
    while not isinstance(ddp, nn.parallel.DistributedDataParallel):
        ddp = ddp.module
    return ddp.bucket_bytes_cap, ddp.find_unused_parameters, ddp.broadcast_buffers


@accelerate(OPTIONS, "test_ddp_kwargs", "options of DistributedDataParallel arrive")
def test_options_of_ddp_arrive(ranks2):
    assert ranks2(options_of_ddp) == [(15 * 2**20, True, False)] * 2


@accelerate(OPTIONS, "test_autocast_kwargs", "a region can be left in float32, and the one around it goes on")
def test_a_region_may_be_left():
    x = torch.ones(2, 2)
    outer, inner = Booster("cpu", "bf16"), Booster("cpu", "fp32")
    with outer.autocast():
        with inner.autocast():
            assert (x @ x).dtype == torch.float32
        assert (x @ x).dtype == torch.bfloat16


# ---------------------------------------------------------------------- objects


@accelerate(WHOLE, "test_free_memory_dereferences_prepared_components", "what was boosted dies with its last reference")
@pytest.mark.parametrize("precision", EVERY)
def test_boosted_objects_die(precision):
    booster, model, optimizer = boost(precision)
    train(booster, model, optimizer, 1)
    seen = [weakref.ref(model.unwrap()), weakref.ref(optimizer)]
    del model, optimizer
    gc.collect()
    assert [ref() for ref in seen] == [None, None]


@accelerate(WHOLE, "test_save_model", "weights written for others load into a bare model")
@pytest.mark.parametrize("safe", [True, False])
def test_weights_for_others_load_into_a_bare_model(safe, tmp_path):
    pytest.importorskip("safetensors")
    booster, model, _ = boost("bf16")
    booster.save_model(model, tmp_path / "weights", use_safetensors=safe)
    other, twin, _ = boost("fp32")
    for param in twin.parameters():
        nn.init.zeros_(param)
    other.load_model(twin, tmp_path / "weights")
    assert torch.equal(flat(twin), flat(model))


@accelerate(TOOLS, "test_can_undo_convert_outputs", "unwrap gives the model with its own forward")
@pytest.mark.parametrize("precision", EVERY)
def test_unwrap_gives_the_model_with_its_own_forward(precision):
    raw = net()
    forward = raw.forward
    booster = Booster("cpu", precision)
    model, *_ = booster.boost(raw, sgd(raw.parameters()))
    assert booster.unwrap(model) is raw
    assert raw.forward == forward
    pickle.dumps(raw)


class Pair(NamedTuple):
    first: torch.Tensor
    second: int


@accelerate(TOOLS, "test_honor_type", "containers keep their type, named tuples too")
@pytest.mark.parametrize(
    "wrap", [list, tuple, lambda x: {"a": x[0]}, lambda x: Pair(x[0], 1)], ids=["list", "tuple", "dict", "named"]
)
def test_containers_keep_their_type(wrap):
    class Model(nn.Linear):
        def forward(self, x):
            return wrap([super().forward(x)])

    model, *_ = Booster("cpu", "bf16").boost(Model(8, 4))
    out = model(batch()[0])
    assert type(out) is type(wrap([torch.ones(1)]))
    values = out.values() if isinstance(out, dict) else out
    assert next(iter(values)).dtype == torch.float32


@accelerate(IMPORTS, "test_import_tree, test_library_imported", "importing needs torch alone")
def test_importing_needs_torch_alone():
    heavy = ("transformers", "safetensors", "timm", "apex", "yaml")
    code = f"import booster, sys; print([name for name in {heavy} if name in sys.modules])"
    path = os.pathsep.join(sys.path)
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert out.stdout.strip() == "[]"


# ---------------------------------------------------------------------- training and synchronisation


def steps_on_ranks(rank, world_size, precision):
    booster, model, optimizer = boost(precision, plugin=TorchDDPPlugin() if world_size > 1 else None)
    for seed in (1, 2):
        x, y = (part.chunk(world_size)[rank] for part in batch(seed))
        booster.backward(F.cross_entropy(model(x), y), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return flat(model)


TOLERANCE = {"fp32": 1e-5, "fp16": 1e-3, "bf16": 6e-3, "fp16_naive": 2e-3, "bf16_naive": 8e-3}


@accelerate(SCRIPT, "training_check", "training equals a plain loop, on one process and on two")
@pytest.mark.parametrize("precision", EVERY)
def test_training_equals_a_plain_loop(ranks2, precision):
    reference = in_float32(steps=2)
    for weights in (steps_on_ranks(0, 1, precision), *ranks2(steps_on_ranks, precision)):
        torch.testing.assert_close(weights, reference, rtol=0, atol=TOLERANCE[precision])


def loader_rows(rank, world_size, shuffle):
    booster = Booster("cpu", plugin=TorchDDPPlugin() if world_size > 1 else None)
    loader = booster.prepare_dataloader(TensorDataset(torch.arange(11)), batch_size=2, shuffle=shuffle)
    rows = [row for (row,) in loader]
    return torch.cat(rows).tolist(), booster.gather(torch.cat(rows), loader).tolist()


@accelerate(SCRIPT, "dl_preparation_check", "ranks together read each sample, and gathered rows are the data set")
@accelerate(METRICS, "test_torch_metrics", "as many rows as samples, whatever the ranks")
@pytest.mark.parametrize("shuffle", [False, True])
def test_gathered_rows_are_the_data_set(ranks2, shuffle):
    (first, gathered), (second, other) = ranks2(loader_rows, shuffle)
    assert set(first) | set(second) == set(range(11))
    assert gathered == other
    assert sorted(gathered) == list(range(11))
    assert shuffle or gathered == list(range(11))


class Counting(IterableDataset):
    def __init__(self, start, length):
        self.start, self.length = start, length

    def __iter__(self):
        yield from range(self.start, self.start + self.length)


def iterable_rows(rank, world_size):
    booster = Booster("cpu", plugin=TorchDDPPlugin())
    loader = DataLoader(Counting(rank * 100, 3 + rank), batch_size=2)
    *_, loader, _ = booster.boost(net(), dataloader=loader)
    rows = torch.cat(list(loader))
    return booster.gather(rows, loader).tolist()


@accelerate(
    METRICS,
    "test_gather_for_metrics_with_iterable_dataset",
    "rows of an iterable data set come rank by rank, none taken for padding",
)
def test_rows_of_an_iterable_data_set_are_all_there(ranks2):
    assert ranks2(iterable_rows) == [[0, 1, 2, 100, 101, 102, 103]] * 2


def dropped_rows(rank, world_size):
    booster = Booster("cpu", plugin=TorchDDPPlugin())
    loader = booster.prepare_dataloader(TensorDataset(torch.arange(11)), batch_size=2, drop_last=True)
    return booster.gather(torch.cat([row for (row,) in loader]), loader).tolist()


@accelerate(METRICS, "test_gather_for_metrics_drop_last", "dropped samples are not there")
def test_dropped_samples_are_not_gathered(ranks2):
    first, second = ranks2(dropped_rows)
    assert first == second
    assert set(first) < set(range(11))
    assert len(first) == len(set(first)) == 8


def operations(rank, world_size):
    booster = Booster("cpu", plugin=TorchDDPPlugin())
    value = torch.tensor([float(rank), rank + 1.0])
    return (
        booster.gather(value).tolist(),
        booster.reduce(value, "sum").tolist(),
        booster.reduce(value, "mean").tolist(),
        booster.gather(torch.full((rank + 1,), rank)).tolist(),
    )


@accelerate(OPERATIONS, "test_gather, test_reduce_sum, test_reduce_mean", "gathered in rank order, reduced over ranks")
@accelerate(OPERATIONS, "test_pad_across_processes", "different lengths need no padding")
def test_operations_on_ranks(ranks2):
    assert ranks2(operations) == [([0.0, 1.0, 1.0, 2.0], [1.0, 3.0], [0.5, 1.5], [0, 1, 1])] * 2


def accumulated(rank, world_size, precision):
    """A group of two and a short one of one; gradients after each, and whether they were equal before the last pass."""
    booster, model, optimizer = boost(precision, plugin=TorchDDPPlugin() if world_size > 1 else None)
    out = []
    for group in ((1, 2), (3,)):
        with booster.accumulate(model, optimizer, num_micro_batches=len(group)):
            for seed in group:
                x, y = (part.chunk(world_size)[rank] for part in batch(seed))
                booster.backward(F.cross_entropy(model(x), y), optimizer)
                out.append(flat_grads(model).clone())
        optimizer.step()
        optimizer.zero_grad()
    return out, flat(model)


@accelerate(SYNC, "test_gradient_accumulation", "gradients meet exactly at the end of each group")
@accelerate(
    SYNC,
    "test_gradient_accumulation_with_opt_and_scheduler",
    "and training is that of one process, the short last group too",
)
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_gradients_meet_at_the_end_of_a_group(ranks2, precision):
    _, reference = accumulated(0, 1, precision)
    (first, weights), (second, other) = ranks2(accumulated, precision)
    assert [torch.equal(a, b) for a, b in zip(first, second, strict=True)] == [False, True, True]
    assert torch.equal(weights, other)
    torch.testing.assert_close(weights, reference, rtol=0, atol=2 * TOLERANCE[precision])


def several_forwards(rank, world_size, how):
    booster, model, optimizer = boost("bf16", plugin=TorchDDPPlugin() if world_size > 1 else None)
    parts = [[part.chunk(world_size)[rank] for part in batch(seed)] for seed in (1, 2)]
    if how == "one backward":
        loss = sum(F.cross_entropy(model(x), y) for x, y in parts) / 2
        booster.backward(loss, optimizer)
    else:
        with booster.accumulate(model, optimizer, num_micro_batches=2):
            losses = [F.cross_entropy(model(x), y) for x, y in parts]
            for loss in losses:
                booster.backward(loss, optimizer)
    optimizer.step()
    return flat(model)


@accelerate(
    SYNC,
    "test_distributed_sync_multiple_fwd",
    "several forward passes and one backward of their sum train as one process",
)
def test_several_forwards_and_one_backward(ranks2):
    reference = several_forwards(0, 1, "one backward")
    for weights in ranks2(several_forwards, "one backward"):
        torch.testing.assert_close(weights, reference, rtol=0, atol=TOLERANCE["bf16"])


def forwards_first(rank, world_size):
    with pytest.raises(RuntimeError, match="call backward after each forward"):
        several_forwards(rank, world_size, "group")


@accelerate(
    SYNC,
    "test_distributed_sync_multiple_fwd (trigger_sync_in_backward)",
    "all forward passes of a group before its backward passes are refused under DDP, and train on one process",
    differs="there a call before the last backward makes it synchronise. DistributedDataParallel prepares that in the forward "
    "pass, so the group is written pass by pass, or as one backward of the sum",
)
def test_all_forwards_of_a_group_first_are_refused_under_ddp(ranks2):
    ranks2(forwards_first)
    torch.testing.assert_close(
        several_forwards(0, 1, "group"), several_forwards(0, 1, "one backward"), rtol=0, atol=6e-3
    )


def two_optimizers(rank, world_size, plugin):
    booster, model = Booster("cpu", "bf16", None if plugin is None else plugin()), net()
    made = [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.AdamW(model[2].parameters(), lr=0.01)]
    model, optimizers, *_ = booster.boost(model, made)
    for seed in (1, 2):
        x, y = (part.chunk(world_size)[rank] for part in batch(seed))
        booster.backward(F.cross_entropy(model(x), y), optimizers)
        for optimizer in optimizers:
            assert optimizer.step().applied
            optimizer.zero_grad()
    return flat(model)


@accelerate(
    WHOLE,
    "test_prepared_objects_are_referenced (several optimizers)",
    "two optimizers of one model train on ranks as on one process",
)
@pytest.mark.parametrize("plugin", [TorchDDPPlugin, LowLevelZeroPlugin])
def test_two_optimizers_of_one_model(ranks2, plugin):
    reference = two_optimizers(0, 1, None)
    for weights in ranks2(two_optimizers, plugin):
        torch.testing.assert_close(weights, reference, rtol=0, atol=8e-3)


# ---------------------------------------------------------------------- resuming


@pytest.fixture
def saved(tmp_path):
    pytest.importorskip("safetensors")
    return tmp_path / "run"


@accelerate(STATE, "test_can_resume_training", "a resumed run is the run that was not interrupted")
@pytest.mark.parametrize("precision", EVERY)
def test_resuming_changes_nothing(saved, precision):
    first, second = boost(precision), boost(precision)
    train(*first, 2)
    first[0].save(saved, *first[1:])
    second[0].load(saved, *second[1:])
    assert train(*first, 2, first=5) == train(*second, 2, first=5)
    assert torch.equal(flat(first[1]), flat(second[1]))


@accelerate(STATE, "test_with_save_limit, test_checkpoint_deletion", "older checkpoints go, the newest stay")
@accelerate(STATE, "test_automatic_loading", "and the newest is taken")
def test_older_checkpoints_go(saved):
    booster, model, optimizer = boost("bf16")
    for step in (1, 2, 3):
        booster.save(saved, model, optimizer, step=step, keep_last=2)
    assert sorted(path.name[-1] for path in saved.glob("step-*")) == ["2", "3"]
    assert booster.load(saved, model, optimizer).step == 3


@accelerate(STATE, "test_can_resume_training_checkpoints_relative_path", "relative paths work")
def test_relative_paths_work(saved, monkeypatch):
    saved.mkdir()
    monkeypatch.chdir(saved)
    booster, model, optimizer = boost("bf16")
    booster.save("here", model, optimizer, step=4)
    assert booster.load("here", model, optimizer).step == 4


@accelerate(STATE, "test_invalid_registration", "what has no state is refused by name")
def test_what_has_no_state_is_refused(saved):
    booster, model, optimizer = boost("bf16")
    with pytest.raises(TypeError, match="dataloader"):
        booster.save(saved, model, optimizer, dataloader=[1, 2])
    assert not saved.exists()


@accelerate(STATE, "test_with_scheduler", "the schedule is resumed as well")
def test_the_schedule_is_resumed(saved):
    def start():
        booster, model = Booster("cpu", "bf16"), net()
        made = sgd(model.parameters())
        model, optimizer, _, _, scheduler = booster.boost(model, made, lr_scheduler=tenths(made))
        return booster, model, optimizer, scheduler

    booster, model, optimizer, scheduler = start()
    for _ in range(3):
        train(booster, model, optimizer, 1)
        scheduler.step()
    booster.save(saved, model, optimizer, lr_scheduler=scheduler)
    booster, model, optimizer, other = start()
    booster.load(saved, model, optimizer, lr_scheduler=other)
    assert other.get_last_lr() == scheduler.get_last_lr() == [pytest.approx(0.07)]
