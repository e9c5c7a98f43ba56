"""Gradients that are stepped on within backward and freed: the same bits as without, one gradient at a time."""

import copy
import math

import pytest
import torch
from comparing import assert_same
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import booster
from benchmarks import allocations, memory, mlp
from booster import Booster, register_elementwise
from booster.mixed_precision import BF16NaiveMixedPrecision, FP16NaiveMixedPrecision, FP16TorchMixedPrecision

SCALE = 2.0**12
WIDTH = 80

PRECISIONS = {
    "fp32": lambda: "fp32",
    "bf16": lambda: "bf16",
    "fp16": lambda: FP16TorchMixedPrecision(init_scale=SCALE),
    "fp16_naive": lambda: FP16NaiveMixedPrecision(initial_scale=SCALE, hysteresis=1, log_num_zeros_in_grad=True),
    "fp16_naive split24 8bit": lambda: FP16NaiveMixedPrecision(
        initial_scale=SCALE, hysteresis=1, master_weights="split24", states="8bit"
    ),
    "bf16_naive": BF16NaiveMixedPrecision,
    "bf16_naive split24 8bit": lambda: BF16NaiveMixedPrecision(master_weights="split24", states="8bit"),
    "bf16_naive kahan": lambda: BF16NaiveMixedPrecision(master_weights="none", rounding="kahan"),
}
SCALED = ("fp16", "fp16_naive", "fp16_naive split24 8bit")
OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=1e-2),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-3),
}


