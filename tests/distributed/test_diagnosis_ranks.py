"""Diagnosis on two ranks of every plugin: faults of the zoo are named alike on all ranks, and nothing is changed by it."""

import dataclasses
import random
import traceback

import pytest
import torch
import torch.distributed as dist
from zoo import FAULTS, PRECISIONS, Cage, judge

from booster import Booster
from booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin

TP_PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
PLUGINS = {
    "DDP": TorchDDPPlugin,
    "FSDP": TorchFSDPPlugin,
    "ZeRO-1": lambda: LowLevelZeroPlugin(stage=1),
    "ZeRO-2": lambda: LowLevelZeroPlugin(stage=2),
    "TP": lambda: HybridParallelPlugin(tp_size=2, pp_size=1, tp_plan=TP_PLAN),
    "DP": lambda: HybridParallelPlugin(tp_size=1, pp_size=1),
    "PP": lambda: HybridParallelPlugin(tp_size=1, pp_size=2, num_microbatches=2),
}
FAULT = {fault.name: fault for fault in FAULTS}
# Where it is, for a pipeline whose second stage begins at the last block: of the fault, in which precision.
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
    ("TP", "a_weight_that_is_nan"): {"operation": READS},
    ("DP", "a_weight_that_is_nan"): {"operation": READS},
    ("PP", "a_weight_that_is_nan"): {"operation": READS},
    ("TP", "large_weights_in_the_last_block"): {"operation": "aten.mm"},
    ("PP", "a_loss_scale_that_is_too_large"): {"module": ""},
}
QUICK = {plugin: list(CASES)[index::4] for index, plugin in enumerate(PLUGINS)}


class Run:
    """A planted fault, boosted. Bad data is in the part of rank 1 alone, where ranks have parts."""

    def __init__(self, name, plugin, precision=None, **options):
        precision = precision or CASES[name][0]
        torch.manual_seed(3)
        cage = Cage(precision)
        FAULT[name].plant(cage)
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
        return local, states, gradients, self.optimizer.loss_scale, torch.get_rng_state(), random.getstate()


def _local(tensor):
    return tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()


def assert_same(one, other, where=""):
    if isinstance(one, torch.Tensor):
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0)), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, (list, tuple)):
        for index, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, f"{where}/{index}")
    else:
        assert one == other or (one != one and other != other), (where, one, other)


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


@pytest.mark.parametrize(
    ("plugin", "names"),
    [pytest.param(plugin, QUICK[plugin], id=plugin) for plugin in PLUGINS]
    + [pytest.param(plugin, list(CASES), id=f"{plugin}-all", marks=pytest.mark.slow) for plugin in PLUGINS],
)
def test_faults_are_named_alike_on_all_ranks(ranks2, plugin, names):
    found = ranks2(diagnose_all, plugin, names)
    problems = {name: wrong(plugin, name, [each[name] for each in found]) for name in names}
    assert {name: problem for name, problem in problems.items() if problem} == {}


# ---------------------------------------------------------------------- nothing changes


def train(run, between=lambda: None):
    """A good step, a bad one on rank 1 alone where ranks have parts, five good ones."""
    bad, results = run.cage.x, []
    for x in (run.good, bad, *[run.good] * 5):
        run.cage.x = x
        torch.manual_seed(len(results))
        results.append(run.step())
        between()
    return results


def compare(rank, world_size, plugin, precision):
    def make(**options):
        return Run("one_sample_with_nan", plugin, precision, **options)

    plain, itself, asked = make(), make(diagnose="first"), make()
    expected = train(plain)
    assert [applied for _, applied in expected] == [True, False, *[True] * 5]
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
        told = f"{type(error).__name__}: {error}"
    run.cage.x = run.good
    return told, run.step()[1]


def test_a_forward_pass_that_raises_on_one_rank_ends_the_diagnosis_on_all(ranks2):
    one, other = ranks2(raise_on_one)
    assert one == ("ReplayError: rank 1 of the group could not replay the step: KeyError: 'only here'", True)
    assert other == ("KeyError: 'only here'", True)
