"""Gradients that travel in float8: how far off their average is, how many bytes are sent, and what composes with it."""

import logging

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from booster import Booster
from booster.mixed_precision import FP16NaiveMixedPrecision, FP16TorchMixedPrecision
from booster.plugin import FP8Communication, LowLevelZeroPlugin, TorchDDPPlugin
from booster.plugin.ddp import averaged_gradients

DIM, CLASSES, BATCH = 24, 5, 64
FEEDBACK = FP8Communication(error_feedback=True)
PLUGINS = {"ddp": TorchDDPPlugin, "zero1": LowLevelZeroPlugin, "zero2": lambda **o: LowLevelZeroPlugin(stage=2, **o)}
SMALL = 1e-3  # MB, so that there are several buckets


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(DIM, 40), nn.Tanh(), nn.Linear(40, 33), nn.Tanh(), nn.Linear(33, CLASSES))


def data(seed=1):
    x = torch.randn(BATCH, DIM, generator=torch.Generator().manual_seed(seed))
    return x, x[:, :CLASSES].argmax(1)


def mine(rank, world_size, seed=1):
    return [part.chunk(world_size)[rank] for part in data(seed)]


def boost(kind, precision="fp32", lr=0.03, optimizer=torch.optim.SGD, model=None, **options):
    options = {"fp8_communication": True, "bucket_cap_mb": SMALL, **options}
    b = Booster("cpu", precision, PLUGINS[kind](**options))
    model = net() if model is None else model
    return b, *b.boost(model, optimizer(model.parameters(), lr=lr))[:2]


def gradient_on(x, y):
    model = net()
    F.cross_entropy(model(x), y).backward()
    return [param.grad for param in model.parameters()]


# ---- the error


def averaged(rank, world_size, kind, options):
    b, model, optimizer = boost(kind, **options)
    for _ in range(2):  # DistributedDataParallel divides into buckets anew after the first
        optimizer.zero_grad()
        b.backward(F.cross_entropy(model(mine(rank, world_size)[0]), mine(rank, world_size)[1]), optimizer)
    return [param.grad for param in model.parameters()]


def check_average(results, world_size):
    each = [gradient_on(*mine(rank, world_size)) for rank in range(world_size)]
    for came in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], came, strict=True))
    square = total = 0.0
    for came, *parts in zip(results[0], *each, strict=True):
        parts = torch.stack(parts)
        mean, size = parts.mean(0), parts.abs().mean(0)
        # The last term: 2**-17 of the largest of a block, which may lie in another parameter, for each rounding.
        largest = max(part.abs().max() for parts in each for part in parts)
        assert ((came - mean).abs() <= mean.abs() / 16 + size * 17 / 256 + 2 * largest * 2.0**-17).all()
        square, total = square + (came - mean).square().sum(), total + mean.square().sum()
    assert 0 < (square / total).sqrt() < 0.04


@pytest.mark.crossed
@pytest.mark.parametrize("kind", ["ddp", "zero1"])
@pytest.mark.parametrize(
    "options", [{}, {"bucket_cap_mb": 25}, {"gradient_as_bucket_view": True}, {"static_graph": True}]
)
def test_an_average_is_off_by_no_more_than_is_said_and_equal_on_all_ranks(ranks2, kind, options):
    check_average(ranks2(averaged, kind, options), 2)


def test_the_same_on_four_ranks(ranks4):
    check_average(ranks4(averaged, "ddp", {}), 4)


def step_of(rank, world_size):
    """Weights before a step of rate 1 less those after it: the gradient that was applied."""
    b, model, optimizer = boost("zero2", lr=1.0)
    before = [param.detach().clone() for param in model.parameters()]
    x, y = mine(rank, world_size)
    b.backward(F.cross_entropy(model(x), y), optimizer)
    optimizer.step()
    return [old - new.detach() for old, new in zip(before, model.parameters(), strict=True)]


@pytest.mark.parametrize("world_size", [2, 4])
def test_zero_2_rounds_once_where_each_rank_gets_its_slice(run_on_ranks, world_size):
    each = [gradient_on(*mine(rank, world_size)) for rank in range(world_size)]
    results = run_on_ranks(step_of, world_size)
    for came, *parts in zip(results[0], *each, strict=True):
        parts = torch.stack(parts)
        largest = max(part.abs().max() for parts in each for part in parts)
        bound = parts.abs().mean(0) / 16 + largest * 2.0**-16  # of which part is the rounding of the weights
        assert ((came - parts.mean(0)).abs() <= bound).all()
        assert not torch.equal(came, parts.mean(0))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def tensors_step(rank, world_size, **options):
    model = net()
    for param in model.parameters():
        param.requires_grad_(param.dim() == 2)
    b = Booster("cpu", "fp32", LowLevelZeroPlugin(stage=2, bucket_cap_mb=SMALL, **options))
    optimizer = torch.optim.Adafactor([param for param in model.parameters() if param.dim() == 2], lr=1.0)
    model, optimizer, *_ = b.boost(model, optimizer)
    before = [param.detach().clone() for param in model.parameters()]
    x, y = mine(rank, world_size)
    b.backward(F.cross_entropy(model(x), y), optimizer)
    optimizer.step()
    return torch.cat([(old - new.detach()).flatten() for old, new in zip(before, model.parameters(), strict=True)])