class Net(nn.Module):
    """Tied embedding and head, a norm kept in float32 under naive precisions, a frozen layer and one that is not used."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.up = nn.Linear(width, 4 * width)
        self.norm = nn.BatchNorm1d(4 * width)
        self.frozen = nn.Linear(4 * width, 4 * width).requires_grad_(False)
        self.down = nn.Linear(4 * width, width)
        self.unused = nn.Linear(width, width)

    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.down(self.frozen(F.gelu(self.norm(self.up(x)))))
        return F.linear(x, self.embed.weight)


class Run:
    """A model trained on the same numbers whatever the options. poison: steps with an inf in the gradient of `up.weight`."""

    def __init__(self, release, precision="fp32", make=OPTIMIZERS["AdamW"], poison=(), groups=False, **options):
        torch.manual_seed(0)
        self.net = Net()
        params = self.net.parameters()
        if groups:
            decayed = [p for p in self.net.parameters() if p.dim() > 1]
            params = [{"params": decayed}, {"params": [p for p in self.net.parameters() if p.dim() < 2], "lr": 1e-3}]
        self.inner = make(params)
        schedule = torch.optim.lr_scheduler.StepLR(self.inner, 2, 0.5)
        self.booster = Booster("cpu", PRECISIONS[precision](), release_gradients=release, **options)
        self.model, self.optimizer, self.criterion, _, self.schedule = self.booster.boost(
            self.net, self.inner, F.cross_entropy, lr_scheduler=schedule
        )
        self.data = torch.Generator().manual_seed(1)
        self.poison, self.number, self.results = set(poison), 0, []
        weight = dict(self.net.named_parameters())["up.weight"]
        weight.register_hook(lambda grad: grad * math.inf if self.number in self.poison else grad)

    def loss(self):
        ids = torch.randint(50, (16,), generator=self.data)
        return self.criterion(self.model(ids), (ids * 3 + 1) % 50)

    def step(self, micro_batches=1):
        if micro_batches == 1:
            self.booster.backward(self.loss(), self.optimizer)
        else:
            with self.booster.accumulate(self.model, self.optimizer, micro_batches):
                for _ in range(micro_batches):
                    self.booster.backward(self.loss(), self.optimizer)
        self.results.append(self.optimizer.step())
        self.optimizer.zero_grad()
        self.schedule.step()
        self.number += 1
        return self

    def train(self, steps, micro_batches=1):
        for _ in range(steps):
            self.step(micro_batches)
        return self

    def all(self):
        """Everything that training leaves: weights, buffers, states, masters, counters, scale, schedule and results."""
        return (
            {name: value.clone() for name, value in self.model.state_dict().items()},
            copy.deepcopy(self.optimizer.state_dict()),
            self.schedule.state_dict(),
            [repr(result) for result in self.results],
        )


def pair(*args, **options):
    return Run("exact", *args, **options), Run(False, *args, **options)


@pytest.fixture
def half_steps(monkeypatch):
    """Names of parameters in the order in which they are stepped within backward; small ones wait for no others."""
    monkeypatch.setattr("booster.update.in_backward_pass._FEWEST", 1)
    monkeypatch.setattr("booster.update.in_backward_pass._SHARE", 10**9)


# ---------------------------------------------------------------------- exact


@pytest.mark.crossed
@pytest.mark.parametrize("options", [{}, {"clip_grad_norm": 0.5}], ids=["plain", "clip"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_exact_is_the_step_without_release_to_the_bit(precision, options):
    released, whole = pair(precision, poison=(2,) if options or precision in SCALED else (), **options)
    assert_same(released.train(5).all(), whole.train(5).all())
    assert whole.results[1].applied
    assert bool(whole.results[2]) == (not options and precision not in SCALED)


@pytest.mark.crossed
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16_naive split24 8bit"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_exact_for_other_optimizers_and_several_groups(precision, make):
    released, whole = pair(precision, make, groups=True, clip_grad_norm=0.3)
    assert_same(released.train(4).all(), whole.train(4).all())


@pytest.mark.parametrize("precision", ["bf16", "fp16_naive", "bf16_naive"])
def test_exact_over_accumulated_micro_batches(precision):
    released, whole = pair(precision, clip_grad_norm=0.5, poison=(1,))
    assert_same(released.train(3, micro_batches=3).all(), whole.train(3, micro_batches=3).all())
    released, whole = pair(precision)
    assert_same(released.train(3, micro_batches=2).all(), whole.train(3, micro_batches=2).all())


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_norm_counts_gradients_that_only_earlier_micro_batches_gave(precision):
    weights = []
    for release in ("exact", False):
        torch.manual_seed(0)
        net = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("always", "once")})
        b = Booster("cpu", PRECISIONS[precision](), release_gradients=release, clip_grad_norm=0.1)
        model, optimizer, *_ = b.boost(net, torch.optim.SGD(net.parameters(), lr=1.0))
        with b.accumulate(model, optimizer, 2):
            for names in (("always", "once"), ("always",)):
                with b.autocast():
                    loss = sum(net[name](torch.ones(2, 4)).float().square().mean() for name in names)
                b.backward(loss, optimizer)
        norm = optimizer.step().grad_norm
        weights.append((norm, [param.detach().clone() for param in net.parameters()]))
    assert_same(*weights)


def test_weights_that_backward_stepped_are_not_in_autocasts_cache():
    run = Run("exact", "bf16")
    with torch.autocast("cpu", torch.bfloat16):
        run.booster.backward(run.loss(), run.optimizer)
        run.model.eval()
        before_step = run.model(torch.arange(16))
    assert_same(before_step, run.model(torch.arange(16)))


def test_skip_nonfinite_alone_takes_two_passes_and_skips():
    released, whole = pair("bf16", skip_nonfinite=True, poison=(1,))
    assert_same(released.train(3).all(), whole.train(3).all())
    assert released.results[1].culprit == ("up.weight",)


def test_a_sum_of_squares_that_overflows_is_no_overflow_of_gradients():
    released, whole = pair("fp32", clip_grad_norm=1.0)
    for run in (released, whole):
        weight = dict(run.net.named_parameters())["down.weight"]
        weight.register_hook(lambda grad: torch.full_like(grad, 3e18))
        run.train(2)
    assert_same(released.all(), whole.all())
    assert released.results[0].applied
    assert released.results[0].grad_norm > 1e20


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_exact_with_packed_states_of_float32_weights(precision):
    released, whole = pair(precision, clip_grad_norm=0.5, states="8bit", poison=(1,))
    assert_same(released.train(3).all(), whole.train(3).all())


@pytest.mark.crossed
@pytest.mark.parametrize("how", ["unfrozen", "added"])
@pytest.mark.parametrize(
    ("precision", "options"),
    [
        ("fp32", {"states": "8bit"}),
        ("fp16_naive", {}),
        ("bf16_naive", {}),
        ("bf16_naive", {"states": "8bit"}),
        *((BF16NaiveMixedPrecision(master_weights=form), {}) for form in ("fp32", "split24", "none")),
    ],
    ids=repr,
)
def test_a_parameter_that_is_trained_from_the_middle_on_is_stepped_as_without_release(precision, options, how):
    ends = []
    for release in (False, "exact"):
        torch.manual_seed(0)
        raw = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
        first = [*raw[0].parameters(), *raw[4].parameters()]
        if how == "unfrozen":
            raw[2].requires_grad_(False)
        optimizer = torch.optim.AdamW(raw.parameters() if how == "unfrozen" else first, lr=1e-2)
        booster = Booster("cpu", copy.deepcopy(precision), release_gradients=release, **options)
        model, optimizer, *_ = booster.boost(raw, optimizer)
        for step in range(4):
            if step == 2 and how == "unfrozen":
                raw[2].requires_grad_(True)
            elif step == 2:
                optimizer.add_param_group({"params": list(raw[2].parameters())})
            booster.backward(F.cross_entropy(model(torch.randn(4, 8)).float(), torch.arange(4)), optimizer)
            optimizer.step()
            raw.zero_grad()  # also of what is not stepped yet
        ends.append([param.detach().clone() for param in raw.parameters()])
    assert_same(*ends)


def test_per_tensor_optimizers():
    muon = lambda params: torch.optim.Muon([p for p in params if p.dim() == 2], lr=1e-2)  # noqa: E731
    for precision in ("fp32", "bf16_naive"):
        released, whole = pair(precision, muon, clip_grad_norm=0.5)
        assert_same(released.train(3).all(), whole.train(3).all())


def test_non_reentrant_checkpointing_is_recomputed_in_each_pass():
    def run(release):
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.GELU()) for _ in range(3)))
        b = Booster("cpu", "fp16", release_gradients=release, clip_grad_norm=0.1)
        forward = lambda x: [x := checkpoint(block, x, use_reentrant=False) for block in net][-1]  # noqa: E731
        _, optimizer, *_ = b.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for _ in range(3):
            with b.autocast():
                loss = forward(torch.randn(4, 8)).float().pow(2).mean()
            b.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in net.parameters()]

    assert_same(run("exact"), run(False))


def test_two_optimizers_of_one_loss_skip_together():
    def run(release):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        b = Booster("cpu", FP16TorchMixedPrecision(init_scale=SCALE), release_gradients=release)
        made = [torch.optim.SGD(net[0].parameters(), lr=0.1), torch.optim.AdamW(net[1].parameters(), lr=0.1)]
        model, optimizers, *_ = b.boost(net, made)
        net[1].weight.register_hook(lambda grad: grad * (math.inf if step == 1 else 1.0))
        results = []
        for step in range(3):  # noqa: B007
            b.backward(model(torch.randn(4, 8)).pow(2).mean(), optimizers)
            results += [repr(optimizer.step()) for optimizer in optimizers]
            for optimizer in optimizers:
                optimizer.zero_grad()
        return [p.detach().clone() for p in net.parameters()], results

    assert_same(run("exact"), run(False))


@pytest.mark.parametrize("poisoned", [False, True])
def test_gradients_of_others_are_added_once_although_there_are_two_passes(poisoned):
    released, whole = pair("fp32", clip_grad_norm=0.5, poison=(0,) if poisoned else ())
    found = []
    for run in (released, whole):
        other = nn.Parameter(torch.ones(50))
        other.grad = torch.full((50,), 2.0)
        loss = (run.model(torch.arange(16)) * other).float().logsumexp(1).sum()
        run.booster.backward(loss, run.optimizer)
        found.append(other.grad)
    assert_same(*found)


# ---------------------------------------------------------------------- what is freed, and when


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16_naive"])
def test_gradients_are_gone_when_backward_returns_and_step_counts_the_step(precision):
    run = Run("exact", precision)
    before = [p.detach().clone() for p in run.net.parameters()]
    run.booster.backward(run.loss(), run.optimizer)
    assert all(param.grad is None for param in run.net.parameters())
    assert any(not torch.equal(p, old) for p, old in zip(run.net.parameters(), before, strict=True))
    assert run.optimizer.num_applied == 0
    assert run.optimizer.step().applied
    assert run.optimizer.num_applied == 1
    assert run.optimizer.progress == 1


def test_the_second_of_two_passes_is_none_of_others_so_that_no_scale_is_read_for_it():
    run = Run("exact", "fp16")
    run.booster.backward(run.loss(), run.optimizer)
    assert not run.optimizer._update.gradients.bare_passes.params


@pytest.mark.parametrize("precision", ["fp32", "bf16_naive"])
def test_a_parameter_is_stepped_before_the_gradients_below_it_are_computed(precision, half_steps):
    run = Run("exact", precision)
    down, seen = run.net.down.weight, []
    before = down.detach().clone()
    run.net.up.weight.register_hook(lambda grad: seen.append((down.grad, torch.equal(down, before))))
    run.step()
    assert seen == [(None, False)]


def test_two_passes_only_where_a_number_is_needed():
    def passes(*args, **options):
        run, count = Run("exact", *args, **options), []
        run.net.up.weight.register_hook(lambda grad: count.append(1))
        run.step()
        return len(count)

    assert [passes("fp32"), passes("bf16_naive"), passes("fp32", clip_grad_norm=1.0), passes("fp16")] == [1, 1, 2, 2]


@register_elementwise
class Calling(torch.optim.SGD):
    """Calls the step that it overrides, around which torch has put the hooks too, once there has been a plain SGD."""

    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize("precision", ["fp32", "bf16_naive"])
def test_step_hooks_fire_once(precision):
    OPTIMIZERS["SGD"](nn.Linear(1, 1).parameters())
    for make in (OPTIMIZERS["AdamW"], lambda params: Calling(params, lr=1e-2)):
        run, seen = Run("exact", precision, make), []
        run.inner.register_step_pre_hook(lambda *_, seen=seen: seen.append("before"))
        run.inner.register_step_post_hook(lambda *_, seen=seen: seen.append("after"))
        run.train(2)
        assert seen == ["before", "after"] * 2


# ---------------------------------------------------------------------- checkpoints


@pytest.mark.crossed
@pytest.mark.parametrize("mode", ["exact", "previous_norm"])
@pytest.mark.parametrize("precision", ["bf16", "bf16_naive split24 8bit"])
def test_a_resumed_run_is_the_run(precision, mode, tmp_path):
    whole = Run(mode, precision, clip_grad_norm=0.5).train(2)
    whole.booster.save(tmp_path, whole.model, whole.optimizer, lr_scheduler=whole.schedule)
    again = Run(mode, precision, clip_grad_norm=0.5)
    again.booster.load(tmp_path, again.model, again.optimizer, lr_scheduler=again.schedule)
    again.data.set_state(whole.data.get_state())
    again.number = 2
    assert_same(again.train(2).all()[:3], whole.train(2).all()[:3])


def test_a_checkpoint_moves_between_released_and_whole_steps(tmp_path):
    released, whole = pair("bf16_naive split24 8bit")
    released.train(2)
    released.booster.save(tmp_path, released.model, released.optimizer, lr_scheduler=released.schedule)
    whole.booster.load(tmp_path, whole.model, whole.optimizer, lr_scheduler=whole.schedule)
    whole.data.set_state(released.data.get_state())
    assert_same(whole.train(2).all()[:3], released.train(2).all()[:3])


def test_a_previous_norm_that_is_none_is_refused_with_nothing_loaded():
    run = Run("previous_norm", "bf16", clip_grad_norm=0.5).train(1)
    state = run.optimizer.state_dict()
    state["booster"]["release"] = {"previous_norm": "large"}
    with pytest.raises(ValueError, match="must hold the norm of a step as 'previous_norm'"):
        run.optimizer.load_state_dict(state)


# ---------------------------------------------------------------------- previous_norm


@pytest.mark.parametrize("precision", ["fp32", "bf16_naive"])
def test_previous_norm_clips_by_the_norm_of_the_step_before(precision):
    run, by_hand = Run("previous_norm", precision, clip_grad_norm=0.05), Run(False, precision)
    norm = None
    for _ in range(4):
        run.step()
        by_hand.booster.backward(by_hand.loss(), by_hand.optimizer)
        own = float(by_hand.optimizer.clip_grad_by_norm(math.inf))
        by_hand.optimizer._update.gradients.clip_by(0.05, own if norm is None else norm)
        by_hand.optimizer.step()
        by_hand.optimizer.zero_grad()
        by_hand.schedule.step()
        norm = own
        assert run.results[-1].grad_norm == own
    assert_same(run.all()[:3:2], by_hand.all()[:3:2])


def test_previous_norm_stops_at_what_is_not_finite_and_says_so(half_steps):
    run = Run("previous_norm", "fp32", clip_grad_norm=0.5, poison=(1,)).train(1)
    norm = run.results[0].grad_norm
    before = {name: p.detach().clone() for name, p in run.net.named_parameters()}
    run.step()
    changed = {name for name, p in run.net.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {
        "down.weight",
        "down.bias",
        "norm.weight",
        "norm.bias",
        "up.bias",
    }  # all that come before up.weight
    assert not run.results[-1].applied
    assert run.results[-1].culprit == ("up.weight",)
    assert run.optimizer._update.gradients.in_backward.previous == norm
    assert run.step().results[-1].applied


# ---------------------------------------------------------------------- what cannot be


def test_what_needs_gradients_after_backward_says_that_it_comes_too_late():
    run = Run("exact", "fp32")
    run.booster.backward(run.loss(), run.optimizer)
    calls = [
        lambda: run.optimizer.clip_grad_by_norm(1.0),
        lambda: run.optimizer.clip_grad_by_value(1.0),
        run.optimizer.unscale_grads,
        run.optimizer.zero_grad,
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match=r"comes too late: .* Booster\(clip_grad_norm=...\)"):
            call()
    with pytest.raises(RuntimeError, match=r"a second backward pass before optimizer.step\(\)"):
        run.booster.backward(run.loss(), run.optimizer)
    with pytest.raises(ValueError, match="create_graph=True makes gradients part of a graph"):
        run.optimizer.step()
        run.booster.backward(run.loss(), run.optimizer, create_graph=True)
    with pytest.raises(RuntimeError, match="use release_gradients=False"):
        run.optimizer.step(lambda: run.loss())


@pytest.mark.parametrize("options", [{}, {"clip_grad_norm": 1.0}])
def test_reentrant_checkpointing_is_refused_before_anything_is_stepped(options):
    net = nn.Linear(4, 4)
    b = Booster("cpu", release_gradients="exact", **options)
    model, optimizer, *_ = b.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    before = net.weight.detach().clone()
    loss = checkpoint(model, torch.ones(1, 4, requires_grad=True), use_reentrant=True).sum()
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        b.backward(loss, optimizer)
    assert torch.equal(net.weight, before)


def test_a_pass_that_raises_half_way_is_not_gone_on_from(half_steps):
    run = Run("exact", "fp32").train(1)
    state, weights = copy.deepcopy(run.optimizer.state_dict()), copy.deepcopy(run.model.state_dict())
    handle = run.net.up.weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.booster.backward(run.loss(), run.optimizer)
    handle.remove()
    for call in (run.optimizer.step, lambda: run.booster.backward(run.loss(), run.optimizer)):
        with pytest.raises(RuntimeError, match="were stepped within it, so the weights are those of no step"):
            call()
    run.model.load_state_dict(weights)
    run.optimizer.load_state_dict(state)
    run.step()


def test_a_first_pass_that_raises_leaves_everything_as_it_was():
    run = Run("exact", "fp16").train(1)
    weights = {name: param.detach().clone() for name, param in run.net.named_parameters()}
    handle = run.net.up.weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.booster.backward(run.loss(), run.optimizer)
    handle.remove()
    assert_same({name: own for name, own in run.net.state_dict().items() if name in weights}, weights)
    assert run.step().results[-1].applied


def refused(match, precision="fp32", **options):
    options = {"release_gradients": "exact", **options}
    with pytest.raises(ValueError, match=match):
        Booster("cpu", precision, **options)


def test_what_cannot_be_released_is_refused_at_construction():
    refused("previous_norm.*under a loss scale overflows are ordinary", "fp16", release_gradients="previous_norm")
    refused("skip_nonfinite=True would find", release_gradients="previous_norm", skip_nonfinite=True)
    refused("compiles a step of all gradients at once", fused_optimizer="compile")
    refused("has its own update", booster.mixed_precision.make("fp16_apex"))
    refused("draws its random numbers", BF16NaiveMixedPrecision(master_weights="none", rounding="stochastic"))
    refused("release_gradients", release_gradients=True)


def test_an_optimizer_that_looks_at_all_parameters_is_refused_before_anything_is_changed():
    net = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="LBFGS would be stepped on some parameters at a time"):
        Booster("cpu", "bf16_naive", release_gradients="exact").boost(net, torch.optim.LBFGS(net.parameters()))
    assert net.weight.dtype == torch.float32


def test_records_of_gradients_are_refused_and_those_of_steps_written(tmp_path):
    run = Run("exact", "fp16_naive", clip_grad_norm=0.01)
    with pytest.raises(ValueError, match="pass every=None"):
        run.booster.record(tmp_path)
    with run.booster.record(tmp_path / "steps", every=None) as record:
        run.train(2)
        assert record.latest["clip"] == pytest.approx(0.01 / run.results[-1].grad_norm, rel=1e-3)


# ---------------------------------------------------------------------- bytes


@pytest.mark.parametrize(
    "way",
    [
        "bf16_naive split24 8bit, clip",
        *(pytest.param(way, marks=pytest.mark.slow) for way in ("fp32", "bf16, clip")),
    ],
)
def test_the_estimate_follows_the_release(way):
    precision, _, clip = way.partition(", ")
    options = {"release_gradients": "exact", "clip_grad_norm": 1.0 if clip else 0.0}
    b = Booster("cpu", PRECISIONS[precision](), **options)
    net = mlp.MLP()
    inner, x = mlp.adamw(net.parameters()), torch.randn(16, mlp.WIDTH)
    expected = b.estimate_memory(net, inner, (x, x), F.mse_loss)
    model, optimizer, criterion, *_ = b.boost(net, inner, F.mse_loss)

    def step():
        b.backward(criterion(model(x), x), optimizer)
        optimizer.step()

    step()
    found = b.memory(model, optimizer)
    highest, _ = allocations.high_water(step, "cpu")
    assert (expected.gradients, found.gradients) == (0, 0)
    assert expected.held - expected.inputs == pytest.approx(found.held, rel=0.01)
    assert expected.peak - expected.inputs == pytest.approx(found.held + highest, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize(
    "precision", [FP16NaiveMixedPrecision, pytest.param(BF16NaiveMixedPrecision, marks=pytest.mark.slow)]
)
def test_five_bytes_a_parameter_are_held_and_six_at_the_peak(precision):
    strategy = precision(master_weights="split24", states="8bit")
    sizes = memory.measure(lambda device: memory.ours(device, strategy, release="exact"), "cpu")
    assert sizes["grad"] == 0
    assert sizes["held"] <= 5.2
    assert sizes["peak"] <= 6.0


@pytest.mark.parametrize("precision", ["bf16_naive", "fp32"])
def test_weights_that_were_loaded_train_on_within_backward(precision):
    weights = []
    for release in (False, "exact"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        booster = Booster("cpu", precision, release_gradients=release)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model, optimizer, *_ = booster.boost(model, optimizer)
        for step in range(3):
            if step == 1:
                state = {name: value.float() * 0.7 for name, value in model.state_dict().items()}
                model.load_state_dict(state)
            booster.backward(model(torch.ones(2, 8)).float().square().mean(), optimizer)
            optimizer.step()
            optimizer.zero_grad()
        weights.append([param.detach() for param in model.parameters()])
    assert all(map(torch.equal, *weights))
