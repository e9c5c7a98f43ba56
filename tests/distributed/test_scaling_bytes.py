"""What small jobs hold and send is what the formulas of docs/scaling.md say, to the byte, and their peak to 5 %."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.scaling import bytes as scaling_bytes
from benchmarks.scaling.decoder import PRECISIONS, Model, hybrid, stage_parameters
from benchmarks.scaling.formulas import accumulated_bytes, layer_activations
from benchmarks.scaling.job import cases, hybrid_plugin
from benchmarks.scaling.plan import Plan, ddp, fsdp, zero
from benchmarks.scaling.traffic import sent_bytes
from booster import Booster
from booster.plugin import LowLevelZeroPlugin, SingleDevice, TorchDDPPlugin, TorchFSDPPlugin

HALF = "naive, fp32 masters"

pytestmark = pytest.mark.slow  # formulas that benchmarks alone use


def named(world_size):
    for index, case in enumerate(cases(world_size)):
        yield pytest.param(index, id=f"{case.name}-{case.precision}".replace(" ", "_"))


def check(rank, world_size, index):
    torch.set_num_threads(1)
    scaling_bytes.check_case(cases(world_size)[index])


@pytest.mark.parametrize("index", list(named(2)))
def test_two_ranks_hold_and_send_what_the_formulas_say(ranks2, index):
    ranks2(check, index)


@pytest.mark.parametrize("index", list(named(4)))
def test_four_ranks_hold_and_send_what_the_formulas_say(ranks4, index):
    ranks4(check, index)


def check_disagreement(rank, world_size):
    for said, done, what in ((1, 2, "gradients"), (2, 1, "held")):
        case = scaling_bytes.Case("wrong", zero(world_size, said), HALF, LowLevelZeroPlugin, {"stage": done})
        with pytest.raises(AssertionError, match=rf"{what} \d+, by the formula"):
            scaling_bytes.check_case(case)
    case = scaling_bytes.Case("wrong", fsdp(world_size), HALF, TorchFSDPPlugin, {"reshard_after_forward": False})
    with pytest.raises(AssertionError, match=r"messages .*'all_gather', 'dp'"):
        scaling_bytes.check_case(case)


def check_peak(rank, world_size):
    """What is held between steps is the same in both: only the peak shows it."""
    torch.set_num_threads(1)
    small = {"stage": 2, "bucket_cap_mb": 0.5}
    case = scaling_bytes.Case("wrong", zero(world_size, 2), HALF, lambda **_: LowLevelZeroPlugin(stage=2), small)
    with pytest.raises(AssertionError, match=r"peak \d+, by the formula"):
        scaling_bytes.check_case(case)


def test_a_peak_that_is_not_what_the_formula_says_is_noticed(ranks2):
    ranks2(check_peak)


def test_a_plan_that_is_not_what_the_plugin_does_is_noticed(ranks2):
    ranks2(check_disagreement)


def count_each(rank, world_size):
    """What is counted of each collective that the library sends, on 1,000 float32 numbers a rank."""
    own, all_ranks = torch.zeros(1000), torch.zeros(2000)
    found = {}
    for name, send in {
        "all_reduce": lambda: dist.all_reduce(own),
        "all_gather": lambda: dist.all_gather(list(all_ranks.chunk(2)), own),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.empty_like(own), own),
        "reduce": lambda: dist.reduce(own, 1),
        "broadcast": lambda: dist.broadcast(own, 1),
        "barrier": dist.barrier,
    }.items():
        with scaling_bytes.Counting() as counting:
            send()
        found[name] = {kind: size for (kind, _), size in counting.bytes.items()}
    return found


def test_each_collective_is_counted_by_its_bytes(ranks2):
    one, other = ranks2(count_each)
    assert one == other
    assert one == {
        "all_reduce": {"all_reduce": 4000},
        "all_gather": {"all_gather": 8000},
        "all_to_all_single": {"reduce_scatter": 4000},
        "reduce": {"reduce_scatter": 4000},
        "broadcast": {"broadcast": 4000},
        "barrier": {},
    }


# ---- gradients that wait


def check_waiting(rank, world_size, case):
    torch.set_num_threads(1)
    precision, parameters = PRECISIONS[case.precision], stage_parameters(case.model, case.plan)
    formula = accumulated_bytes(parameters, case.plan, precision)
    if case.plan.gradient_shards == 1:  # they wait where the result will lie
        formula = parameters * precision.gradient
    measured = scaling_bytes.measure_waiting(case)
    assert measured == formula


@pytest.mark.parametrize(
    "case",
    [
        scaling_bytes.Case("DDP", ddp(2), HALF, TorchDDPPlugin),
        scaling_bytes.Case("ZeRO-2", zero(2, 2), HALF, LowLevelZeroPlugin, {"stage": 2}),
        scaling_bytes.Case("FSDP", fsdp(2), HALF, TorchFSDPPlugin),
        scaling_bytes.Case("FSDP", fsdp(2), "fp32", TorchFSDPPlugin),
    ],
    ids=lambda case: f"{case.name}-{case.precision}".replace(" ", "_"),
)
def test_accumulated_gradients_wait_whole_on_every_rank(ranks2, case):
    ranks2(check_waiting, case)


# ---- activations

LLAMA = Model(hidden=256, layers=2, heads=4, ffn=512, vocabulary=256, sequence=64)
GPT = Model(hidden=256, layers=2, heads=4, ffn=1024, vocabulary=256, sequence=64, gated=False, dropout=True)


def check_activations(rank, world_size, model, precision, options):
    torch.set_num_threads(1)
    sequence_parallel = options.get("sequence_parallelism", False)
    plan = hybrid(2, tp=2, sequence_parallel=sequence_parallel) if options else Plan()
    plugin, given = hybrid_plugin(options["tp_size"], 1, **options) if options else (SingleDevice, {})
    case = scaling_bytes.Case("activations", plan, precision, plugin, given)
    numbers, tokens = PRECISIONS[precision], scaling_bytes.MICRO_BATCH * model.sequence
    formula = layer_activations(
        model, numbers, tokens, tp=plan.tp, sequence_parallel=sequence_parallel, stored_scores=model.dropout
    )
    formula += numbers.copy * model.layer_matrices // plan.tp
    measured = scaling_bytes.measure_activations(case, model)
    statistics = 16 * tokens + 4 * tokens * model.heads
    assert 0 <= measured - formula <= statistics


@pytest.mark.parametrize(
    ("model", "precision", "options"),
    [
        (LLAMA, "naive, split", {}),
        (LLAMA, "fp32", {}),
        (LLAMA, "autocast", {}),
        (GPT, "naive, split", {}),
        (LLAMA, HALF, {"tp_size": 2}),
        (LLAMA, HALF, {"tp_size": 2, "sequence_parallelism": True}),
        (LLAMA, "autocast", {"tp_size": 2, "sequence_parallelism": True}),
    ],
)
def test_a_layer_keeps_the_activations_of_the_formula_and_statistics(ranks2, model, precision, options):
    ranks2(check_activations, model, precision, options)


def check_copies(rank, world_size):
    """Under fully_shard too, autocast's half copies of all weights live from forward to backward."""
    torch.set_num_threads(1)
    case = scaling_bytes.Case("FSDP", fsdp(world_size), "autocast", TorchFSDPPlugin)
    kept = scaling_bytes.measure_activations(case, LLAMA)
    whole = PRECISIONS["autocast"].copy * LLAMA.layer_matrices
    formula = layer_activations(LLAMA, PRECISIONS["autocast"], scaling_bytes.MICRO_BATCH * LLAMA.sequence)
    assert 0 <= kept - formula - whole <= 20 * scaling_bytes.MICRO_BATCH * LLAMA.sequence * LLAMA.heads


