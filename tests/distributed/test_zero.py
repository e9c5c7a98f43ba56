"""LowLevelZeroPlugin on gloo ranks: gradients and weights are DistributedDataParallel's, states and masters are divided."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import booster
from booster import Booster
from booster.mixed_precision import (
    BF16MixedPrecision,
    BF16NaiveMixedPrecision,
    FP16NaiveMixedPrecision,
    FP16TorchMixedPrecision,
    MixedPrecision,
)
from booster.plugin import LowLevelZeroPlugin, TorchDDPPlugin

DIM, CLASSES, BATCH, STEPS, SCALE = 16, 5, 16, 16, 2.0**10
PRECISIONS = {
    "fp32": MixedPrecision,
    "fp16": lambda: FP16TorchMixedPrecision(init_scale=SCALE, growth_interval=5),
    "bf16": BF16MixedPrecision,
    "fp16_naive": lambda: FP16NaiveMixedPrecision(initial_scale=SCALE, growth_interval=5, hysteresis=1),
    "bf16_naive": BF16NaiveMixedPrecision,
}
TOLERANCE = {"fp32": 2e-6, "fp16": 1e-3, "bf16": 1e-2, "fp16_naive": 1e-2, "bf16_naive": 1e-2}
STAGES = [1, 2]
stages = pytest.mark.parametrize("stage", STAGES)
precisions = pytest.mark.parametrize("precision", PRECISIONS)

# Small buckets, so that there are several, with boundaries between ranks inside parameters and on them.
SMALL = {"bucket_cap_mb": 1e-3}
FUSED = {
    "Adam": lambda params: torch.optim.Adam(params, lr=1e-2),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.03, momentum=0.9),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2, initial_accumulator_value=0.1),
}


class Net(nn.Module):
    """Matrices, vectors, a scalar, a convolution in channels-last order, a tied weight, a frozen and an unused parameter."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(DIM, DIM)
        self.conv = nn.Conv2d(2, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.LayerNorm(2 * DIM)
        self.tied = nn.Linear(2 * DIM, 2 * DIM, bias=False)
        self.tied_again = nn.Linear(2 * DIM, 2 * DIM, bias=False)
        self.tied_again.weight = self.tied.weight
        self.scale = nn.Parameter(torch.ones(()))
        self.frozen = nn.Linear(2 * DIM, 2 * DIM)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(2 * DIM, CLASSES)

    def forward(self, x):
        x = torch.tanh(self.embed(x))
        x = self.conv(x.view(-1, 2, 4, DIM // 8)).flatten(1)
        x = self.tied_again(torch.tanh(self.tied(self.norm(x)))) + self.frozen(x)
        return self.head(x * self.scale)


def net(seed=0):
    torch.manual_seed(seed)
    return Net()


def batch(step, rank=0, world_size=1):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, DIM, generator=generator)
    return x.chunk(world_size)[rank], x[:, :CLASSES].argmax(1).chunk(world_size)[rank]


class Job:
    """A boosted model and optimizer, and what they did."""

    def __init__(self, precision, plugin, model=None, make=FUSED["AdamW"], **options):
        model = net() if model is None else model
        strategy = PRECISIONS[precision]() if isinstance(precision, str) else precision
        self.booster = Booster("cpu", strategy, plugin, **options)
        optimizer = make([p for p in model.parameters()] if callable(make) else None)
        self.model, self.optimizer, *_ = self.booster.boost(model, optimizer)
        self.losses, self.results = [], []

    def backward(self, x, y, factor=1.0):
        loss = F.cross_entropy(self.model(x), y)
        self.booster.backward(loss * factor, self.optimizer)
        self.losses.append(loss.detach())

    def step(self, clip=None):
        norm = self.optimizer.clip_grad_by_norm(clip) if clip else None
        self.results.append((bool(self.optimizer.step()), norm))
        self.optimizer.zero_grad()

    def train(self, steps, rank, world_size, clip=None):
        for step in steps:
            self.backward(*batch(step, rank, world_size))
            self.step(clip)
        return self

    def parts(self):
        """This rank's parts of parameters and gradients, by name; None for no gradient."""
        names = {param: name for name, param in self.model.named_parameters()}
        shards = self.optimizer._update.shards
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        with shards.local():
            held = {names[param]: shards.part_of(param) for param in params}
            return {n: (p.detach().clone(), None if p.grad is None else p.grad.clone()) for n, p in held.items()}

    def weights(self):
        return {name: param.detach().clone() for name, param in self.model.named_parameters()}


def zero(stage, **options):
    return LowLevelZeroPlugin(stage=stage, **(SMALL | options))


def same(first, second):
    """Equality of nested dicts and lists to the bit."""
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(value, second[key]) for key, value in first.items())
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    return first == second


# ---- equal to DistributedDataParallel ----


def beside_ddp(rank, world_size, precision, stage, optimizer):
    """Train with both plugins on the same batches, and compare gradients and weights after every step."""
    ddp = Job(precision, TorchDDPPlugin(), make=FUSED[optimizer])
    job = Job(precision, zero(stage), make=FUSED[optimizer])
    shards = job.optimizer._update.shards
    for step in range(STEPS):
        for each in (ddp, job):
            each.backward(*batch(step, rank, world_size))
        params = dict(job.model.named_parameters())
        for name, param in ddp.model.named_parameters():
            grad = job.parts()[name][1]
            if stage == 1 and param.requires_grad:
                assert torch.equal(params[name].grad, param.grad), name
            if stage == 2:
                assert params[name].grad is None, name
            if shards.part_of(params[name]).numel() and param.requires_grad:
                assert torch.equal(grad, shards.cut(param.grad, params[name])), f"{name} at step {step}"
            else:
                assert grad is None, name
        ddp.step()
        job.step()
        assert same(job.weights(), ddp.weights()), f"step {step}"
    assert same(job.losses, ddp.losses)
    assert job.optimizer.loss_scale == ddp.optimizer.loss_scale
    return job.losses, job.weights(), job.optimizer.state_dict(), ddp.optimizer.state_dict()


@precisions
@stages
def test_gradients_weights_and_state_equal_ddp_to_the_bit(ranks2, precision, stage):
    first, second = ranks2(beside_ddp, precision, stage, "AdamW")
    assert same(first[1:3], second[1:3]), "ranks agree on weights and state"
    assert same(first[2], first[3]), "the state dict is the one of DDP"
    assert first[0][-1] < first[0][0]


@pytest.mark.parametrize("optimizer", FUSED)
def test_every_fused_optimizer_equals_ddp_to_the_bit(ranks2, optimizer):
    for precision, stage in (("fp32", 1), ("fp16_naive", 2)):
        for _, _, state, of_ddp in ranks2(beside_ddp, precision, stage, optimizer):
            assert same(state, of_ddp)


def four_beside_ddp(rank, world_size, precision, stage):
    ddp = Job(precision, TorchDDPPlugin(**SMALL)).train(range(STEPS), rank, world_size)
    job = Job(precision, zero(stage)).train(range(STEPS), rank, world_size)
    return job.losses, job.weights(), ddp.losses, ddp.weights()


@stages
@pytest.mark.parametrize("precision", ["fp32", "fp16_naive"])
def test_on_four_ranks_only_the_order_of_summation_differs_from_ddp(ranks4, precision, stage):
    results = ranks4(four_beside_ddp, precision, stage)
    for losses, weights, of_ddp, weights_of_ddp in results:
        assert same(weights, results[0][1]), "ranks agree to the bit"
        assert torch.stack(losses) == pytest.approx(torch.stack(of_ddp), abs=TOLERANCE[precision])
        for name, weight in weights.items():
            assert (weight.float() - weights_of_ddp[name].float()).abs().max() <= TOLERANCE[precision], name
        if stage == 1:
            assert same(weights, weights_of_ddp), "stage 1 leaves the reduction to DDP, whose order hangs on its buckets"


# ---- equal to one process ----


def in_one_process(precision, steps, clip=None, num_splits=1, make=FUSED["AdamW"]):
    """Whole-batch losses, norms and weights of one process; half gradients are averaged over parts, as ranks do."""
    job = Job(precision, None, make=make)
    losses = []
    for step in range(steps):
        for part in range(num_splits):
            job.backward(*batch(step, part, num_splits), factor=1 / num_splits)
        losses.append(torch.stack(job.losses[-num_splits:]).mean())
        job.step(clip)
    return torch.stack(losses), [norm for _, norm in job.results], job.weights(), job.optimizer.loss_scale


def train_and_reduce(rank, world_size, precision, stage, clip, optimizer):
    job = Job(precision, zero(stage), make=FUSED[optimizer]).train(range(STEPS), rank, world_size, clip)
    losses = job.booster.reduce(torch.stack(job.losses))
    return losses, [norm for _, norm in job.results], job.weights(), job.optimizer.loss_scale


@precisions
@stages
def test_training_with_clipping_equals_one_process(run_on_ranks, precision, stage):
    splits = 2 if precision.endswith("naive") else 1
    losses, norms, weights, scale = in_one_process(precision, STEPS, 0.5, splits, FUSED["SGD"])
    assert losses[-1] < losses[0]
    assert any(norm > 0.5 for norm in norms), "something was clipped"
    for world_size in (2, 4):
        for one in run_on_ranks(train_and_reduce, world_size, precision, stage, 0.5, "SGD"):
            assert (one[0] - losses).abs().max() <= TOLERANCE[precision]
            assert [float(n) for n in one[1]] == pytest.approx([float(n) for n in norms], rel=4 * TOLERANCE[precision])
            assert all((one[2][n].float() - w.float()).abs().max() <= TOLERANCE[precision] for n, w in weights.items())
            assert one[3] == scale


# ---- overflow in one rank's part ----


def overflow(rank, world_size, precision, stage, optimizer, when):
    """Put an inf into the gradient of one rank's part, after the gradients were reduced."""
    options = {} if precision.startswith("fp16") else {"skip_nonfinite": True}
    job = Job(precision, zero(stage), make=FUSED[optimizer], **options)
    before, shards = job.weights(), job.optimizer._update.shards
    for step in range(4):
        job.backward(*batch(step, rank, world_size))
        if step == when:
            before = job.weights()
            with shards.local():
                mine = [p for p in job.optimizer.param_groups[0]["params"] if p.grad is not None]
                if rank == world_size - 1:
                    mine[len(mine) // 2].grad.view(-1)[-1] = float("inf")
        result = job.optimizer.step()
        assert result.applied == (step != when)
        if step == when:
            assert same(job.weights(), before), "nothing was written"
            assert bool(result.culprit) == (rank == world_size - 1)
        job.optimizer.zero_grad()
    assert all(weight.isfinite().all() for weight in job.weights().values())
    assert max(float(w.float().abs().max()) for w in job.weights().values()) < 10, "sound after the skip"
    return job.weights(), job.optimizer.loss_scale, job.optimizer.num_skipped


@stages
@pytest.mark.parametrize(("precision", "when"), [(p, 2) for p in PRECISIONS] + [("fp16", 0), ("fp16_naive", 0)])
def test_an_inf_in_one_ranks_part_makes_all_skip(ranks2, precision, when, stage):
    first, second = ranks2(overflow, precision, stage, "AdamW", when)
    assert same(first, second), "weights and scales agree"
    assert first[1] == (SCALE / 2 if precision.startswith("fp16") else 1.0)
    assert first[2] == 1


@stages
@pytest.mark.parametrize("optimizer", FUSED)
def test_an_overflow_in_the_first_step_leaves_every_fused_optimizer_sound(ranks2, optimizer, stage):
    for precision in ("fp16", "fp16_naive"):
        first, second = ranks2(overflow, precision, stage, optimizer, 0)
        assert same(first, second)
