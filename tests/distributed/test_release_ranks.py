"""Gradients that are stepped on within backward where ranks share them: the bits of the step without release."""

import gc
import math
import time

import pytest
import torch
from choices import precisions
from torch import nn
from torch.nn import functional as F

from booster import Booster
from booster.memory.measured_memory import StorageTracker
from booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin

PRECISIONS = precisions(
    "fp32", "bf16", "fp16", "fp16_naive", "bf16_naive", "bf16_naive split24 8bit", scale=2.0**12, hysteresis=1
)
BUCKET = 0.009  # MiB: some three buckets
PLAN = {"blocks.*.0": "colwise", "blocks.*.2": "rowwise"}
PLUGINS = {
    "DDP": lambda: TorchDDPPlugin(bucket_cap_mb=BUCKET),
    "DDP, unused": lambda: TorchDDPPlugin(bucket_cap_mb=BUCKET, find_unused_parameters=True),
    "ZeRO-1": lambda: LowLevelZeroPlugin(stage=1, bucket_cap_mb=BUCKET),
    "ZeRO-2": lambda: LowLevelZeroPlugin(stage=2, bucket_cap_mb=BUCKET),
    "FSDP": TorchFSDPPlugin,
    "TP": lambda: HybridParallelPlugin(2, 1, tp_plan=PLAN),
}


