"""Diagnosis on two ranks of every plugin: faults of the zoo are named alike on all ranks, and nothing is changed by it."""

import dataclasses
import random
import traceback

import pytest
import torch
import torch.distributed as dist
from choices import plugins
from comparing import assert_same
from programs import run
from torch import nn
from torch.nn import functional as F
from zoo import DIM, FAULTS, PRECISIONS, Cage, judge

from booster import Booster

TP_PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
PLUGINS = plugins("DDP", "FSDP", "ZeRO-1", "ZeRO-2", "TP", "DP", "PP", tp_plan=TP_PLAN, num_microbatches=2)
FAULT = {fault.name: fault for fault in FAULTS}
# Where it is, for a pipeline with a second stage that begins at the last block: of the fault, in which precision.
CASES = {
    "large_weights_in_the_last_block": ("fp16", 1),
    "attention_scores_without_scaling": ("fp16_naive", 0),
    "log_of_zero_in_a_block": ("bf16", 0),
    "one_sample_with_nan": ("fp16", 0),
    "a_weight_that_is_nan": ("bf16_naive", 0),
    "log_of_a_probability_that_is_zero": ("fp16", 1),
    "a_loss_scale_that_is_too_large": ("fp16", 1),
    "the_slope_of_a_root_at_zero": ("fp16", 0),
    "a_function_of_ones_own_whose_gradient_is_nan": ("fp32", 1),
    "a_slope_beyond_half_at_this_scale": ("fp16_naive", 0),
    "a_causal_mask": ("fp16", None),
}
# Sharded weights are read before the module is called; divided layers add their bias later; a pipeline casts outputs itself.
READS = {"aten._to_copy", "aten._foreach_copy_", "aten.addmm"}
ALSO = {
    ("FSDP", "a_weight_that_is_nan"): {"operation": READS},
    ("TP", "a_weight_that_is_nan"): {"operation": "aten.mm"},
    ("DP", "a_weight_that_is_nan"): {"operation": READS},
    ("TP", "large_weights_in_the_last_block"): {"operation": "aten.mm"},
    ("PP", "a_loss_scale_that_is_too_large"): {"module": ""},
}
QUICK = {plugin: list(CASES)[index :: len(PLUGINS)] for index, plugin in enumerate(PLUGINS)}


