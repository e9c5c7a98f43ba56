"""What was boosted is gone with its last reference: nothing waits for Python's collector, which does not know of a GPU's
memory, and does not see through hooks that autograd holds."""

import gc
import tempfile
import weakref

import pytest
import torch
from choices import precisions
from matrix import PARALLELISMS, SCALE, VOCABULARY, Parallelism, Transformer, loss_of
from recorded_graph import RecordedGraphs

from benchmarks.waits import as_on_a_gpu
from booster import Booster
from booster.mixed_precision import BF16NaiveMixedPrecision, FP16TorchMixedPrecision
from booster.plugin import HybridParallelPlugin

PRECISIONS = {
    **precisions("fp32", "bf16", "fp16", "fp16_naive", "bf16_naive", scale=SCALE),
    "8bit": lambda: BF16NaiveMixedPrecision(master_weights="split24", states="8bit"),
}


KEPT = ["blocks.*.norm1", "norm"]  # of several modules `fully_shard` makes one group, with its own hooks
PRECISIONS |= {"fp16 kept": lambda: FP16TorchMixedPrecision(init_scale=SCALE, keep_fp32=KEPT)}
STAGES = {"tp_size": 1, "pp_size": 2, "num_microbatches": 2}
LAYOUTS = PARALLELISMS | {
    "interleaved": Parallelism(2, HybridParallelPlugin, STAGES | {"pp_style": "interleaved", "num_model_chunks": 2}),
    "zbv": Parallelism(2, HybridParallelPlugin, STAGES | {"pp_style": "zbv"}),
}
DIVIDING = ("DDP", "ZeRO-1", "ZeRO-2", "FSDP", "TP", "PP", "interleaved", "zbv")
OPTIONS = {
    "plain": {},
    "clip": {"clip_grad_norm": 0.5},
    "release": {"release_gradients": "exact"},
    "not fused": {"fused_optimizer": False},
    "offload": {"offload_states": True},
    "compile": {"fused_optimizer": "compile"},
    "diagnose": {"diagnose": 3, "clip_grad_norm": 0.5},
}


def job(refs, precision, layout, options, record=False):
    """Train for three steps, and note what should be gone afterwards. record: keep a record of the run."""
    torch.manual_seed(0)
    raw = Transformer(num_blocks=4 if layout in ("interleaved", "zbv") else 2)
    optimizer = torch.optim.AdamW(raw.parameters(), lr=1e-3)
    refs["the user's model"], refs["the user's optimizer"] = weakref.ref(raw), weakref.ref(optimizer)
    booster = Booster("cpu", PRECISIONS[precision](), LAYOUTS[layout].plugin(), **options)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, criterion, _, schedule = booster.boost(raw, optimizer, loss_of, lr_scheduler=schedule)
    refs["the model"], refs["the optimizer"] = weakref.ref(model), weakref.ref(optimizer)
    refs["the schedule"], refs["the criterion"] = weakref.ref(schedule), weakref.ref(criterion)
    refs |= {f"parameter {name}": weakref.ref(param) for name, param in model.named_parameters()}
    if record:
        reads = {"every": None} if "release_gradients" in options else {"every": 1, "activations": "blocks.*"}
        booster.record(tempfile.mkdtemp(), **reads)
    for _ in range(3):
        tokens = torch.randint(VOCABULARY, (4, 8))
        booster.execute_pipeline(iter([(tokens, tokens)]), model, criterion, optimizer)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    note_states(refs, optimizer)


def note_states(refs, optimizer):
    for number, state in enumerate(optimizer.unwrap().state.values()):
        tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
        refs |= {f"state {key} {number}": weakref.ref(value) for key, value in tensors.items()}


