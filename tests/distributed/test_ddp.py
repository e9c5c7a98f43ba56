"""TorchDDPPlugin on gloo ranks: training equals one process on the whole batch, and ranks never drift apart."""

import os
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.utils.data import DataLoader, TensorDataset

from booster import Booster
from booster.mixed_precision import DtypePolicy, FP16TorchMixedPrecision, MixedPrecision
from booster.plugin import TorchDDPPlugin

DIM, CLASSES, BATCH, STEPS = 16, 5, 128, 16
SCALE = 1024.0
PRECISIONS = ["fp32", "fp16", "bf16"]
# Gradients are averaged in float32. fp16 and bf16 round each rank's products on their own.
TOLERANCE = {"fp32": 2e-6, "fp16": 1e-4, "bf16": 2 * torch.finfo(torch.bfloat16).eps}
# Of single gradients, relative to the largest one.
ROUNDING = {"fp32": 2e-6, "fp16": torch.finfo(torch.float16).eps, "bf16": torch.finfo(torch.bfloat16).eps}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(DIM, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, x):
        return self.head(self.norm(torch.tanh(self.embed(x))))

    def features(self, x):
        return self.embed(x)


def net(seed=0):
    torch.manual_seed(seed)
    return Net()


def data(seed=1, rows=BATCH):
    x = torch.randn(rows, DIM, generator=torch.Generator().manual_seed(seed))
    return x, x[:, :CLASSES].argmax(1)


def shard(rank, world_size, *tensors):
    return [t.chunk(world_size)[rank] for t in tensors]


def make(precision, world_size, **options):
    strategy = FP16TorchMixedPrecision(init_scale=SCALE, growth_interval=5) if precision == "fp16" else precision
    return Booster("cpu", strategy, TorchDDPPlugin(**options) if world_size > 1 else None)