class Net(nn.Module):
    """Tied embedding and head. spoils: the gradient of the first element of norm.weight has an inf on this rank."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 20)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(20, 50), nn.GELU(), nn.Linear(50, 20)) for _ in range(2))
        self.norm = nn.LayerNorm(20)
        self.rare = nn.Linear(20, 20)
        self.spoils = False
        self.uses_rare = True

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        if self.uses_rare:
            x = x + self.rare(x)
        weight = self.norm.weight * 1
        if self.spoils:
            weight.register_hook(lambda grad: grad.index_fill(0, torch.zeros(1, dtype=torch.long), math.inf))
        return F.linear(F.layer_norm(x, (20,), weight, self.norm.bias), self.embed.weight)


class Run:
    """A model trained on this rank's numbers, the same whatever the options. spoil: steps in which rank 1 has an inf in a
    gradient. rare: in which steps which ranks use the layer `rare`; None: all in all. rare_at_first: only the first
    micro-batch of a step uses it."""

    def __init__(self, rank, release, plugin, precision="fp32", spoil=(), rare=None, rare_at_first=False, **options):
        torch.manual_seed(0)
        self.rank, self.net, self.spoil, self.rare, self.number = rank, Net(), spoil, rare, 0
        decayed = [p for p in self.net.parameters() if p.dim() > 1]
        rest = [p for p in self.net.parameters() if p.dim() < 2]
        made = torch.optim.AdamW([{"params": decayed}, {"params": rest, "lr": 1e-3}], lr=1e-2)
        self.booster = Booster("cpu", PRECISIONS[precision](), PLUGINS[plugin](), release_gradients=release, **options)
        schedule = torch.optim.lr_scheduler.StepLR(made, 2, 0.5)
        self.model, self.optimizer, self.criterion, _, self.schedule = self.booster.boost(
            self.net, made, F.cross_entropy, lr_scheduler=schedule
        )
        share = self.booster.plugin.data_parallel_rank
        self.data = torch.Generator().manual_seed(share)
        self.spoils_here = share == self.booster.plugin.data_parallel_size - 1
        self.results, self.gone, self.rare_at_first = [], True, rare_at_first

    def backward(self, micro_batch=0):
        self.net.spoils = self.number in self.spoil and self.spoils_here
        self.net.uses_rare = self.rare is None or self.rank in self.rare[self.number]
        if self.rare_at_first:
            self.net.uses_rare = micro_batch == 0
        ids = torch.randint(30, (8,), generator=self.data)
        self.booster.backward(self.criterion(self.model(ids), (ids * 3 + 1) % 30), self.optimizer)

    def train(self, steps, micro_batches=1):
        for _ in range(steps):
            if micro_batches == 1:
                self.backward()
            else:
                with self.booster.accumulate(self.model, self.optimizer, micro_batches):
                    for micro_batch in range(micro_batches):
                        self.backward(micro_batch)
            self.gone = self.gone and all(param.grad is None for param in self.model.parameters())
            self.results.append(repr(self.optimizer.step()))
            self.optimizer.zero_grad()
            self.schedule.step()
            self.number += 1
        return self

    def left(self):
        """Everything that training leaves, as what compares by its bits."""
        return [
            bits(self.model.state_dict()),
            bits(self.optimizer.state_dict()),
            self.results,
            self.schedule.state_dict(),
        ]


def bits(value):
    if hasattr(value, "full_tensor"):
        value = value.full_tensor()
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
    if isinstance(value, dict):
        return {str(key): bits(each) for key, each in value.items()}
    return [bits(each) for each in value] if isinstance(value, (list, tuple)) else value


def both(rank, world_size, plugin, precision, options, micro_batches=1):
    released = Run(rank, "exact", plugin, precision, **options).train(4, micro_batches)
    plain = Run(rank, False, plugin, precision, **options).train(4, micro_batches)
    return released.left() == plain.left(), released.results, plain.results, released.gone


def assert_same(found, skipped=()):
    for same, released, plain, gone in found:
        assert released == plain
        assert [step for step, result in enumerate(released) if "applied=False" in result] == list(skipped)
        assert same
        assert gone


slow = pytest.mark.slow
HERE = [("bf16_naive split24 8bit", {"clip_grad_norm": 0.5, "spoil": (2,)}), ("fp32", {})]
ELSEWHERE = [
    ("fp32", {"clip_grad_norm": 0.5}),
    ("fp32", {"skip_nonfinite": True, "spoil": (1,)}),
    ("bf16", {"clip_grad_norm": 0.5}),
    ("fp16", {"spoil": (0,)}),
    ("fp16", {"clip_grad_norm": 0.5, "spoil": (2,)}),
    ("fp16_naive", {"spoil": (1, 2)}),
    ("bf16_naive", {}),
]
CASES = [*HERE, *(pytest.param(*case, marks=slow) for case in ELSEWHERE)]


@pytest.mark.slow_cases("ZeRO-1")
@pytest.mark.crossed
@pytest.mark.parametrize(("precision", "options"), CASES, ids=str)
@pytest.mark.parametrize("plugin", PLUGINS)
def test_exact_is_the_step_without_release_to_the_bit(ranks2, plugin, precision, options):
    assert_same(ranks2(both, plugin, precision, options), options.get("spoil", ()))


@pytest.mark.parametrize(
    ("precision", "options"), [HERE[0], *(pytest.param(*case, marks=slow) for case in ELSEWHERE)], ids=str
)
@pytest.mark.parametrize("plugin", ["DDP", *(pytest.param(name, marks=slow) for name in PLUGINS if name != "DDP")])
def test_exact_is_so_on_four_ranks_whose_sums_have_an_order(ranks4, plugin, precision, options):
    assert_same(ranks4(both, plugin, precision, options), options.get("spoil", ()))


@pytest.mark.slow_cases("DDP")
@pytest.mark.parametrize(
    ("plugin", "precision"),
    [
        *((plugin, "bf16_naive") for plugin in PLUGINS if plugin not in ("DDP, unused", "TP")),
        *(pytest.param(plugin, "bf16_naive", marks=slow) for plugin in ("DDP, unused", "TP")),
        *(pytest.param(*pair, marks=slow) for pair in (("FSDP", "fp32"), ("FSDP", "fp16"), ("TP", "fp16"))),
    ],
)
def test_accumulated_gradients_are_released_in_the_last_pass_of_a_group(ranks2, plugin, precision):
    assert_same(ranks2(both, plugin, precision, {"clip_grad_norm": 0.5, "spoil": (1,)}, 3), [1])


@pytest.mark.parametrize(
    ("plugin", "precision"),
    [
        ("FSDP", "bf16_naive"),
        *(pytest.param(*case, marks=slow) for case in (("FSDP", "fp32"), ("TP", "fp16"), ("ZeRO-2", "bf16_naive"))),
    ],
)
def test_gradients_that_only_earlier_micro_batches_brought_are_counted_and_stepped_on(ranks2, plugin, precision):
    assert_same(ranks2(both, plugin, precision, {"clip_grad_norm": 0.5, "rare_at_first": True}, 2))


RARE = [(0,), (), (0, 1), (1,)]


@pytest.mark.parametrize("plugin", ["DDP, unused", "ZeRO-2"])
def test_a_layer_that_some_ranks_leave_out_is_stepped_if_any_uses_it(ranks2, plugin):
    assert_same(ranks2(both, plugin, "bf16_naive", {"clip_grad_norm": 0.5, "rare": RARE}))


def left_out(rank, world_size):
    with pytest.raises(RuntimeError, match="no gradient of rare.weight, rare.bias; use find_unused_parameters=True"):
        Run(rank, "exact", "DDP", rare=[()]).train(1)


def test_a_layer_that_is_left_out_is_named(ranks2):
    ranks2(left_out)


def frozen_since(rank, world_size, plugin, precision):
    # DistributedDataParallel takes what is frozen for unused.
    runs = [Run(rank, *how, precision).train(1) for how in ((False, "DDP, unused"), ("exact", plugin))]
    for run in runs:
        run.net.rare.requires_grad_(False)
        run.train(1)
        run.net.rare.requires_grad_(True)
        run.train(1)
    return [run.left() for run in runs]


@pytest.mark.parametrize(("plugin", "precision"), [("DDP", "fp32"), ("ZeRO-1", "bf16_naive")])
def test_a_layer_that_is_frozen_for_a_while_is_not_missed(ranks2, plugin, precision):
    for whole, released in ranks2(frozen_since, plugin, precision):
        assert whole == released


def resumed(rank, world_size, plugin, mode, folder):
    options = {"clip_grad_norm": 0.5}
    whole = Run(rank, mode, plugin, "bf16_naive", **options).train(4)
    first = Run(rank, mode, plugin, "bf16_naive", **options).train(2)
    first.booster.save(folder, model=first.model, optimizer=first.optimizer, lr_scheduler=first.schedule)
    second = Run(rank, mode, plugin, "bf16_naive", **options)
    second.booster.load(folder, model=second.model, optimizer=second.optimizer, lr_scheduler=second.schedule)
    second.data, second.number = first.data, 2
    second.train(2)
    second.results = first.results + second.results
    return whole.left() == second.left()


@pytest.mark.parametrize("mode", ["exact", pytest.param("previous_norm", marks=slow)])
@pytest.mark.parametrize(
    "plugin", ["ZeRO-2", *(pytest.param(name, marks=slow) for name in PLUGINS if name != "ZeRO-2")]
)
def test_a_run_that_is_resumed_in_the_middle_is_the_run(ranks2, plugin, mode, tmp_path):
    assert ranks2(resumed, plugin, mode, str(tmp_path / "saved")) == [True, True]


def clipped_by_the_norm_before(rank, world_size, plugin, precision):
    """Norms that steps report, by what each was clipped, and whether ranks hold the same weights."""
    run = Run(rank, "previous_norm", plugin, precision, clip_grad_norm=0.05).train(3)
    other = Run(rank, "exact", plugin, precision, clip_grad_norm=0.05).train(1)
    return run.results[0] == other.results[0], len(run.left()[2]), bits(run.model.state_dict())


@pytest.mark.crossed
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16_naive split24 8bit", marks=slow)])
@pytest.mark.parametrize("plugin", PLUGINS)
def test_previous_norm_takes_one_pass_and_keeps_ranks_alike(ranks2, plugin, precision):
    (first, steps, weights), (also, _, others) = ranks2(clipped_by_the_norm_before, plugin, precision)
    assert (first, also) == (True, True)
    assert steps == 3
    assert weights == others


def stopped(rank, world_size, plugin):
    """Results of the steps before, with and after a gradient that is not finite in the part of one rank, and the weights."""
    run = Run(rank, "previous_norm", plugin, clip_grad_norm=0.05, spoil=(1,)).train(3)
    return run.results, bits(run.model.state_dict()), all(p.isfinite().all() for p in run.net.parameters())


@pytest.mark.parametrize("plugin", PLUGINS)
def test_previous_norm_stops_on_all_ranks_at_what_one_of_them_finds(ranks2, plugin):
    (results, weights, finite), (others, also, _) = ranks2(stopped, plugin)
    assert results == others
    assert weights == also
    assert finite
    assert ["applied=False" in result for result in results] == [False, True, False]
    assert "culprit=('norm.weight',)" in results[1]


WIDTH, DEPTH = 260, 9  # layers of more elements than wait for others; their biases do wait


def growth(rank, world_size, plugin, precision):
    """Bytes that a backward pass adds to what is alive between its fifth layer, when three buckets are under way, and its last
    but one."""
    made = TorchFSDPPlugin(wrap_policy=nn.Linear) if plugin == "FSDP" else PLUGINS[plugin]()
    b = Booster("cpu", PRECISIONS[precision](), made, release_gradients="exact")
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))
    levels, trackers = [], []

    def settled(grad):
        """Note the level; what gloo's threads let go of late, for which a moment is given, does not count."""
        for tracker in trackers:
            for _ in range(60_000):
                if len(levels) < 5 or tracker.now <= levels[4] + WIDTH * WIDTH:
                    break
                time.sleep(0.001)
            levels.append(tracker.now)

    for layer in net:
        layer.register_forward_hook(lambda module, args, output: output.register_hook(settled) and None)
    model, optimizer, *_ = b.boost(net, torch.optim.AdamW(net.parameters()))
    x = torch.ones(4, WIDTH) + rank
    b.backward(model(x).pow(2).mean(), optimizer)
    optimizer.step()
    loss = model(x).pow(2).mean()
    with StorageTracker(t for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter)) as tracker:
        trackers.append(tracker)
        b.backward(loss, optimizer)
    return levels[-2] - levels[4]