def captured(refs, precision):
    """Train by a captured step; a recorder takes the graph's place."""
    torch.manual_seed(0)
    raw = Transformer()
    optimizer = torch.optim.AdamW(raw.parameters(), lr=1e-3)
    refs["the user's model"], refs["the user's optimizer"] = weakref.ref(raw), weakref.ref(optimizer)
    booster = Booster("cpu", PRECISIONS[precision]())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, _, _, schedule = booster.boost(raw, optimizer, lr_scheduler=schedule)
    graphs = RecordedGraphs()

    def step(tokens):
        loss = loss_of(model(tokens), tokens)
        booster.backward(loss, optimizer)
        optimizer.clip_grad_by_norm(0.5)
        result = optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return loss, result

    tokens = torch.randint(VOCABULARY, (4, 8))
    step = booster._captured(step, (tokens,), graphs, 8)
    for _ in range(4):
        step(tokens)
    assert graphs.num_replays == 3
    refs |= {
        name: weakref.ref(each)
        for name, each in (("the model", model), ("the optimizer", optimizer), ("the step", step))
    }
    refs |= {f"parameter {name}": weakref.ref(param) for name, param in model.named_parameters()}
    note_states(refs, optimizer)


def survivors(rank, world_size, *arguments, of=job):
    """What is alive after a job."""
    of({}, *arguments)  # torch imports and compiles at the first
    refs = {}
    gc.collect()
    gc.disable()
    try:
        of(refs, *arguments)
        return sorted(name for name, ref in refs.items() if ref() is not None)
    finally:
        gc.enable()


ONE_DEVICE = [
    *((precision, "plain", False) for precision in PRECISIONS if precision != "fp16 kept"),
    *((precision, "release", False) for precision in ("fp32", "fp16", "bf16_naive")),
    ("fp16", "clip", True),
    ("fp16_naive", "clip", True),
    ("bf16_naive", "offload", False),
    ("fp32", "not fused", False),
    pytest.param("bf16_naive", "compile", False, marks=pytest.mark.slow),
    *(pytest.param(p, "release", True, marks=pytest.mark.slow) for p in ("bf16", "fp16_naive", "8bit")),
]
ON_RANKS = [
    ("ZeRO-2", "fp32", "plain", False),
    ("ZeRO-2", "8bit", "release", False),
    ("ZeRO-1", "fp16_naive", "release", True),
    ("DDP", "bf16", "release", False),
    ("FSDP", "fp16 kept", "clip", True),
    ("FSDP", "bf16_naive", "release", False),
    ("TP", "bf16_naive", "plain", False),
    ("PP", "fp16", "plain", False),
    ("interleaved", "bf16_naive", "plain", False),
    ("zbv", "fp16_naive", "plain", False),
]
OTHERS_ON_RANKS = [
    (layout, precision, options, record)
    for layout in DIVIDING
    for precision in PRECISIONS
    for options, record in (("plain", False), ("release", False), ("clip", True))
    if (layout, precision, options, record) not in ON_RANKS
    and not (layout in ("PP", "interleaved", "zbv") and options != "plain")
]


@pytest.mark.slow_cases("fp16-plain", "bf16-plain", "bf16_naive-plain")
@pytest.mark.parametrize(("precision", "options", "record"), ONE_DEVICE)
def test_deleting_frees_all_at_once_with_the_collector_off(precision, options, record):
    assert survivors(0, 1, precision, "single", OPTIONS[options], record) == []


WAITING = [("fp32", "clip"), ("fp16", "diagnose"), ("bf16_naive", "clip")]
WAITING += [pytest.param(*each, marks=pytest.mark.slow) for each in (("8bit", "diagnose"), ("fp16_naive", "release"))]


@pytest.mark.parametrize(("precision", "options"), WAITING)
def test_steps_whose_outcome_is_on_a_device_keep_nothing_alive(precision, options):
    with as_on_a_gpu():
        assert survivors(0, 1, precision, "single", OPTIONS[options]) == []


@pytest.mark.parametrize("precision", ["fp16", pytest.param("fp32", marks=pytest.mark.slow), "bf16_naive", "8bit"])
def test_deleting_a_captured_step_frees_all_at_once(precision):
    with as_on_a_gpu():
        assert survivors(0, 1, precision, of=captured) == []


@pytest.mark.slow_cases("zbv", "interleaved")
@pytest.mark.slow_cases("DDP", "ZeRO-1")
@pytest.mark.parametrize(
    ("layout", "precision", "options", "record"),
    [*ON_RANKS, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS_ON_RANKS)],
)
def test_deleting_frees_all_at_once_on_ranks_too(ranks2, layout, precision, options, record):
    assert ranks2(survivors, precision, layout, OPTIONS[options], record) == [[], []]
