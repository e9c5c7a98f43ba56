"""HybridParallelPlugin with what a training loop uses besides: accumulation, checkpoints, loaders, frozen and tied weights."""

import contextlib
import gc
import os
import sys
from itertools import pairwise

import pytest
import torch
from comparing import weights, whole
from matrix import BATCH, DIM, LENGTH, TP_PLAN, VOCABULARY, Transformer, loss_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from benchmarks.allocations import alive
from benchmarks.scaling.bytes import high_level
from booster import Booster
from booster.mixed_precision import BF16NaiveMixedPrecision, FP16ApexMixedPrecision
from booster.plugin import HybridParallelPlugin, SingleDevice, TorchFSDPPlugin

LAYOUTS = [(2, 1), (1, 2)]  # (tp_size, pp_size), with two data-parallel ranks each


def plugin(rank, world_size, tp_size=2, pp_size=1, **options):
    if world_size == 1:
        return SingleDevice()
    return HybridParallelPlugin(tp_size, pp_size, **{"tp_plan": TP_PLAN} | options)


def batch(step, booster):
    """This rank's share of the inputs and targets of a step."""
    draw = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=draw)
    share = BATCH // booster.plugin.data_parallel_size
    tokens = tokens.narrow(0, booster.plugin.data_parallel_rank * share, share)
    return tokens[:, :-1], (tokens[:, :-1] * 3 + 1) % VOCABULARY


def steps(booster, model, optimizer, criterion, first, last):
    losses = []
    for step in range(first, last):
        out = booster.execute_pipeline(iter([batch(step, booster)]), model, criterion, optimizer)
        losses.append(float(booster.reduce(out["loss"])))
        optimizer.clip_grad_by_norm(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def built(rank, world_size, precision="fp32", optimizer=torch.optim.AdamW, lr=3e-3, **options):
    torch.manual_seed(7)
    booster = Booster("cpu", precision, plugin(rank, world_size, **options))
    model = Transformer()
    made = optimizer(model.parameters(), lr=lr)
    model, made, criterion, _, _ = booster.boost(model, made, loss_of)
    return booster, model, made, criterion


def merged(results):
    """The weights that any rank holds."""
    return {name: weight for result in results for name, weight in result.items()}


def check_close(found, expected, tolerance):
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(
            found[name], expected[name], rtol=0, atol=tolerance, msg=lambda text, name=name: name + text
        )


# ---------------------------------------------------------------------- models


class Tied(Transformer):
    """Embedding and head share their weight, one block is frozen, activations are recomputed."""

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(DIM, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks[1].requires_grad_(False)
        self.register_buffer("gain", torch.tensor(1.5))

    def forward(self, tokens):
        x = self.embedding(tokens) + self.position
        for block in self.blocks:
            x = checkpoint(block, x * self.gain, use_reentrant=False)
        return self.head(self.norm(x))


def with_groups(rank, world_size, tp_size=2, pp_size=1, zero_stage=0):
    torch.manual_seed(7)
    booster = Booster("cpu", "fp32", plugin(rank, world_size, tp_size, pp_size, zero_stage=zero_stage))
    model = Tied()
    decayed = [param for param in model.parameters() if param.requires_grad and param.dim() > 1]
    others = [param for param in model.parameters() if param.requires_grad and param.dim() == 1]
    # Not Adam, which makes a step of the noise that is the gradient of a key's bias.
    made = torch.optim.SGD(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.1}], lr=0.05, momentum=0.9
    )
    schedule = torch.optim.lr_scheduler.StepLR(made, 2, 0.5)
    frozen = whole(next(model.blocks[1].parameters()))
    model, made, criterion, _, schedule = booster.boost(model, made, loss_of, None, schedule)
    norms = []
    for step in range(4):
        booster.execute_pipeline(iter([batch(step, booster)]), model, criterion, made)
        made.clip_grad_by_norm(0.3)
        norms.append(made.step().grad_norm)
        schedule.step()
        made.zero_grad()
    held = weights(model)
    rates = [group["lr"] for group in made.param_groups]
    kept = next((held[name] for name in held if name.startswith("blocks.1.")), frozen)
    return held, norms, rates, torch.equal(kept, frozen)