def both_tensor_steps(rank, world_size):
    return tensors_step(rank, world_size, fp8_communication=True), tensors_step(rank, world_size)


def test_zero_2_rounds_tensors_that_are_dealt_whole(ranks4):
    results = ranks4(both_tensor_steps)
    low, wide = results[0]
    assert 0 < (low - wide).norm() < 0.15 * wide.norm()
    assert all(torch.equal(low, other) for other, _ in results)


# ---- bytes


def sent(rank, world_size, kind, precision):
    """Bytes of collectives of floating or uint8 tensors in one backward pass, as a ring sends them, and of how many numbers."""
    b, model, optimizer = boost(
        kind, precision, bucket_cap_mb=25, model=nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 64))
    )
    count = 0.0
    with pytest.MonkeyPatch.context() as patch:

        def counted(name, of):
            real = getattr(averaged_gradients, name, None) or getattr(dist, name)

            def call(out, given, *args, **kwargs):
                nonlocal count
                count += (world_size - 1) / world_size * max(out.nbytes, given.nbytes) if of == "whole" else 0.0
                return real(out, given, *args, **kwargs)

            patch.setattr(averaged_gradients if hasattr(averaged_gradients, name) else dist, name, call)

        counted("all_to_all_single", "whole")
        counted("all_gather_flat", "whole")
        b.backward(model(torch.randn(4, 256)).square().mean(), optimizer)
    return count, sum(param.numel() for param in model.parameters())


@pytest.mark.parametrize(("kind", "trips"), [("ddp", 2), ("zero1", 2), ("zero2", 1)])
def test_half_the_bytes_of_bfloat16_are_sent(ranks4, kind, trips):
    """An all-reduce on a ring sends every number twice, less what a rank keeps; a reduce-scatter once."""
    for count, numbers in ranks4(sent, kind, "bf16_naive"):
        of_bfloat16 = trips * 3 / 4 * 2 * numbers
        assert 0.5 < count / of_bfloat16 < 0.51


# ---- what is not finite


def overflow(rank, world_size, kind, feedback):
    model = net()
    precision = FP16TorchMixedPrecision(init_scale=1024.0)
    b, model, optimizer = boost(kind, precision, model=model, fp8_communication=FEEDBACK if feedback else True)
    x, y = mine(rank, world_size)
    outcomes = []
    for step in range(3):
        optimizer.zero_grad()
        hooks = []
        if step == 1 and rank == 1:
            hooks = [
                model.unwrap()[2].weight.register_hook(lambda grad: grad.index_fill(0, torch.tensor(7), torch.inf))
            ]
        b.backward(F.cross_entropy(model(x), y), optimizer)
        for hook in hooks:
            hook.remove()
        result = optimizer.step()
        outcomes.append((result.applied, result.loss_scale, result.culprit))
    return outcomes, [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize(("kind", "feedback"), [("ddp", False), ("ddp", True), ("zero1", False), ("zero2", False)])
def test_an_inf_on_one_rank_makes_every_rank_skip(ranks2, kind, feedback):
    (first, weights), (second, others) = ranks2(overflow, kind, feedback)
    assert [applied for applied, _, _ in first] == [True, False, True]
    assert first[2][1] == 512.0
    assert first[1][2] == ("2.weight",)  # and no neighbour of it in its block
    assert first == second
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(weights, others, strict=True))


# ---- composition


def train(rank, world_size, kind, precision, options):
    make = {
        "fp16": lambda: FP16TorchMixedPrecision(init_scale=1024.0),
        "fp16_naive": lambda: FP16NaiveMixedPrecision(initial_scale=1024.0),
    }.get(precision, lambda: precision)
    b, model, optimizer = boost(kind, make(), lr=0.01, optimizer=torch.optim.AdamW, **options)
    losses, norms = [], []
    for step in range(5):
        x, y = mine(rank, world_size, seed=step)
        halves = list(zip(x.chunk(2), y.chunk(2), strict=True))
        with b.no_sync(model, optimizer):
            first = F.cross_entropy(model(halves[0][0]), halves[0][1]) / 2
            b.backward(first, optimizer)
        second = F.cross_entropy(model(halves[1][0]), halves[1][1]) / 2
        b.backward(second, optimizer)
        norms.append(float(optimizer.clip_grad_by_norm(0.5) or 0.0))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(b.reduce((first + second).detach()).item())
    return losses, norms, [param.detach() for param in model.parameters()]