@pytest.mark.slow_cases("DDP")
@pytest.mark.parametrize("plugin", ["FSDP", "DDP", pytest.param("ZeRO-1", marks=slow)])
def test_a_small_gradient_that_waits_keeps_no_large_ones_in_memory(ranks2, plugin):
    for found in ranks2(growth, plugin, "bf16_naive split24 8bit"):
        assert found < WIDTH * WIDTH  # a byte an element of one layer, and three layers were stepped between


def after_one_that_raised(rank, world_size, plugin):
    """A pass over a graph that was there before another one raised, beside a run without that one."""
    runs = [Run(rank, "exact", plugin).train(1) for _ in range(2)]
    ids = torch.arange(8).roll(rank)
    for run, raises in zip(runs, (True, False), strict=True):
        losses = [run.criterion(run.model(ids), (ids * 3 + 1) % 30) for _ in range(2)]
        if raises:
            handle = run.net.embed.weight.register_hook(lambda grad: (_ for _ in ()).throw(KeyError("user's hook")))
            with pytest.raises(KeyError):
                run.booster.backward(losses[0], run.optimizer)
            handle.remove()
            run.optimizer.zero_grad()
        run.booster.backward(losses[1], run.optimizer)
        run.results.append(repr(run.optimizer.step()))
    return runs[0].left() == runs[1].left()