@pytest.mark.crossed
@pytest.mark.parametrize("zero_stage", [0, 2])
@pytest.mark.parametrize(("tp_size", "pp_size"), LAYOUTS)
def test_tied_and_frozen_weights_groups_schedules_and_checkpointing(run_on_ranks, tp_size, pp_size, zero_stage):
    expected, norms, rates, _ = with_groups(0, 1)
    found = run_on_ranks(with_groups, 4, tp_size, pp_size, zero_stage)
    for _, other_norms, other_rates, frozen_stayed in found:
        assert other_norms == pytest.approx(norms, rel=1e-5)
        assert other_rates == rates
        assert frozen_stayed
    held = merged([result[0] for result in found])
    held.pop("head.weight", None)  # where embedding and head lie on different stages each has its own name
    check_close(held, expected, 2e-5)


# ---------------------------------------------------------------------- schedules


def encoder(num_layers=2):
    layer = torch.nn.TransformerEncoderLayer(DIM, 4, 2 * DIM, dropout=0.0, batch_first=True, norm_first=True)
    return torch.nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)


def scheduled(rank, world_size, precision, options, num_layers):
    """Losses and norms of an encoder with a known plan; evaluation at the end, with outputs."""
    torch.manual_seed(7)
    booster = Booster("cpu", precision, plugin(rank, world_size, **options, tp_plan=None) if options else None)
    model = encoder(num_layers)
    made = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, made, criterion, _, _ = booster.boost(model, made, torch.nn.MSELoss())
    losses, norms = [], []
    draw = torch.Generator().manual_seed(5)
    count, mine = booster.plugin.data_parallel_size, booster.plugin.data_parallel_rank
    for _ in range(3):
        x, y = (torch.randn(BATCH, 6, DIM, generator=draw).chunk(count)[mine] for _ in range(2))
        out = booster.execute_pipeline(iter([(x, y)]), model, criterion, made)
        losses.append(float(booster.reduce(out["loss"])))
        made.clip_grad_by_norm(0.3)
        norms.append(made.step().grad_norm)
        made.zero_grad()
    model.eval()
    out = booster.execute_pipeline(iter([(x, y)]), model, criterion, return_outputs=True)
    losses.append(float(booster.reduce(out["loss"])))
    shape = None if out["outputs"] is None else tuple(out["outputs"].shape)
    return losses, norms, shape