class Normalised(nn.Module):
    """Has buffers that every forward pass writes to."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM)

    def forward(self, x):
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class Run:
    """A planted fault, boosted. Bad data is in the part of rank 1 alone, where ranks have parts."""

    def __init__(self, name, plugin, precision=None, prepare=None, **options):
        precision = precision or CASES[name][0]
        torch.manual_seed(3)
        cage = Cage(precision)
        FAULT[name].plant(cage)
        if prepare is not None:
            prepare(cage.model)
        self.good = torch.nan_to_num(cage.x, 0.0)
        if plugin not in ("TP", "PP") and dist.get_rank() == 0:
            cage.x = self.good
        self.cage, self.plugin = cage, plugin
        self.booster = Booster("cpu", PRECISIONS[precision](cage.scale), PLUGINS[plugin](), **options)
        optimizer = torch.optim.AdamW(cage.model.parameters(), lr=1e-2)
        self.model, self.optimizer, *_ = self.booster.boost(cage.model, optimizer)

    def criterion(self, out, y):
        return self.cage.loss(out, dataclasses.replace(self.cage, y=y))

    def forward(self):
        """The loss; in a pipeline, after the backward pass."""
        if self.plugin == "PP":
            batch = (self.cage.x, self.cage.y)
            return self.booster.execute_pipeline(iter([batch]), self.model, self.criterion, self.optimizer)["loss"]
        return self.criterion(self.model(self.cage.x), self.cage.y)

    def step(self):
        loss = self.forward()
        if self.plugin != "PP":
            self.booster.backward(loss, self.optimizer)
        applied = self.optimizer.step().applied
        self.optimizer.zero_grad()
        return float(loss.detach()), applied

    def diagnose(self):
        return self.booster.diagnose(self.forward, self.optimizer)

    def everything(self):
        """All that a replay could have changed on this rank."""
        local = {name: _local(param).clone() for name, param in self.model.named_parameters()}
        states = {
            f"{index}.{key}": _local(value).clone() if isinstance(value, torch.Tensor) else value
            for index, state in enumerate(self.optimizer.state.values())
            for key, value in state.items()
        }
        gradients = {
            name: None if param.grad is None else _local(param.grad).clone()
            for name, param in self.model.named_parameters()
        }
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        return local, buffers, states, gradients, self.optimizer.loss_scale, torch.get_rng_state(), random.getstate()


def _local(tensor):
    return tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()


# ---------------------------------------------------------------------- faults


def diagnose_all(rank, world_size, plugin, names):
    found = {}
    for name in names:
        try:
            found[name] = Run(name, plugin).diagnose()
        except Exception:
            found[name] = traceback.format_exc()
    return found


def wrong(plugin, name, found):
    """What of the diagnoses of all ranks is not as it should be."""
    if any(isinstance(each, str) for each in found):
        return found
    precision, stage = CASES[name]
    problems = judge(found[0], {**FAULT[name].truth(precision), **ALSO.get((plugin, name), {})})
    if len({str(each) for each in found}) > 1:
        problems["ranks"] = list(map(str, found))
    if found[0].certain != (found[0].kind is not None):
        problems["certain"] = found[0].certain
    rank = stage if plugin == "PP" else 1 if found[0].kind == "data" and plugin != "TP" else 0
    if found[0].kind and (found[0].rank, found[0].stage) != (rank, stage if plugin == "PP" else None):
        problems["rank"] = (found[0].rank, found[0].stage)
    return problems and (problems, str(found[0]))


@pytest.mark.slow_cases("DP", "ZeRO-1", "DDP")
@pytest.mark.parametrize(
    ("plugin", "names"),
    [pytest.param(plugin, QUICK[plugin], id=plugin) for plugin in PLUGINS]
    + [pytest.param(plugin, list(CASES), id=f"{plugin}-all", marks=pytest.mark.slow) for plugin in PLUGINS],
)
def test_faults_are_named_alike_on_all_ranks(ranks2, plugin, names):
    found = ranks2(diagnose_all, plugin, names)
    problems = {name: wrong(plugin, name, [each[name] for each in found]) for name in names}
    assert {name: problem for name, problem in problems.items() if problem} == {}


# ---------------------------------------------------------------------- a sum over ranks


def sums_beyond_half(model):
    """What each rank adds to the output of the last block is 4e4, and all of it 8e4."""
    block = model.blocks[2]
    for layer, weight, bias in ((block.up, 0.0, 1.0), (block.down, 4e4 / DIM / float(F.gelu(torch.ones(()))), 0.0)):
        nn.init.constant_(layer.weight, weight)
        nn.init.constant_(layer.bias, bias)


def diagnose_sum(rank, world_size, precision):
    found = Run("a_causal_mask", "TP", precision, sums_beyond_half).diagnose()
    return (
        (found.kind, found.module, found.direction, found.dtype, found.certain, found.remedies),
        found.operation,
        str(found),
    )


@pytest.mark.slow_cases("fp16")
@pytest.mark.parametrize("precision", ["fp16", "fp16_naive"])
def test_a_sum_over_ranks_that_overflows_is_named_where_the_part_of_each_rank_is_finite(ranks2, precision):
    (one, operation, text), (other, _, same) = ranks2(diagnose_sum, precision)
    remedies = ("finite with mixed_precision='fp32'",)
    assert one == ("overflow", "blocks.2.down", "forward", "float16", True, remedies), text
    assert "reduce" in operation
    assert (one, text) == (other, same)


# ---------------------------------------------------------------------- nothing changes


def train(run, between=lambda: None):
    """A good step, a bad one on rank 1 alone where ranks have parts, two good ones."""
    bad, results = run.cage.x, []
    for x in (run.good, bad, *[run.good] * 2):
        run.cage.x = x
        torch.manual_seed(len(results))
        results.append(run.step())
        between()
    return results


def normalise(model):
    model.blocks[0].extra = Normalised()


def compare(rank, world_size, plugin, precision):
    def make(**options):
        return Run("one_sample_with_nan", plugin, precision, normalise, **options)

    plain, itself, asked = make(), make(diagnose="first"), make()
    expected = train(plain)
    assert [applied for _, applied in expected] == [True, False, True, True]
    assert_same(train(itself), expected, "by itself")
    assert_same(itself.everything(), plain.everything(), "by itself")

    def diagnose():
        before = asked.everything()
        asked.diagnose()
        assert_same(asked.everything(), before, "asked")

    assert_same(train(asked, diagnose), expected, "asked")
    assert_same(asked.everything(), plain.everything(), "asked")
    (found,) = itself.booster.diagnoses
    return (found.kind, found.rank, found.stage, found.rows, found.certain), str(found)


@pytest.mark.slow_cases("ZeRO-2")
@pytest.mark.parametrize(
    ("plugin", "precision"),
    [("ZeRO-2", "fp16"), ("PP", "fp16_naive")]
    + [
        pytest.param(plugin, precision, marks=pytest.mark.slow)
        for plugin in PLUGINS
        for precision in ("fp16", "fp16_naive")
        if (plugin, precision) not in (("ZeRO-2", "fp16"), ("PP", "fp16_naive"))
    ],
)
def test_a_diagnosis_changes_nothing_and_the_next_steps_are_the_same_to_the_bit(ranks2, plugin, precision):
    (one, text), (other, same) = ranks2(compare, plugin, precision)
    whole = plugin in ("TP", "PP")
    in_stage = plugin == "PP" and precision == "fp16"  # fp16_naive casts inputs before they are given to a stage
    assert one == ("data", 0 if whole else 1, 0 if in_stage else None, (2,), True), text
    assert (one, text) == (other, same)


# ---------------------------------------------------------------------- a rank that raises


def raise_on_one(rank, world_size):
    run = Run("one_sample_with_nan", "DDP")

    def forward():
        if rank == 1:
            raise KeyError("only here")
        return run.forward()

    try:
        run.booster.diagnose(forward, run.optimizer)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    run.cage.x = run.good
    return message, run.step()[1]


def raise_everywhere(rank, world_size, plugin, when):
    run = Run("one_sample_with_nan", plugin)

    def forward():
        loss = run.forward()
        if when == "forward":
            raise KeyError(rank)
        loss.register_hook(lambda grad: 1 / 0)
        return loss

    try:
        run.booster.diagnose(forward, run.optimizer)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    run.cage.x = run.good
    return message, run.step()[1]


@pytest.mark.parametrize(("plugin", "when"), [("FSDP", "forward"), ("DDP", "backward"), ("FSDP", "backward")])
def test_a_pass_that_raises_on_all_ranks_raises_there_its_own_error_and_training_goes_on(ranks2, plugin, when):
    expected = [f"KeyError: {rank}" if when == "forward" else "ZeroDivisionError: division by zero" for rank in (0, 1)]
    assert ranks2(raise_everywhere, plugin, when) == [(text, True) for text in expected]


RAISES_WHEN_REPLAYED = """
import sys
from datetime import timedelta

