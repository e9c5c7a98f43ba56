"""Under ZeRO each rank writes and reads its own part of states and masters, and no rank holds the whole."""

import copy
import sys
from functools import partial
from itertools import product

import pytest
import torch
from comparing import difference, whole
from poisoned import memory_that_holds
from torch import nn
from torch.profiler import ProfilerActivity, profile

from booster import Booster
from booster.checkpoint.manifest import read_manifest
from booster.plugin import LowLevelZeroPlugin, SingleDevice, TorchDDPPlugin, TorchFSDPPlugin
from booster.shards import zero_buckets, zero_states

OPTIMIZERS = {
    "AdamW": torch.optim.AdamW,
    "Adafactor": torch.optim.Adafactor,  # states of other shapes; parameters are dealt whole
}
CASES = [("fp32", "AdamW"), ("bf16_naive", "AdamW"), ("fp32", "Adafactor")]


def boosted(precision, optimizer, plugin, seed=0):
    torch.manual_seed(seed)
    conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
    model = nn.Sequential(conv, nn.Flatten(), nn.Linear(5 * 4 * 4, 7), nn.Linear(7, 33))
    booster = Booster("cpu", precision, plugin)
    model, optimizer, *_ = booster.boost(model, OPTIMIZERS[optimizer](model.parameters(), lr=0.01))
    return booster, model, optimizer