def boost(precision, world_size, model=None, lr=0.03, **options):
    model = net() if model is None else model
    booster = make(precision, world_size, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return booster, *booster.boost(model, optimizer)[:2]


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def grads(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def train(rank, world_size, precision, clip=None, options=None, model=None):
    """Losses of the whole batch, final parameters, loss scales and norms."""
    model = net() if model is None else model
    booster = make(precision, world_size, **(options or {}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    model, optimizer, criterion, *_ = booster.boost(model, optimizer, nn.CrossEntropyLoss())
    losses, norms = [], []
    for step in range(STEPS):
        x, y = shard(rank, world_size, *data(step))
        loss = criterion(model(x), y)
        booster.backward(loss, optimizer)
        if clip:
            norms.append(optimizer.clip_grad_by_norm(clip))
        assert optimizer.step().applied
        optimizer.zero_grad()
        losses.append(booster.reduce(loss))
    return torch.stack(losses), flat(model), optimizer.loss_scale, torch.stack(norms) if norms else torch.zeros(1)


# ---- equal to one process ----


def lbfgs(rank, world_size):
    booster, model = make("fp32", world_size), net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5, line_search_fn="strong_wolfe")
    model, optimizer, *_ = booster.boost(model, optimizer)
    x, y = shard(rank, world_size, *data())
    losses = []
    for _ in range(3):

        def closure():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            booster.backward(loss, optimizer)
            return loss

        losses.append(optimizer.step(closure).loss)
    return torch.stack(losses), flat(model)


def test_an_optimizer_that_reads_losses_reads_their_mean_over_the_ranks(ranks2):
    losses, params = lbfgs(0, 1)
    (first, first_params), (second, second_params) = ranks2(lbfgs)
    assert torch.equal(first, second), "ranks got different losses"
    assert torch.equal(first_params, second_params), "ranks drifted apart"
    assert (first - losses).abs().max() <= 1e-4
    assert (first_params - params).abs().max() <= 1e-3


@pytest.mark.parametrize(
    "options", [{"gradient_as_bucket_view": True}, {"static_graph": True}, {"find_unused_parameters": True}], ids=str
)
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")
def test_options_do_not_change_the_result(ranks2, options):
    losses, params, *_ = train(0, 1, "fp16")
    for other_losses, other_params, *_ in ranks2(train, "fp16", None, options):
        assert (other_losses - losses).abs().max() <= TOLERANCE["fp16"]
        assert (other_params - params).abs().max() <= TOLERANCE["fp16"]


# ---- overflow on one rank ----


def two_optimizers_overflow(rank, world_size):
    booster = make("fp16", world_size)
    nets = [net(0), net(1)]
    pairs = [booster.boost(n, torch.optim.SGD(n.parameters(), lr=0.1))[:2] for n in nets]
    before = [flat(n) for n in nets]
    x, y = shard(rank, world_size, *data())
    loss = F.cross_entropy(pairs[0][0](x), y) + F.cross_entropy(pairs[1][0](x), y)
    booster.backward(loss, [optimizer for _, optimizer in pairs])
    if rank == 1:
        next(nets[1].parameters()).grad.fill_(float("inf"))
    applied = [optimizer.step().applied for _, optimizer in pairs]
    return applied, [torch.equal(flat(n), b) for n, b in zip(nets, before, strict=True)]


def test_optimizers_of_one_loss_skip_together_on_all_ranks(ranks2):
    assert ranks2(two_optimizers_overflow) == [([False, False], [True, True])] * 2


# ---- synchronisation ----


def accumulate(rank, world_size, precision, compiled=False):
    """Five micro-batches in groups of two: the last group is short."""
    booster, model, optimizer = boost(precision, world_size)
    if compiled:
        model = torch.compile(model, backend="eager")
    micro = [shard(rank, world_size, *data(seed)) for seed in range(5)]
    history = []
    for group in (micro[:2], micro[2:4], micro[4:]):
        with booster.accumulate(model, optimizer, num_micro_batches=len(group)):
            for x, y in group:
                booster.backward(F.cross_entropy(model(x), y), optimizer)
        optimizer.clip_grad_by_norm(100.0)
        assert optimizer.step().applied
        optimizer.zero_grad()
        history.append(flat(model))
    return history


def accumulate_reference(precision):
    _, model, optimizer = boost(precision, 1)
    batches = [data(seed) for seed in range(5)]
    history = []
    for group in (batches[:2], batches[2:4], batches[4:]):
        x, y = (torch.cat(parts) for parts in zip(*group, strict=True))
        optimizer.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        history.append(flat(model))
    return history


def forwards_first(rank, world_size):
    booster, model, optimizer = boost("fp32", world_size)
    x, y = shard(rank, world_size, *data())
    with pytest.raises(RuntimeError, match="call backward after each forward"):
        with booster.accumulate(model, optimizer, num_micro_batches=2):
            losses = [F.cross_entropy(model(x), y) for _ in range(2)]
            for loss in losses:
                booster.backward(loss, optimizer)


def test_running_all_forwards_of_a_group_first_raises(ranks2):
    ranks2(forwards_first)


def own_tokens(rank, world_size, counts):
    booster, model, optimizer = boost("fp32", world_size)
    x, y = shard(rank, world_size, *data())
    for count in counts[rank]:
        with booster.accumulate(model, optimizer, num_micro_batches=1, num_tokens=count):
            booster.backward(F.cross_entropy(model(x), y, reduction="sum"), optimizer)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("counts", [[[8], [24]], [[8, 9], [8, 7]], [[None], [8]]], ids=str)
def test_tokens_of_each_rank_alone_are_not_taken_for_those_of_all(ranks2, counts):
    with pytest.raises(
        Exception, match=r"(?s)num_tokens=.* on rank .*over all micro-batches and all data-parallel ranks"
    ):
        ranks2(own_tokens, counts)


# ---- options reach DistributedDataParallel ----


def options_seen(rank, world_size):
    _, model, _ = boost(
        "fp32",
        world_size,
        broadcast_buffers=False,
        bucket_cap_mb=3,
        gradient_as_bucket_view=True,
        static_graph=True,
    )
    unused = boost("fp32", world_size, find_unused_parameters=True)[1].module.find_unused_parameters
    ddp, default = model.module, boost("fp32", world_size)[1].module
    names = ("broadcast_buffers", "gradient_as_bucket_view", "static_graph", "find_unused_parameters")
    buckets = [d.bucket_bytes_cap // 2**20 for d in (ddp, default)]
    return (
        type(ddp).__name__,
        [getattr(ddp, n) for n in names[:3]] + [unused],
        [getattr(default, n) for n in names],
        buckets,
    )


def test_options_reach_ddp(ranks2):
    expected = ("DistributedDataParallel", [False, True, True, True], [True, False, False, False], [3, 25])
    assert ranks2(options_seen) == [expected] * 2


def buffers(rank, world_size, broadcast):
    torch.manual_seed(rank)  # weights differ: rank 0's are taken
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM), nn.Linear(DIM, CLASSES))
    booster, model, optimizer = boost("bf16", world_size, model, broadcast_buffers=broadcast)
    for step in range(3):
        x, y = shard(rank, world_size, *data(step))
        booster.backward(F.cross_entropy(model(x), y), optimizer)
        optimizer.step()
    with torch.no_grad():
        model(data(9)[0])
    return flat(model), model[1].running_mean.clone()


@pytest.mark.parametrize("broadcast", [True, False])
def test_rank_0_gives_its_weights_to_all_and_its_buffers_where_asked(ranks2, broadcast):
    (params0, mean0), (params1, mean1) = ranks2(buffers, broadcast)
    assert torch.equal(params0, params1)
    assert torch.equal(mean0, mean1) == broadcast


class State:
    def __init__(self):
        self.dtypes = set()
        self.group = None


def doubling_hook(state, bucket):
    if isinstance(state, State):
        state.dtypes.add(bucket.buffer().dtype)
        group = dist.group.WORLD
    else:
        group = state
    tensor = bucket.buffer().mul_(2.0 / dist.get_world_size(group))
    return dist.all_reduce(tensor, group=group, async_op=True).get_future().then(lambda future: future.value()[0])


def hooked(rank, world_size, kind):
    state = State()
    hook = {
        "function": doubling_hook,
        "pair": (state, doubling_hook),
        "torch": (None, default_hooks.fp16_compress_hook),
        "bfloat16": default_hooks.bf16_compress_hook,
        "bfloat16 around another": (None, default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)),
        "bfloat16 around PowerSGD": (
            powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2),
            default_hooks.bf16_compress_wrapper(powerSGD_hook.powerSGD_hook),
        ),
    }
    booster, model, optimizer = boost("fp16", world_size, comm_hook=hook[kind])
    x, y = shard(rank, world_size, *data())
    booster.backward(F.cross_entropy(model(x), y), optimizer)
    optimizer.unscale_grads()
    return grads(model), state.dtypes


