"""One model with two optimizers, Muon for the matrices of its blocks and AdamW for the rest, on every plugin."""

import copy
from itertools import product

import pytest
import torch
from choices import plugins
from comparing import weights, whole
from matrix import PRECISIONS, TP_PLAN, Transformer, loss_of
from test_hybrid import batch

from booster import Booster
from booster.plugin import LowLevelZeroPlugin, TorchDDPPlugin

PLUGINS = plugins("single", "ddp", "fsdp", "zero1", "zero2", "tp", "pp", "interleaved", tp_plan=TP_PLAN)
BLOCKS = {"interleaved": 4}  # one for each chunk of a stage; others take two
SEVERAL = [name for name in PLUGINS if name != "single"]


def is_matrix(name, param):
    return name.startswith("blocks.") and param.dim() == 2


def optimizers_of(model, order=("muon", "adamw")):
    params = dict(model.named_parameters())
    made = {
        "muon": torch.optim.Muon([p for n, p in params.items() if is_matrix(n, p)], lr=0.02),
        "adamw": torch.optim.AdamW([p for n, p in params.items() if not is_matrix(n, p)], lr=3e-3),
    }
    return [made[name] for name in order]


def built(name, precision="fp32", num_blocks=2):
    torch.manual_seed(7)
    booster = Booster("cpu", PRECISIONS[precision](), PLUGINS[name]())
    model = Transformer(num_blocks=num_blocks)
    optimizers = optimizers_of(model)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in optimizers]
    model, optimizers, criterion, _, schedulers = booster.boost(model, optimizers, loss_of, None, schedulers)
    return booster, model, optimizers, criterion, schedulers


def steps(parts, first, last, overflow_at=None):
    """Train, with a loss of inf at `overflow_at`; returns which optimizer stepped when."""
    booster, model, optimizers, criterion, schedulers = parts
    applied = []
    for step in range(first, last):
        inputs, targets = batch(step, booster)
        criterion_now = overflowing(criterion) if step == overflow_at else criterion
        booster.execute_pipeline(iter([(inputs, targets)]), model, criterion_now, optimizers)
        for optimizer in optimizers:
            optimizer.clip_grad_by_norm(0.5)
        applied.append([bool(optimizer.step()) for optimizer in optimizers])
        for optimizer in optimizers:
            optimizer.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
    return applied


def overflowing(criterion):
    return lambda output, target: criterion(output, target) * float("inf")


def state(parts):
    """Of model, optimizers and schedulers."""
    _, model, optimizers, _, schedulers = parts
    return copy.deepcopy((model.state_dict(), *([each.state_dict() for each in e] for e in (optimizers, schedulers))))


def load(parts, saved, strict=True):
    _, model, optimizers, _, schedulers = parts
    model.load_state_dict(saved[0], strict=strict)
    for several, states in zip((optimizers, schedulers), saved[1:], strict=True):
        for each, own in zip(several, states, strict=True):
            each.load_state_dict(own)


def trained(rank, world_size, name, precision, num_blocks):
    """Weights at the end; which differ in a job that was resumed on the way; what was applied; learning rates."""
    parts = built(name, precision, num_blocks)
    steps(parts, 0, 2)
    saved = state(parts)
    applied = steps(parts, 2, 4, overflow_at=2)
    again = built(name, precision, num_blocks)
    load(again, copy.deepcopy(saved))  # torch's load_state_dict goes on with the tensors that it is given
    steps(again, 2, 4, overflow_at=2)
    end, resumed = weights(parts[1]), weights(again[1])
    rates = [scheduler.get_last_lr()[0] for scheduler in parts[4]]
    return end, [n for n in end if not torch.equal(end[n], resumed[n])], applied, rates, saved


_alone = {}


def alone(precision, num_blocks=2):
    if (precision, num_blocks) not in _alone:
        _alone[precision, num_blocks] = trained(0, 1, "single", precision, num_blocks)
    return _alone[precision, num_blocks]