def test_autocast_keeps_half_copies_of_weights_that_are_sharded(ranks2):
    ranks2(check_copies)


# ---- bytes on the wire


def check_sockets(rank, world_size):
    whole = torch.ones(2**20)
    part = torch.ones(2**20 // world_size)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    for kind, run in (
        ("all_reduce", lambda: dist.all_reduce(whole)),
        ("all_gather", lambda: gather(whole, part)),
    ):
        run()  # connections are made at the first use
        dist.barrier()
        before = scaling_bytes.socket_bytes()
        run()
        after = scaling_bytes.socket_bytes()
        dist.barrier()
        formula = sent_bytes(kind, world_size, whole.nbytes)
        assert formula <= after - before <= 1.01 * formula, kind


def test_a_ring_sends_what_the_formula_says(ranks4):
    if scaling_bytes.socket_bytes() is None:
        pytest.skip("this kernel does not count the bytes of a connection")
    ranks4(check_sockets)


def check_step_on_sockets(rank, world_size, options, factor):
    """factor: how often each gradient and weight is sent, of (n - 1) / n bytes a byte."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
    booster = Booster("cpu", "fp32", LowLevelZeroPlugin(bucket_cap_mb=1, **options))
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    inputs = torch.randn(4, 512)

    def step():
        booster.backward(model(inputs).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()

    for _ in range(2):
        step()
    before = scaling_bytes.socket_bytes()
    step()
    sent = scaling_bytes.socket_bytes() - before
    dist.barrier()
    formula = sum(param.nbytes for param in model.parameters()) * factor * (world_size - 1) / world_size
    assert formula <= sent <= 1.02 * formula, (options, sent / formula)


@pytest.mark.parametrize(
    ("options", "factor"),
    [({}, 3), ({"reduce_scatter": True}, 2), ({"stage": 2}, 2)],
    ids=["stage 1", "stage 1, reduce_scatter", "stage 2"],
)
def test_a_step_whose_gradients_are_reduce_scattered_sends_the_least(ranks4, options, factor):
    """An all-reduce is two, a reduce-scatter and the all-gather of weights one each."""
    if scaling_bytes.socket_bytes() is None:
        pytest.skip("this kernel does not count the bytes of a connection")
    ranks4(check_step_on_sockets, options, factor)