@pytest.mark.parametrize(
    "kind", ["function", "pair", "torch", "bfloat16", "bfloat16 around another", "bfloat16 around PowerSGD"]
)
def test_communication_hooks_are_called(ranks2, kind):
    booster, model, optimizer = boost("fp16", 1)
    x, y = data()
    booster.backward(F.cross_entropy(model(x), y), optimizer)
    optimizer.unscale_grads()
    factor = 2 if kind in ("function", "pair") else 1
    tolerance = 2 * ROUNDING["bf16" if "bfloat16" in kind else "fp16"] * grads(model).abs().max()
    for result, dtypes in ranks2(hooked, kind):
        assert (result - factor * grads(model)).abs().max() <= tolerance
        assert dtypes == ({torch.float32} if kind == "pair" else set())


# ---- what raises ----


def misuse(rank, world_size):
    with pytest.raises(ValueError, match="sync_batchnorm=True needs CUDA"):
        Booster("cpu", None, TorchDDPPlugin(sync_batchnorm=True))
    booster = make("fp32", world_size)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = flat(model)
    dataset = TensorDataset(*data())
    with pytest.raises(ValueError, match="prepare_dataloader"):
        booster.boost(model, optimizer, dataloader=DataLoader(dataset, 4))
    stranger = nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match=r"\(3,\)\]\) belong to no boosted model"):
        booster.boost(model, torch.optim.SGD([*model.parameters(), stranger], lr=0.1))

    class Metric(nn.Module):
        def __init__(self):
            super().__init__()
            self.proxies = nn.Parameter(torch.zeros(3))

    with pytest.raises(ValueError, match=r"trainable parameters \['proxies'\].*submodule of the model"):
        booster.boost(model, optimizer, Metric())
    with pytest.raises(TypeError, match="DistributedDataParallel already"):
        booster.boost(nn.parallel.DistributedDataParallel(net()))
    # Nothing was touched by all that: the same objects can still be boosted.
    assert torch.equal(flat(model), before)
    boosted, boosted_optimizer, _, loader, _ = booster.boost(
        model, optimizer, dataloader=booster.plugin.prepare_dataloader(dataset, 4)
    )
    assert len(list(loader)) == BATCH // 4 // world_size

    with pytest.raises(RuntimeError, match="boosted already"):
        booster.boost(model)
    booster.backward(boosted(shard(rank, world_size, *data())[0]).sum(), boosted_optimizer)