@pytest.mark.parametrize("plugin", ["DDP", "ZeRO-2"])
def test_a_pass_follows_one_that_raised_without_a_forward_between(ranks2, plugin):
    assert ranks2(after_one_that_raised, plugin) == [True, True]


def refusals(rank, world_size):
    plugins = (
        TorchDDPPlugin(gradient_as_bucket_view=True),
        TorchDDPPlugin(static_graph=True),
        TorchDDPPlugin(comm_hook=lambda state, bucket: None),
        LowLevelZeroPlugin(fp8_communication=True),
        HybridParallelPlugin(1, 2),
    )
    found = []
    for plugin in plugins:
        with pytest.raises(ValueError, match="release_gradients=.* is not possible here") as raised:
            Booster("cpu", "bf16", plugin, release_gradients="exact")
        found.append(str(raised.value))
    with pytest.raises(ValueError, match="under a loss scale overflows are ordinary"):
        Booster("cpu", "fp16", TorchFSDPPlugin(), release_gradients="previous_norm", clip_grad_norm=1.0)
    return found


def test_what_keeps_gradients_is_refused_with_the_reason(ranks2):
    reasons = ("outlive them; leave it False", "all at once", "leave it out", "use stage=2", "use pp_size=1")
    for reason, message in zip(reasons, ranks2(refusals)[0], strict=True):
        assert reason in message


def without_synchronisation(rank, world_size, plugin):
    run = Run(rank, "exact", plugin)
    with run.model.module.no_sync(), pytest.raises(RuntimeError, match="passes ran inside no_sync"):
        run.backward()
    with run.booster.no_sync(run.model):
        run.backward()
    with pytest.raises(RuntimeError, match="passes ran inside no_sync"):
        run.optimizer.step()


@pytest.mark.parametrize("plugin", ["DDP", "ZeRO-1", "ZeRO-2"])
def test_gradients_of_one_rank_alone_are_not_stepped_on(ranks2, plugin):
    ranks2(without_synchronisation, plugin)


def other_parameters(rank, world_size, plugin, release="exact"):
    """Two optimizers on one model, and a loss for one of them: what the other one's parameters have as gradients."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    several = [torch.optim.AdamW(part.parameters(), lr=1e-2) for part in net]
    b = Booster("cpu", "fp32", PLUGINS[plugin](), release_gradients=release, clip_grad_norm=0.5)
    model, (first, _), *_ = b.boost(net, several)
    b.backward(model(torch.ones(2, 4) * rank).pow(2).mean(), first)
    return [bits(param.grad) for param in net[1].parameters()], [param.grad is None for param in net[0].parameters()]


@pytest.mark.parametrize("plugin", ["DDP", "FSDP"])
def test_gradients_of_another_optimizer_are_averaged_once(ranks2, plugin):
    (theirs, gone), (same, _) = ranks2(other_parameters, plugin)
    assert theirs == same
    assert gone == [True, True]
    assert theirs == ranks2(other_parameters, plugin, False)[0][0]


def two_passes_over_another(rank, world_size):
    with pytest.raises(RuntimeError, match="name every optimizer of the loss"):
        other_parameters(rank, world_size, "ZeRO-2")


def test_two_passes_over_slices_of_another_optimizer_are_refused(ranks2):
    ranks2(two_passes_over_another)