def against_plain(rank, world_size, kind, precision, options):
    return train(rank, world_size, kind, precision, options), train(
        rank, world_size, kind, precision, {"fp8_communication": False}
    )


SLOW = {("zero1", "fp32"), ("zero1", "bf16_naive"), ("zero1", "fp16_naive"), ("zero2", "fp32"), ("zero2", "bf16_naive")}
CASES = [
    pytest.param(kind, precision, {}, marks=[pytest.mark.slow] * ((kind, precision) in SLOW))
    for kind in PLUGINS
    for precision in ("fp32", "fp16", "bf16_naive", "fp16_naive")
]
CASES += [("ddp", "fp32", {"fp8_communication": FEEDBACK}), ("zero1", "bf16", {"fp8_communication": FEEDBACK})]


@pytest.mark.parametrize(("kind", "precision", "options"), CASES)
def test_training_with_accumulation_and_clipping_goes_as_without(ranks2, kind, precision, options):
    results = ranks2(against_plain, kind, precision, options)
    (losses, norms, weights), (plain, plain_norms, _) = results[0]
    assert losses != plain
    assert losses == pytest.approx(plain, abs=0.05)
    assert norms == pytest.approx(plain_norms, rel=0.1)
    (other_losses, other_norms, others), _ = results[1]
    assert (other_losses, other_norms) == (losses, norms)
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(DIM, CLASSES), nn.Linear(DIM, CLASSES)

    def forward(self, x):
        return self.used(x)


def with_unused(rank, world_size, kind):
    torch.manual_seed(0)
    b, model, optimizer = boost(kind, model=Branches(), find_unused_parameters=True, optimizer=torch.optim.AdamW)
    before = model.unused.weight.detach().clone()
    for _ in range(3):
        x, y = mine(rank, world_size)
        b.backward(F.cross_entropy(model(x), y), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return torch.equal(before, model.unused.weight), model.used.weight.detach()


@pytest.mark.parametrize("kind", PLUGINS)
def test_parameters_that_no_rank_reaches_are_left_alone(ranks2, kind):
    (first, weight), (second, other) = ranks2(with_unused, kind)
    assert first
    assert second
    assert torch.equal(weight, other)


# ---- error feedback


def many_passes(rank, world_size, options):
    b, model, optimizer = boost("ddp", fp8_communication=options)
    x, y = mine(rank, world_size)
    total = [torch.zeros_like(param) for param in model.parameters()]
    for _ in range(20):
        optimizer.zero_grad()
        b.backward(F.cross_entropy(model(x), y), optimizer)
        for sum_, param in zip(total, model.parameters(), strict=True):
            sum_ += param.grad
    return total


def test_error_feedback_makes_up_for_rounding_in_the_long_run(ranks2):
    """What is carried over is at most one pass's error, so the error of a sum does not grow with its length."""
    exact = [
        torch.stack(parts).mean(0) * 20 for parts in zip(*(gradient_on(*mine(r, 2)) for r in range(2)), strict=True)
    ]
    errors = {}
    for options in (FEEDBACK, FP8Communication()):
        sums = ranks2(many_passes, options)[0]
        difference = torch.cat([(a - e).flatten() for a, e in zip(sums, exact, strict=True)]).norm()
        errors[options.error_feedback] = difference / torch.cat([e.flatten() for e in exact]).norm() * 20
    assert errors[True] < 0.06  # of the norm of one pass's gradient
    assert errors[False] > 0.2


def carried_after_inf(rank, world_size):
    b, model, optimizer = boost("ddp", fp8_communication=FEEDBACK)
    x, y = mine(rank, world_size)
    sums = []
    for spoiled in (False, True):
        optimizer.zero_grad()
        handle = (
            model.unwrap()[0].weight.register_hook(lambda grad: grad * torch.inf) if spoiled and rank == 1 else None
        )
        b.backward(F.cross_entropy(model(x), y), optimizer)
        if handle is not None:
            handle.remove()
        sums.append(sum(float(each.abs().sum()) for each in b.plugin._averages[model.module].errors.values()))
    return sums


def test_a_pass_that_all_ranks_skip_carries_nothing_over(ranks2):
    for before, after in ranks2(carried_after_inf):
        assert before > 0
        assert after == 0


# ---- what raises


def sparse(rank, world_size):
    model = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 2))
    b = Booster("cpu", "fp32", TorchDDPPlugin(fp8_communication=True))
    model, optimizer, *_ = b.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match="does not average sparse gradients"):
        b.backward(model(torch.tensor([1, 2])).sum(), optimizer)