def test_misuse_raises_and_changes_nothing(ranks2):
    ranks2(misuse)


def unhonoured_policy(rank, world_size):
    class HalfReduce(MixedPrecision):
        policy = DtypePolicy(param=torch.bfloat16, reduce=torch.float32)

    class FloatReduce(MixedPrecision):
        policy = DtypePolicy(reduce=torch.float32)

    model = net()
    with pytest.raises(ValueError, match=r"reduces gradients in the dtype of the parameters.*reduce=torch.float32"):
        Booster("cpu", HalfReduce(), TorchDDPPlugin()).boost(model)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    Booster("cpu", FloatReduce(), TorchDDPPlugin()).boost(model)


def test_a_reduce_dtype_that_ddp_cannot_honour_raises_before_the_model_is_touched(ranks2):
    ranks2(unhonoured_policy)


def launched_with_a_group(rank, world_size):
    with _environment(WORLD_SIZE="2", RANK=str(rank), LOCAL_RANK=str(rank)):
        return TorchDDPPlugin().data_parallel_size


@contextmanager
def _environment(**variables):
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def test_a_launched_job_with_a_group_is_welcome(ranks2):
    assert ranks2(launched_with_a_group) == [2, 2]


def test_a_launched_job_without_a_group_raises(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"WORLD_SIZE=2.*launch_from_torch\(\) before TorchDDPPlugin"):
        TorchDDPPlugin()


def no_plugin(rank, world_size):
    import logging

    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("booster").addHandler(handler)
    try:
        booster = Booster("cpu", "fp16")
        model = net()
        model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if rank == 0:  # no collective anywhere, also in a launched job
            booster.backward(model(data()[0]).square().mean(), optimizer)
            optimizer.step()
    finally:
        logging.getLogger("booster").removeHandler(handler)
    return [record.getMessage() for record in records if record.levelno >= logging.WARNING]


def test_without_a_plugin_ranks_are_alone_and_told_so(ranks2):
    first, second = ranks2(no_plugin)
    assert len(first) == 1
    assert "no plugin in a job of 2 processes" in first[0]
    assert second == []


# ---- the boosted model under DDP ----


def methods(rank, world_size):
    booster, model, optimizer = boost("bf16", world_size)
    x, _ = shard(rank, world_size, *data())
    with pytest.raises(RuntimeError, match=r"model.features\(\).*DistributedDataParallel synchronises only"):
        model.features(x)
    with torch.no_grad():
        out = model.features(x)
    assert out.dtype == torch.float32
    model.requires_grad_(True)
    assert list(model.state_dict()) == list(net().state_dict())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in net().named_parameters()]
    assert type(booster.unwrap(model)) is Net
    assert not torch.is_autocast_enabled("cpu")


def test_methods_beside_forward_raise_where_gradients_would_not_be_synchronised(ranks2):
    ranks2(methods)


class Dataclassy(Net):
    def both(self, x):
        from dataclasses import dataclass

        @dataclass
        class Output:
            out: torch.Tensor

        return Output(self.embed(x))


def dataclass_method(rank, world_size):
    _, model, _ = boost("fp32", world_size, Dataclassy())
    with pytest.raises(RuntimeError, match=r"model.both\(\)"):
        model.both(data()[0])


def test_gradients_are_found_in_any_container(ranks2):
    ranks2(dataclass_method)


def frozen(rank, world_size):
    torch.manual_seed(rank)
    teacher = Net().requires_grad_(False)
    booster = make("bf16", world_size)
    boosted = booster.boost(teacher)[0]
    with torch.no_grad():
        return boosted(data()[0]), flat(teacher)


def test_a_frozen_model_is_served_and_equal_on_all_ranks(ranks2):
    (out0, params0), (out1, params1) = ranks2(frozen)
    assert torch.equal(params0, params1)
    assert torch.equal(out0, out1)