@pytest.mark.slow_cases("zbv", "bf16_naive", "sequence")
@pytest.mark.crossed
@pytest.mark.parametrize(
    ("precision", "tolerance"),
    [("fp32", 2e-6), pytest.param("fp16", 3e-3, marks=pytest.mark.slow), ("bf16_naive", 1e-2)],
)
@pytest.mark.parametrize(
    "options",
    [
        {"tp_size": 2, "pp_size": 2, "sequence_parallelism": True},
        pytest.param({"tp_size": 1, "pp_size": 2, "pp_style": "gpipe", "microbatch_size": 1}, marks=pytest.mark.slow),
        {"tp_size": 1, "pp_size": 2, "pp_style": "zbv", "num_microbatches": 4, "zero_stage": 1},
        pytest.param(
            {"tp_size": 1, "pp_size": 2, "pp_style": "interleaved", "num_model_chunks": 2, "num_microbatches": 4},
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda options: options.get("pp_style", "sequence"),
)
def test_schedules_and_sequence_parallelism_train_like_one_process(run_on_ranks, precision, tolerance, options):
    num_layers = 4 if options.get("pp_style") in ("zbv", "interleaved") else 2  # one for each chunk of a stage
    losses, norms, _ = scheduled(0, 1, precision, None, num_layers)
    results = run_on_ranks(scheduled, 4, precision, options, num_layers)
    for other_losses, other_norms, _ in results:
        assert other_losses == pytest.approx(losses, abs=tolerance)
        assert other_norms == pytest.approx(norms, rel=max(tolerance, 1e-5))
    shapes = {shape for _, _, shape in results}
    share = BATCH // (4 // (options["tp_size"] * 2))
    assert shapes == {None, (share, 6, DIM)}  # outputs are on the last stage


# ---------------------------------------------------------------------- data


def loaded(rank, world_size, tp_size, pp_size):
    booster = Booster("cpu", None, plugin(rank, world_size, tp_size, pp_size))
    loader = booster.prepare_dataloader(TensorDataset(torch.arange(8)), batch_size=2)
    seen = [batch[0] for batch in loader]
    return seen, booster.gather(torch.cat(seen), loader)


@pytest.mark.parametrize(("tp_size", "pp_size"), LAYOUTS)
def test_ranks_of_one_model_copy_read_the_same_batches_and_gather_gives_each_sample_once(
    run_on_ranks, tp_size, pp_size
):
    results = run_on_ranks(loaded, 4, tp_size, pp_size)
    copies = [results[:2], results[2:]] if tp_size == 2 else [results[0::2], results[1::2]]
    for same in copies:
        for (one, _), (other, _) in pairwise(same):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert not torch.equal(copies[0][0][0][0], copies[1][0][0][0])
    assert all(torch.equal(gathered, torch.arange(8)) for _, gathered in results)


# ---------------------------------------------------------------------- misuse


def refusals(rank, world_size):
    messages = []
    for options in (
        {"tp_size": 3, "pp_size": 1},
        {"tp_size": 0, "pp_size": 1},
        {"tp_size": 2, "pp_size": 1, "zero_stage": 3},
        {"tp_size": 1, "pp_size": 2, "pp_style": "1f2b"},
        {"tp_size": 1, "pp_size": 2, "num_model_chunks": 2},
        {"tp_size": 1, "pp_size": 2, "pp_style": "interleaved"},
        {"tp_size": 1, "pp_size": 2, "num_microbatches": 2, "microbatch_size": 2},
        {"tp_size": 1, "pp_size": 2, "sequence_parallelism": True},
        {"tp_size": 2, "pp_size": 1, "split_points": ["blocks.1"]},
        {"tp_size": 1, "pp_size": 2, "num_micro_batches": 2, "num_microbatches": 2},
        {"tp_size": 1, "pp_size": 2, "num_micro_batches": 2, "microbatch_size": 2},
    ):
        with pytest.raises(ValueError, match="=") as caught:
            HybridParallelPlugin(**options)
        messages.append(str(caught.value))
    for spelling in ("num_micro_batches", "num_microbatches"):
        plugin = HybridParallelPlugin(1, 2, **{spelling: 4})
        assert plugin.num_micro_batches(8) == 4
    booster, model, made, criterion = built(rank, world_size, tp_size=1, pp_size=2)
    fresh = Transformer()
    with pytest.raises(ValueError, match="register_elementwise"):
        booster.boost(fresh, torch.optim.LBFGS(fresh.parameters()))
    with pytest.raises(RuntimeError, match="execute_pipeline"):
        model(batch(0, booster)[0])
    with pytest.raises(RuntimeError, match="num_microbatches"), booster.no_sync(model):
        pass
    with pytest.raises(ValueError, match="does not divide into 2 micro-batches"):
        booster.execute_pipeline(iter([(torch.zeros(3, 2), torch.zeros(3, 2))]), model, criterion, made)
    with pytest.raises(TypeError, match="iter"):
        booster.execute_pipeline([batch(0, booster)], model, criterion, made)
    return messages


def test_what_cannot_work_is_refused_at_once(run_on_ranks):
    messages = run_on_ranks(refusals, 2)[0]
    assert "does not divide the world size 2" in messages[0]
    assert messages[6].startswith("num_microbatches=2 and microbatch_size=2 say the same")
    assert "two spellings" in messages[-2]
    assert messages[-1].startswith("num_micro_batches=2 and microbatch_size=2 say the same")


def resources_of_plugins(rank, world_size):
    def count():
        gc.collect()
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    makers = [
        lambda: HybridParallelPlugin(2, 1, tp_plan=TP_PLAN),
        lambda: HybridParallelPlugin(1, 2, zero_stage=1),
        lambda: TorchFSDPPlugin(replicate_size=world_size // 2),
    ]
    grown = []
    for make in makers:
        built_once(make)
        before = count()
        for _ in range(2):
            built_once(make)
        grown.append([after - old for after, old in zip(count(), before, strict=True)])
    return grown


def built_once(make):
    model = Transformer()
    Booster("cpu", "fp32", make()).boost(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts by /proc")
def test_plugins_of_equal_shape_share_threads_and_descriptors(ranks4):
    assert ranks4(resources_of_plugins) == [[[0, 0]] * 3] * 4


# ---------------------------------------------------------------------- a data-parallel size of 1


class Seen(TorchDispatchMode):
    """Notes what `fully_shard` does, messages with the dtype of what is sent, and the optimizer's fused calls."""

    def __init__(self):
        super().__init__()
        self.of_fsdp, self.sums, self.calls = [], [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if func.namespace == "fsdp":
            self.of_fsdp.append(name)
        if func.namespace in ("c10d", "_c10d_functional") and name in ("allreduce_", "all_reduce"):
            given = args[0][0] if isinstance(args[0], list) else args[0]
            self.sums.append((given.dtype, given.numel()))
        self.calls += name.startswith("_fused_adamw")
        return func(*args, **(kwargs or {}))


PURE = [(2, 1), (1, 2)]  # (tp_size, pp_size) on two ranks


def apex():
    return FP16ApexMixedPrecision("O2", verbosity=0)


def seen_in_a_step(rank, world_size, precision, options):
    booster, model, optimizer, criterion = built(
        rank, world_size, precision() if callable(precision) else precision, **options
    )
    steps(booster, model, optimizer, criterion, 0, 1)
    with Seen() as seen:
        steps(booster, model, optimizer, criterion, 1, 2)
    return seen.of_fsdp, seen.calls, len(list(model.parameters()))


@pytest.mark.crossed
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16_naive", apex])
@pytest.mark.parametrize(("tp_size", "pp_size"), PURE)
def test_without_data_parallelism_no_weight_is_gathered_from_a_group_of_one(ranks2, precision, tp_size, pp_size):
    for of_fsdp, calls, tensors in ranks2(seen_in_a_step, precision, {"tp_size": tp_size, "pp_size": pp_size}):
        assert of_fsdp == []
        assert 1 <= calls <= 10 < tensors  # one call, or one for each bucket of masters


def taken(rank, world_size, tp_size, pp_size):
    """Bytes for each parameter of this rank, between steps, with gradients, and at the highest point of a step."""
    # Where a CPU has no units for halves, "auto" would add activations in float32 to what is counted here.
    booster = Booster("cpu", "bf16_naive", plugin(rank, world_size, tp_size, pp_size), half_products="native")
    data = tuple(tensor[:2] for tensor in batch(0, booster))
    kept = []

    def step():
        booster.execute_pipeline(iter([data]), kept[0], kept[2], kept[1], return_loss=False)
        kept[1].step()

    def build():
        net = Transformer(320, 4)  # of which a bucket is an eighth, and not the least that is worth a call
        kept.extend(booster.boost(net, torch.optim.AdamW(net.parameters()), loss_of)[:3])
        step()
        kept[1].zero_grad()
        gc.collect()

    alive()
    _, between = high_level(build, [])
    highest, more = high_level(step, [])
    count = sum(getattr(param, "to_local", lambda p=param: p)().numel() for param in kept[0].parameters())
    return between / count, (between + more) / count, (between + highest) / count


@pytest.mark.slow_cases("1-2")
@pytest.mark.parametrize(("tp_size", "pp_size"), PURE)
def test_half_weights_without_data_parallelism_take_what_they_take_on_one_device(ranks2, tp_size, pp_size):
    for between, held, highest in ranks2(taken, tp_size, pp_size):
        assert between == pytest.approx(2 + 2 + 8, abs=0.4)  # weight, rest of the master, AdamW's states
        assert held == pytest.approx(2 + 2 + 8 + 2, abs=0.4)  # and gradients
        assert highest < 2 + 2 + 8 + 2 + 3  # and a bucket, and activations


def trained_whole(rank, world_size, precision):
    """Weights after three steps without clipping, of this rank, or of one process."""
    one_batch = {"tp_size": 1, "pp_size": 2, "num_microbatches": 1, "pp_style": "gpipe"}
    booster, model, optimizer, criterion = built(rank, world_size, precision, **one_batch)
    for step in range(3):
        booster.execute_pipeline(iter([batch(step, booster)]), model, criterion, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@pytest.mark.parametrize("precision", ["bf16_naive", "fp16_naive"])
def test_stages_with_half_weights_train_to_the_bit_as_one_device(ranks2, precision):
    check_close(merged(ranks2(trained_whole, precision)), trained_whole(0, 1, precision), 0.0)


def pinned(rank, world_size, tp_size, pp_size):
    precision = BF16NaiveMixedPrecision(keep_fp32=["blocks.*.norm1", "blocks.*.out"])
    booster, model, optimizer, criterion = built(rank, world_size, precision, tp_size=tp_size, pp_size=pp_size)
    dtypes = {name: param.dtype for name, param in model.named_parameters()}
    with Seen() as seen:
        losses = steps(booster, model, optimizer, criterion, 0, 3)
    return dtypes, losses, {dtype for dtype, size in seen.sums if size > 100}


@pytest.mark.parametrize(("tp_size", "pp_size"), PURE)
def test_pinned_modules_stay_in_float32_without_data_parallelism(ranks2, tp_size, pp_size):
    expected, losses, _ = pinned(0, 1, 1, 1)
    assert set(expected.values()) == {torch.float32, torch.bfloat16}
    for dtypes, other_losses, summed in ranks2(pinned, tp_size, pp_size):
        assert dtypes == {name: expected[name] for name in dtypes}
        assert other_losses == pytest.approx(losses, abs=1e-2)
        assert summed == (
            {torch.float32, torch.bfloat16} if tp_size == 2 else set()
        )  # what pinned rows give, and others


def born_on_meta(rank, world_size):
    torch.manual_seed(rank)
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    booster = Booster("cpu", "bf16_naive", HybridParallelPlugin(2, 1, tp_plan={"0": "colwise", "2": "rowwise"}))
    model, made, *_ = booster.boost(model, made)
    booster.backward(model(torch.ones(2, 4)).sum(), made)
    assert made.step()
    return weights(model)


def test_half_weights_that_are_divided_may_be_born_on_the_meta_device(ranks2):
    one, other = ranks2(born_on_meta)
    check_close(one, other, 0.0)


# ---------------------------------------------------------------------- gradients of norms under sequence parallelism


def sequence(rank, world_size, precision, events, zero_stage=0):
    """Losses, what was applied and the sums over ranks of the last step, of an encoder with several passes a step.

    events: "clip": after the first pass of each step. "inf": in a norm's gradient, on rank 1, in the second step.
    """
    torch.manual_seed(7)
    options = {"tp_size": 2, "pp_size": 1, "sequence_parallelism": True, "tp_plan": None}
    booster = Booster("cpu", precision, plugin(rank, world_size, **options))
    net = encoder()
    model, made, criterion, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1), torch.nn.MSELoss())
    draw = torch.Generator().manual_seed(5)
    losses, applied, sums = [], [], []
    for step in range(3):
        data = [torch.randn(2, 6, DIM, generator=draw) for _ in range(4)]
        with Seen() if step == 2 else contextlib.nullcontext() as seen:
            for x, y in zip(data[::2], data[1::2], strict=True):
                loss = criterion(model(x), y)
                losses.append(float(loss.detach()))
                booster.backward(loss, made)
                if "clip" in events:
                    made.clip_grad_by_norm(0.05)
            if "inf" in events and step == 1 and (rank == 1 or world_size == 1):
                grad = model.get_parameter("layers.1.norm1.weight").grad
                getattr(grad, "to_local", lambda grad=grad: grad)()[0] = torch.inf
            applied.append(bool(made.step()))
        sums = [] if seen is None else seen.sums
        made.zero_grad()
    return losses, applied, sums


@pytest.mark.slow_cases("bf16_naive")
@pytest.mark.parametrize("precision", ["fp32", "bf16_naive"])
def test_norms_gradients_are_summed_over_the_ranks_once_a_step(ranks2, precision):
    losses, _, _ = sequence(0, 1, precision, ())
    for found, _, sums in ranks2(sequence, precision, ()):
        assert found == pytest.approx(losses, abs=1e-5 if precision == "fp32" else 1e-2)
        ((dtype, size),) = sums
        assert dtype == torch.float32
        assert size == sum(p.numel() for name, p in encoder().named_parameters() if _is_summed(name))


def _is_summed(name):
    """Norms, biases of rows, and packed biases of projections, which are stored whole."""
    return "norm" in name or name.endswith(("out_proj.bias", "linear2.bias", "in_proj_bias"))


@pytest.mark.parametrize(("precision", "events"), [("fp32", ("clip",)), ("fp16", ("inf",))])
def test_norms_gradients_are_whole_after_clips_amid_a_step_and_overflows_of_one_rank(ranks2, precision, events):
    losses, applied, _ = sequence(0, 1, precision, events)
    assert applied == [True, "inf" not in events, True]
    for found, other_applied, _ in ranks2(sequence, precision, events):
        assert other_applied == applied
        assert found == pytest.approx(losses, abs=1e-5 if precision == "fp32" else 1e-2)


def zeroed_in_place(rank, world_size, precision, zero_stage):
    booster, model, optimizer, criterion = built(rank, world_size, precision, zero_stage=zero_stage)

    def gradients():
        return [getattr(param.grad, "to_local", lambda grad=param.grad: grad)().clone() for param in model.parameters()]

    data = batch(0, booster)
    booster.execute_pipeline(iter([data]), model, criterion, optimizer)
    first = gradients()
    optimizer.zero_grad(set_to_none=False)
    assert not any(grad.any() for grad in gradients())
    booster.execute_pipeline(iter([data]), model, criterion, optimizer)
    return max(float((again - before).abs().max()) for again, before in zip(gradients(), first, strict=True))


@pytest.mark.crossed
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_naive"])
@pytest.mark.parametrize("zero_stage", [0, 2])
def test_gradients_beside_tensor_parallel_ones_are_zeroed_in_place(ranks2, precision, zero_stage):
    assert ranks2(zeroed_in_place, precision, zero_stage) == [0.0, 0.0]
