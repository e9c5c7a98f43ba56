"""Where ranks decide on their devices: the same training as where hosts decide, one small collective, and nothing read."""

from contextlib import nullcontext

import pytest
import torch
from matrix import PARALLELISMS, PRECISIONS, Transformer, loss_of, train
from test_hybrid import batch

from benchmarks.scaling.bytes import Counting
from benchmarks.waits import HostReads, as_on_a_gpu
from booster import Booster

STEPS, OVERFLOWS = 5, (0, 3)
TRAINED = [
    *(("fp16", column) for column in ("DDP", "FSDP", "ZeRO-1", "ZeRO-2", "TP", "PP")),
    *(("fp16_naive", column) for column in ("DDP", "FSDP", "ZeRO-1", "ZeRO-2")),
    *(pytest.param("bf16_naive", column, marks=pytest.mark.slow) for column in ("DDP", "ZeRO-2", "TP", "PP")),
]


def trains_both_ways(rank, world_size, precision, column, optimizer):
    # Natively, as sums of halves are widened for tensors alone that say they lie on the CPU.
    by_hosts = train(precision, column, optimizer, STEPS, OVERFLOWS, half_products="native")
    with as_on_a_gpu():
        return by_hosts, train(precision, column, optimizer, STEPS, OVERFLOWS, half_products="native")


def compare(found, precision):
    for by_host, by_device in found:
        assert (by_device.applied, by_device.scales) == (by_host.applied, by_host.scales)
        assert by_device.applied == [step not in OVERFLOWS for step in range(STEPS)]
        for name, weight in by_host.weights.items():
            if name.endswith("k.bias"):  # no loss depends on it: AdamW makes whole steps of its rounding errors
                continue
            eps = 2.0**-7 if precision.endswith("naive") else 1e-4  # one step of a half weight
            off = (by_device.weights[name] - weight).abs()
            apart = off > eps * (weight.abs() + 0.1)
            # AdamW makes steps of lr=3e-3 of a gradient that is rounding error alone: one element in a thousand may be such.
            assert int(apart.sum()) <= weight.numel() // 1000, (name, int(apart.sum()))
            assert float(off.max()) <= 2 * STEPS * 3e-3, name
    for step in OVERFLOWS:  # a device knows its own gradients alone until somebody waits
        named = {name for _, by_device in found for name in by_device.culprits[step]}
        assert named == set(found[0][0].culprits[step])
        assert {by_device.reasons[step] for _, by_device in found} == {"nonfinite_grad"}


@pytest.mark.slow_cases("ZeRO-1", "DDP")
@pytest.mark.crossed
@pytest.mark.parametrize(("precision", "column"), TRAINED)
def test_ranks_that_decide_on_devices_train_and_skip_as_hosts_do(ranks2, precision, column):
    compare(ranks2(trains_both_ways, precision, column, "AdamW"), precision)


@pytest.mark.parametrize("column", ["ZeRO-1", pytest.param("FSDP", marks=pytest.mark.slow)])
def test_momentum_begins_soundly_after_a_first_step_that_was_skipped(ranks2, column):
    compare(ranks2(trains_both_ways, "fp16", column, "SGD"), "fp16")


def keeps_gradients(rank, world_size, column, on_device):
    """Whether each step was applied, and the weights after them; gradients are not cleared between them."""
    with as_on_a_gpu() if on_device else torch.enable_grad():
        torch.manual_seed(7)
        model = Transformer()
        booster = Booster("cpu", PRECISIONS["fp16"](), PARALLELISMS[column].plugin())
        model, made, criterion, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.05), loss_of)
        applied = []
        for step in range(4):
            booster.execute_pipeline(iter([batch(step, booster)]), model, criterion, made)
            if step == 1:
                made.clip_grad_by_norm(0.1)
            if step == 2:
                made.clip_grad_by_value(1e-3)
            applied.append(made.step().applied)
    return applied, [getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("column", ["ZeRO-1", "ZeRO-2", "FSDP"])
def test_gradients_that_outlive_a_step_are_what_they_are_where_hosts_decide(ranks2, column):
    by_host, by_device = (ranks2(keeps_gradients, column, on_device) for on_device in (False, True))
    for (applied, weights), (expected, others) in zip(by_device, by_host, strict=True):
        assert applied == expected == [True] * 4
        for weight, other in zip(weights, others, strict=True):
            torch.testing.assert_close(weight, other, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------- what a step costs


def costs(rank, world_size, precision, column, on_device):
    """(names of what was read on the host, small collectives) of a fifth step with a clip, after looks at the first ones."""
    with as_on_a_gpu() if on_device else torch.enable_grad():
        torch.manual_seed(7)
        model = Transformer()
        booster = Booster("cpu", PRECISIONS[precision](), PARALLELISMS[column].plugin())
        model, made, criterion, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-3), loss_of)
        for step in range(5):
            booster.execute_pipeline(iter([batch(step, booster)]), model, criterion, made)
            made.sync()
            with Counting() if step == 4 else nullcontext() as sent, HostReads() as reads:
                made.clip_grad_by_norm(0.5)
                result = made.step()
            made.zero_grad()
        assert made._update.decision.on_device == on_device
    return result.applied, dict(reads.found), sent.short


SHARDED = ["FSDP", "ZeRO-1", "ZeRO-2", "TP", "PP"]
COUNTED = [
    *(("fp32", column) for column in ("DDP", *SHARDED)),
    *(("fp16", column) for column in SHARDED),
    *(("bf16_naive", column) for column in ("DDP", *SHARDED)),
]


@pytest.mark.slow_cases("ZeRO-2", "DDP")
@pytest.mark.crossed
@pytest.mark.parametrize(("precision", "column"), COUNTED)
def test_a_clipped_step_of_ranks_reads_nothing_and_sends_one_number(ranks2, precision, column):
    for applied, reads, short in ranks2(costs, precision, column, True):
        assert applied
        assert reads == {}
        assert short == 1


@pytest.mark.slow_cases("ZeRO-2", "DDP")
@pytest.mark.parametrize("column", ["DDP", *SHARDED])
def test_hosts_that_decide_read_one_number_and_send_one(ranks2, column):
    for applied, reads, short in ranks2(costs, "fp16", column, False):
        assert applied
        assert reads.get("__float__", 0) + reads.get("item", 0) <= (2 if column == "DDP" else 1)
        assert short == 1