import torch
from torch import nn

import booster
from booster import Booster
from booster.numerics.diagnosis import replay
from booster.plugin import TorchFSDPPlugin

replay.PATIENCE = timedelta(seconds=15)  # for what ranks still do alike
booster.launch_from_torch(backend="gloo")
rank = torch.distributed.get_rank()


class Once(nn.Linear):
    calls = 0

    def forward(self, x):
        Once.calls += 1
        out = super().forward(x)
        if rank == 1 and Once.calls > 1:
            fail() if sys.argv[1] == "forward" else out.register_hook(fail)
        return out


def fail(*args):
    raise ValueError("only in the replay")


b = Booster("cpu", "fp16", TorchFSDPPlugin(), diagnose="first")
model = nn.Sequential(nn.Linear(4, 4), Once(4, 4), nn.Linear(4, 2))
model, optimizer, *_ = b.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
b.backward(model(torch.full((2, 4), float("nan"))).sum(), optimizer)
optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_job_whose_replay_raises_on_one_rank_alone_ends_with_that_ranks_error(tmp_path, when):
    """The other rank waits in a collective of FSDP, for which the process group would wait half an hour."""
    (tmp_path / "job.py").write_text(RAISES_WHEN_REPLAYED)
    job = run("-m", "booster", "run", "--nproc_per_node", "2", "job.py", when, folder=tmp_path, timeout=600)
    assert job.returncode == 1
    assert "ValueError: only in the replay" in job.stderr
    assert "RanksApart: a replay raised on rank 1 of the group, and ranks [0] did not come to its end" in job.stderr


def test_a_forward_pass_that_raises_on_one_rank_ends_the_diagnosis_on_all(ranks2):
    one, other = ranks2(raise_on_one)
    assert one == ("ReplayError: rank 1 of the group could not replay the step: KeyError: 'only here'", True)
    assert other == ("KeyError: 'only here'", True)