def train(booster, model, optimizer, steps, rank):
    for step in range(steps):
        torch.manual_seed(10 * step + rank)
        booster.backward(model(torch.randn(2, 3, 6, 6)).float().square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()


def flat_state(model, optimizer):
    """Weights, and states and masters of whole parameters, by name; a collective under ZeRO."""
    state = optimizer.state_dict()
    found = {f"model {name}": value.clone() for name, value in model.state_dict().items()}
    found |= {f"{index} {key}": v.clone() for index, own in state["state"].items() for key, v in own.items()}
    return found | {f"master {k}": v.clone() for k, v in state["booster"].get("masters", {}).get("weights", {}).items()}


def save_and_load(rank, world_size, root):
    """For each case: the state at the save, and that after loading it into another run, without gathering anything."""
    results = []
    for index, (precision, optimizer) in enumerate(CASES):
        booster, model, made = boosted(precision, optimizer, LowLevelZeroPlugin(stage=2))
        train(booster, model, made, 2, rank)
        gather, zero_states.gather_states = zero_states.gather_states, None
        try:
            booster.save(f"{root}/{index}", model, made, step=1)
            other, model_, made_ = boosted(precision, optimizer, LowLevelZeroPlugin(stage=1), seed=1)
            train(other, model_, made_, 1, rank)
            other.load(f"{root}/{index}", model_, made_)
        finally:
            zero_states.gather_states = gather
        results.append((flat_state(model, made), flat_state(model_, made_)))
    return results


def test_a_checkpoint_is_written_and_read_in_parts(ranks2, tmp_path):
    ranks = ranks2(save_and_load, str(tmp_path))
    for index, (precision, optimizer) in enumerate(CASES):
        booster, model, made = boosted(precision, optimizer, SingleDevice(), seed=2)
        booster.load(tmp_path / str(index), model, made)
        alone = flat_state(model, made)
        for results in ranks:
            saved, loaded = results[index]
            assert saved.keys() == loaded.keys() == alone.keys()
            for name, value in saved.items():
                assert torch.equal(value, loaded[name]), (precision, optimizer, name)
                assert torch.equal(value, alone[name]), (precision, optimizer, name)
        tensors = read_manifest(tmp_path / str(index) / "step-0000000001").tensors
        states = [tensor for name, tensor in tensors.items() if name.startswith("optimizers")]
        assert len({chunk.file for tensor in states for chunk in tensor.chunks}) == 2


def optimizer_alone(rank, world_size, precision, optimizer):
    """By plugin: the weights after an older state of the optimizer was loaded without the model's, and one step on."""
    found = []
    for plugin in (TorchDDPPlugin(), LowLevelZeroPlugin(stage=1), LowLevelZeroPlugin(stage=2)):
        parts = boosted(precision, optimizer, plugin)
        train(*parts, 2, rank)
        older = copy.deepcopy(parts[2].state_dict())
        train(*parts, 2, rank)
        parts[2].load_state_dict(older)
        loaded = {name: value.clone() for name, value in parts[1].state_dict().items()}
        train(*parts, 1, rank)
        found.append({**flat_state(*parts[1:]), **{f"loaded {name}": value for name, value in loaded.items()}})
    return found


@pytest.mark.crossed
@pytest.mark.parametrize("optimizer", ["AdamW", "Adafactor"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16_naive", "bf16_naive"])
def test_a_state_of_the_optimizer_without_the_model_s_loads_as_under_ddp(ranks2, precision, optimizer):
    on_ranks = ranks2(optimizer_alone, precision, optimizer)
    expected = on_ranks[0][0]
    for of_ddp, *of_zero in on_ranks:
        for found in (of_ddp, *of_zero):
            assert found.keys() == expected.keys()
            assert all(torch.equal(value, expected[name]) for name, value in found.items())


def counted_state(rank, world_size, precision, message):
    """(collectives of the state_dict of an optimizer of 24 tensors, what it holds); message: bytes that travel at once."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(9, 9) for _ in range(12)])
    booster = Booster("cpu", precision, LowLevelZeroPlugin(stage=2, bucket_cap_mb=1e-3))
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    booster.backward(model(torch.ones(2, 9)).float().square().mean(), optimizer)
    optimizer.step()
    own, zero_states.MESSAGE = zero_states.MESSAGE, message
    try:
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen:
            state = optimizer.state_dict()
    finally:
        zero_states.MESSAGE = own
    calls = [event.name for event in seen.events() if event.name.startswith("c10d::")]
    masters = state["booster"].get("masters", {}).get("weights", {})
    whole = {f"{i} {key}": value for i, entry in state["state"].items() for key, value in entry.items()} | masters
    return calls, {name: value.clone() for name, value in whole.items()}


@pytest.mark.parametrize("precision", ["fp32", "bf16_naive"])
def test_a_state_dict_travels_in_a_few_messages_however_many_tensors_it_has(ranks2, precision):
    (calls, whole), (_, other) = ranks2(counted_state, precision, 2**27)
    gathers = 2 if precision == "bf16_naive" else 1  # of states, of masters: two small ones and one of the data each
    assert len(calls) == 3 * gathers, calls
    cut, _ = ranks2(counted_state, precision, 1000)  # a message ends anywhere inside an element
    assert len(cut[0]) > len(calls)
    for name, value in whole.items():
        assert torch.equal(value, other[name])
        assert torch.equal(value, cut[1][name])


def forgotten(rank, world_size):
    """How often `zero_grad` of an optimizer of 24 tensors goes through a single one of a bucket, and what is left."""
    booster, model = (
        Booster("cpu", "fp32", LowLevelZeroPlugin(stage=2)),
        nn.Sequential(*[nn.Linear(9, 9) for _ in range(12)]),
    )
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    booster.backward(model(torch.ones(2, 9)).float().square().mean(), optimizer)
    singly, clear = [], zero_buckets.FlatParameters.clear_gradient
    zero_buckets.FlatParameters.clear_gradient = lambda self, index: singly.append(index) or clear(self, index)
    try:
        optimizer.zero_grad()
    finally:
        zero_buckets.FlatParameters.clear_gradient = clear
    return len(singly), [bucket.gradient for bucket in model.module.layout.buckets]


def test_zero_grad_forgets_whole_buckets(ranks2):
    assert ranks2(forgotten) == [(0, [None])] * 2


PADDED = {
    "zero1": lambda: LowLevelZeroPlugin(stage=1),
    "zero2": lambda: LowLevelZeroPlugin(stage=2),
    "fsdp": lambda: TorchFSDPPlugin(),  # its last rank has fewer rows, or none
}
NUMBERS = [("fp32", None), ("bf16_naive", None), ("fp32", "8bit")]


def in_dirty_memory(rank, world_size, place, root, byte, *, saves):
    """Where all memory holds `byte` until it is written to: by precision, all that is trained after two steps and a save to
    `root`, or after a load from there; norms of two steps more; and all that is trained then."""
    found = []
    with memory_that_holds(byte):
        for index, (precision, states) in enumerate(NUMBERS):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 1, bias=False))
            booster = Booster("cpu", precision, PADDED[place](), **({"states": states} if states else {}))
            model, made, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.01))

            def steps(first, last, booster=booster, model=model, made=made):
                norms = []
                for step in range(first, last):
                    data = torch.randn(12, 6, generator=torch.Generator().manual_seed(step)).chunk(world_size)[rank]
                    booster.backward(model(data).float().square().mean(), made)
                    made.clip_grad_by_norm(0.05)
                    norms.append(float(made.step().grad_norm))
                    made.zero_grad()
                return norms

            if saves:
                steps(0, 2)
                booster.save(f"{root}/{index}", model, made, step=1)
            else:
                booster.load(f"{root}/{index}", model, made)
            kept = {name: whole(value).float() for name, value in flat_state(model, made).items()}
            norms = steps(2, 4)
            found.append((kept, norms, {name: whole(value).float() for name, value in flat_state(model, made).items()}))
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="fills memory as glibc does")
@pytest.mark.parametrize(
    ("place", "ranks"),
    [
        ("zero1", 2),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in product(PADDED, (2, 4)) if case != ("zero1", 2)),
    ],
)
def test_what_pads_a_buffer_is_neither_kept_nor_counted_from_three_ranks_to_others(
    run_on_ranks, tmp_path, place, ranks
):
    huge, other = 0x7F, 0x5A  # 3.4e38, and NaN in float16; 1.5e16
    saved = run_on_ranks(partial(in_dirty_memory, saves=True), 3, place, str(tmp_path), huge)[0]
    loaded = [
        run_on_ranks(partial(in_dirty_memory, saves=False), ranks, place, str(tmp_path), byte)[0]
        for byte in (huge, other)
    ]
    assert difference(*loaded) is None
    for (precision, states), (kept, norms, _), (moved, later, end) in zip(NUMBERS, saved, loaded[0], strict=True):
        if states is None:  # else blocks of codes that share a scale are others on each number of ranks
            assert difference(kept, moved) is None, precision
        assert all(bool(value.isfinite().all()) for value in end.values()), precision
        # The same rows in other groups: gradients of half weights are rounded to 8 bits on each rank.
        assert later == pytest.approx(norms, rel=2.0**-20 if (precision, states) == ("fp32", None) else 0.05)