def test_sparse_gradients_raise(ranks2):
    ranks2(sparse)


def test_what_cannot_be_honoured_raises():
    with pytest.raises(ValueError, match="fp8_communication and comm_hook both say"):
        TorchDDPPlugin(fp8_communication=True, comm_hook=lambda state, bucket: None)
    with pytest.raises(ValueError, match="leave error_feedback False, or use stage=1"):
        LowLevelZeroPlugin(stage=2, fp8_communication=FEEDBACK)


def steps(rank, world_size, b, model, optimizer, seeds):
    losses = []
    for seed in seeds:
        x, y = mine(rank, world_size, seed=seed)
        loss = F.cross_entropy(model(x), y)
        b.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(param.detach().clone() for param in model.parameters())]


def resumed(rank, world_size, kind, precision, options, more, folder):
    """Losses and weights of more steps: gone on with, resumed, and resumed in a job that had begun another run."""

    def make():
        return boost(kind, precision, lr=0.01, optimizer=torch.optim.AdamW, fp8_communication=options)

    def carried(b, model):
        kept = b.plugin.error_feedback(model.module) or {}
        return [kept[param].clone() for param in model.parameters() if param in kept]

    b, model, optimizer = make()
    steps(rank, world_size, b, model, optimizer, (1, 2, 3))
    b.save(folder, model, optimizer)
    before = carried(b, model)
    assert len(before) == (6 if options == FEEDBACK else 0)
    found = [steps(rank, world_size, b, model, optimizer, more)]
    for begun in ((), (7, 8)):
        b, model, optimizer = make()
        steps(rank, world_size, b, model, optimizer, begun)
        b.load(folder, model, optimizer)
        assert all(torch.equal(a, c) for a, c in zip(carried(b, model), before, strict=True))
        found.append(steps(rank, world_size, b, model, optimizer, more))
    return found


@pytest.mark.parametrize("kind", ["ddp", "zero2"])
def test_a_resumed_run_goes_on_to_the_bit(ranks2, kind, tmp_path):
    for on, *others in ranks2(resumed, kind, "fp32", True, (4, 5, 6), str(tmp_path / "run")):
        for other in others:
            assert all(torch.equal(a, b) for a, b in zip(on, other, strict=True))


@pytest.mark.parametrize(("kind", "precision"), [("ddp", "fp32"), ("zero1", "bf16_naive")])
def test_what_error_feedback_carries_is_in_checkpoints(ranks2, kind, precision, tmp_path):
    """One step, to the bit: in the next DistributedDataParallel divides buckets anew, and so who carries what."""
    for on, *others in ranks2(resumed, kind, precision, FEEDBACK, (4,), str(tmp_path / "run")):
        for other in others:
            assert all(torch.equal(a, b) for a, b in zip(on, other, strict=True))


def saved_by_two(rank, world_size, folder, options):
    b, model, optimizer = boost("ddp", fp8_communication=options)
    x, y = mine(rank, world_size)
    b.backward(F.cross_entropy(model(x), y), optimizer)
    optimizer.step()
    optimizer.zero_grad()
    b.save(folder, model, optimizer)


def loaded_elsewhere(rank, world_size, folder):
    b, model, optimizer = boost("ddp", fp8_communication=FEEDBACK)
    x, y = mine(rank, world_size)
    b.backward(F.cross_entropy(model(x), y), optimizer)
    optimizer.zero_grad()
    assert b.plugin.error_feedback(model.module)
    with pytest.MonkeyPatch.context() as patch:
        said = []
        patch.setattr(
            logging.getLogger("booster.checkpoint.loading"), "warning", lambda text, *a: said.append(text % a)
        )
        b.load(folder, model, optimizer)
    assert b.plugin.error_feedback(model.module) == {}
    return said


@pytest.mark.parametrize(
    ("options", "world_size", "reason"),
    [(FEEDBACK, 4, "it is that of 2 ranks"), (True, 2, "there is none")],
)
def test_where_what_was_carried_does_not_fit_it_begins_anew_and_says_so(
    run_on_ranks, tmp_path, options, world_size, reason
):
    folder = str(tmp_path / "run")
    run_on_ranks(saved_by_two, 2, folder, options)
    for said in run_on_ranks(loaded_elsewhere, world_size, folder):
        assert any(
            f"what rounding took from gradients (error_feedback=True) is left out, since {reason}" in each
            for each in said
        )