# Of the way that weights went: Muon's products are bfloat16 whatever the precision.
TOLERANCES = {"fp32": 0.1, "fp16": 0.1, "fp16_naive": 0.1, "bf16_naive": 0.5, "fp16_apex O2": 0.1}
CASES = [
    *product(SEVERAL, ["fp32", "fp16_naive"]),
    *product(["zero2", "interleaved"], ["fp16", "bf16_naive", "fp16_apex O2"]),
    ("tp", "fp16_apex O2"),
    pytest.param("tp", "bf16_naive", marks=pytest.mark.slow),
]


def check_against_one_process(end, precision, num_blocks=2):
    reference = alone(precision, num_blocks)[0]
    torch.manual_seed(7)
    start = {name: whole(param) for name, param in Transformer(num_blocks=num_blocks).named_parameters()}
    for name, weight in end.items():
        if name.endswith(".k.bias"):  # its gradient is noise, of which Adam makes a step
            continue
        off, way = weight - reference[name], (reference[name] - start[name]).norm()
        if name == "blocks.0.norm2.weight":  # one of its first gradients is 1e-4 of the others: its sign is noise
            off[15] = 0.0
        assert off.norm() <= TOLERANCES[precision] * way, name
    return start.keys()


@pytest.mark.slow_cases("interleaved", "zero1")
@pytest.mark.crossed
@pytest.mark.parametrize(("name", "precision"), CASES)
def test_muon_and_adamw_train_one_model_as_one_process_does(ranks2, name, precision):
    num_blocks = BLOCKS.get(name, 2)
    _, torn, _, rates, _ = alone(precision, num_blocks)
    assert not torn
    seen = set()
    for end, torn, applied, own_rates, _ in ranks2(trained, name, precision, num_blocks):
        assert not torn, "a resumed job ends in other bits"
        assert applied == [[False, False], [True, True]]
        assert own_rates == rates
        names = check_against_one_process(end, precision, num_blocks)
        seen |= end.keys()
    assert seen == names


def resumed(rank, world_size, name, saved):
    parts = built(name)
    load(parts, saved, strict=name != "pp")
    steps(parts, 2, 4, overflow_at=2)
    return weights(parts[1])


@pytest.mark.parametrize("name", ["fsdp", "zero1", "pp"])
def test_states_of_both_that_one_process_wrote_load_on_ranks(ranks2, name):
    for end in ranks2(resumed, name, alone("fp32")[4]):
        check_against_one_process(end, "fp32")


def add_late(rank, world_size, stage, order):
    """A parameter that was in neither optimizer at first trains once it is added to either."""
    torch.manual_seed(7)
    booster = Booster("cpu", "fp32", LowLevelZeroPlugin(stage=stage) if stage else TorchDDPPlugin())
    model = Transformer()
    late = model.blocks[1].q.weight
    optimizers = optimizers_of(model, order)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [param for param in group["params"] if param is not late]
    model, optimizers, criterion, *_ = booster.boost(model, optimizers, loss_of)
    parts = booster, model, optimizers, criterion, []
    before = whole(late)
    steps(parts, 0, 1)
    assert torch.equal(whole(late), before)
    optimizers[0].add_param_group({"params": [late]})
    steps(parts, 1, 3)
    assert not torch.equal(whole(late), before)
    return weights(model)


@pytest.mark.crossed
@pytest.mark.parametrize("order", [("muon", "adamw"), ("adamw", "muon")], ids=["muon", "adamw"])
@pytest.mark.parametrize("stage", [1, 2])
def test_a_parameter_of_neither_may_be_added_to_either_under_zero(ranks2, stage, order):
    (first, second), (of_ddp, _) = ranks2(add_late, stage, order), ranks2(add_late, 0, order)
    for name, weight in of_ddp.items():
        assert torch.equal(first[name], second[name])
        assert name.endswith(".k.bias") or torch.allclose(first[name], weight, atol=2e-3), name
